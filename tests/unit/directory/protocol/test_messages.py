"""The unions on the wire are the core's, whole, and their tags are told apart."""

from typing import get_args

from directory.core.actions import AnyReply
from directory.core.events import Request
from directory.protocol.ended import Ended
from directory.protocol.messages import (
    Acked,
    Attach,
    Attached,
    ClientBody,
    DaemonBody,
    SessionReply,
    SessionRequest,
)


def test_every_request_and_every_answer_of_the_core_can_travel() -> None:
    assert set(get_args(ClientBody)) == {*get_args(Request), Attach, Ended}
    assert set(get_args(DaemonBody)) == {*get_args(AnyReply), Attached, Acked}


def test_no_tag_is_used_twice_in_a_union() -> None:
    for union in (ClientBody, DaemonBody, SessionRequest, SessionReply):
        kinds = get_args(union)
        assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


def test_a_field_without_a_default_never_follows_one_with() -> None:
    for union in (ClientBody, DaemonBody, SessionRequest, SessionReply):
        for kind in get_args(union):
            assert len(kind.__struct_defaults__) <= len(kind.__struct_fields__)
            assert kind.__struct_config__.frozen
