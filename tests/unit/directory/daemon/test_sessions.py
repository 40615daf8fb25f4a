"""Sessions over real sockets in this process: who is let in, and what the daemon is told."""

import gc
import os
import resource
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from directory.core import actions
from directory.core.events import Event, PoolClosed, PoolRegistered
from directory.core.ids import PoolId
from directory.daemon.loop import Loop
from directory.daemon.registration import Registration
from directory.daemon.sessions import Sessions
from directory.protocol.admin import AdminCheck, AdminReport, AdminRequest
from directory.protocol.codec import decode_session_reply, encode
from directory.protocol.ended import Wanted
from directory.protocol.messages import (
    Hello,
    OpenLane,
    Register,
    Registered,
    SessionRefused,
    SessionReply,
    SessionRequest,
)
from transfer.ipc.channel import ChannelClosed, FdChannel
from transfer.layout import mha_layer_first

LAYOUT = mha_layer_first(layers=1, page_size=4, page_count=8, heads=1, head_dim=8, itemsize=1)
REGISTER = Register("a", b"f", "mirrored", encode(LAYOUT), b"\x90")


class Rig:
    """Sessions, the daemon around them as a record of calls, and a client's channel."""

    epoch = 9
    wanted: Wanted = "sums"

    def __init__(self, path: Path) -> None:
        self.events: list[Event] = []
        self.imports: list[PoolId] = []
        self.open: list[PoolId] = []
        self.lanes: list[tuple[PoolId, list[int], int]] = []
        self.thin: list[bool] = []
        self.loop = Loop()
        self.path = path
        self.sessions = Sessions(self.loop, self, "ipc://x", 4, Counter())
        self.sessions.listen(path)

    def tell(self, event: Event) -> None:
        self.events.append(event)

    def admin(self, request: AdminRequest) -> AdminReport:
        return AdminReport(self.epoch, {"nodes": 1}, ("tree: broken",), ())

    def open_lane(self, pool: PoolId, fds: Sequence[int], arena_bytes: int, *, thin: bool) -> None:
        self.lanes.append((pool, list(fds), arena_bytes))
        self.thin.append(thin)

    def import_pool(self, pool: PoolId, registration: Registration) -> None:
        assert len(registration.fds) == 2
        self.imports.append(pool)

    def open_pool(self, pool: PoolId, secret: bytes) -> None:
        self.open.append(pool)

    def close_pool(self, pool: PoolId) -> None:
        if pool in self.open:
            self.open.remove(pool)

    def connect(self) -> FdChannel:
        channel = FdChannel.connect(str(self.path), 10)
        self.loop.turn(1)
        return channel

    def say(self, channel: FdChannel, message: SessionRequest, fds: tuple[int, ...] = ()) -> None:
        channel.send(encode(message), fds)
        self.loop.turn(1)

    def heard(self, channel: FdChannel) -> SessionReply:
        payload, _ = channel.wait_frame(10)
        return decode_session_reply(payload)

    def registering(self) -> FdChannel:
        """A client that has asked for its pool to be taken in."""
        channel = self.connect()
        self.say(channel, Hello(1, 1))
        self.heard(channel)
        self.say(channel, REGISTER, (0, 0))
        return channel


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A rig that is closed afterwards."""
    rig = Rig(tmp_path / "s.sock")
    yield rig
    rig.sessions.close()
    rig.loop.close()


def test_another_users_process_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    channel = rig.connect()
    refused = rig.heard(channel)
    assert isinstance(refused, SessionRefused)
    assert refused.code == "not_authorised"
    assert len(rig.sessions) == 0
    channel.close()


def test_a_session_too_many_is_told_so_even_when_it_speaks_after_the_end(rig: Rig) -> None:
    opened = [rig.connect() for _ in range(4)]
    channel = rig.connect()
    payload, _ = channel.call(encode(Hello(1, 1)), deadline_s=10)
    refused = decode_session_reply(payload)
    assert isinstance(refused, SessionRefused)
    assert refused.code == "too_many"
    for each in (*opened, channel):
        each.close()


def test_a_session_for_which_there_is_no_descriptor_is_told_so(rig: Rig) -> None:
    channels = [FdChannel.connect(str(rig.path), 10) for _ in range(2)]
    # Everything below the highest descriptor is taken, so that there is room for none.
    gc.collect()  # what nobody refers to any more would make room
    fill = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    while fill[-1] < highest:
        fill.append(os.dup(fill[0]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fill[-1] + 1, hard))
    try:
        for _ in channels:
            rig.loop.turn(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fill:
            os.close(fd)
    for channel in channels:
        payload, _ = channel.call(encode(Hello(1, 1)), deadline_s=10)
        refused = decode_session_reply(payload)
        assert isinstance(refused, SessionRefused)
        assert refused.code == "too_many"
        assert "file descriptor" in refused.message
        channel.close()


def test_a_pool_is_taken_in_then_imported_then_announced(rig: Rig) -> None:
    channel = rig.registering()
    (event,) = rig.events
    assert isinstance(event, PoolRegistered)
    assert event.page_count == 8
    rig.sessions.on_registered(actions.Registered(event.token, 5, 2))
    assert (rig.imports, rig.open) == ([5], [])
    rig.sessions.on_imported(5, True, "", "")
    registered = rig.heard(channel)
    assert isinstance(registered, Registered)
    assert (registered.pool, registered.generation, registered.endpoint) == (5, 2, "ipc://x")
    assert rig.open == [5]
    channel.close()
    rig.loop.turn(1)
    assert isinstance(rig.events[-1], PoolClosed)
    assert rig.open == []


def test_a_lane_is_opened_with_the_mode_of_its_pool(rig: Rig) -> None:
    channel = rig.registering()
    rig.sessions.on_registered(actions.Registered(1, 5, 1))
    rig.sessions.on_imported(5, True, "", "")
    rig.heard(channel)
    with open(os.devnull) as null:
        rig.say(channel, OpenLane(4096), (null.fileno(), null.fileno()))
    assert (rig.lanes[0][0], rig.thin) == (5, [REGISTER.mode == "thin"])
    channel.close()


def test_importing_again_announces_nothing(rig: Rig) -> None:
    channel = rig.registering()
    rig.sessions.on_registered(actions.Registered(1, 5, 1))
    rig.sessions.on_imported(5, True, "", "")
    rig.heard(channel)
    rig.sessions.on_imported(5, True, "", "")
    assert channel.receive() == []
    assert rig.open == [5]
    channel.close()


@pytest.mark.parametrize("live", [False, True])
def test_a_failed_import_ends_the_session_even_of_a_live_pool(rig: Rig, live: bool) -> None:
    channel = rig.registering()
    rig.sessions.on_registered(actions.Registered(1, 5, 1))
    if live:
        rig.sessions.on_imported(5, True, "", "")
        rig.heard(channel)
    rig.sessions.on_imported(5, False, "import_failed", "no room")
    assert rig.heard(channel) == SessionRefused("import_failed", "no room")
    assert [type(event) for event in rig.events] == [PoolRegistered, PoolClosed]
    assert len(rig.sessions) == 0
    channel.close()


def test_the_pool_of_a_client_that_left_before_its_answers_is_closed(rig: Rig) -> None:
    channel = rig.registering()
    channel.close()
    rig.loop.turn(1)
    rig.sessions.on_registered(actions.Registered(1, 5, 1))
    rig.sessions.on_registration_refused(actions.RegistrationRefused(1, "x", "y"))
    rig.sessions.on_imported(5, True, "", "")
    assert (rig.imports, rig.open) == ([], [])
    closed = rig.events[-1]
    assert isinstance(closed, PoolClosed)
    assert closed.pool == 5


def test_the_directorys_refusal_is_handed_on_and_ends_the_session(rig: Rig) -> None:
    channel = rig.registering()
    rig.sessions.on_registration_refused(actions.RegistrationRefused(1, "too_many", "full"))
    assert rig.heard(channel) == SessionRefused("too_many", "full")
    with pytest.raises(ChannelClosed):
        channel.wait_frame(10)
    assert [type(event) for event in rig.events] == [PoolRegistered]
    channel.close()


def test_what_follows_a_broken_message_is_not_read(rig: Rig) -> None:
    channel = rig.connect()
    channel.send(b"junk")
    channel.send(encode(Hello(1, 1)))
    rig.loop.turn(1)
    assert isinstance(rig.heard(channel), SessionRefused)
    with pytest.raises(ChannelClosed):
        channel.wait_frame(10)
    channel.close()


def test_a_check_is_answered_as_often_as_asked_and_registers_nothing(rig: Rig) -> None:
    channel = rig.connect()
    rig.say(channel, Hello(1, 1))
    rig.heard(channel)
    for _ in range(2):
        rig.say(channel, AdminCheck())
        assert rig.heard(channel) == rig.admin(AdminCheck())
    assert rig.events == []
    channel.close()
    rig.loop.turn(1)
    assert (rig.events, len(rig.sessions)) == ([], 0)


def test_a_check_before_hello_or_with_descriptors_is_refused(rig: Rig) -> None:
    channel = rig.connect()
    rig.say(channel, AdminCheck())
    refused = rig.heard(channel)
    assert isinstance(refused, SessionRefused)
    assert refused.message == "say Hello before AdminCheck"
    channel.close()
    rig.loop.turn(1)
    channel = rig.connect()
    rig.say(channel, Hello(1, 1))
    rig.heard(channel)
    rig.say(channel, AdminCheck(), (0,))
    refused = rig.heard(channel)
    assert isinstance(refused, SessionRefused)
    assert "without descriptors" in refused.message
    channel.close()


@pytest.mark.parametrize("live", [False, True])
def test_a_rank_that_goes_with_its_group_is_told_so_if_it_would_wait_for_ever(
    rig: Rig, live: bool
) -> None:
    channel = rig.registering()
    rig.sessions.on_registered(actions.Registered(1, 5, 1))
    if live:
        rig.sessions.on_imported(5, True, "", "")
        rig.heard(channel)
    rig.sessions.on_released(5)
    rig.sessions.on_released(77)
    if live:
        assert channel.receive() == []
        assert len(rig.sessions) == 1
    else:
        refused = rig.heard(channel)
        assert isinstance(refused, SessionRefused)
        assert refused.code == "unknown_pool"
        assert len(rig.sessions) == 0
    channel.close()


def test_a_pool_is_announced_only_when_no_mover_touches_what_its_instance_had_before(
    rig: Rig,
) -> None:
    first, other = rig.registering(), rig.registering()
    rig.sessions.on_registered(actions.Registered(1, 5, 1))
    rig.sessions.on_registered(actions.Registered(2, 6, 1))
    rig.sessions.on_imported(5, True, "", "")
    rig.heard(first)
    rig.sessions.on_released(5)
    rig.sessions.on_imported(6, True, "", "")
    assert other.receive() == []
    assert rig.open == [5]
    rig.sessions.on_unmapped(77)
    assert other.receive() == []
    rig.sessions.on_unmapped(5)
    registered = rig.heard(other)
    assert isinstance(registered, Registered)
    assert registered.pool == 6
    assert rig.open == [5, 6]
    first.close()
    other.close()


def test_another_instances_copies_hold_no_registration_back(rig: Rig) -> None:
    first = rig.registering()
    rig.sessions.on_registered(actions.Registered(1, 5, 1))
    rig.sessions.on_imported(5, True, "", "")
    rig.heard(first)
    rig.sessions.on_released(5)
    other = rig.connect()
    rig.say(other, Hello(1, 1))
    rig.heard(other)
    rig.say(other, msgspec.structs.replace(REGISTER, instance="b"), (0, 0))
    rig.sessions.on_registered(actions.Registered(2, 6, 1))
    rig.sessions.on_imported(6, True, "", "")
    assert isinstance(rig.heard(other), Registered)
    first.close()
    other.close()
