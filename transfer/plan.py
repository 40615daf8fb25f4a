"""The planner: which byte ranges a copy moves, given layouts and page lists.

Pure. Owns how pages become ranges: chunks that lie side by side on both sides are fused, and
adjacent pages are merged into runs where both sides are contiguous. It must refuse every page
that is not in its place, and never opens memory or knows an address.

Order: parts as given, then buffers in layout order (so by layer), then pages. About 0.2 us a
range in plain Python, and a long restore has millions: so pages are checked first, all of them,
and ranges are made batch by batch as they are taken. A device takes a batch at once.
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeAlias, TypeVar

from directory.core.actions import CopyPart
from directory.core.errors import LayoutError
from directory.core.ids import HOST, Place, PoolId, is_pool
from transfer.bounds import surely_below
from transfer.host_tier import INDEX_MASK, SEGMENT_SHIFT, TierShape
from transfer.layout import PoolLayout

MemoryKey: TypeAlias = tuple[Place, int]
"""One physical memory: (pool, allocation) or (HOST, segment)."""

Range: TypeAlias = tuple[int, int, int]
"""(source offset, target offset, bytes), offsets within the two memories of its batch."""

assert array("I").itemsize == 4, "packed page lists are unsigned 32-bit"


class RangeBatch(NamedTuple):
    """Ranges between the same two memories. Target ranges of one part never overlap."""

    source: MemoryKey
    target: MemoryKey
    ranges: list[Range]
    nbytes: int


class Chunk(NamedTuple):
    """A part of every page that is contiguous on both sides: where it lies in each."""

    source_allocation: int
    source_offset: int
    source_stride: int
    target_allocation: int
    target_offset: int
    target_stride: int
    nbytes: int

    @property
    def merges(self) -> bool:
        """Whether adjacent pages are contiguous on both sides."""
        return self.source_stride == self.nbytes == self.target_stride


class Shard(NamedTuple):
    """Which part of a host slot a pool's page is. `slot_bytes` 0: the slot is the page."""

    slot_bytes: int = 0
    offset: int = 0


WHOLE = Shard()

Segments: TypeAlias = Sequence[tuple[int, Sequence[int], Sequence[int]]]
"""(segment, source pages, target pages), host slots as indices in that segment."""

ChunkCache: TypeAlias = dict[tuple[tuple[Place, Place], Shard], list[Chunk]]
"""Fused chunks by (source, target) and shard; `forget` drops a pool's when it goes."""


_Key = TypeVar("_Key", bound=tuple[Any, ...])


def forget(cache: MutableMapping[_Key, Any], pool: PoolId) -> None:
    """Drop what is remembered of a pool's layout; keys begin with a pair of places."""
    for key in [key for key in cache if pool in key[0]]:
        del cache[key]


def check_part(
    part: CopyPart,
    layouts: Mapping[PoolId, PoolLayout],
    tier: TierShape | None,
    cache: ChunkCache | None = None,
    shard: Shard = WHOLE,
) -> Iterator[RangeBatch]:
    """Ranges of one part, to be taken. Raises `LayoutError` now, for pages or places that do not
    exist or match; what it returns raises nothing."""
    segments = check_pages(part, layouts, tier, shard)
    if not segments:
        return iter(())
    known = ((part.source, part.target), shard)
    chunks = cache.get(known) if cache is not None else None
    if chunks is None:
        chunks = fused_chunks(layouts.get(part.source), layouts.get(part.target), shard)
        if cache is not None:
            cache[known] = chunks
    return part_batches(part, segments, chunks)


def check_pages(
    part: CopyPart, layouts: Mapping[PoolId, PoolLayout], tier: TierShape | None, shard: Shard
) -> Segments:
    """The pages of a part, by segment of the host tier. Raises as `checked_lists`."""
    starts, stops = checked_lists(part, layouts, tier, shard)
    return _by_segment(part, starts, stops) if starts else []


def checked_lists(
    part: CopyPart, layouts: Mapping[PoolId, PoolLayout], tier: TierShape | None, shard: Shard
) -> tuple[Sequence[int], Sequence[int]]:
    """Source and target pages of a part, host slots as whole numbers. Raises `LayoutError` for
    pages or places that do not exist.

    A layer may wait for this, so lists are looked at whole, not page by page.
    """
    source_pages = unpack(part.source_pages).tolist()  # a list's numbers are objects already
    target_pages = unpack(part.target_pages).tolist()
    if len(source_pages) != len(target_pages):
        raise LayoutError(f"{len(source_pages)} source pages for {len(target_pages)} target pages")
    if not source_pages:
        return (), ()
    if len(set(target_pages)) != len(target_pages):
        raise LayoutError("a target page is named twice")
    if part.source == HOST and part.target == HOST:
        raise LayoutError("a copy within the host tier is not a transfer")
    source = _layout(part.source, layouts)
    target = _layout(part.target, layouts)
    pool = source or target
    assert pool is not None
    slot_bytes = _slot_bytes(shard, pool)
    _check_side(part.source, source_pages, part.source_pages, source, tier, slot_bytes)
    _check_side(part.target, target_pages, part.target_pages, target, tier, slot_bytes)
    return source_pages, target_pages


