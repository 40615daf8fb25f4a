"""The engine and pools whose pages have names: looked up at the one right moment, or not at all."""

from collections.abc import Callable, Iterator

import msgspec
import pytest

from directory.core.actions import SubmitCopy
from directory.core.events import CopyDone
from tests.unit.transfer.bench import FENCE_DEADLINE_US, Bench
from tests.unit.transfer.support import HOST, copy, part, slot
from transfer.engine import Engine, EngineEvent
from transfer.engine_limits import EngineLimits
from transfer.imports import translated

CURRENT = 1
LIMITS = EngineLimits(fence_deadline_us=FENCE_DEADLINE_US)


class TooEarly(Engine):
    """A deliberate bug: names are looked up when a copy comes, before its fences have passed."""

    def submit(self, request: SubmitCopy) -> None:
        """Look up, and go on with page numbers."""
        parts = tuple(translated(part, self._pools) for part in request.parts)
        # The right moment comes later; by then the table says what the numbers are of.
        self._early = {request.op: parts}
        super().submit(request)

    def _start(self, copy: "object") -> bool:
        request = copy.request  # type: ignore[attr-defined]
        tables = {}
        for number, pool in self._pools.items():
            tables[number], pool.page_table = pool.page_table, None
        copy.request = msgspec.structs.replace(request, parts=self._early[request.op])  # type: ignore[attr-defined]
        try:
            return super()._start(copy)  # type: ignore[arg-type]
        finally:
            for number, table in tables.items():
                self._pools[number].page_table = table


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    """Make benches with pools of the test's choice."""
    made: list[Bench] = []

    def make(*named: int, engine: type[Engine] = Engine) -> Bench:
        made.append(Bench(LIMITS, named=named, engine=engine))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def only(events: list[EngineEvent]) -> CopyDone:
    (event,) = events
    assert isinstance(event, CopyDone)
    return event


@pytest.mark.parametrize("named", [(1,), (2,), (1, 2)])
def test_copies_go_by_what_the_names_stand_for(
    make_bench: MakeBench, named: tuple[int, ...]
) -> None:
    bench = make_bench(*named)
    page = {number: 5 if number in named else 3 for number in (1, 2)}
    for number in named:
        bench.pools[number].name(3, 5)
    source, target = bench.pools[1], bench.pools[2]
    assert only(bench.run(copy(1, "backup", part(1, [3], HOST, [slot(0)])))).outcome == "ok"
    assert bench.host_page(0) == source.pattern(1, page[1])
    assert only(bench.run(copy(2, "peer_copy", part(1, [3], 2, [3])))).outcome == "ok"
    assert target.read_page(page[2]) == source.pattern(1, page[1])
    target.fill(2)
    assert only(bench.run(copy(3, "load_back", part(HOST, [slot(0)], 2, [3])))).outcome == "ok"
    assert target.read_page(page[2]) == source.pattern(1, page[1])
    others = set(range(bench.layout.page_count)) - {page[2]}
    assert all(target.read_page(at) == target.pattern(2, at) for at in others)


def named_behind_a_fence(bench: Bench) -> tuple[bytes, bytes]:
    """A stream writes names and pages and then lets its timeline pass, as a GPU's does; the copy
    has long been there. Returns what landed and what should have."""
    source = bench.pools[1]
    source.name(3, 7)  # whose page it was before
    bench.engine.submit(copy(1, "backup", part(1, [3], HOST, [slot(0)]), fences=[(1, CURRENT, 2)]))
    assert bench.engine.step() == []
    source.write_page(9, b"\x55" * bench.layout.page_bytes)
    source.name(3, 9)
    source.timelines.write(CURRENT, 2)
    assert only(bench.until_idle()).outcome == "ok"
    return bench.host_page(0), source.read_page(9)


def test_a_name_is_not_looked_up_before_the_fences_have_passed(make_bench: MakeBench) -> None:
    landed, right = named_behind_a_fence(make_bench(1))
    assert landed == right


