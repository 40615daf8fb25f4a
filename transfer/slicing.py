"""What is submitted at once: a copy's slices, in the form that the device takes.

Owns the forms of pages that were made of layouts (patterns), for as long as their pools are there.
A device that takes whole pages gets them, any other the ranges of `plan`; both move the same bytes.
Decides nothing about when a slice goes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from directory.core.actions import CopyPart, SubmitCopy
from directory.core.ids import PoolId
from transfer.copies import Copy, Slice
from transfer.host_tier import TierShape
from transfer.landing import PageStep, PatternCache, Progress, layered, layered_pages
from transfer.lanes import Turn
from transfer.layout import PoolLayout
from transfer.pages import PageBatch, Pattern, left_of, page_batch, page_slices
from transfer.plan import (
    ChunkCache,
    Shard,
    checked_lists,
    forget,
    fused_chunks,
    plan,
    slices,
)
from transfer.staged_slices import capped, staged_slices
from transfer.staging import Slab, StagedCopy


class SliceSizes(NamedTuple):
    """Bounds of a slice. `landing_bytes`: least size of a step of layers that is told at once.
    `near_bytes`: of a copy between GPU memories, which is much faster than the host's bus;
    `calm_bytes`: of one within a GPU, where nothing computes; `link_bytes`: of one to another GPU,
    where something computes, or may; `later_bytes`: of the later steps of
    a load that lands layer by layer; `row_bytes`: least size of a page's part in such a step of a
    load that goes through a slab."""

    nbytes: int
    ranges: int
    landing_bytes: int
    near_bytes: int
    calm_bytes: int
    link_bytes: int
    later_bytes: int
    row_bytes: int


class StagedStep(PageStep):
    """Some layers of a load that goes through a slab."""

    def slices(self, slice_bytes: int, slice_ranges: int) -> Iterator[list[PageBatch]]:
        """Its slices, in the order of the host's slots."""
        del slice_ranges
        return staged_slices(self.batches, slice_bytes)


class Slicer:
    """Makes slices. `whole_pages`: the device takes those."""

    def __init__(self, sizes: SliceSizes, *, whole_pages: bool) -> None:
        self._sizes = sizes
        self._whole_pages = whole_pages
        self._chunks: ChunkCache = {}
        self._patterns: PatternCache = {}

    def forget(self, pool: PoolId) -> None:
        """A pool is gone."""
        forget(self._chunks, pool)
        forget(self._patterns, pool)

    def slices(
        self,
        request: SubmitCopy,
        parts: Sequence[CopyPart],
        layouts: Mapping[PoolId, PoolLayout],
        tier: TierShape | None,
        *,
        near: bool = False,
        local: bool = False,
    ) -> tuple[Iterator[Slice], Progress | None]:
        """The slices of a copy, to be taken, and how far it is if it lands layer by layer.

        Raises `LayoutError` now, for anything that is not where it is said to be.
        """
        sizes, landing = self._sizes, request.landing
        shard = Shard(request.slot_bytes, request.shard_offset)
        if landing is not None:
            least = sizes.landing_bytes
            if self._whole_pages:
                paged = layered_pages(
                    landing, parts, layouts, tier, shard, least, patterns=self._patterns
                )
                progress = Progress(paged)
            else:
                progress = Progress(layered(landing, parts, layouts, tier, shard, least))
            later = max(sizes.nbytes, sizes.later_bytes)
            return progress.slices(sizes.nbytes, sizes.ranges, later), progress
        if not self._whole_pages:
            batches = plan(parts, layouts, tier, self._chunks, shard)
            return slices(batches, sizes.nbytes, sizes.ranges), None
        checked = [self._pages(part, layouts, tier, shard) for part in parts]
        nbytes = sizes.calm_bytes if local else sizes.near_bytes if near else sizes.nbytes
        return page_slices(chain.from_iterable(checked), nbytes), None

    def staged(
        self,
        request: SubmitCopy,
        parts: Sequence[CopyPart],
        layouts: Mapping[PoolId, PoolLayout],
        tier: TierShape | None,
        slab: Slab,
    ) -> tuple[StagedCopy, Progress | None]:
        """The same of a copy that goes through a slab. Raises as `slices` does."""
        shard = Shard(request.slot_bytes, request.shard_offset)
        progress, part = None, slab.part_bytes
        pieces: Iterator[list[PageBatch]]
        if request.landing is not None:
            least, patterns = self._sizes.landing_bytes, self._patterns
            steps = layered_pages(
                request.landing, parts, layouts, tier, shard, least,
                patterns=patterns, row_bytes=self._sizes.row_bytes,
            )  # fmt: skip
            progress = Progress([StagedStep(*step) for step in steps])
            pieces = progress.slices(part, 0, part)  # type: ignore[assignment]
        else:
            checked = [self._pages(p, layouts, tier, shard) for p in parts]
            pieces = staged_slices(chain.from_iterable(checked), part)
        return StagedCopy(slab, capped(pieces), whole_pages=self._whole_pages), progress

    def shorten(self, copy: Copy, turn: Turn) -> None:
        """Cut the next slice of a copy between GPU memories down: something computes there, or
        may."""
        more, sizes = copy.more, self._sizes
        if not self._whole_pages or not more or turn in (Turn.PLAIN, Turn.CALM):
            return
        nbytes = sizes.near_bytes if turn is Turn.PACED else sizes.link_bytes
        if sum(batch.nbytes for batch in more) > nbytes:
            pieces: Iterator[Slice] = page_slices(more, nbytes)  # type: ignore[arg-type]
            copy.more = next(pieces)
            # What is left stays in one piece: the next slice may be a large one again.
            copy.rest = left_of(more, copy.more) or None  # type: ignore[arg-type]
            if copy.rest is None:
                copy.slices = chain(pieces, copy.slices)

    def _pages(
        self,
        part: CopyPart,
        layouts: Mapping[PoolId, PoolLayout],
        tier: TierShape | None,
        shard: Shard,
    ) -> Iterator[PageBatch]:
        starts, stops = checked_lists(part, layouts, tier, shard)
        if not starts:
            return iter(())
        key = ((part.source, part.target), shard, -1)
        known = self._patterns.get(key)
        if known is None:
            chunks = fused_chunks(layouts.get(part.source), layouts.get(part.target), shard)
            known = self._patterns[key] = [(0, Pattern(chunks))]
        return iter([page_batch(part, starts, stops, known[0][1])])