def part_batches(
    part: CopyPart, segments: Segments, chunks: Sequence[Chunk]
) -> Iterator[RangeBatch]:
    """The ranges of a part that was checked."""
    for segment, starts, stops in segments:
        merges = any(chunk.merges for chunk in chunks)
        runs = runs_of(starts, stops) if merges else []
        if len(runs) == len(starts):
            runs = []
        for chunk in chunks:
            ranges = _ranges(chunk, starts, stops, runs)
            source_memory = segment if part.source == HOST else chunk.source_allocation
            target_memory = segment if part.target == HOST else chunk.target_allocation
            yield RangeBatch(
                (part.source, source_memory),
                (part.target, target_memory),
                ranges,
                chunk.nbytes * len(starts),
            )


def plan(
    parts: Sequence[CopyPart],
    layouts: Mapping[PoolId, PoolLayout],
    tier: TierShape | None,
    cache: ChunkCache | None = None,
    shard: Shard = WHOLE,
) -> Iterator[RangeBatch]:
    """Ranges of all parts of a copy, in order, to be taken; every part is checked now.

    Raises `LayoutError` as `check_part` does.
    """
    checked = [check_part(part, layouts, tier, cache, shard) for part in parts]
    return chain.from_iterable(checked)


def slices(
    batches: Iterable[RangeBatch], slice_bytes: int, slice_ranges: int
) -> Iterator[list[RangeBatch]]:
    """Cut a plan into pieces of at most so many bytes and ranges, in order.

    Ranges longer than a slice are cut, too, so that no piece holds a device longer.
    """
    current: list[RangeBatch] = []
    bytes_left, ranges_left = slice_bytes, slice_ranges
    for batch in batches:
        ranges = _cut_long(batch, slice_bytes)
        ends = list(accumulate(nbytes for _, _, nbytes in ranges))
        start = taken = 0
        while start < len(ranges):
            stop = bisect_right(
                ends, taken + bytes_left, start, min(start + ranges_left, len(ends))
            )
            if stop > start:
                nbytes = ends[stop - 1] - taken
                current.append(batch._replace(ranges=ranges[start:stop], nbytes=nbytes))
                bytes_left -= nbytes
                ranges_left -= stop - start
                start, taken = stop, ends[stop - 1]
            if start < len(ranges):
                yield current
                current = []
                bytes_left, ranges_left = slice_bytes, slice_ranges
    if current:
        yield current


def unpack(pages: bytes) -> "array[int]":
    """Page numbers of a packed list (unsigned 32-bit, little endian)."""
    if len(pages) % 4:
        raise LayoutError(f"a packed page list of {len(pages)} bytes is not whole numbers")
    numbers = array("I", pages)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def fused_chunks(
    source: PoolLayout | None, target: PoolLayout | None, shard: Shard = WHOLE
) -> list[Chunk]:
    """Chunks of a page between two places (None: the host tier), neighbours fused.

    Raises `LayoutError` as `buffer_chunks` does.
    """
    return fused(buffer_chunks(source, target, shard))


def buffer_chunks(
    source: PoolLayout | None, target: PoolLayout | None, shard: Shard = WHOLE
) -> list[Chunk]:
    """The chunk of every buffer in order, none fused.

    Raises `LayoutError` when the two sides do not have the same page form, or the page does not
    fit into its shard of a slot.
    """
    if source is not None and target is not None and source.page_form() != target.page_form():
        raise LayoutError(
            "the pools' pages are made of different buffers (role, layer, bytes or form); "
            "they must not share a namespace"
        )
    sides = _sides(source, target, shard), _sides(target, source, shard)
    return [Chunk(*left[:3], *right) for left, right in zip(*sides, strict=True)]


def fused(separate: Iterable[Chunk]) -> list[Chunk]:
    """Chunks of which neighbours have become one, where they are neighbours on both sides."""
    chunks: list[Chunk] = []
    for chunk in separate:
        last = chunks[-1] if chunks else None
        if last is not None and _follows(last, chunk):
            chunks[-1] = last._replace(nbytes=last.nbytes + chunk.nbytes)
        else:
            chunks.append(chunk)
    return chunks


def _follows(last: Chunk, chunk: Chunk) -> bool:
    return (
        last.source_allocation == chunk.source_allocation
        and last.target_allocation == chunk.target_allocation
        and last.source_stride == chunk.source_stride
        and last.target_stride == chunk.target_stride
        and last.source_offset + last.nbytes == chunk.source_offset
        and last.target_offset + last.nbytes == chunk.target_offset
    )


def _sides(
    layout: PoolLayout | None, other: PoolLayout | None, shard: Shard
) -> list[tuple[int, int, int, int]]:
    """(allocation, offset, stride, bytes) of each chunk; a host page follows the pool's order."""
    if layout is not None:
        return [(b.allocation, b.offset, b.page_stride, b.chunk_bytes) for b in layout.buffers]
    if other is None:
        raise LayoutError("a copy needs a pool on one side")
    slot_bytes = _slot_bytes(shard, other)
    sizes = [buffer.chunk_bytes for buffer in other.buffers]
    starts = accumulate(sizes, initial=shard.offset)
    return [(0, start, slot_bytes, size) for start, size in zip(starts, sizes, strict=False)]


