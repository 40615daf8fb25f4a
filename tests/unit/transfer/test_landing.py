"""Layer-wise loads: what a landing counter says is true, and nothing is said after a loss."""

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.actions import Landing, SubmitCopy
from directory.core.errors import LayoutError
from directory.core.events import CopyDone
from directory.core.ids import LANDINGS
from tests.unit.transfer.support import HOST, OwnedPool, part, slot, small_tier
from transfer.device.fake import FakeDevice, FakePageDevice
from transfer.engine import Engine
from transfer.engine_limits import EngineLimits
from transfer.host_tier import TierShape
from transfer.landing import STEPS_MAX, Progress, layered
from transfer.layout import BufferLayout, PoolLayout, mha_layer_first, mla, page_first

PAGES = 12
POOL = 1
MHA = {"layers": 3, "page_size": 2, "page_count": PAGES, "heads": 1, "head_dim": 4, "itemsize": 2}


def all_k_first() -> PoolLayout:
    """All K buffers, then all V: a layer's chunks are not neighbours in a host page."""
    buffers = [
        BufferLayout("k" if number < 3 else "v", number % 3, number, 0, 16, 16)
        for number in range(6)
    ]
    return PoolLayout(2, PAGES, tuple(buffers), (16 * PAGES,) * 6)


LAYOUTS: dict[str, PoolLayout] = {
    "layer first": mha_layer_first(**MHA, separate=True),
    "one allocation": mha_layer_first(**MHA, separate=False),
    "page first": page_first(**MHA),
    "mla with index": mla(
        layers=3,
        page_size=2,
        page_count=PAGES,
        latent_dim=5,
        itemsize=2,
        index_bytes_per_token=3,
    ),
    "all k first": all_k_first(),
}


class LoadBench:
    """A pool with landing counters, a tier of patterns, a fake device."""

    def __init__(
        self, layout: PoolLayout, *, tables: int = 4, pages: bool = False, **limits: int
    ) -> None:
        """`pages`: the device takes whole pages."""
        self.device = FakePageDevice() if pages else FakeDevice()
        self.layout = layout
        self.now_us = 1
        every = EngineLimits(landing_bytes=0, fence_deadline_us=1_000)._replace(**limits)
        self.engine = Engine(self.device, lambda: self.now_us, every)
        self.pool = OwnedPool(layout, landings=tables)
        self.engine.add_pool(self.pool.import_as(POOL))
        self.source = OwnedPool(layout)
        self.source.fill(5)
        self.tier = small_tier(layout, slots=16, per_segment=4)
        self.engine.open_tier(self.tier)
        for index in range(16):
            view = self.tier.page(slot(index, 4), layout.page_bytes)
            view[:] = self.expected(index)
            view.release()

    def expected(self, index: int) -> bytes:
        """What lies in a slot: no two bytes of two slots at the same place are equal."""
        return bytes((1 + index * 16 + i % 16) % 256 for i in range(self.layout.page_bytes))

    def load(self, op: int, slots: list[int], onto: list[int], **more: object) -> SubmitCopy:
        """A load in two parts, if there is more than one page."""
        cut = len(slots) // 2
        parts = tuple(
            part(HOST, [slot(index, 4) for index in slots[a:b]], POOL, onto[a:b])
            for a, b in ((0, cut), (cut, len(slots)))
            if a < b
        )
        options = {"landing": Landing(POOL, LANDINGS, 0), **more}
        return SubmitCopy(op, "load_back", parts, (), (), **options)  # type: ignore[arg-type]

    def counter(self, index: int = LANDINGS) -> int:
        return self.pool.timelines.read(index)

    def whole_layers(self, slots: list[int], onto: list[int]) -> int:
        """How many leading layers are in place for every page."""
        for count, layer in enumerate(self.layout.layers()):
            for index, page in zip(slots, onto, strict=True):
                found, wanted = self.pool.read_page(page), self.expected(index)
                start = 0
                for buffer in self.layout.buffers:
                    stop = start + buffer.chunk_bytes
                    if buffer.layer == layer and found[start:stop] != wanted[start:stop]:
                        return count
                    start = stop
        return len(self.layout.layers())

    def close(self) -> None:
        while self.device.step():
            pass
        self.engine.step()
        self.engine.release_pool(POOL)
        while not self.engine.idle:
            self.device.step(9)
            self.engine.step()
        self.engine.close()
        self.pool.close()
        self.source.close()
        self.tier.close()


MakeBench = Callable[..., LoadBench]


