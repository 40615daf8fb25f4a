"""The calls of one submission, before they are queued: rectangles, pages for a kernel, ranges.

Pure. Owns their forms and the arithmetic from pages to addresses. It chooses nothing (shapes.py)
and queues nothing (cuda.py).
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from transfer.pages import PageBatch
from transfer.plan import Chunk, MemoryKey, Range
from transfer.tiles import Direction, Tile

FEW = 12
"""Offsets of a page below which a call of C code a page costs more than it saves."""


class Rectangle(NamedTuple):
    """One 2D copy between two addresses."""

    source: int
    source_pitch: int
    target: int
    target_pitch: int
    width: int
    rows: int


class KernelPages(NamedTuple):
    """Chunks of one size, at addresses, of pages: for a kernel."""

    chunks: Sequence[Chunk]
    source_pages: Sequence[int]
    target_pages: Sequence[int]


class Work:
    """The calls of one submission: rectangles by direction, pages for a kernel, and ranges."""

    def __init__(self) -> None:
        self.rectangles: list[tuple[Direction, list[Rectangle]]] = []
        self.kernels: list[KernelPages] = []
        self.sources, self.targets, self.sizes = array("Q"), array("Q"), array("Q")
        self.keys: set[MemoryKey] = set()
        self.direction: Direction = "to_host"

    def add_rectangles(self, rectangles: list[Rectangle]) -> None:
        """Add 2D copies in the present direction."""
        if rectangles:
            self.rectangles.append((self.direction, rectangles))

    def add_ranges(self, source: int, target: int, ranges: Iterable[Range]) -> None:
        """Add ranges, given as offsets to two addresses."""
        for start, stop, nbytes in ranges:
            self.sources.append(source + start)
            self.targets.append(target + stop)
            self.sizes.append(nbytes)


def add_merged(
    work: Work, tiles: Sequence[Tile], runs: Sequence[tuple[int, int, int]], *, tiled: bool
) -> None:
    """Chunks of adjacent pages are adjacent on both sides: a run is one wide row a chunk."""
    rectangles = []
    for start, stop, count in runs:
        for tile in tiles:
            width = count * tile.width
            source = tile.source + start * tile.source_stride
            target = tile.target + stop * tile.target_stride
            pitches = tile.source_pitch, tile.target_pitch
            if tiled and tile.rows > 1:
                rectangles.append(
                    Rectangle(source, pitches[0], target, pitches[1], width, tile.rows)
                )
                continue
            rows = range(tile.rows)
            work.add_ranges(source, target, ((r * pitches[0], r * pitches[1], width) for r in rows))
    work.add_rectangles(rectangles)


def add_tile(work: Work, tile: Tile, starts: Sequence[int], stops: Sequence[int]) -> None:
    """One rectangle a page."""
    source, source_pitch, source_stride, target, target_pitch, target_stride, width, rows = tile
    if rows == 1:
        work.sources.extend(array("Q", [source + page * source_stride for page in starts]))
        work.targets.extend(array("Q", [target + page * target_stride for page in stops]))
        work.sizes.extend(array("Q", [width]) * len(starts))
        return
    work.add_rectangles(
        [
            Rectangle(
                source + s * source_stride, source_pitch,
                target + t * target_stride, target_pitch, width, rows,
            )
            for s, t in zip(starts, stops, strict=True)
        ]
    )  # fmt: skip


class Columns(NamedTuple):
    """Chunks as columns: addresses of page 0, and strides (0: not all the same)."""

    chunks: Sequence[Chunk]
    sources: list[int]
    source_stride: int
    targets: list[int]
    target_stride: int
    sizes: "array[int]"

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "Columns":
        """Of chunks at addresses."""
        strides = {c.source_stride for c in chunks}, {c.target_stride for c in chunks}
        source, target = (next(iter(found)) if len(found) == 1 else 0 for found in strides)
        return cls(
            chunks,
            [c.source_offset for c in chunks],
            source,
            [c.target_offset for c in chunks],
            target,
            array("Q", [c.nbytes for c in chunks]),
        )


def add_chunks(work: Work, columns: Columns, starts: Sequence[int], stops: Sequence[int]) -> None:
    """One range a chunk and page, page after page: a host page is then one stretch.

    This is most of what a slice costs, so the usual case, one stride a side, has its own way.
    """
    if columns.source_stride and columns.target_stride:
        _extend(work.sources, columns.sources, columns.source_stride, starts)
        _extend(work.targets, columns.targets, columns.target_stride, stops)
    else:
        sources = [(c.source_offset, c.source_stride) for c in columns.chunks]
        targets = [(c.target_offset, c.target_stride) for c in columns.chunks]
        work.sources.extend([at + page * stride for page in starts for at, stride in sources])
        work.targets.extend([at + page * stride for page in stops for at, stride in targets])
    work.sizes.extend(columns.sizes * len(starts))


def add_spread(
    work: Work,
    columns: Columns,
    batch: PageBatch,
    starts: Sequence[int],
    pages: Sequence[int],
    side: int,
) -> None:
    """One range a chunk and page, of slots of any segments.

    `starts`: the slots' addresses; `side`: which one is the host's (1: the target); `pages`: of the
    other side; `columns`: for that one.
    """
    if side:
        host, pool = work.targets, work.sources
        offsets = [c.target_offset for c in batch.pattern.chunks]
        ends, stride = columns.sources, columns.source_stride
    else:
        host, pool = work.sources, work.targets
        offsets = [c.source_offset for c in batch.pattern.chunks]
        ends, stride = columns.targets, columns.target_stride
    _extend(host, offsets, 1, starts)
    if stride:
        _extend(pool, ends, stride, pages)
    else:
        strides = [c.source_stride if side else c.target_stride for c in columns.chunks]
        pairs = list(zip(ends, strides, strict=True))
        pool.extend([at + page * each for page in pages for at, each in pairs])
    work.sizes.extend(columns.sizes * len(pages))


def _extend(onto: "array[int]", offsets: Sequence[int], stride: int, pages: Sequence[int]) -> None:
    """Addresses of all offsets in every page."""
    if len(offsets) == 1:  # an array that is made of all of them takes a quarter of the time
        at = offsets[0]
        if isinstance(pages, range) and pages.step == 1:  # rows of a slab
            rows = range(pages.start * stride + at, pages.stop * stride + at, stride)
            onto.extend(array("Q", list(rows)))
        elif stride == 1 and not at:
            onto.extend(array("Q", pages))
        else:
            onto.extend(array("Q", [page * stride + at for page in pages]))
        return
    if len(offsets) < FEW:
        every = [base + at for page in pages for base in (page * stride,) for at in offsets]
        onto.extend(array("Q", every))
        return
    for page in pages:
        onto.extend(map((page * stride).__add__, offsets))


def add_run_rows(work: Work, chunks: Sequence[Chunk], runs: Sequence[tuple[int, int, int]]) -> None:
    """One rectangle a chunk and run of pages: a row is a page."""
    work.add_rectangles(
        [
            Rectangle(
                c.source_offset + start * c.source_stride, c.source_stride,
                c.target_offset + stop * c.target_stride, c.target_stride, c.nbytes, count,
            )
            for start, stop, count in runs
            for c in chunks
        ]
    )  # fmt: skip


def split(
    run: tuple[int, int, int], side: int, stride: int, border: int
) -> list[tuple[int, int, int]]:
    """Cut a run of pages, none of which crosses a border itself, where the next registration of
    the host's memory begins. `stride`: bytes from page to page on that side."""
    pieces = []
    start, stop, count = run
    while count:
        first = (start, stop)[side]
        following = (first * stride // border + 1) * border
        here = min(count, -(-(following - first * stride) // stride))
        pieces.append((start, stop, here))
        start, stop, count = start + here, stop + here, count - here
    return pieces


def cut_at(ranges: Sequence[Range], side: int, chunk_bytes: int) -> list[Range]:
    """Cut ranges so that none crosses a multiple of `chunk_bytes` on one side."""
    pieces: list[Range] = []
    for source, target, nbytes in ranges:
        while nbytes:
            start = (source, target)[side]
            piece = min(nbytes, chunk_bytes - start % chunk_bytes)
            pieces.append((source, target, piece))
            source, target, nbytes = source + piece, target + piece, nbytes - piece
    return pieces
