"""The circuit breaker and the gate before the movers: what is tried, what waits, what fails."""

from collections import Counter

import pytest

from directory.core.actions import SubmitCopy
from directory.core.events import CopyDone, Outcome
from directory.core.limits import COPY_WAIT_MS_MAX
from directory.daemon.breaker import (
    BREAKER,
    FAILURES_MAX,
    REST_US_MAX,
    REST_US_MIN,
    Breaker,
    BreakerState,
)
from directory.daemon.gate import Gate


def opened(now: int = 0) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker("backup")
    for op in range(FAILURES_MAX):
        assert breaker.allows(op, now)
        assert breaker.ended(op, broken=True, now=now) is (op == FAILURES_MAX - 1)
    assert state(breaker) is BreakerState.OPEN
    return breaker


def state(breaker: Breaker) -> BreakerState:
    """Its state, of which a type checker assumes nothing from before."""
    return breaker.state


def copy(op: int, kind: str = "backup") -> SubmitCopy:
    return SubmitCopy(op, kind, (), (), ())  # type: ignore[arg-type]


def test_one_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker("backup")
    for op in range(10 * FAILURES_MAX):
        breaker.ended(op, broken=op % FAILURES_MAX != 0, now=0)
    assert state(breaker) is BreakerState.CLOSED


def test_an_open_breaker_lets_nothing_through_before_it_has_rested_and_then_one() -> None:
    breaker = opened(now=7)
    assert not breaker.allows(100, 7 + REST_US_MIN - 1)
    assert breaker.allows(101, 7 + REST_US_MIN)
    assert not breaker.allows(102, 7 + 100 * REST_US_MAX)


def test_what_becomes_of_the_one_that_was_tried_decides_and_nothing_else() -> None:
    breaker = opened()
    assert breaker.allows(101, REST_US_MIN)
    breaker.ended(3, broken=True, now=REST_US_MIN)
    breaker.ended(4, broken=False, now=REST_US_MIN)
    assert state(breaker) is BreakerState.TRYING
    breaker.ended(101, broken=False, now=REST_US_MIN)
    assert state(breaker) is BreakerState.CLOSED
    assert not breaker.ended(102, broken=True, now=REST_US_MIN), "it has forgotten the failures"


def test_it_rests_ever_longer_up_to_a_cap_and_anew_after_a_success() -> None:
    breaker, now, rests = opened(), 0, []
    for op in range(100, 110):
        began = now
        while not breaker.allows(op, now):
            now += REST_US_MIN
        rests.append(now - began)
        breaker.ended(op, broken=True, now=now)
    assert rests[0] == REST_US_MIN
    assert rests == sorted(rests)
    assert rests[-1] == rests[-2] == REST_US_MAX
    assert breaker.allows(200, now + REST_US_MAX)
    breaker.ended(200, broken=False, now=now)
    for op in range(300, 300 + FAILURES_MAX):
        breaker.ended(op, broken=True, now=now)
    assert breaker.allows(400, now + REST_US_MIN)


def test_a_try_that_was_never_made_is_made_by_the_next() -> None:
    breaker = opened()
    assert breaker.allows(101, REST_US_MIN)
    breaker.forget(100, REST_US_MIN)
    assert not breaker.allows(102, REST_US_MIN)
    breaker.forget(101, REST_US_MIN)
    assert breaker.allows(102, REST_US_MIN)


def test_a_dead_mover_is_one_failure_however_many_copies_it_had() -> None:
    breaker = Breaker("backup")
    assert not breaker.mover_lost(set(range(100)), 0)
    for _ in range(FAILURES_MAX - 2):
        assert not breaker.mover_lost({1}, 0)
    assert breaker.mover_lost({1}, 0)
    assert breaker.allows(7, REST_US_MIN)
    breaker.mover_lost({1, 2, 7}, REST_US_MIN)
    assert state(breaker) is BreakerState.OPEN, "its try was among them"


@pytest.mark.parametrize("outcome", ["failed", "void", "ok"])
def test_what_is_not_the_devices_fault_never_opens_it(outcome: Outcome) -> None:
    gate = Gate(Counter())
    for op in range(10 * FAILURES_MAX):
        assert gate.admit(copy(op), 0, serving=True)
        gate.ended(CopyDone(op, outcome, "fence timeout"), 0)
    assert gate.open_kinds() == []


def test_kinds_of_copies_fail_apart() -> None:
    gate = Gate(Counter())
    for op in range(FAILURES_MAX):
        assert gate.admit(copy(op), 0, serving=True)
        gate.ended(CopyDone(op, "failed", "", 0, 0, True), 0)
    assert gate.open_kinds() == ["backup"]
    assert not gate.admit(copy(50), 1, serving=True)
    assert gate.admit(copy(51, "load_back"), 1, serving=True)
    assert [done.op for done in gate.failed(1)] == [50]
    assert gate.failed(1) == []


def test_what_waits_is_handed_on_in_order_or_fails_at_its_time() -> None:
    gate = Gate(Counter())
    for op, now in ((1, 0), (2, 10), (3, 20)):
        assert not gate.admit(copy(op), now, serving=False)
    late = COPY_WAIT_MS_MAX * 1000
    assert gate.due_us() == late
    assert gate.failed(late - 1) == []
    assert [done.op for done in gate.failed(late + 10)] == [1, 2]
    assert gate.in_flight == 0
    assert [waiting.op for waiting in gate.to_submit()] == [3]
    assert gate.busy
    assert gate.due_us() is None
    gate.ended(CopyDone(3, "ok"), late)
    assert gate.in_flight == 0


def test_nothing_that_waited_or_failed_outlives_the_mover_that_was_lost() -> None:
    gate = Gate(Counter())
    gate.admit(copy(1), 0, serving=True)
    gate.admit(copy(2), 0, serving=False)
    gate.mover_lost(1)
    assert (gate.busy, gate.failed(10**9), gate.to_submit()) == (False, [], [])
    assert "0 in flight" in repr(gate)


def test_the_table_leads_from_every_state_to_closed() -> None:
    reached = {BreakerState.CLOSED}
    for _ in BREAKER:
        reached |= {state for (state, _), then in BREAKER.items() if then in reached}  # type: ignore[misc]
    assert reached == set(BreakerState)
