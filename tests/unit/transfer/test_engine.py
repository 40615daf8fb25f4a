"""The engine on a fake device: admission, validation, order, loss, release."""

from collections.abc import Callable, Iterable, Iterator

import pytest

from directory.core.actions import SubmitCopy
from directory.core.errors import TransferError
from directory.core.events import CopyDone
from tests.unit.transfer.bench import FENCE_DEADLINE_US, Bench
from tests.unit.transfer.support import (
    HOST,
    OwnedPool,
    copy,
    part,
    slot,
    small_tier,
)
from transfer.engine import EngineEvent, PoolReleased
from transfer.engine_limits import EngineLimits
from transfer.layout import page_first
from transfer.plan import RangeBatch

FORWARD, CURRENT = 0, 1
PAGE_FIRST = page_first(layers=2, page_size=2, page_count=16, heads=1, head_dim=8, itemsize=2)


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


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """A bench with the usual limits."""
    return make_bench()


def backup(
    op: int, pages: Iterable[int], slots: Iterable[int], **more: Iterable[tuple[int, int, int]]
) -> SubmitCopy:
    return copy(op, "backup", part(1, pages, HOST, map(slot, slots)), **more)


def only(events: list[EngineEvent]) -> CopyDone:
    (event,) = events
    assert isinstance(event, CopyDone)
    return event


def ops(batches: Iterable[tuple[RangeBatch, ...]]) -> list[tuple[int, int]]:
    return [(pieces[0].source[0], pieces[0].target[0]) for pieces in batches]


def test_a_page_survives_backup_load_back_and_peer_copy(bench: Bench) -> None:
    done = only(bench.run(backup(1, [3, 7], [9, 2])))
    assert (done.op, done.outcome, done.nbytes) == (1, "ok", 2 * bench.layout.page_bytes)
    assert bench.host_page(9) == bench.pools[1].pattern(1, 3)
    assert bench.host_page(2) == bench.pools[1].pattern(1, 7)
    only(bench.run(copy(2, "load_back", part(HOST, [slot(9)], 2, [5]))))
    assert bench.pools[2].read_page(5) == bench.pools[1].pattern(1, 3)
    only(bench.run(copy(3, "peer_copy", part(2, [5], 1, [0]))))
    assert bench.pools[1].read_page(0) == bench.pools[1].pattern(1, 3)
    assert bench.pools[2].read_page(4) == bench.pools[2].pattern(2, 4), "its neighbours are not"
    assert bench.pools[2].read_page(6) == bench.pools[2].pattern(2, 6)


def test_a_mixed_copy_lands_its_parts_from_different_places(bench: Bench) -> None:
    only(bench.run(backup(1, [1], [0])))
    parts = (part(HOST, [slot(0)], 2, [8]), part(1, [2], 2, [9]))
    assert only(bench.run(copy(2, "mixed", *parts))).outcome == "ok"
    assert bench.pools[2].read_page(8) == bench.pools[1].pattern(1, 1)
    assert bench.pools[2].read_page(9) == bench.pools[1].pattern(1, 2)


@pytest.mark.parametrize("timeline", [FORWARD, CURRENT])
@pytest.mark.parametrize("pool", [1, 2])
def test_nothing_is_submitted_before_every_fence_has_passed_f47(
    bench: Bench, pool: int, timeline: int
) -> None:
    fences = [(p, t, 5) for p in (1, 2) for t in (FORWARD, CURRENT)]
    for p, t, value in fences:
        bench.pools[p].timelines.write(t, value if (p, t) != (pool, timeline) else value - 1)
    bench.engine.submit(copy(1, "peer_copy", part(1, [0], 2, [0]), fences=fences))
    assert bench.engine.step() == []
    assert bench.engine.only_fences
    assert bench.device.history == []
    bench.pools[1].write_page(0, b"\x55" * bench.layout.page_bytes)  # the late write
    bench.pools[pool].timelines.write(timeline, 5)
    assert only(bench.until_idle()).outcome == "ok"
    assert bench.pools[2].read_page(0) == b"\x55" * bench.layout.page_bytes


