"""The planner against a naive copier that moves one chunk of one page after the other."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.core.actions import CopyPart
from directory.core.errors import LayoutError
from tests.unit.transfer.support import HOST, packed, part, slot, small_layout
from transfer import plan as module
from transfer.host_tier import SEGMENT_SHIFT, TierShape
from transfer.layout import PoolLayout, mha_layer_first, mla, page_first
from transfer.plan import ChunkCache, MemoryKey, Range, RangeBatch, Shard, forget, plan, slices

PER_SEGMENT = 8
PAGES = 24
Memories = dict[MemoryKey, bytearray]


def layouts() -> Iterator[tuple[str, PoolLayout]]:
    mha = {"layers": 2, "page_size": 2, "page_count": PAGES, "heads": 1, "head_dim": 3}
    yield "layer first", mha_layer_first(**mha, itemsize=1, separate=True)
    yield "one allocation", mha_layer_first(**mha, itemsize=1, separate=False)
    yield "page first", page_first(**mha, itemsize=1)
    latent = {"layers": 2, "page_size": 2, "page_count": PAGES, "latent_dim": 5, "itemsize": 1}
    yield "mla with index", mla(**latent, index_bytes_per_token=1, separate=True)
    yield "one buffer", mla(**{**latent, "layers": 1}, index_bytes_per_token=0, separate=True)


LAYOUTS = dict(layouts())
MHA_NAMES = ["layer first", "one allocation", "page first"]


def chunk_of(place: int, page: int, number: int, layout: PoolLayout) -> tuple[MemoryKey, int]:
    """Where the chunk lies, straight from the definitions."""
    if place == HOST:
        before = sum(b.chunk_bytes for b in layout.buffers[:number])
        return (HOST, page >> 16), (page & 0xFFFF) * layout.page_bytes + before
    buffer = layout.buffers[number]
    return (place, buffer.allocation), buffer.offset + page * buffer.page_stride


def naive(memories: Memories, copy_part: CopyPart, table: dict[int, PoolLayout]) -> None:
    source_layout = table[copy_part.source if copy_part.source != HOST else copy_part.target]
    target_layout = table[copy_part.target if copy_part.target != HOST else copy_part.source]
    sources = memoryview(copy_part.source_pages).cast("I")
    targets = memoryview(copy_part.target_pages).cast("I")
    for source_page, target_page in zip(sources, targets, strict=True):
        for number, buffer in enumerate(source_layout.buffers):
            key, at = chunk_of(copy_part.source, source_page, number, source_layout)
            chunk = memories[key][at : at + buffer.chunk_bytes]
            key, at = chunk_of(copy_part.target, target_page, number, target_layout)
            memories[key][at : at + buffer.chunk_bytes] = chunk


def carry_out(memories: Memories, batches: Iterable[RangeBatch]) -> None:
    for batch in batches:
        assert batch.nbytes == sum(n for _, _, n in batch.ranges)
        for source, target, n in batch.ranges:
            assert target + n <= len(memories[batch.target])
            memories[batch.target][target : target + n] = memories[batch.source][
                source : source + n
            ]


def make_memories(table: dict[int, PoolLayout], tier: TierShape, seed: int) -> Memories:
    rng = random.Random(seed)
    memories = {
        (pool, n): bytearray(rng.randbytes(size))
        for pool, layout in table.items()
        for n, size in enumerate(layout.allocation_bytes)
    }
    for segment in range(tier.segment_count):
        memories[HOST, segment] = bytearray(rng.randbytes(tier.bytes_of(segment)))
    return memories


@st.composite
def page_lists(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two lists of equal length with runs in them, as an allocator makes them."""
    count = draw(st.integers(0, PAGES))
    lists = []
    for _ in range(2):
        pages = list(range(PAGES))
        for _ in range(draw(st.integers(0, 4))):
            cut = draw(st.integers(0, PAGES))
            pages = pages[cut:] + pages[:cut][:: draw(st.sampled_from([1, -1]))]
        lists.append(pages[:count])
    return lists[0], lists[1]