@pytest.fixture(params=[False, True], ids=["ranges", "pages"])
def make_bench(request: pytest.FixtureRequest) -> Iterator[MakeBench]:
    """Benches whose device takes ranges, and the same with whole pages."""
    made: list[LoadBench] = []

    def make(layout: str = "layer first", **options: int) -> LoadBench:
        made.append(LoadBench(LAYOUTS[layout], pages=request.param, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def only(events: list[object]) -> CopyDone:
    (event,) = events
    assert isinstance(event, CopyDone)
    return event


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(list(LAYOUTS)),
    count=st.integers(1, 8),
    slice_bytes=st.integers(8, 400),
    landing_bytes=st.sampled_from([0, 30, 200, 10_000]),
    seed=st.integers(0, 1 << 30),
    pages=st.booleans(),
)
def test_the_counter_never_says_more_than_has_landed_and_ends_with_all_layers(
    layout: str, count: int, slice_bytes: int, landing_bytes: int, seed: int, pages: bool
) -> None:
    rng = random.Random(seed)
    bench = LoadBench(
        LAYOUTS[layout],
        pages=pages,
        slice_bytes=slice_bytes,
        slice_ranges=rng.randrange(1, 9),
        landing_bytes=landing_bytes,
        submissions_max=rng.randrange(1, 6),
    )
    try:
        slots, onto = rng.sample(range(16), count), rng.sample(range(PAGES), count)
        bench.engine.submit(bench.load(1, slots, onto))
        events: list[object] = list(bench.engine.step())
        said = [0]
        while not events:
            if bench.device.waiting and rng.random() < 0.8:
                bench.device.complete(rng.choice(list(bench.device.waiting)))
            events += bench.engine.step()
            said.append(bench.counter())
            assert bench.counter() <= bench.whole_layers(slots, onto)
        assert said == sorted(said), "a counter never goes back"
        assert only(events).outcome == "ok"
        assert bench.counter() == len(bench.layout.layers())
    finally:
        bench.close()


def test_layers_are_told_one_by_one_as_they_land(make_bench: MakeBench) -> None:
    bench = make_bench(submissions_max=1)
    bench.engine.submit(bench.load(1, [0, 5], [3, 8]))
    bench.engine.step()
    said, events = [], list[object]()
    while bench.device.waiting:
        bench.device.step()
        events += bench.engine.step()
        said.append(bench.counter())
    assert said == [1, 2, 3]
    assert only(events).outcome == "ok"


def test_a_ranks_shard_of_a_slot_lands_layer_by_layer(make_bench: MakeBench) -> None:
    bench = make_bench(submissions_max=1)
    size = bench.layout.page_bytes
    # Slots twice as large: what lies in the second half of slot n is page 2 n + 1 of the tier.
    parts = (part(HOST, [0 << 16 | 1, 2 << 16 | 0], POOL, [4, 9]),)
    bench.engine.submit(
        SubmitCopy(1, "load_back", parts, (), (), 2 * size, size, Landing(POOL, LANDINGS, 0))
    )
    events: list[object] = list(bench.engine.step())
    while not events:
        bench.device.step()
        events += bench.engine.step()
        assert bench.counter() <= bench.whole_layers([3, 9], [4, 9])
    assert only(events).outcome == "ok"
    assert bench.whole_layers([3, 9], [4, 9]) == bench.counter() == 3


def test_a_layer_that_landed_before_an_earlier_one_is_not_told(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.engine.submit(bench.load(1, [0], [3]))
    bench.engine.step()
    bench.device.step()
    bench.engine.step()
    second, third = sorted(bench.device.waiting)
    bench.device.complete(third)
    assert bench.engine.step() == []
    assert bench.counter() == 1
    bench.device.complete(second)
    assert only(list(bench.engine.step())).outcome == "ok"
    assert bench.counter() == 3


def test_small_layers_go_together(make_bench: MakeBench) -> None:
    bench = make_bench(landing_bytes=2 * 2 * 16 * 2)  # two layers of two pages
    bench.engine.submit(bench.load(1, [0, 1], [3, 8]))
    bench.engine.step()
    assert len(bench.device.waiting) == 1
    bench.device.step()
    bench.engine.step()
    assert bench.counter() == 2
    assert len(bench.device.waiting) == 1
    bench.device.step()
    bench.engine.step()
    assert bench.counter() == 3


def test_a_load_has_few_steps_however_many_layers_its_pool_has() -> None:
    layout = mha_layer_first(**{**MHA, "layers": 1_000}, separate=False)
    steps = layered(
        Landing(POOL, LANDINGS, 0),
        [part(HOST, [0, 1], POOL, [4, 5])],
        {POOL: layout},
        TierShape(1 << 20, 1 << 20),
    )
    assert len(steps) <= STEPS_MAX
    assert steps[-1].layers == 1_000
    assert sum(batch.nbytes for step in steps for batch in step.batches) == 2 * layout.page_bytes


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_device_error_ends_what_is_told_and_the_copy_is_lost(
    make_bench: MakeBench, when: int
) -> None:
    bench = make_bench(submissions_max=1)
    bench.engine.submit(bench.load(1, [0], [3]))
    bench.engine.step()
    for _ in range(when):
        bench.device.step()
        bench.engine.step()
    bench.device.fail(next(iter(bench.device.waiting)))
    done = only(list(bench.engine.step()))
    assert done.outcome == "failed"
    assert bench.counter() == when


def test_layers_that_land_after_the_loss_are_not_told(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.engine.submit(bench.load(1, [0], [3]))
    bench.engine.step()
    bench.device.step()
    bench.engine.step()
    second, third = sorted(bench.device.waiting)
    bench.device.fail(second)
    bench.engine.step()
    bench.device.complete(third)
    assert only(list(bench.engine.step())).outcome == "failed"
    assert bench.counter() == 1


def test_the_first_layer_has_the_bus_to_itself_and_what_follows_goes_in_larger_slices(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(slice_bytes=64, later_slice_bytes=128, submissions_max=9)
    bench.engine.submit(bench.load(1, [0, 1, 2, 3], [3, 8, 2, 1]))
    bench.engine.step()
    layer = bench.layout.page_bytes // 3 * 4
    assert [s.nbytes for s in bench.device.history] == [64] * (layer // 64)
    bench.device.step(len(bench.device.waiting) - 1)
    bench.engine.step()
    assert len(bench.device.waiting) == 1
    bench.device.step()
    bench.engine.step()
    assert bench.counter() == 1
    assert [s.nbytes for s in bench.device.history[layer // 64 :]] == [128] * (2 * layer // 128)


def test_a_released_pool_is_told_nothing_more(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.engine.submit(bench.load(1, [0], [3]))
    bench.engine.step()
    bench.engine.release_pool(POOL)
    while bench.device.step():
        pass
    done = next(e for e in bench.engine.step() if isinstance(e, CopyDone))
    assert done.outcome == "void"
    assert bench.counter() == 0


@pytest.mark.parametrize("told", [0, 1], ids=["before it begins", "in the middle"])
def test_a_counter_that_its_owner_took_over_ends_the_load(make_bench: MakeBench, told: int) -> None:
    bench = make_bench(submissions_max=1)
    events: list[object] = []
    if told == 0:
        bench.pool.timelines.write(LANDINGS, 3)
    bench.engine.submit(bench.load(1, [0], [3]))
    events += bench.engine.step()
    if told:
        bench.device.step()
        events += bench.engine.step()
        assert bench.counter() == 1
        bench.pool.timelines.write(LANDINGS, 3)
        bench.device.step()
        events += bench.engine.step()
    done = only(events)
    assert done.outcome == "failed"
    assert "its owner gave the load up" in done.detail
    assert bench.counter() == 3, "what the owner wrote stands"


@pytest.mark.parametrize(
    ("landing", "words"),
    [
        (Landing(POOL, 1, 0), "no landing counter"),
        (Landing(POOL, LANDINGS + 400, 0), "timeline 403 of a table"),
        (Landing(7, LANDINGS, 0), "in the counter's pool"),
    ],
)
def test_a_counter_that_is_none_fails_the_copy_before_a_byte_moves(
    make_bench: MakeBench, landing: Landing, words: str
) -> None:
    bench = make_bench()
    bench.engine.submit(bench.load(1, [0], [3], landing=landing))
    done = only(list(bench.engine.step()))
    assert done.outcome == "failed"
    assert words in done.detail
    assert not bench.device.history


def test_a_pool_without_counters_fails_the_copy(make_bench: MakeBench) -> None:
    bench = make_bench(tables=0)
    bench.engine.submit(bench.load(1, [0], [3]))
    assert "of a table of 2" in only(list(bench.engine.step())).detail


def test_pages_of_pools_have_no_layers_to_tell() -> None:
    layouts = {1: LAYOUTS["layer first"], 2: LAYOUTS["layer first"]}
    landing = Landing(POOL, LANDINGS, 0)
    for parts in ([part(2, [0], 1, [4])], [part(HOST, [0], 2, [4])]):
        with pytest.raises(LayoutError, match="only pages of the host tier"):
            layered(landing, parts, layouts, TierShape(1 << 20, 1 << 20))
    with pytest.raises(LayoutError, match="no page at all"):
        layered(landing, [part(HOST, [], 1, [])], layouts, TierShape(1 << 20, 1 << 20))


def test_an_empty_progress_has_nothing_to_tell() -> None:
    assert Progress(()).layers == 0