def test_a_fence_that_never_passes_fails_the_copy_at_its_deadline(bench: Bench) -> None:
    bench.engine.submit(backup(1, [0], [0], fences=[(1, CURRENT, 9)]))
    bench.now_us += FENCE_DEADLINE_US - 1
    assert bench.engine.step() == []
    bench.now_us += 1
    done = only(bench.engine.step())
    assert done.outcome == "failed"
    assert done.detail == "fence timeout: pool 1 current timeline at 0, needs 9"
    assert bench.device.history == []


def test_a_waiting_copy_does_not_hold_up_those_behind_it(bench: Bench) -> None:
    bench.engine.submit(backup(1, [0], [0], fences=[(1, FORWARD, 1)]))
    bench.engine.submit(backup(2, [1], [1]))
    bench.engine.step()
    bench.device.step()
    assert only(bench.engine.step()).op == 2


def test_a_word_that_moved_before_submission_voids_the_copy_without_copying(bench: Bench) -> None:
    bench.pools[1].words.bump(4)
    done = only(bench.run(backup(1, [0], [0], words=[(1, 3, 0), (1, 4, 0)])))
    assert (done.outcome, done.nbytes, done.duration_us) == ("void", 0, 0)
    assert done.detail == "pool 1 span word 4 is 1, was reported as 0"
    assert bench.device.history == []


@pytest.mark.parametrize("word", [0, 4])
def test_a_word_that_moves_during_the_copy_voids_it(bench: Bench, word: int) -> None:
    bench.engine.submit(backup(1, [0], [0], words=[(1, 0, 0), (1, 4, 0)]))
    assert bench.engine.step() == []
    assert len(bench.device.waiting) == 1
    bench.pools[1].words.bump(word)
    assert bench.engine.step() == [], "its slice may still write: it is not over"
    bench.device.step()
    assert only(bench.engine.step()).outcome == "void"


def test_a_word_that_moves_between_completion_and_check_voids_the_copy(bench: Bench) -> None:
    bench.engine.submit(backup(1, [0], [0], words=[(1, 4, 0)]))
    bench.engine.step()
    bench.device.step()
    bench.pools[1].words.bump(4)
    assert only(bench.engine.step()).outcome == "void"


def test_the_rest_of_a_void_copy_is_not_submitted(make_bench: MakeBench) -> None:
    bench = make_bench(slice_ranges=4, submissions_max=1)
    bench.engine.submit(backup(1, range(8), range(8), words=[(1, 4, 0)]))
    bench.engine.step()
    bench.pools[1].words.bump(4)
    done = only(bench.until_idle())
    assert done.outcome == "void"
    assert len(bench.device.history) == 1
    assert done.nbytes == bench.device.history[0].nbytes


