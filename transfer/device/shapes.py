"""Which calls carry a batch of pages: rectangles, runs, or a list of ranges.

Owns what was made of each pattern (its rectangles at the addresses of attached memories) and the
choice among the shapes. Pure but for those tables: it queues nothing. It must never name a byte
outside of an attached memory, nor let a piece cross from one registration of host memory into the
next.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import sub
from typing import NamedTuple, Protocol

from directory.core.ids import HOST
from transfer.device.cuda_kernel import moves
from transfer.device.protocol import UnknownMemory
from transfer.device.work import (
    Columns,
    KernelPages,
    Work,
    add_chunks,
    add_merged,
    add_run_rows,
    add_spread,
    add_tile,
    cut_at,
    split,
)
from transfer.host_tier import INDEX_MASK, SEGMENT_SHIFT
from transfer.pages import PageBatch, Pattern
from transfer.plan import Chunk, MemoryKey, runs_of
from transfer.tiles import ROWS_MIN, Direction, Rates, Tile, tiles_of

PLACED_MAX = 4_096
"""Patterns remembered; then all are made anew."""


class Attached(Protocol):
    """What is known of an attached memory."""

    @property
    def address(self) -> int:
        """Of its first byte."""
        ...

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """No copy may cross a multiple of it (0: any may)."""
        ...

    @property
    def device(self) -> str:
        """UUID of its GPU; empty for the host's memory."""
        ...

    @property
    def base(self) -> int:
        """Where the allocation begins that it is a part of."""
        ...


class Placed(NamedTuple):
    """A pattern at addresses, and how it is moved."""

    direction: Direction
    chunks: list[Chunk]
    columns: Columns
    tiles: list[Tile]
    tiled: bool
    runs_tiled: bool
    merges: bool
    by_kernel: list[list[Chunk]]
    """Chunks by size, if the kernel can move all of them; else nothing."""
    source_last: int
    """The highest page whose chunks lie within their memories."""
    target_last: int
    border: int
    """The host's pages must not cross a multiple of it; 0: none does."""
    source_border: int
    """The same for runs of pages, whichever side it is on."""
    keys: set[MemoryKey]


class Spread:
    """A pattern between a pool and any segments of the host tier. `first`: placed in one of them,
    for what is the same in all. `plain`: a list of ranges, and no page crosses a border.
    `few`: so few chunks a page that it is always one list."""

    def __init__(self, first: Placed) -> None:
        self.first = first
        self.plain = not first.tiled
        # Of a page of few chunks rectangles are no faster than a list, and placing a layer of every
        # segment takes longer than moving it.
        self.few = not first.merges and len(first.chunks) < ROWS_MIN
        self.pool_keys = {key for key in first.keys if key[0] != HOST}
        self.bases: dict[int, int] = {}  # address of each segment
        self.lasts: dict[int, int] = {}  # its last slot
        self.last_min = 1 << 62
        """The last slot of the shortest of them."""

    def pool_last(self, side: int) -> int:
        """The highest page of the pool; `side` 1: the host is the target."""
        return self.first.source_last if side else self.first.target_last

    def add(self, number: int, memory: Attached, span: tuple[int, int, int]) -> None:
        """Know a segment: its address, and its last slot whose bytes are in it."""
        stride, _, end = span
        last = (memory.nbytes - 1 - end) // stride
        self.bases[number] = memory.address
        self.lasts[number] = last
        self.last_min = min(self.last_min, last)
        if memory.chunk_bytes:
            self.plain = False


