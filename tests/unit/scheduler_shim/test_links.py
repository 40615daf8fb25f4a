"""Links that cannot be made, because there are no descriptors: nothing half-made stays open."""

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from directory.core.limits import MESSAGE_BYTES_MAX
from scheduler_shim import lane_link
from scheduler_shim.arena import TokenArena
from scheduler_shim.lane_link import LaneLink, make_link, open_link
from scheduler_shim.link import NoLink, ZmqLink
from tests.descriptors import open_descriptors
from transfer.ipc.channel import FdChannel
from transfer.ipc.lane import FrameLane


class Session:
    """Both ends of a session, and where a daemon would listen."""

    def __init__(self, folder: Path) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = FdChannel(ours)
        self.endpoint = f"ipc://{folder / 'frames.sock'}"

    def close(self) -> None:
        self.channel.close()
        self.theirs.close()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    made = Session(tmp_path)
    yield made
    made.close()


def no_more(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def no_socket(*_: object, **__: object) -> Any:
    raise zmq.ZMQError(errno.EMFILE)


@pytest.mark.parametrize("at", ["socket", "connect"])
def test_a_dealer_that_cannot_be_made_leaves_nothing_open(
    session: Session, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    before = open_descriptors()
    link = ZmqLink(session.channel, session.endpoint, later=True)
    with monkeypatch.context() as patched:
        patched.setattr(zmq.Context if at == "socket" else zmq.Socket, at, no_socket)
        with pytest.raises(NoLink, match="Too many open files"):
            link.connect()
    assert open_descriptors() == before
    link.connect()  # there is room again
    assert link.alive
    link.close()
    assert open_descriptors() == before - 1


def test_a_lane_that_cannot_be_made_leaves_zeromq(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(FrameLane, "pair", no_more)
        link = make_link(session.channel, session.endpoint, TokenArena(MESSAGE_BYTES_MAX))
    assert isinstance(link, LaneLink)
    assert "by ZeroMQ" in repr(link)
    assert link.arena is None
    link.close()
    assert open_descriptors() == before - 1


def test_without_either_the_arena_is_given_back_and_the_session_is_the_callers(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(FrameLane, "pair", no_more)
    monkeypatch.setattr(zmq.Context, "socket", no_socket)
    with pytest.raises(NoLink):
        make_link(session.channel, session.endpoint, TokenArena(MESSAGE_BYTES_MAX))
    assert open_descriptors() == before
    assert session.channel.fileno() >= 0
    monkeypatch.setattr(lane_link, "make_arena", lambda: TokenArena(MESSAGE_BYTES_MAX))
    with pytest.raises(NoLink):
        open_link(session.channel, session.endpoint, lane=True)
    assert session.channel.closed
    assert open_descriptors() == before - 1


def test_a_lane_that_ends_where_no_dealer_can_be_made_is_a_lost_daemon(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = LaneLink(session.channel, session.endpoint, TokenArena(MESSAGE_BYTES_MAX))
    assert link.send(b"a frame")
    monkeypatch.setattr(zmq.Context, "socket", no_socket)
    session.theirs.close()  # and with it the lane's other end, which was never taken out
    for _ in range(3):
        assert link.receive() == []
        link.wait(1_000)
    assert not link.alive
    assert not link.send(b"another one")
    assert not link.hold(b"another one")
    link.close()


@pytest.mark.parametrize("opens", [True, False])
def test_a_lane_that_was_made_before_is_opened_or_goes_with_its_link(
    session: Session, opens: bool
) -> None:
    before = open_descriptors()
    link = make_link(session.channel, session.endpoint, TokenArena(MESSAGE_BYTES_MAX), later=True)
    assert isinstance(link, LaneLink)
    link.prepare()
    made = link._pair
    link.prepare()
    assert link._pair is made is not None, "repeatable"
    assert "by ZeroMQ" in repr(link), "nobody has been told yet"
    if opens:
        link.open()
        assert link._lane is made[0]
        assert link.arena is not None
        assert made[1].fileno() < 0, "the other end is the daemon's"
    link.close()
    session.theirs.close()
    assert open_descriptors() == before - 2, "both ends of the session, nothing else"