def test_a_restore_overtakes_a_large_backup_after_a_bounded_number_of_slices(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(slice_ranges=2, submissions_max=2)
    bench.engine.submit(backup(1, range(16), range(16)))
    bench.engine.step()
    assert bench.device.in_flight == 2
    bench.engine.submit(copy(2, "load_back", part(HOST, [slot(20)], 2, [0])))
    events = bench.until_idle()
    assert [event.op for event in events if isinstance(event, CopyDone)] == [2, 1]
    order = ops(submission.batches for submission in bench.device.history)
    assert order[:5] == [(1, HOST), (1, HOST), (HOST, 2), (HOST, 2), (1, HOST)]
    assert [s.urgent for s in bench.device.history[:3]] == [False, False, True]
    assert bench.host_page(15) == bench.pools[1].pattern(1, 15)


def test_slices_keep_within_bytes_and_number_in_flight(make_bench: MakeBench) -> None:
    bench = make_bench(slice_bytes=100, submissions_max=3)
    bench.engine.submit(backup(1, range(16), range(16)))
    bench.engine.submit(backup(2, range(16), range(16, 32)))
    events = bench.engine.step()
    while not bench.engine.idle:
        assert bench.device.in_flight <= 3
        bench.device.step()
        events += bench.engine.step()
    assert [e.outcome for e in events if isinstance(e, CopyDone)] == ["ok", "ok"]
    assert max(s.nbytes for s in bench.device.history) <= 100
    for page in range(16):
        assert bench.host_page(page) == bench.host_page(16 + page)
        assert bench.host_page(page) == bench.pools[1].pattern(1, page)


def test_completions_in_any_order_end_each_copy_once(make_bench: MakeBench) -> None:
    bench = make_bench(slice_ranges=2, submissions_max=8)
    for op in (1, 2):
        bench.engine.submit(backup(op, range(4), range(4 * op, 4 * op + 4)))
    events = bench.engine.step()
    bench.device.delay(max(bench.device.waiting), 2)
    while not bench.engine.idle:
        bench.device.step(newest_first=True)
        events += bench.engine.step()
    assert sorted(e.op for e in events if isinstance(e, CopyDone)) == [1, 2]
    for page in range(4):
        assert bench.host_page(4 + page) == bench.pools[1].pattern(1, page)


def test_a_device_error_fails_the_copy_once_its_other_slices_are_done_f51(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(slice_ranges=4, submissions_max=2)
    bench.engine.submit(backup(1, range(8), range(8)))
    bench.engine.step()
    first, second = bench.device.waiting
    bench.device.fail(first, "ECC")
    assert bench.engine.step() == []
    bench.device.complete(second)
    done = only(bench.engine.step())
    assert (done.outcome, done.detail) == ("failed", "the device failed: ECC")
    assert len(bench.device.history) == 2, "nothing more is submitted"


def test_a_refused_submission_fails_its_copy_and_no_other(bench: Bench) -> None:
    bench.device.refuse_next("poisoned")
    events = bench.run(backup(1, [0], [0]), backup(2, [1], [1]))
    outcomes = [(e.op, e.outcome) for e in events if isinstance(e, CopyDone)]
    assert outcomes == [(1, "failed"), (2, "ok")]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (backup(1, [99], [0]), "beyond the 16 pages"),
        (backup(1, [0], [99]), "not in the tier"),
        (backup(1, [0, 1], [0]), "2 source pages for 1"),
        (backup(1, [0], [0], words=[(1, 999, 0)]), "word 999 of a table"),
        (backup(1, [0], [0], fences=[(1, 999, 0)]), "timeline 999 of a table"),
    ],
)
def test_a_copy_of_what_is_not_there_fails_and_says_why(
    bench: Bench, request_: SubmitCopy, says: str
) -> None:
    done = only(bench.run(request_))
    assert done.outcome == "failed"
    assert says in done.detail
    assert bench.device.history == []


def test_a_copy_of_nothing_is_ok(bench: Bench) -> None:
    assert only(bench.run(copy(1, "peer_copy"))).outcome == "ok"
    assert only(bench.run(backup(2, [], []))).nbytes == 0


def test_a_copy_with_a_pool_that_is_not_imported_is_void(bench: Bench) -> None:
    done = only(bench.run(copy(1, "peer_copy", part(1, [0], 7, [0]))))
    assert (done.outcome, done.detail) == ("void", "pool 7 is not imported (any more)")
    assert only(bench.run(backup(2, [0], [0], words=[(9, 0, 0)]))).outcome == "void"


def test_an_op_that_is_under_way_is_lost_when_it_comes_again(bench: Bench) -> None:
    bench.engine.submit(backup(1, [0], [0]))
    bench.engine.submit(backup(1, [0], [0]))
    done = only(bench.until_idle())
    assert (done.outcome, done.detail) == ("failed", "copy 1 was submitted twice")


def test_an_op_that_comes_again_while_it_runs_ends_only_when_nothing_is_in_flight(
    bench: Bench,
) -> None:
    bench.engine.submit(backup(1, [0], [0]))
    assert bench.engine.step() == []
    bench.engine.submit(backup(1, [0], [0]))
    bench.engine.submit(backup(1, [0], [0]))
    assert bench.engine.step() == [], "the device still writes"
    assert only(bench.until_idle()).outcome == "failed"


