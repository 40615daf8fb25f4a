"""Slices that are with the device: one that never ends costs the mover, and whose fault it was."""

from collections.abc import Callable, Iterator

import pytest

from directory.core.actions import SubmitCopy
from directory.core.events import CopyDone
from tests.unit.transfer.bench import FENCE_DEADLINE_US, Bench
from tests.unit.transfer.support import HOST, copy, part, slot
from transfer.device.protocol import DeviceLost
from transfer.engine import EngineEvent
from transfer.engine_limits import EngineLimits

MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    """Make benches with limits of the test's choice."""
    made: list[Bench] = []

    def make(**limits: int) -> Bench:
        made.append(Bench(EngineLimits(fence_deadline_us=FENCE_DEADLINE_US)._replace(**limits)))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def backup(op: int, pages: list[int], slots: list[int]) -> SubmitCopy:
    return copy(op, "backup", part(1, pages, HOST, map(slot, slots)))


def only(events: list[EngineEvent]) -> CopyDone:
    (event,) = events
    assert isinstance(event, CopyDone)
    return event


def test_a_slice_that_the_device_never_finishes_costs_the_whole_device(
    make_bench: MakeBench,
) -> None:
    # Only the end of the process makes certain that nothing touches the pages any more.
    bench = make_bench(device_deadline_us=5_000)
    bench.engine.submit(backup(1, [0], [0]))
    assert bench.engine.step() == []
    bench.now_us += 4_999
    assert bench.engine.step() == []
    bench.now_us += 1
    with pytest.raises(DeviceLost, match="has not finished a slice of <Copy 1 backup"):
        bench.engine.step()
    bench.device.step()  # so that it can be tidied up


def test_a_slice_that_was_finished_while_nobody_looked_is_no_loss(make_bench: MakeBench) -> None:
    bench = make_bench(device_deadline_us=5_000)
    bench.engine.submit(backup(1, [0], [0]))
    bench.engine.step()
    bench.now_us += 1_000_000
    bench.device.step()
    assert only(bench.engine.step()).outcome == "ok"


def test_a_device_error_is_told_apart_from_what_a_copy_has_done_wrong(
    make_bench: MakeBench,
) -> None:
    bench = make_bench()
    bench.engine.submit(backup(1, [0], [0]))
    bench.engine.step()
    bench.device.fail(next(iter(bench.device.waiting)), "ECC")
    done = only(bench.until_idle())
    assert (done.outcome, done.broken) == ("failed", True)
    done = only(bench.run(backup(2, [99], [0])))
    assert (done.outcome, done.broken) == ("failed", False)
