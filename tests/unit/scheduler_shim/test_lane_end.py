"""The lane ends alone, or with its daemon: the client goes on by ZeroMQ, or learns of the death.

The daemon's server and core are the real ones; a client that only polls must find out all by
itself, because an engine that is busy never waits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from directory.core.actions import Answer, Refused
from directory.core.directory import Directory
from directory.core.errors import NotAuthorised
from directory.core.events import Asked, Body, Insert, PoolRegistered
from directory.core.ids import PoolId
from directory.core.limits import RESEND_AFTER_MS
from directory.core.namespace import NamespaceKey
from directory.daemon.loop import Loop
from directory.daemon.server import Server
from scheduler_shim.client import DaemonClient
from scheduler_shim.lane_link import LaneLink, make_arena
from scheduler_shim.session import Registration
from scheduler_shim.speaking import ATTACHES_MAX
from tests.unit.scheduler_shim.pair import Pair
from tests.unit.scheduler_shim.test_speaking import Rig
from transfer.ipc.channel import FdChannel

EPOCH = 7
DEADLINE_S = 60.0
KEY = NamespaceKey()


class Node:
    """A client with a lane, and the server and core of its daemon, all in this process."""

    def __init__(self, folder: Path) -> None:
        self.directory = Directory(host_bytes=0)
        self.loop = Loop()
        self.server = Server(folder / "r.sock", EPOCH, self.ask, Counter(), self.loop)
        self.loop.watch_hidden(self.server)
        registered = self.directory.handle(
            PoolRegistered(1, 0, "a", b"f", 1, 4096, 64, "mirrored")
        )[0]
        self.pool: PoolId = registered.pool  # type: ignore[union-attr]
        self.server.open_pool(self.pool, b"s")
        mine, self.session = FdChannel.pair()
        arena = make_arena(warm=False)
        assert arena is not None
        endpoint = f"ipc://{folder}/r.sock"
        link = LaneLink(mine, endpoint, arena)
        ((_, fds),) = self.session.receive()
        self.server.open_lane(self.pool, fds, arena.nbytes)
        registration = Registration(self.pool, 1, EPOCH, b"s", endpoint, lane=True)
        self.client = DaemonClient(link, registration)

    def ask(self, pool: PoolId, seq: int, body: Body) -> None:
        for action in self.directory.handle(Asked(pool, seq, 0, body)):
            if isinstance(action, Answer):
                self.server.answer(action.pool, action.seq, action.body)

    def close(self) -> None:
        self.client.close()
        self.session.close()
        self.server.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("count", [ATTACHES_MAX + 1, 40, 1_000])
def test_however_much_is_open_when_the_lane_ends_the_registration_stays(
    node: Node, count: int
) -> None:
    for number in range(1, count + 1):
        page = number.to_bytes(4, "little")
        body = Insert("r", 0, KEY, page, page, number, 0, (0, 0), fresh_pages=1)
        node.client.report(body)
    node.server._lanes.close(node.pool)
    give_up = time.monotonic() + DEADLINE_S
    with (
        capture_logs()
    ):  # a daemon does not write down each frame that it refuses, which takes long
        while node.client.open_count and not node.client.lost:
            assert time.monotonic() < give_up
            node.loop.turn(0.001)
            while node.loop.waiting():
                node.loop.turn(0)
            node.client.poll()
    assert (node.client.lost, node.client.counters["lanes_ended"]) == ("", 1)
    assert node.directory.pools[node.pool].pages == min(count, 4096)


def test_what_is_refused_at_a_time_asks_for_one_attach_and_silence_for_few(pair: Pair) -> None:
    def refuse(times: int) -> None:
        for _ in range(times):
            pair.daemon.say(2, 0, Refused(NotAuthorised.code, "attach it first"))
        pair.client.poll()

    for _ in range(ATTACHES_MAX):
        refuse(100)
        assert not pair.client.lost
        pair.later(RESEND_AFTER_MS / 1_000)
    refuse(1)
    assert NotAuthorised.code in pair.client.lost


def test_a_client_that_only_polls_learns_that_its_daemon_is_dead(rig: Rig) -> None:
    rig.lane.close()
    rig.session.close()
    rig.client.poll()
    assert rig.client.lost == "the daemon closed the session"


def test_so_it_does_where_the_lane_ends_first(rig: Rig) -> None:
    rig.lane.close()
    rig.client.poll()
    assert (rig.client.lost, rig.client.counters["lanes_ended"]) == ("", 1)
    rig.session.close()
    rig.client.poll()
    assert rig.client.lost == "the daemon closed the session"