def test_the_queue_of_copies_is_bounded(make_bench: MakeBench) -> None:
    bench = make_bench(copies_max=1)
    bench.engine.submit(backup(1, [0], [0]))
    with pytest.raises(TransferError, match="1 copies under way"):
        bench.engine.submit(backup(2, [0], [0]))


def test_a_pool_is_released_only_when_no_running_copy_touches_it_f59(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(slice_ranges=4, submissions_max=1)
    bench.engine.submit(copy(1, "load_back", part(HOST, map(slot, range(8)), 2, range(8))))
    bench.engine.submit(backup(2, [0], [8]))  # of the other pool: not concerned
    bench.engine.step()
    bench.engine.release_pool(2)
    assert bench.engine.step() == []
    assert (2, 0) in bench.device.attached
    bench.device.step()
    events = bench.engine.step()
    assert [type(e) for e in events] == [CopyDone, PoolReleased]
    assert only(events[:1]).outcome == "void"
    assert events[1] == PoolReleased(2)
    assert not [key for key in bench.device.attached if key[0] == 2]
    assert only(bench.until_idle()) == CopyDone(2, "ok", "", bench.layout.page_bytes, 0)


def test_releasing_a_pool_voids_its_waiting_copies_at_once(make_bench: MakeBench) -> None:
    bench = make_bench(submissions_max=1)
    bench.engine.submit(backup(1, [0], [0], fences=[(1, 0, 9)]))
    bench.engine.submit(copy(2, "load_back", part(HOST, [slot(0)], 2, [0])))
    bench.engine.step()
    bench.engine.submit(backup(3, [1], [1]))  # ready, behind the other's slice
    bench.engine.release_pool(1)
    events = bench.engine.step()
    voided = [(e.op, e.outcome) for e in events if isinstance(e, CopyDone)]
    assert voided == [(1, "void"), (3, "void")]
    assert events[-1] == PoolReleased(1)
    only(bench.until_idle())


def test_a_copy_that_comes_while_its_pool_is_being_released_is_void(bench: Bench) -> None:
    bench.engine.submit(backup(1, [0], [0]))
    bench.engine.step()
    bench.engine.release_pool(1)
    bench.engine.submit(backup(2, [1], [1]))
    assert only(bench.engine.step()).op == 2
    bench.device.step()
    assert [type(e) for e in bench.engine.step()] == [CopyDone, PoolReleased]


def test_releasing_a_pool_that_is_not_here_is_answered(bench: Bench) -> None:
    bench.engine.release_pool(7)
    assert bench.engine.step() == [PoolReleased(7)]


def test_a_pool_is_not_imported_twice(bench: Bench) -> None:
    again = bench.pools[1].import_as(1)
    with pytest.raises(TransferError, match="imported already"):
        bench.engine.add_pool(again)
    again.close()
    assert bench.engine.pool_count == 2


def test_a_pool_that_comes_again_is_addressed_by_its_new_layout(bench: Bench) -> None:
    request = part(1, [3], 2, [4])
    only(bench.run(copy(1, "peer_copy", request)))
    bench.engine.release_pool(2)
    assert bench.until_idle() == [PoolReleased(2)]
    another = OwnedPool(PAGE_FIRST)
    bench.engine.add_pool(another.import_as(2))
    assert only(bench.run(copy(2, "peer_copy", request))).outcome == "ok"
    assert another.read_page(4) == bench.pools[1].pattern(1, 3)
    another.close()


def test_a_second_tier_is_refused(bench: Bench) -> None:
    other = small_tier(bench.layout)
    with pytest.raises(TransferError, match="a host tier already"):
        bench.engine.open_tier(other)
    other.close()


def test_the_duration_runs_from_the_first_slice_to_the_end(bench: Bench) -> None:
    bench.engine.submit(backup(1, [0], [0], fences=[(1, 0, 1)]))
    bench.now_us = 100
    bench.engine.step()
    bench.pools[1].timelines.write(0, 1)
    bench.now_us = 200
    bench.engine.step()
    bench.device.step()
    bench.now_us = 250
    assert only(bench.engine.step()).duration_us == 50