class Shapes:
    """Chooses the calls of batches of pages.

    `can_tile`: whether rectangles can be copied. `kernel_moves`: whether a kernel may move chunks
    at these addresses in this direction (asked for each batch: a peer may be computing).
    """

    def __init__(
        self,
        memory: Callable[[MemoryKey], Attached],
        own_device: str,
        rates: Rates,
        *,
        can_tile: bool,
        kernel_moves: Callable[[Direction], bool] = lambda _: False,
    ) -> None:
        self.rates = rates
        self._memory = memory
        self._own = own_device
        self._can_tile = can_tile
        self._kernel_moves = kernel_moves
        self._placed: dict[tuple[Pattern, int, int, int], Placed] = {}
        self._spreads: dict[tuple[Pattern, int, int], Spread] = {}

    def forget(self) -> None:
        """Addresses have changed: what was placed is placed anew."""
        self._placed.clear()
        self._spreads.clear()

    def direction(self, source: Attached, target: Attached) -> Direction:
        """Between which kinds of memory a copy goes."""
        if not source.device or not target.device:
            return "from_host" if not source.device else "to_host"
        return "within" if source.device == target.device == self._own else "peer"

    def add(self, batch: PageBatch, work: Work) -> Direction:
        """Add the calls of a batch. Raises `UnknownMemory` before anything is added."""
        if batch.segment is None:
            return self._add_spread(batch, work)
        placed = self._place(batch)
        starts, stops = batch.source_pages, batch.target_pages
        _check(batch.source, max(starts), placed.source_last)
        _check(batch.target, max(stops), placed.target_last)
        work.direction = placed.direction
        work.keys |= placed.keys
        if placed.by_kernel and self._kernel_moves(placed.direction):
            work.kernels += [KernelPages(chunks, starts, stops) for chunks in placed.by_kernel]
            return placed.direction
        if placed.border:
            starts, stops = self._cut(batch, placed.border, work)
        runs = self._runs(batch, placed, starts, stops) if placed.merges else []
        if placed.merges and 2 * len(runs) <= len(starts):
            add_merged(work, placed.tiles, runs, tiled=placed.tiled)
        elif placed.tiled:
            for tile in placed.tiles:
                add_tile(work, tile, starts, stops)
        elif not placed.runs_tiled or not self._run_rows(batch, placed, starts, stops, work):
            add_chunks(work, placed.columns, starts, stops)
        return placed.direction

    def _add_spread(self, batch: PageBatch, work: Work) -> Direction:
        """Add pages of several segments of the host tier: at once if they are but a few of each,
        since a segment at a time would cost more than their bytes."""
        if HOST not in batch[:2]:
            return self.add(batch._replace(segment=0), work)
        side, chunk = _host_side(batch)
        slots, others = batch.source_pages, batch.target_pages
        if side:
            slots, others = others, slots
        spread = self._spread(batch, slots[0] >> SEGMENT_SHIFT)
        groups = in_groups(slots)
        numbers = {group[0] for group in groups} or {slot >> SEGMENT_SHIFT for slot in slots}
        for number in numbers.difference(spread.bases):
            spread.add(number, self._memory((HOST, number)), _host_span(batch))
        many = len(slots) >= ROWS_MIN * len(numbers) and not spread.few
        if many and spread.first.merges:  # nothing can be merged where few slots follow one another
            many = 2 * list(map(sub, slots[1:], slots)).count(1) >= len(slots)
        if not spread.plain or many:
            for part in batch.by_segment():
                self.add(part, work)
            return spread.first.direction
        pool = batch.source if side else batch.target
        highest = others[-1] if isinstance(others, range) else max(others)
        _check(pool, highest, spread.pool_last(side))
        stride = chunk.target_stride if side else chunk.source_stride
        bases, starts = spread.bases, list[int]()
        for number, at, stop in groups:
            _check(HOST, slots[stop - 1] & INDEX_MASK, spread.lasts[number])
            base = bases[number] - (number << SEGMENT_SHIFT) * stride
            starts += [base + slot * stride for slot in slots[at:stop]]
        if not groups and max(map(INDEX_MASK.__and__, slots)) > spread.last_min:
            for slot in slots:
                if slot & INDEX_MASK > (last := spread.lasts[slot >> SEGMENT_SHIFT]):
                    _check(HOST, slot, last)
        if not groups:
            starts = [bases[s >> SEGMENT_SHIFT] + (s & INDEX_MASK) * stride for s in slots]
        work.direction = spread.first.direction
        work.keys |= spread.pool_keys
        work.keys.update([(HOST, number) for number in numbers])
        add_spread(work, spread.first.columns, batch, starts, others, side)
        return spread.first.direction

    def _spread(self, batch: PageBatch, number: int) -> Spread:
        key = (batch.pattern, batch.source, batch.target)
        known = self._spreads.get(key)
        if known is None:
            if len(self._spreads) >= PLACED_MAX:
                self._spreads.clear()
            known = self._spreads[key] = Spread(self._make(batch._replace(segment=number)))
        return known

    def _run_rows(
        self,
        batch: PageBatch,
        placed: Placed,
        starts: Sequence[int],
        stops: Sequence[int],
        work: Work,
    ) -> bool:
        """One rectangle a chunk and run, a row is a page; False if runs are too short for that."""
        runs = self._runs(batch, placed, starts, stops)
        if len(starts) < ROWS_MIN * len(runs):
            return False
        add_run_rows(work, placed.chunks, runs)
        return True

    def _runs(
        self, batch: PageBatch, placed: Placed, starts: Sequence[int], stops: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Runs of adjacent pages, none over two registrations of the host's memory."""
        runs = runs_of(starts, stops) if starts else []
        if not placed.source_border:
            return runs
        side, first = _host_side(batch)
        stride = first.target_stride if side else first.source_stride
        return [piece for run in runs for piece in split(run, side, stride, placed.source_border)]

    def _place(self, batch: PageBatch) -> Placed:
        key = (batch.pattern, batch.source, batch.target, batch.segment or 0)
        known = self._placed.get(key)
        if known is None:
            if len(self._placed) >= PLACED_MAX:
                self._placed.clear()
            known = self._placed[key] = self._make(batch)
        return known

    def _make(self, batch: PageBatch) -> Placed:
        chunks: list[Chunk] = []
        source_last = target_last = 1 << 62
        source = target = self._memory(batch.source_key(batch.pattern.chunks[0]))
        for chunk in batch.pattern.chunks:
            source = self._memory(batch.source_key(chunk))
            target = self._memory(batch.target_key(chunk))
            room = source.nbytes - chunk.source_offset - chunk.nbytes
            source_last = min(source_last, room // chunk.source_stride)
            room = target.nbytes - chunk.target_offset - chunk.nbytes
            target_last = min(target_last, room // chunk.target_stride)
            # An allocation is named by where it begins: the driver refuses a rectangle that
            # reaches from one into the next, however they lie.
            chunks.append(
                chunk._replace(
                    source_allocation=source.base,
                    source_offset=source.address + chunk.source_offset,
                    target_allocation=target.base,
                    target_offset=target.address + chunk.target_offset,
                )
            )
        direction = self.direction(source, target)
        tiles = tiles_of(chunks)
        rows = len(chunks) // len(tiles)
        smallest = min(chunk.nbytes for chunk in chunks)
        method = self.rates.method
        registered = source.chunk_bytes or target.chunk_bytes
        return Placed(
            direction,
            chunks,
            Columns.of(chunks),
            tiles,
            self._can_tile and method(direction, smallest, rows) == "tile",
            self._can_tile and method(direction, smallest, ROWS_MIN) == "tile",
            all(chunk.merges for chunk in chunks),
            _by_size(chunks) if direction in ("within", "peer") else [],
            source_last,
            target_last,
            registered if registered and _may_cross(batch, registered) else 0,
            registered,
            batch.keys(),
        )

    def _cut(
        self, batch: PageBatch, border: int, work: Work
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Pages that lie in one registration; the ranges of the others are cut at the border."""
        side, _ = _host_side(batch)
        slots = batch.target_pages if side else batch.source_pages
        stride, begin, end = _host_span(batch)
        crossing = [
            n
            for n, slot in enumerate(slots)
            if (slot * stride + begin) // border != (slot * stride + end) // border
        ]
        if not crossing:
            return batch.source_pages, batch.target_pages
        lost = batch._replace(
            source_pages=[batch.source_pages[n] for n in crossing],
            target_pages=[batch.target_pages[n] for n in crossing],
        )
        for piece in lost.ranges():
            source, target = self._memory(piece.source), self._memory(piece.target)
            work.add_ranges(source.address, target.address, cut_at(piece.ranges, side, border))
        out = set(crossing)
        kept = [n for n in range(len(slots)) if n not in out]
        return [batch.source_pages[n] for n in kept], [batch.target_pages[n] for n in kept]


def in_groups(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """(segment, first, behind the last) of slots in ascending order; nothing of any others."""
    groups: list[tuple[int, int, int]] = []
    if sorted(slots) != slots:
        return groups
    at, count = 0, len(slots)
    while at < count:
        number = slots[at] >> SEGMENT_SHIFT
        stop = bisect_left(slots, (number + 1) << SEGMENT_SHIFT, at)
        groups.append((number, at, stop))
        at = stop
    return groups


def _host_side(batch: PageBatch) -> tuple[int, Chunk]:
    """Which side is the host's (0 source, 1 target), and a chunk; all have its host stride."""
    return (0 if batch.source == HOST else 1), batch.pattern.chunks[0]


def _host_span(batch: PageBatch) -> tuple[int, int, int]:
    """Bytes from slot to slot, and the first and last byte of a slot that are touched."""
    side, first = _host_side(batch)
    stride = first.target_stride if side else first.source_stride
    ends = [
        (start, start + c.nbytes)
        for c in batch.pattern.chunks
        for start in ((c.target_offset if side else c.source_offset),)
    ]
    return stride, min(start for start, _ in ends), max(end for _, end in ends) - 1


def _may_cross(batch: PageBatch, border: int) -> bool:
    stride, _, end = _host_span(batch)
    return bool(border % stride) or end >= stride


def _by_size(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    if not moves(chunks):
        return []
    sizes: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        sizes.setdefault(chunk.nbytes, []).append(chunk)
    return list(sizes.values())


def _check(place: int, page: int, last: int) -> None:
    if page > last:
        raise UnknownMemory(f"page {page} of place {place} is beyond its memory ({last} is last)")
