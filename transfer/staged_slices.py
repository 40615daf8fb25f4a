"""How pages that go through a slab are cut into slices, and in which order they go.

Pure. Owns the order: what the bus waits for first as it comes, and the rest by the host's slots. It
must never lose a page, name one twice, or give a page another's slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter

from directory.core.ids import HOST
from transfer.ipc.stage_ring import PAGES_MAX
from transfer.pages import PageBatch, page_slices

SORTED_MAX = 8_192
"""Pages whose order is made at once: some 2 ms, in which nothing else of the mover goes on."""
FIRST_SHARE = 2
"""So much smaller is a copy's first slice: the bus, or the scheduler, waits for it."""


def capped(slices: Iterable[list[PageBatch]]) -> Iterator[list[PageBatch]]:
    """The same slices, none with more pages than a request names."""
    for batches in slices:
        if sum(len(batch.source_pages) for batch in batches) <= PAGES_MAX:
            yield batches
        else:
            yield from page_slices(batches, PAGES_MAX * batches[0].pattern.nbytes)


def staged_slices(batches: Iterable[PageBatch], slice_bytes: int) -> Iterator[list[PageBatch]]:
    """Slices of pages that go through a slab: a small one first and another one, as they come,
    which are on their way while the others are put in order."""
    left = iter(batches)
    first = next(left, None)
    if first is None:
        return
    pages = slice_bytes // first.pattern.nbytes
    head, rest = split_at(first, max(1, pages // FIRST_SHARE))
    if rest:
        yield from page_slices([head], slice_bytes)
        head, rest = split_at(rest[0], max(1, pages))
        if rest:
            yield from page_slices([head], slice_bytes)
    ordered = (piece for batch in chain(rest or [head], left) for piece in by_slot(batch))
    yield from page_slices(ordered, slice_bytes)


def by_slot(batch: PageBatch) -> Iterator[PageBatch]:
    """Pages between a pool and the host tier in the order of their slots, so many at a time.

    The bus moves rows of 128 KiB in ascending order up to a tenth faster than here and there, and
    each slice reaches fewer segments.
    """
    left = [batch]
    while left and HOST in batch[:2]:
        here, left = split_at(left[0], SORTED_MAX)
        if here.target == HOST:
            stops, starts = in_order(here.target_pages, here.source_pages)
        else:
            starts, stops = in_order(here.source_pages, here.target_pages)
        yield here._replace(source_pages=starts, target_pages=stops)
    yield from left  # all of it where it goes between pools


def split_at(batch: PageBatch, count: int) -> tuple[PageBatch, list[PageBatch]]:
    """The first so many pages, and the others if there are any."""
    starts, stops = batch.source_pages, batch.target_pages
    if len(starts) <= count:
        return batch, []
    first = batch._replace(source_pages=starts[:count], target_pages=stops[:count])
    return first, [batch._replace(source_pages=starts[count:], target_pages=stops[count:])]


def in_order(slots: Sequence[int], pages: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Slots in ascending order, and with each the page that it was with."""
    by_number = dict(zip(slots, pages, strict=True))
    if len(by_number) == len(slots) > 1:
        ordered = sorted(by_number)
        return ordered, list(itemgetter(*ordered)(by_number))
    order = sorted(range(len(slots)), key=slots.__getitem__)  # one slot for several pages
    return [slots[n] for n in order], [pages[n] for n in order]
