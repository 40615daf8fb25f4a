"""A stager that is stuck over a return: the next daemon's loads are nothing to it, nor it to them.

The shim, its client and its daemon are real; the stager alone is a stand-in, told when to rest.
"""

from __future__ import annotations

from directory.core.events import Mode
from tests.unit.scheduler_shim.sglang.conftest import Load
from tests.unit.scheduler_shim.sglang.layerwise_rig import (
    ABC,
    OTHERS,
    LoadingEngine,
    LoadRequest,
    at_rest,
)
from tests.unit.scheduler_shim.support import FakeDaemon


class StuckStager:
    """One that has begun to write for a mover that is dead, and is not done with it."""

    at_rest = False
    requests = 0

    def settle(self) -> None:
        """It does not come to rest in time."""

    def begin(self, number: int) -> bool:
        """It serves no other registration."""
        return False

    def close(self) -> None:
        """Nothing is its own."""


def leave_and_return(a: LoadingEngine, daemon: FakeDaemon, mode: Mode) -> StuckStager:
    """The daemon dies and another one comes, while the stager is stuck."""
    daemon.die()
    a.step()
    stuck = StuckStager()
    a.pool.staging = stuck  # type: ignore[assignment]
    daemon.restart()
    for _ in range(400):
        a.step()
        daemon.run()
        daemon.clock_us += 10_000
        if a.shim.mode == mode:
            break
    return stuck


def returned(engine: Load, daemon: FakeDaemon, mode: Mode) -> tuple[LoadingEngine, StuckStager]:
    """An engine that has lost its daemon and has another one, with a stager that is stuck yet."""
    a = engine(mode)
    stuck = leave_and_return(a, daemon, mode)
    for number, tokens in enumerate((ABC, *OTHERS)):
        a.serve(f"again{number}", tokens)
    assert a.holds(ABC) == 0
    assert a.shim.room.late, "what was lost with the last daemon is out of use"
    daemon.hold_copies = a.behind = a.stalled = True
    return a, stuck


def begin(a: LoadingEngine, daemon: FakeDaemon, rid: str, tokens: bytes) -> LoadRequest:
    """Have a request admitted whose pass waits for its load."""
    request = a.submit(rid, tokens)
    for _ in range(5):
        a.step()
        daemon.run()
    assert request.loaded_pages == 3
    return request


def over(a: LoadingEngine, daemon: FakeDaemon) -> None:
    """Everything that is under way comes to its end."""
    daemon.hold_copies = a.behind = a.stalled = False
    daemon.run()
    at_rest(a)


def test_a_load_of_the_next_daemon_goes_on_when_the_stager_comes_to_rest(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a, stuck = returned(engine, daemon, mode)
    request = begin(a, daemon, "r", ABC)
    stuck.at_rest = True
    a.step()
    assert not a.shim.room.late
    assert "lost" not in repr(a.shim.loads)
    over(a, daemon)
    assert (request.failed, request.hit_pages) == ("", 3)
    assert a.counters.get("loads_lost_in_flight", 0) == 0


def test_no_two_loads_have_one_counter_after_a_stager_came_to_rest(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a, stuck = returned(engine, daemon, mode)
    first = begin(a, daemon, "first", ABC)
    stuck.at_rest = True
    a.step()
    second = begin(a, daemon, "second", OTHERS[0])
    counters = [load.landing.counter for load in a.shim.loads._by_rid.values()]
    assert len(set(counters)) == 2
    over(a, daemon)
    assert [first.failed, second.failed] == ["", ""]


def test_counters_of_what_was_lost_wait_for_the_stager(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    daemon.hold_copies = a.behind = a.stalled = True
    lost = begin(a, daemon, "lost", ABC)
    stuck = leave_and_return(a, daemon, mode)
    assert lost.failed
    assert len(a.landings.open) == 1, "whoever writes for the dead mover may write it"
    stuck.at_rest = True
    a.step()
    assert a.landings.open == []
    over(a, daemon)