def test_looking_up_too_early_would_be_found(make_bench: MakeBench) -> None:
    landed, right = named_behind_a_fence(make_bench(1, engine=TooEarly))
    assert landed != right


def test_a_target_that_is_named_behind_a_fence_is_written_where_it_is_then(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(2)
    target = bench.pools[2]
    target.name(3, 7)
    bench.engine.submit(copy(1, "peer_copy", part(1, [0], 2, [3]), fences=[(2, CURRENT, 1)]))
    assert bench.engine.step() == []
    target.name(3, 9)
    target.timelines.write(CURRENT, 1)
    assert only(bench.until_idle()).outcome == "ok"
    assert target.read_page(9) == bench.pools[1].pattern(1, 0)
    assert target.read_page(7) == target.pattern(2, 7)


def test_a_name_whose_word_has_moved_on_is_void_and_not_looked_up(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    bench.pools[1].words.bump(4)  # given up: what it stands for is no page any more
    done = only(bench.run(copy(1, "backup", part(1, [3], HOST, [slot(0)]), words=[(1, 4, 0)])))
    assert done.outcome == "void"
    assert bench.device.history == []


def test_a_name_that_is_given_up_in_mid_copy_voids_it(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    bench.pools[1].name(3, 5)
    bench.engine.submit(copy(1, "backup", part(1, [3], HOST, [slot(0)]), words=[(1, 4, 0)]))
    bench.engine.step()
    bench.pools[1].words.bump(4)
    bench.pools[1].name(3, 6)
    assert only(bench.until_idle()).outcome == "void"


@pytest.mark.parametrize("page", [16, 17, (1 << 32) - 1])
@pytest.mark.parametrize("pool", [1, 2])
def test_an_entry_that_is_no_page_fails_its_own_copy_and_no_other(
    make_bench: MakeBench, pool: int, page: int
) -> None:
    bench = make_bench(1, 2)
    for number in (1, 2):
        for name in range(4):
            bench.pools[number].name(name, name)
    bench.pools[pool].name(2, page)
    before = [bench.pools[2].read_page(at) for at in range(bench.layout.page_count)]
    bench.engine.submit(copy(1, "peer_copy", part(1, [0, 2], 2, [0, 2])))
    bench.engine.submit(copy(2, "peer_copy", part(1, [1], 2, [1])))
    events = {event.op: event for event in bench.until_idle() if isinstance(event, CopyDone)}
    assert events[1].outcome == "failed"
    assert events[1].detail == f"name 2 stands for page {page}, beyond the 16 of the pool"
    assert events[2].outcome == "ok"
    assert bench.pools[2].read_page(1) == bench.pools[1].pattern(1, 1)
    assert [bench.pools[2].read_page(at) for at in (0, 2)] == [before[0], before[2]]


def test_a_name_beyond_the_table_fails_its_copy(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    done = only(bench.run(copy(1, "backup", part(1, [16], HOST, [slot(0)]))))
    assert (done.outcome, done.detail) == (
        "failed",
        "name 16 is beyond the 16 entries of the page table",
    )


def test_two_names_of_one_page_are_no_targets_of_one_copy(make_bench: MakeBench) -> None:
    bench = make_bench(2)
    bench.pools[2].name(1, 5)
    bench.pools[2].name(2, 5)
    done = only(bench.run(copy(1, "peer_copy", part(1, [1, 2], 2, [1, 2]))))
    assert (done.outcome, done.detail) == ("failed", "a target page is named twice")
    assert bench.pools[2].read_page(5) == bench.pools[2].pattern(2, 5)


def test_host_slots_are_never_taken_for_names(make_bench: MakeBench) -> None:
    bench = make_bench(1)
    bench.pools[1].name(0, 4)
    only(bench.run(copy(1, "backup", part(1, [0], HOST, [slot(9)]))))
    assert bench.host_page(9) == bench.pools[1].pattern(1, 4)
