"""Whole pages, or the same chunks of each, as one piece: for devices that choose the shape.

Pure. Owns the form of such a piece and how it is cut. Where `plan` spells every range out, a
`PageBatch` names pages and chunks, so that a device that knows addresses may move a page as a
rectangle, a run of pages as another, or the ranges one by one. What it holds has been checked.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from directory.core.actions import CopyPart
from directory.core.ids import HOST, Place
from transfer.host_tier import INDEX_MASK, SEGMENT_SHIFT
from transfer.plan import Chunk, MemoryKey, RangeBatch, Segments, part_batches


class Pattern:
    """Chunks of a page; compared by identity, so that a device can remember what it made of it.

    `layers`: the first of its layers and how many, of the pool's in ascending order; (0, 0): all,
    in the order of the pool's layout.
    """

    __slots__ = ("chunks", "layers", "nbytes", "_cuts")

    def __init__(self, chunks: Sequence[Chunk], layers: tuple[int, int] = (0, 0)) -> None:
        self.chunks = tuple(chunks)
        self.layers = layers
        self.nbytes = sum(chunk.nbytes for chunk in self.chunks)
        self._cuts: dict[int, list[Pattern]] = {}

    def cut(self, slice_bytes: int) -> "list[Pattern]":
        """The chunks in order, in as few equal pieces as keep to the size, if chunks allow that."""
        known = self._cuts.get(slice_bytes)
        if known is None:
            known = self._cuts[slice_bytes] = list(self._pieces(slice_bytes))
        return known

    def _pieces(self, slice_bytes: int) -> "Iterator[Pattern]":
        each = -(-self.nbytes // -(-self.nbytes // slice_bytes))
        current: list[Chunk] = []
        held = 0
        for chunk in self.chunks:
            if current and held + chunk.nbytes > each:
                yield Pattern(current)
                current, held = [], 0
            current.append(chunk)
            held += chunk.nbytes
        yield Pattern(current)

    def __repr__(self) -> str:
        return f"<Pattern {len(self.chunks)} chunks, {self.nbytes} bytes>"


class PageBatch(NamedTuple):
    """The chunks of a pattern, of each of these pages. `segment`: of the host tier, if one side is
    it; page numbers of that side are indices in the segment. None: they are whole slot numbers,
    of any segments. Target pages are all different."""

    source: Place
    target: Place
    segment: int | None
    pattern: Pattern
    source_pages: Sequence[int]
    target_pages: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return self.pattern.nbytes * len(self.source_pages)

    def keys(self) -> set[MemoryKey]:
        """The memories that are touched."""
        return {
            key
            for batch in self.by_segment()
            for chunk in self.pattern.chunks
            for key in (batch.source_key(chunk), batch.target_key(chunk))
        }

    def source_key(self, chunk: Chunk) -> MemoryKey:
        """Where a chunk is read; of a batch of one segment."""
        return (self.source, self._number(self.source, chunk.source_allocation))

    def target_key(self, chunk: Chunk) -> MemoryKey:
        """Where a chunk is written; of a batch of one segment."""
        return (self.target, self._number(self.target, chunk.target_allocation))

    def _number(self, place: Place, allocation: int) -> int:
        return allocation if place != HOST or self.segment is None else self.segment

    def by_segment(self) -> "list[PageBatch]":
        """The same pages, each batch of one segment."""
        if self.segment is not None:
            return [self]
        if HOST not in (self.source, self.target):
            return [self._replace(segment=0)]
        out = self.source == HOST
        slots, others = self.source_pages, self.target_pages
        if not out:
            slots, others = others, slots
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for slot, page in zip(slots, others, strict=True):
            group = groups.setdefault(slot >> SEGMENT_SHIFT, ([], []))
            group[0].append(slot & INDEX_MASK)
            group[1].append(page)
        return [
            self._replace(
                segment=segment,
                source_pages=indices if out else pages,
                target_pages=pages if out else indices,
            )
            for segment, (indices, pages) in groups.items()
        ]

    def ranges(self) -> Iterator[RangeBatch]:
        """The same copy range by range."""
        part = CopyPart(self.source, b"", self.target, b"")
        for batch in self.by_segment():
            assert batch.segment is not None
            segments: Segments = [(batch.segment, batch.source_pages, batch.target_pages)]
            yield from part_batches(part, segments, self.pattern.chunks)


def page_batch(
    part: CopyPart, starts: Sequence[int], stops: Sequence[int], pattern: Pattern
) -> PageBatch:
    """The pages of a part that was checked; there is at least one."""
    segment: int | None = 0
    if HOST in (part.source, part.target):
        out = part.source == HOST
        slots = starts if out else stops
        segment = slots[0] >> SEGMENT_SHIFT
        if slots[-1] >> SEGMENT_SHIFT != segment or (
            min(slots) >> SEGMENT_SHIFT != max(slots) >> SEGMENT_SHIFT
        ):
            segment = None
        elif out:
            starts = list(map(INDEX_MASK.__and__, slots))
        else:
            stops = list(map(INDEX_MASK.__and__, slots))
    return PageBatch(part.source, part.target, segment, pattern, starts, stops)


def page_slices(batches: Iterable[PageBatch], slice_bytes: int) -> Iterator[list[PageBatch]]:
    """Cut batches into pieces of about so many bytes, in order; small ones go together.

    A piece holds whole chunks, and at least one; pages that are larger than a slice are cut
    between chunks. Batches of different places never share a piece.
    """
    current: list[PageBatch] = []
    left = slice_bytes
    for batch in chain.from_iterable(_cut_pages(batch, slice_bytes) for batch in batches):
        if current and (current[-1][:2] != batch[:2] or left < batch.pattern.nbytes):
            yield current
            current, left = [], slice_bytes
        start = 0
        while start < len(batch.source_pages):
            stop = start + max(1, left // batch.pattern.nbytes)
            piece = batch._replace(
                source_pages=batch.source_pages[start:stop],
                target_pages=batch.target_pages[start:stop],
            )
            current.append(piece)
            left -= piece.nbytes
            start = stop
            if start < len(batch.source_pages) or left <= 0:
                yield current
                current, left = [], slice_bytes
    if current:
        yield current


def left_of(batches: Sequence[PageBatch], first: Sequence[PageBatch]) -> list[PageBatch]:
    """What `page_slices` has not put into its first piece, uncut; nothing if it has cut a page."""
    cut = (part.pattern is not whole.pattern for part, whole in zip(first, batches, strict=False))
    if any(cut):
        return []
    last = len(first) - 1
    done = len(first[last].source_pages)
    whole = batches[last]
    rest = list(batches[last + 1 :])
    if done < len(whole.source_pages):
        rest.insert(
            0,
            whole._replace(
                source_pages=whole.source_pages[done:], target_pages=whole.target_pages[done:]
            ),
        )
    return rest


def _cut_pages(batch: PageBatch, slice_bytes: int) -> Iterator[PageBatch]:
    """The batch itself, or where a page is larger than a slice, its pages in pieces."""
    if batch.pattern.nbytes <= slice_bytes or len(batch.pattern.chunks) == 1:
        yield batch
        return
    pieces = batch.pattern.cut(slice_bytes)
    for number in range(len(batch.source_pages)):
        for pattern in pieces:
            yield batch._replace(
                pattern=pattern,
                source_pages=batch.source_pages[number : number + 1],
                target_pages=batch.target_pages[number : number + 1],
            )
