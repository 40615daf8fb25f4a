"""The moments that a tick waits for the daemon: for whom, how long, what is said behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from directory.core.events import Match
from scheduler_shim.client import DaemonClient
from tests.unit.scheduler_shim.fake_daemon import FakeDaemon, FakeLink
from tests.unit.scheduler_shim.sglang.conftest import Add
from tests.unit.scheduler_shim.sglang.rig import MiniEngine, prompt

FORWARD_US = 60_000


class HoldingLink(FakeLink):
    """As a lane does: what is held goes with the next frame, or when answers are looked for."""

    arena = None

    def __init__(self, daemon: FakeDaemon) -> None:
        super().__init__(daemon)
        self.kept: list[bytes] = []
        self.sleeps = 0

    def hold(self, frame: bytes) -> bool:
        self.kept.append(frame)
        return True

    def looks_no_more(self) -> None:
        """The next wait sleeps at once."""
        self.sleeps += 1

    @property
    def holds(self) -> bool:
        return bool(self.kept)

    def send_held(self) -> None:
        self.to_daemon.extend(self.kept)
        self.kept.clear()

    def take_held_lost(self) -> int:
        return 0

    def send(self, frame: bytes) -> bool:
        self.send_held()
        return super().send(frame)

    def receive(self) -> list[bytes]:
        self.send_held()
        return super().receive()

    def wait(self, timeout_us: int | None, fds: Sequence[int] = ()) -> None:
        self.send_held()
        super().wait(timeout_us, fds)


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Callable[[MiniEngine], HoldingLink]:
    """Have an engine's client hold frames, as it does on a lane."""

    def made(engine: MiniEngine) -> HoldingLink:
        client = engine.shim.client
        assert isinstance(client, DaemonClient)
        link = HoldingLink(engine.daemon)
        peer = next(p for p in engine.daemon._peers.values() if p.link is engine.link)
        link.to_daemon, link.to_client = engine.link.to_daemon, engine.link.to_client
        engine.link = peer.link = link
        monkeypatch.setattr(client, "_link", link)
        monkeypatch.setattr(client, "_leave_lane", lambda: None)
        monkeypatch.setattr(client, "_lane", link)
        return link

    return made


def test_what_is_looked_up_again_in_the_wait_is_asked_before_a_forward_pass(
    daemon: FakeDaemon, add: Add, holding: Callable[[MiniEngine], HoldingLink]
) -> None:
    """A restore that two wait for lands in the wait: one of them goes on, the other asks."""
    short, whole = prompt(1, 2, 3, 4), prompt(1, 2, 3, 4, 5, 6, 7, 8)
    other = add("b", page_count=32)
    other.serve("b0", short)
    other.serve("b1", whole)
    engine = add("a", page_count=32, idle_wait_us=1_000, share=1.0)
    link = holding(engine)
    first, second = engine.submit("first", short), engine.submit("second", whole)
    for _ in range(60):
        engine.shim.tick(engine.queue, busy=False)
        assert link.kept == [], "nothing looks for answers in a forward pass"
        admitted = [request for request in engine.queue if not engine.shim.held(request.rid)]
        for request in admitted:
            request.hit_pages = engine.holds(request.tokens[: -len(prompt())])
            engine.shim.gone(request.rid)
            engine.queue.remove(request)
        daemon.run()
        daemon.clock_us += FORWARD_US if admitted else 200
        if not engine.queue:
            break
    assert (first.hit_pages, second.hit_pages) == (4, 8)
    assert engine.counters["restores_joined"] == 1
    assert engine.shim.client is not None
    assert "deadlines_missed" not in engine.shim.client.counters


def test_a_busy_engine_admits_in_the_step_that_has_asked(daemon: FakeDaemon, add: Add) -> None:
    engine = add("a", page_count=32, busy_wait_us=500)
    request = engine.submit("r", prompt(1, 2))
    engine.shim.tick(engine.queue, busy=True)
    assert not engine.shim.held("r"), "what lies beyond is known already"
    assert engine.counters["asked"] == 1
    slow = add("b", page_count=32)
    slow.queue.append(request)
    slow.shim.tick(slow.queue, busy=True)
    assert slow.shim.held("r")


def test_a_busy_engine_waits_a_moment_and_only_in_the_tick_that_has_asked(
    daemon: FakeDaemon, add: Add
) -> None:
    engine = add("a", page_count=32, busy_wait_us=500, match_ms=20)
    daemon.drop_request = lambda body: isinstance(body, Match)
    engine.submit("r", prompt(1, 2))
    before = daemon.clock_us
    engine.shim.tick(engine.queue, busy=True)
    assert daemon.clock_us - before == 500
    engine.shim.tick(engine.queue, busy=True)
    assert daemon.clock_us - before == 500, "it has asked nothing"
    assert engine.shim.held("r")
    engine.submit("r2", prompt(3, 4))
    engine.shim.tick(engine.queue, busy=True)
    assert daemon.clock_us - before == 1_000
    daemon.drop_request = lambda _: False
    daemon.clock_us += 20_000
    engine.settle()


def test_a_busy_engine_waits_for_nobody_whose_prefix_its_own_pool_has(
    daemon: FakeDaemon, add: Add
) -> None:
    engine = add("a", page_count=32, busy_wait_us=500)
    engine.serve("first", prompt(1, 2))
    waits = len(engine.link.waits)
    engine.submit("again", prompt(1, 2))
    engine.shim.tick(engine.queue, busy=True)
    assert not engine.shim.held("again")
    assert len(engine.link.waits) == waits


def test_what_a_busy_engine_restores_is_asked_before_its_forward_pass(
    daemon: FakeDaemon, add: Add, holding: Callable[[MiniEngine], HoldingLink]
) -> None:
    add("b", page_count=32).serve("b", prompt(1, 2, 3))
    engine = add("a", page_count=32, busy_wait_us=500, share=1.0)
    link = holding(engine)
    engine.submit("r", prompt(1, 2, 3))
    engine.shim.tick(engine.queue, busy=True)
    assert engine.counters["restores"] == 1
    assert link.kept == []
    engine.queue.clear()
    engine.settle()


def test_only_an_idle_engine_that_has_just_asked_looks_for_the_answer_before_it_sleeps(
    daemon: FakeDaemon, add: Add, holding: Callable[[MiniEngine], HoldingLink]
) -> None:
    add("b", page_count=32).serve("b", prompt(1, 2, 3))
    engine = add("a", page_count=32, idle_wait_us=1_000, busy_wait_us=500, share=1.0)
    link = holding(engine)
    daemon.hold_copies = True
    engine.submit("r", prompt(1, 2, 3))
    engine.shim.tick(engine.queue, busy=False)
    assert (engine.counters["restores"], link.sleeps) == (1, 0)
    engine.shim.tick(engine.queue, busy=False)
    assert link.sleeps == 1, "a copy takes longer than waking up"
    engine.submit("r2", prompt(7, 8))
    engine.shim.tick(engine.queue, busy=True)
    assert link.sleeps == 2, "whatever runs has more use for the processor"
    daemon.hold_copies = False
    engine.settle()