@given(
    names=st.one_of(
        st.tuples(st.sampled_from(MHA_NAMES), st.sampled_from(MHA_NAMES)),
        st.sampled_from([(name, name) for name in LAYOUTS]),
    ),
    direction=st.sampled_from(["backup", "load_back", "peer_copy"]),
    pages=page_lists(),
    bounds=st.tuples(st.integers(1, 200), st.integers(1, 20)),
)
def test_a_plan_moves_exactly_the_bytes_that_a_naive_copier_moves(
    names: tuple[str, str],
    direction: str,
    pages: tuple[list[int], list[int]],
    bounds: tuple[int, int],
) -> None:
    table = {1: LAYOUTS[names[0]], 2: LAYOUTS[names[1]]}
    page_bytes = table[1].page_bytes
    tier = TierShape(PAGES * page_bytes + page_bytes // 2, PER_SEGMENT * page_bytes + 1)
    source, target = {"backup": (1, HOST), "load_back": (HOST, 2), "peer_copy": (1, 2)}[direction]
    one = [slot(p, PER_SEGMENT) for p in pages[0]] if source == HOST else pages[0]
    other = [slot(p, PER_SEGMENT) for p in pages[1]] if target == HOST else pages[1]
    copy_part = part(source, one, target, other)
    expected, whole, sliced = (make_memories(table, tier, 7) for _ in range(3))
    naive(expected, copy_part, table)

    batches = list(plan([copy_part], table, tier))
    carry_out(whole, batches)
    assert whole == expected

    for piece in slices(batches, *bounds):
        assert 0 < sum(b.nbytes for b in piece) <= bounds[0]
        assert 0 < sum(len(b.ranges) for b in piece) <= bounds[1]
        carry_out(sliced, piece)
    assert sliced == expected


def ranges_of(batches: Iterable[RangeBatch]) -> int:
    return sum(len(batch.ranges) for batch in batches)


def test_adjacent_pages_of_equal_page_first_layouts_become_one_range() -> None:
    layout = LAYOUTS["page first"]
    copy_part = part(1, range(3, 13), 2, range(10, 20))
    assert ranges_of(plan([copy_part], {1: layout, 2: layout}, None)) == 1


def test_a_run_ends_where_either_side_jumps_or_a_segment_ends() -> None:
    layout = LAYOUTS["page first"]
    tier = TierShape(PAGES * layout.page_bytes, PER_SEGMENT * layout.page_bytes)
    slots = [slot(p, PER_SEGMENT) for p in range(4, 12)]
    assert ranges_of(plan([part(1, range(8), HOST, slots)], {1: layout}, tier)) == 2
    jump = part(1, [0, 1, 2, 3], 2, [0, 1, 3, 4])
    assert ranges_of(plan([jump], {1: layout, 2: layout}, None)) == 2


def test_a_peer_copy_between_layer_first_pools_is_one_range_a_buffer() -> None:
    layout = LAYOUTS["layer first"]
    batches = list(plan([part(1, range(8), 2, range(8))], {1: layout, 2: layout}, None))
    assert [len(b.ranges) for b in batches] == [1, 1, 1, 1]
    assert [b.source for b in batches] == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_a_layer_first_backup_moves_whole_chunks() -> None:
    layout = LAYOUTS["layer first"]
    tier = TierShape(PAGES * layout.page_bytes, PAGES * layout.page_bytes)
    batches = list(plan([part(1, range(8), HOST, range(8))], {1: layout}, tier))
    assert {n for b in batches for _, _, n in b.ranges} == {layout.buffers[0].chunk_bytes}
    assert ranges_of(batches) == 8 * 4


@pytest.mark.parametrize(
    ("copy_part", "says"),
    [
        (part(1, [0], 2, [0, 1]), "1 source pages for 2"),
        (part(1, [PAGES], 2, [0]), "beyond the 24 pages of pool 1"),
        (part(1, [0], 2, [2**32 - 1]), "beyond the 24 pages of pool 2"),
        (part(1, [0, 1], 2, [3, 3]), "named twice"),
        (part(1, [0], HOST, [slot(24)]), "not in the tier"),
        (part(1, [0], HOST, [8]), "not in the tier"),
        (part(9, [0], 1, [0]), "place 9 is not imported"),
        (part(1, [0], -2, [0]), "place -2 is not imported"),
        (part(HOST, [0], HOST, [1]), "within the host tier"),
        (part(1, [0], 3, [0]), "different buffers"),
        (CopyPart(1, b"\0\0\0", 2, packed([1])), "not whole numbers"),
    ],
)
def test_a_copy_that_names_what_is_not_there_is_refused(copy_part: CopyPart, says: str) -> None:
    layout = small_layout(PAGES)
    table = {1: layout, 2: layout, 3: small_layout(PAGES, layers=3)}
    tier = TierShape(24 * layout.page_bytes, PER_SEGMENT * layout.page_bytes)
    with pytest.raises(LayoutError, match=says):
        plan([copy_part], table, tier)


def test_a_copy_to_the_host_without_a_tier_is_refused() -> None:
    with pytest.raises(LayoutError, match="no host tier"):
        plan([part(1, [0], HOST, [0])], {1: small_layout()}, None)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_the_shards_of_ranks_lie_side_by_side_in_a_slot_and_come_back_alike(name: str) -> None:
    layout, ranks, count = LAYOUTS[name], 3, PER_SEGMENT + 2
    slot_bytes = ranks * layout.page_bytes
    tier = TierShape(2 * PER_SEGMENT * slot_bytes, PER_SEGMENT * slot_bytes)
    table = dict.fromkeys(range(1, 2 * ranks + 1), layout)
    memories, cache = make_memories(table, tier, 3), ChunkCache()
    slots = [slot(page, PER_SEGMENT) for page in range(count)]
    for rank in range(ranks):
        shard = Shard(slot_bytes, rank * layout.page_bytes)
        backup = part(rank + 1, range(count), HOST, slots)
        carry_out(memories, plan([backup], table, tier, cache, shard))
    for rank in range(ranks):
        shard = Shard(slot_bytes, rank * layout.page_bytes)
        load = part(HOST, slots, ranks + rank + 1, range(count))
        carry_out(memories, plan([load], table, tier, cache, shard))
    for rank in range(ranks):
        for page in range(count):
            for number, buffer in enumerate(layout.buffers):
                key, at = chunk_of(rank + 1, page, number, layout)
                mine = memories[key][at : at + buffer.chunk_bytes]
                key, at = chunk_of(ranks + rank + 1, page, number, layout)
                assert memories[key][at : at + buffer.chunk_bytes] == mine
    assert len(cache) == 2 * ranks
    forget(cache, 1)
    assert len(cache) == 2 * ranks - 1


@pytest.mark.parametrize(
    ("slot_bytes", "offset"), [(100, 40), (256, 200), (256, -64), (-256, 0), (63, 0)]
)
def test_a_shard_that_does_not_lie_in_its_slot_is_refused(slot_bytes: int, offset: int) -> None:
    layout = small_layout(PAGES, layers=1)
    assert layout.page_bytes == 64
    tier = TierShape(1 << 20, 1 << 20)
    with pytest.raises(LayoutError, match="not within a slot"):
        plan([part(1, [0], HOST, [0])], {1: layout}, tier, None, Shard(slot_bytes, offset))


def test_slots_of_several_shards_are_fewer_and_one_beyond_is_refused() -> None:
    layout = small_layout(PAGES)
    tier = TierShape(8 * layout.page_bytes, 8 * layout.page_bytes)
    shard = Shard(2 * layout.page_bytes, layout.page_bytes)
    assert list(plan([part(1, [0], HOST, [3])], {1: layout}, tier, None, shard))
    with pytest.raises(LayoutError, match="not in the tier"):
        plan([part(1, [0], HOST, [4])], {1: layout}, tier, None, shard)


@pytest.mark.parametrize(
    ("segment", "index", "there"),
    [(0, 3, True), (0, 4, False), (1, 1, True), (1, 2, False), (1, 3, False), (2, 0, False)],
)
def test_a_shorter_last_segment_has_fewer_slots_and_the_others_have_theirs(
    segment: int, index: int, there: bool
) -> None:
    layout = small_layout(PAGES)
    size = layout.page_bytes
    tier = TierShape(6 * size, 4 * size)
    slots = [2, 1 << SEGMENT_SHIFT, segment << SEGMENT_SHIFT | index]
    request = part(1, range(3), HOST, slots)
    if there:
        assert list(plan([request], {1: layout}, tier))
    else:
        with pytest.raises(LayoutError, match="not in the tier"):
            plan([request], {1: layout}, tier)


def test_ranges_are_made_as_they_are_taken_and_pages_are_checked_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A million tokens' restore has ten million ranges: to make them at once takes seconds, in
    # which a mover answers nobody.
    made: list[int] = []
    whole = module._ranges

    def counted(*what: Any) -> list[Range]:
        made.append(1)
        return whole(*what)

    monkeypatch.setattr(module, "_ranges", counted)
    layout = LAYOUTS["layer first"]
    table = {1: layout, 2: layout}
    batches = plan([part(1, range(4), 2, range(4)), part(1, range(2), 2, [8, 9])], table, None)
    assert made == []
    next(slices(batches, 1, 1))
    assert len(made) == 1
    with pytest.raises(LayoutError, match="beyond"):
        plan([part(1, [0], 2, [0]), part(1, [PAGES], 2, [1])], table, None)