def _slot_bytes(shard: Shard, pool: PoolLayout) -> int:
    """Size of a slot; raises `LayoutError` when the pool's page is not within it."""
    slot_bytes = shard.slot_bytes or pool.page_bytes
    if not 0 <= shard.offset <= slot_bytes - pool.page_bytes:
        raise LayoutError(
            f"a page of {pool.page_bytes} bytes at byte {shard.offset} is not within a slot of "
            f"{slot_bytes}"
        )
    return slot_bytes


def _layout(place: Place, layouts: Mapping[PoolId, PoolLayout]) -> PoolLayout | None:
    if place == HOST:
        return None
    if not is_pool(place) or place not in layouts:
        raise LayoutError(f"place {place} is not imported here")
    return layouts[place]


def _by_segment(
    part: CopyPart, source_pages: Sequence[int], target_pages: Sequence[int]
) -> Segments:
    if part.source != HOST and part.target != HOST:
        return [(0, source_pages, target_pages)]
    slots = source_pages if part.source == HOST else target_pages
    first, last = min(slots) >> SEGMENT_SHIFT, max(slots) >> SEGMENT_SHIFT
    if first == last:
        indices = [slot & INDEX_MASK for slot in slots]
        if part.source == HOST:
            return [(first, indices, target_pages)]
        return [(first, source_pages, indices)]
    groups: dict[int, tuple[list[int], list[int]]] = {}
    others = target_pages if part.source == HOST else source_pages
    for slot, page in zip(slots, others, strict=True):
        group = groups.get(slot >> SEGMENT_SHIFT)
        if group is None:
            group = groups[slot >> SEGMENT_SHIFT] = ([], [])
        group[0].append(slot & INDEX_MASK)
        group[1].append(page)
    if part.source == HOST:
        return [(segment, indices, pages) for segment, (indices, pages) in groups.items()]
    return [(segment, pages, indices) for segment, (indices, pages) in groups.items()]


def _check_side(
    place: Place,
    pages: Sequence[int],
    packed: bytes,
    layout: PoolLayout | None,
    tier: TierShape | None,
    slot_bytes: int,
) -> None:
    if layout is not None:
        if not surely_below(packed, layout.page_count) and max(pages) >= layout.page_count:
            highest = max(pages)
            raise LayoutError(
                f"page {highest} is beyond the {layout.page_count} pages of pool {place}"
            )
        return
    if tier is None:
        raise LayoutError("there is no host tier here")
    # A tier may have many segments, and all but the last, which may be shorter, are alike. None of
    # its slots is beyond it if the highest one is not.
    highest = max(pages)
    if highest >> SEGMENT_SHIFT >= tier.segment_count - 1:
        tier.locate(highest, slot_bytes)
    each = tier.segment_bytes // slot_bytes
    if not surely_below(packed, each, 2) and _highest_index(packed) >= each:
        tier.locate(max(pages, key=INDEX_MASK.__and__), slot_bytes)


def _highest_index(packed: bytes) -> int:
    """The highest index within its segment of the slots of a packed list."""
    lower = array("H", packed)[::2]  # halves of numbers that are little endian
    if sys.byteorder == "big":
        lower.byteswap()
    return max(lower)


def runs_of(starts: Sequence[int], stops: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source page, target page, count) of maximal runs that advance by one on both sides."""
    runs: list[tuple[int, int, int]] = []
    first_source, first_target, count = starts[0], stops[0], 0
    for source, target in zip(starts, stops, strict=True):
        if source == first_source + count and target == first_target + count:
            count += 1
            continue
        runs.append((first_source, first_target, count))
        first_source, first_target, count = source, target, 1
    runs.append((first_source, first_target, count))
    return runs


def _ranges(
    chunk: Chunk, starts: Sequence[int], stops: Sequence[int], runs: list[tuple[int, int, int]]
) -> list[Range]:
    _, source_offset, source_stride, _, target_offset, target_stride, nbytes = chunk
    if runs and chunk.merges:
        return [
            (source_offset + s * nbytes, target_offset + t * nbytes, n * nbytes) for s, t, n in runs
        ]
    return [
        (source_offset + s * source_stride, target_offset + t * target_stride, nbytes)
        for s, t in zip(starts, stops, strict=True)
    ]


def _cut_long(batch: RangeBatch, slice_bytes: int) -> list[Range]:
    """The batch's ranges, each cut to at most a slice."""
    if batch.nbytes <= slice_bytes or all(r[2] <= slice_bytes for r in batch.ranges):
        return batch.ranges
    return [
        (source + done, target + done, min(slice_bytes, nbytes - done))
        for source, target, nbytes in batch.ranges
        for done in range(0, nbytes, slice_bytes)
    ]
