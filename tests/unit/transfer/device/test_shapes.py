"""Whatever shapes are chosen, exactly the bytes of the pages move, and none crosses a border.

Strategy: layouts, addresses, pages, borders and rates are drawn; the calls are carried out on one
array of bytes that stands for all memory, and compared with the ranges of the plan.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.device.cuda_kernel import unroll_of
from transfer.device.protocol import UnknownMemory
from transfer.device.shapes import Shapes
from transfer.device.work import Work, split
from transfer.pages import PageBatch, Pattern, page_slices
from transfer.plan import Chunk, MemoryKey
from transfer.tiles import Direction, Method, Rates, tiles_of

HOST = -1
SPACE = 1 << 20
WAYS: tuple[Direction, ...] = ("to_host", "from_host", "within", "peer")


SLICES = st.integers(8, 40_000)


class Memory(NamedTuple):
    """An attached memory."""

    address: int
    nbytes: int
    chunk_bytes: int
    device: str
    base: int = 0


def rates(method: Method) -> Rates:
    other: Method = "tile" if method == "batch" else "batch"
    return Rates({(d, m, 0): float(m == method) for d in WAYS for m in (method, other)})


class Scene(NamedTuple):
    """Memories, a pattern between two places, and pages."""

    memories: dict[MemoryKey, Memory]
    batch: PageBatch


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Two pools, or a pool and the host, with layers at equal or unequal distances."""
    layers = draw(st.integers(1, 12))
    forms = [[8] * layers, [16, 8] * layers, [8, 8, 4] * layers, [512] * layers]
    sizes = draw(st.sampled_from([*forms, [2048, 1536][: 1 + layers % 2] * (layers // 4 + 1)]))
    pages = draw(st.integers(1, 12))
    memories: dict[MemoryKey, Memory] = {}
    at = 64

    def room(nbytes: int) -> int:
        nonlocal at
        begin = at
        at += nbytes
        return begin

    def pool(number: int) -> list[tuple[int, int, int]]:
        """(allocation, offset, stride) a chunk; all of one role before the next, or in turn."""
        order = list(range(len(sizes)))
        if draw(st.booleans()):
            order.sort(key=lambda n: n % 2)
        spans = [size * pages for size in sizes]
        if draw(st.booleans()):
            spans = [max(spans)] * len(spans)
        found = [(0, 0, 0)] * len(sizes)
        base = at
        for n in order:
            if draw(st.sampled_from([False, False, False, True])):
                base = room(16) + 16  # another allocation begins
            memories[(number, n)] = Memory(room(spans[n]), spans[n], 0, "GPU-own", base)
            found[n] = (n, 0, sizes[n])
        return found

    def host(border: int) -> list[tuple[int, int, int]]:
        page = sum(sizes)
        memories[(HOST, 3)] = Memory(room(page * pages), page * pages, border, "")
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        return [(0, start, page) for start in starts]

    border = draw(st.sampled_from([0, 0, 24, 64, 128]))
    places = draw(st.sampled_from([(1, 2), (1, HOST), (HOST, 1)]))
    sides = [host(border) if place == HOST else pool(place) for place in places]
    left, right = sides
    chunks = [Chunk(*a, *b, n) for a, b, n in zip(left, right, sizes, strict=True)]
    if HOST in places and draw(st.booleans()):
        # Slots of three segments; the last one is shorter.
        stride = sum(sizes)
        for segment, slots in ((0, pages), (7, max(1, pages // 2))):
            span = stride * slots
            memories[(HOST, segment)] = Memory(room(span), span, memories[(HOST, 3)][2], "")
        slots_of = {0: pages, 3: pages, 7: max(1, pages // 2)}
        every = [segment << 16 | n for segment, slots in slots_of.items() for n in range(slots)]
        count = draw(st.integers(1, pages))
        numbers = draw(st.permutations(range(pages)))[:count]
        chosen = draw(st.permutations(every))[:count]
        ends = (chosen, numbers) if places[0] == HOST else (numbers, chosen)
        return Scene(memories, PageBatch(*places, None, Pattern(chunks), *ends))
    count = draw(st.integers(1, pages))
    starts: Sequence[int] = draw(st.permutations(range(pages)))[:count]
    stops: Sequence[int] = draw(st.permutations(range(pages)))[:count]
    if draw(st.booleans()):
        starts, stops = sorted(starts), sorted(stops)
    if draw(st.booleans()):  # rows of a slab
        first = draw(st.integers(0, pages - count))
        rows = range(first, first + count)
        starts, stops = (starts, rows) if draw(st.booleans()) else (rows, stops)
    return Scene(memories, PageBatch(*places, 3, Pattern(chunks), starts, stops))


def moves(work: Work) -> list[tuple[int, int, int]]:
    """(source, target, bytes) of every row and range."""
    by_kernel = [
        (
            c.source_offset + s * c.source_stride,
            c.target_offset + t * c.target_stride,
            c.nbytes,
        )
        for chunks, starts, stops in work.kernels
        for c in chunks
        for s, t in zip(starts, stops, strict=True)
    ]
    rows = [
        (r.source + n * r.source_pitch, r.target + n * r.target_pitch, r.width)
        for _, rectangles in work.rectangles
        for r in rectangles
        for n in range(r.rows)
    ]
    return by_kernel + rows + list(zip(work.sources, work.targets, work.sizes, strict=True))


def carried_out(pieces: Sequence[tuple[int, int, int]]) -> bytes:
    memory = bytearray(array("I", range(SPACE // 4)).tobytes())
    before = bytes(memory)
    for source, target, nbytes in pieces:
        memory[target : target + nbytes] = before[source : source + nbytes]
    return bytes(memory)


def planned(scene: Scene) -> list[tuple[int, int, int]]:
    return [
        (scene.memories[b.source].address + s, scene.memories[b.target].address + t, n)
        for b in scene.batch.ranges()
        for s, t, n in b.ranges
    ]


@settings(max_examples=200, deadline=None)
@given(scenes(), st.sampled_from(["tile", "batch"]), st.booleans(), st.booleans(), SLICES)
def test_the_calls_move_what_the_plan_says_and_nothing_else(
    scene: Scene, method: Method, can_tile: bool, kernel: bool, slice_bytes: int
) -> None:
    shapes = Shapes(
        scene.memories.__getitem__,
        "GPU-own",
        rates(method),
        can_tile=can_tile,
        kernel_moves=lambda _: kernel,
    )
    work = Work()
    for batches in page_slices([scene.batch], slice_bytes):
        for batch in batches:
            shapes.add(batch, work)
    pieces = moves(work)
    assert sum(n for _, _, n in pieces) == scene.batch.nbytes
    for chunks, *_ in work.kernels:
        assert len({unroll_of(c.nbytes) for c in chunks}) == 1
        assert len({c.nbytes for c in chunks}) == 1
        assert scene.batch.source != HOST != scene.batch.target, "a kernel never uses the bus"
    assert carried_out(pieces) == carried_out(planned(scene))
    assert work.keys == scene.batch.keys()
    if not can_tile:
        assert not any(rectangles for _, rectangles in work.rectangles)
    border_of(scene, work)
    allocations_of(scene, work)


def allocations_of(scene: Scene, work: Work) -> None:
    """No rectangle reaches from one allocation into the next, on either side."""
    for _, rectangles in work.rectangles:
        for r in rectangles:
            for first, pitch in ((r.source, r.source_pitch), (r.target, r.target_pitch)):
                rows = (first + n * pitch for n in range(r.rows))
                found = {
                    m.base
                    for row in rows
                    for m in scene.memories.values()
                    if m.address <= row < m.address + m.nbytes
                }
                assert len(found) == 1


def border_of(scene: Scene, work: Work) -> None:
    """No call touches two registrations of the host's memory: a rectangle is one call."""
    for key, host in scene.memories.items():
        if key[0] == HOST and host.chunk_bytes:
            border_of_segment(host, work)


def border_of_segment(host: Memory, work: Work) -> None:
    spans = [
        (at - host.address, at - host.address + (r.rows - 1) * pitch + r.width - 1)
        for _, rectangles in work.rectangles
        for r in rectangles
        for at, pitch in ((r.source, r.source_pitch), (r.target, r.target_pitch))
    ] + [
        (at - host.address, at - host.address + n - 1)
        for side in (work.sources, work.targets)
        for at, n in zip(side, work.sizes, strict=True)
    ]
    for first, last in spans:
        if 0 <= first < host.nbytes:
            assert first // host.chunk_bytes == last // host.chunk_bytes


@settings(max_examples=100, deadline=None)
@given(scenes(), st.integers(8, 600))
def test_slices_hold_whole_chunks_of_every_page_and_keep_to_their_size(
    scene: Scene, slice_bytes: int
) -> None:
    largest = max(chunk.nbytes for chunk in scene.batch.pattern.chunks)
    cut = page_slices([scene.batch, scene.batch], slice_bytes)
    sizes = [sum(batch.nbytes for batch in batches) for batches in cut]
    assert sum(sizes) == 2 * scene.batch.nbytes
    assert max(sizes) <= max(slice_bytes, slice_bytes + largest)


def as_an_engine_has_it(layers: int, page_size: int) -> list[Chunk]:
    """All K before all V in the pool, in turn on the host."""
    chunk = page_size * 16
    pool = [(0, (n % 2 * layers + n // 2) * 4096, chunk) for n in range(2 * layers)]
    slot = [(0, n * chunk, 2 * layers * chunk) for n in range(2 * layers)]
    return [Chunk(*a, *b, chunk) for a, b in zip(pool, slot, strict=True)]


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("first", [0, 3])
def test_rows_of_a_slab_behind_its_beginning_are_where_the_plan_says(
    first: int, rows_first: bool
) -> None:
    """A part of the slab begins anywhere: one chunk a page at an offset, rows one after another."""
    count, row, offset = 5, 64, 128
    rows, slots = range(first, first + count), [9, 2, 7, 0, 4]
    memories: dict[MemoryKey, Memory] = {(1, 0): Memory(1 << 16, 1 << 16, 0, "GPU-own")}
    memories[HOST, 0] = Memory(1 << 10, 1 << 12, 0, "")
    slab, slot = (0, offset, row), (0, 0, row)
    chunk = Chunk(*slab, *slot, row) if rows_first else Chunk(*slot, *slab, row)
    ends = (1, HOST, 0) if rows_first else (HOST, 1, 0)
    pages = (rows, slots) if rows_first else (slots, rows)
    scene = Scene(memories, PageBatch(*ends, Pattern([chunk]), *pages))
    shapes = Shapes(memories.__getitem__, "GPU-own", rates("batch"), can_tile=True)
    work = Work()
    shapes.add(scene.batch, work)
    assert sorted(moves(work)) == sorted(planned(scene))


@pytest.mark.parametrize("turned", [False, True])
def test_k_before_v_makes_two_rectangles_a_page_whichever_side_is_which(turned: bool) -> None:
    chunks = as_an_engine_has_it(32, 8)
    if turned:
        chunks = [Chunk(*c[3:6], *c[:3], c.nbytes) for c in chunks]
    tiles = tiles_of(chunks)
    assert [(tile.rows, tile.width) for tile in tiles] == [(32, 128), (32, 128)]
    pitches = {(tile.source_pitch, tile.target_pitch) for tile in tiles}
    assert pitches == {(256, 4096) if turned else (4096, 256)}


def test_rows_too_far_apart_for_the_hardware_are_no_rectangle() -> None:
    chunks = [Chunk(0, n << 31, 8, 0, n * 8, 16, 8) for n in range(2)]
    assert [tile.rows for tile in tiles_of(chunks)] == [1, 1]
    assert [tile.rows for tile in tiles_of(chunks, pitch_max=1 << 31)] == [2]


def test_the_faster_way_of_the_next_smaller_size_is_taken() -> None:
    known = Rates(
        {
            ("to_host", "batch", 1000): 9.0,
            ("to_host", "tile", 1000): 5.0,
            ("to_host", "batch", 2000): 5.0,
            ("to_host", "tile", 2000): 9.0,
        }
    )
    chosen = [known.method("to_host", n, 64) for n in (10, 1000, 1999, 2000, 9999)]
    assert chosen == ["batch", "batch", "batch", "tile", "tile"]
    assert known.method("to_host", 2000, 3) == "batch", "three rows are not worth a call"
    assert known.method("within", 2000, 3) == "tile", "but within a GPU they are"
    assert known.method("within", 2000, 1) == "batch"


def test_a_page_beyond_a_memory_is_refused_before_anything_is_added() -> None:
    memories = {(1, 0): Memory(0, 64, 0, "GPU-own"), (HOST, 0): Memory(100, 32, 0, "")}
    shapes = Shapes(memories.__getitem__, "GPU-own", rates("tile"), can_tile=True)
    pattern = Pattern(chunks_of_one())
    work = Work()
    for pages in (([8], [0]), ([0], [4])):
        with pytest.raises(UnknownMemory, match="beyond its memory"):
            shapes.add(PageBatch(1, HOST, 0, pattern, *pages), work)
    assert not work.sizes
    shapes.add(PageBatch(1, HOST, 0, pattern, [7], [3]), work)
    assert list(work.sizes) == [8]


def chunks_of_one() -> list[Chunk]:
    return [Chunk(0, 0, 8, 0, 0, 8, 8)]


def test_a_run_is_split_where_the_next_registration_begins() -> None:
    assert split((5, 0, 10), 1, 10, 40) == [(5, 0, 4), (9, 4, 4), (13, 8, 2)]
    assert split((3, 9, 2), 0, 10, 40) == [(3, 9, 1), (4, 10, 1)]


def test_a_layer_of_many_segments_is_one_list_and_no_segment_is_placed_for_it() -> None:
    """Eight pages of each of four segments: two chunks a page, as a layer's K and V are."""
    pages, chunk, segments = 8, 16, 4
    slot = 6 * chunk
    memories: dict[MemoryKey, Memory] = {(1, 0): Memory(1 << 16, 1 << 16, 0, "GPU-own")}
    for number in range(segments):
        memories[HOST, number] = Memory(1 << 10 | number << 12, pages * slot, 0, "")
    layer = [Chunk(0, n * chunk, slot, 0, n << 12, chunk, chunk) for n in (0, 1)]
    slots = [number << 16 | index for number in range(segments) for index in range(pages)]
    targets = list(range(len(slots)))
    batch = PageBatch(HOST, 1, None, Pattern(layer), slots, targets)
    shapes = Shapes(memories.__getitem__, "GPU-own", rates("tile"), can_tile=True)
    work = Work()
    shapes.add(batch, work)
    assert not work.rectangles
    assert len(work.sizes) == len(slots) * len(layer)
    scene = Scene(memories, batch)
    assert carried_out(moves(work)) == carried_out(planned(scene))
    assert not shapes._placed, "a prompt's segments times its layers would be placed one by one"


@pytest.mark.parametrize(("step", "alone"), [(2, True), (1, False)])
def test_rows_to_slots_that_do_not_follow_one_another_are_one_list(step: int, alone: bool) -> None:
    """Rows of a staging slab, many of each segment: segment by segment they cost twice as much."""
    pages, row, segments = 16, 64, 2
    memories: dict[MemoryKey, Memory] = {(1, 0): Memory(1 << 16, 1 << 16, 0, "GPU-own")}
    for number in range(segments):
        memories[HOST, number] = Memory(1 << 10 | number << 12, pages * step * row, 0, "")
    slots = [number << 16 | step * index for number in range(segments) for index in range(pages)]
    pattern = Pattern([Chunk(0, 0, row, 0, 0, row, row)])
    batch = PageBatch(1, HOST, None, pattern, list(range(len(slots))), slots)
    shapes = Shapes(memories.__getitem__, "GPU-own", rates("batch"), can_tile=True)
    work = Work()
    shapes.add(batch, work)
    assert carried_out(moves(work)) == carried_out(planned(Scene(memories, batch)))
    assert bool(shapes._placed) is not alone
    assert len(work.sizes) == (len(slots) if alone else segments)
