"""What a client says by its lane, in which order, when it releases a lease."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from directory.core.events import Body, Evict, Live, Lock, Match, Stats, Unlock
from directory.core.namespace import NamespaceKey
from directory.protocol.codec import decode_envelope
from scheduler_shim.client import DaemonClient
from scheduler_shim.lane_link import LaneLink, make_arena
from scheduler_shim.session import Registration
from transfer.ipc.channel import FdChannel
from transfer.ipc.lane import FrameLane

EPOCH, POOL = 7, 1
KEY = NamespaceKey()
ASKS = Match("r", 1, KEY, b"1234")
LOOKS = Match("r", 1, KEY, b"1234", acquire=False)


class Rig:
    """A client whose daemon only listens."""

    def __init__(self, folder: Path, world_size: int = 1) -> None:
        mine, self.session = FdChannel.pair()
        arena = make_arena(warm=False)
        assert arena is not None
        link = LaneLink(mine, f"ipc://{folder}/router.sock", arena)
        link._spin_ns = 0
        ((_, fds),) = self.session.receive()
        self.lane = FrameLane(socket.socket(fileno=fds[0]))
        socket.close(fds[1])
        registration = Registration(POOL, 1, EPOCH, b"s", "", lane=True)
        self.client = DaemonClient(link, registration, world_size=world_size)

    def heard(self) -> list[tuple[int, Body]]:
        """Numbers and bodies of what has been said since this was asked."""
        frames: list[bytes] = []
        while more := self.lane.receive():
            frames += more
        envelopes = map(decode_envelope, frames)
        return [(said.seq, said.body) for said in envelopes]  # type: ignore[misc]

    def close(self) -> None:
        self.client.close()
        self.session.close()
        self.lane.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_a_release_comes_behind_a_match_that_asks_for_a_lease(rig: Rig) -> None:
    rig.client.report(Unlock(5))
    rig.client.report(Unlock(6))
    assert rig.heard() == []
    rig.client.ask(ASKS)
    assert rig.heard() == [(1, ASKS)], "the match goes at once"
    rig.client.wait(0)
    assert rig.heard() == [(2, Unlock(5)), (3, Unlock(6))]


@pytest.mark.parametrize("body", [LOOKS, Evict(3), Lock("r", 1, 4), Stats(), Unlock(9)])
def test_all_other_questions_come_behind_what_was_released(rig: Rig, body: Match | Evict) -> None:
    rig.client.report(Unlock(5))
    rig.client.ask(body)
    assert rig.heard() == [(1, Unlock(5)), (2, body)]


def test_so_do_reports(rig: Rig) -> None:
    rig.client.report(Unlock(5))
    rig.client.report(LOOKS, hold=True)
    rig.client.report(Unlock(6))
    rig.client.report_live([("r", 1)])
    said = [body for _, body in rig.heard()]
    assert said == [Unlock(5), LOOKS, Unlock(6), Live((("r", 1),))]


@pytest.mark.parametrize(
    "listen",
    [
        lambda client: client.wait(0),
        lambda client: client.poll(),
        lambda client: client.send_held(),
    ],
)
def test_it_is_said_at_the_latest_when_somebody_listens(
    rig: Rig, listen: Callable[[DaemonClient], object]
) -> None:
    rig.client.report(Unlock(5))
    assert rig.client.open_count == 1, "who rests while something is open goes on listening"
    listen(rig.client)
    assert rig.heard() == [(1, Unlock(5))]
    assert rig.client.open_count == 1


def test_ranks_number_alike_whenever_they_listen(tmp_path: Path) -> None:
    rig = Rig(tmp_path, world_size=2)
    rig.client.report(Unlock(5))
    rig.client.ask(ASKS)
    assert rig.heard() == [(1, Unlock(5)), (2, ASKS)]
    rig.close()


def test_with_the_daemon_goes_what_was_not_said(rig: Rig) -> None:
    rig.client.report(Unlock(5))
    rig.client.lose("gone")
    rig.client.send_held()
    rig.client.report(Unlock(6))
    assert rig.client.open_count == 0
