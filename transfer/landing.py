"""Loads that land layer by layer: their order, and how far one is at every moment.

Owns the division of a load into steps of whole layers and the count of what has landed. A load
goes layer by layer over all of its pages, and a step has landed when nothing of it and of all steps
before is still under way. A counter is written when the engine says so, and only as long as the
load is not lost. Peer copies have no steps: what comes out of a pool counts when all of it is
validated.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

from directory.core.actions import CopyPart, Landing
from directory.core.errors import LayoutError, TransferError
from directory.core.ids import HOST, LANDINGS, Place, PoolId
from transfer.device.protocol import Ticket
from transfer.host_tier import TierShape
from transfer.ipc.sync import TimelineTable
from transfer.layout import PoolLayout
from transfer.pages import PageBatch, Pattern, page_batch, page_slices
from transfer.plan import (
    WHOLE,
    Chunk,
    RangeBatch,
    Segments,
    Shard,
    buffer_chunks,
    check_pages,
    checked_lists,
    fused,
    part_batches,
    slices,
)

STEPS_MAX = 128
"""Steps of one load, whatever its layers: each costs a submission and a store."""


class Step(NamedTuple):
    """Some layers of a load. `layers`: how many have landed once this step and all before have."""

    layers: int
    batches: Iterator[RangeBatch]

    def slices(self, slice_bytes: int, slice_ranges: int) -> Iterator[list[RangeBatch]]:
        """Its slices, in order."""
        return slices(self.batches, slice_bytes, slice_ranges)


class PageStep(NamedTuple):
    """The same, in whole pages."""

    layers: int
    batches: Iterator[PageBatch]

    def slices(self, slice_bytes: int, slice_ranges: int) -> Iterator[list[PageBatch]]:
        """Its slices, in order; how many ranges a page is matters to nobody."""
        del slice_ranges
        return page_slices(self.batches, slice_bytes)


PatternCache: TypeAlias = dict[tuple[tuple[Place, Place], Shard, int], list[tuple[int, Pattern]]]
"""(layers so far, chunks) by places, shard and least bytes of a page's part (-1: whole pages)."""
PATTERNS_MAX = 4_096


def layered(
    landing: Landing,
    parts: Sequence[CopyPart],
    layouts: Mapping[PoolId, PoolLayout],
    tier: TierShape | None,
    shard: Shard = WHOLE,
    step_bytes: int = 0,
) -> list[Step]:
    """The steps of a load, in order; every part is checked now.

    A step is at least one layer and at least `step_bytes`, where there are so many. Raises
    `LayoutError` as `plan` does, and for what cannot land layer by layer.
    """
    _check_landing(landing, parts)
    checked = [(part, check_pages(part, layouts, tier, shard)) for part in parts]
    pages = sum(len(starts) for _, segments in checked for _, starts, _ in segments)
    layout = layouts[landing.pool]
    chunks = buffer_chunks(None, layout, shard)
    groups = _groups(layout, chunks, _least(pages, layout.page_bytes, step_bytes))
    return [Step(layers, _batches(checked, group)) for layers, group in groups]


def layered_pages(
    landing: Landing,
    parts: Sequence[CopyPart],
    layouts: Mapping[PoolId, PoolLayout],
    tier: TierShape | None,
    shard: Shard,
    step_bytes: int,
    *,
    patterns: PatternCache,
    row_bytes: int = 0,
) -> list[PageStep]:
    """The same steps for a device that takes whole pages. `patterns` is filled. `row_bytes`: a step
    has at least so much of a page."""
    _check_landing(landing, parts)
    lists = [(part, *checked_lists(part, layouts, tier, shard)) for part in parts]
    pages = sum(len(starts) for _, starts, _ in lists)
    chunks = partial(buffer_chunks, None, layouts[landing.pool], shard)
    places = HOST, landing.pool
    layout = layouts[landing.pool]
    single = _patterns(patterns, (places, shard, 0), layout, chunks)
    page_bytes = sum(pattern.nbytes for _, pattern in single)
    least = max(row_bytes, _least(pages, page_bytes, step_bytes))
    groups = single
    if least > min(pattern.nbytes for _, pattern in single):
        groups = _patterns(patterns, (places, shard, least), layout, chunks)
    # Lists of pages are made once: the first layer waits for all that is done here.
    whole = [page_batch(*checked, groups[0][1]) for checked in lists if checked[1]]
    return [PageStep(layers, _with_pattern(whole, pattern)) for layers, pattern in groups]


def _check_landing(landing: Landing, parts: Sequence[CopyPart]) -> None:
    if landing.counter < LANDINGS:
        raise LayoutError(f"counter {landing.counter} is no landing counter")
    if any(part.source != HOST or part.target != landing.pool for part in parts):
        raise LayoutError("only pages of the host tier land layer by layer, in the counter's pool")


def _least(pages: int, page_bytes: int, step_bytes: int) -> int:
    """Bytes of a page that a step moves at least."""
    if not pages:
        raise LayoutError("a load of no page at all has no layers")
    step_bytes = max(step_bytes, -(-pages * page_bytes // STEPS_MAX))
    return -(-step_bytes // pages)


def _patterns(
    known: PatternCache,
    key: tuple[tuple[Place, Place], Shard, int],
    layout: PoolLayout,
    chunks: Callable[[], Sequence[Chunk]],
) -> list[tuple[int, Pattern]]:
    """(layers so far, chunks) a step of at least so many bytes of a page as the key says."""
    found = known.get(key)
    if found is None:
        if len(known) >= PATTERNS_MAX:
            known.clear()
        groups = _groups(layout, chunks(), key[2])
        before = [0, *(layers for layers, _ in groups)]
        found = known[key] = [
            (layers, Pattern(group, (first, layers - first)))
            for first, (layers, group) in zip(before, groups, strict=False)
        ]
    return found


def _batches(
    checked: Sequence[tuple[CopyPart, Segments]], chunks: Sequence[Chunk]
) -> Iterator[RangeBatch]:
    """The same chunks of all parts' pages."""
    return chain.from_iterable(part_batches(part, segments, chunks) for part, segments in checked)


def _with_pattern(batches: Sequence[PageBatch], pattern: Pattern) -> Iterator[PageBatch]:
    """The same pages with another pattern."""
    return (batch._replace(pattern=pattern) for batch in batches)


def _groups(
    layout: PoolLayout, chunks: Sequence[Chunk], page_bytes_min: int
) -> list[tuple[int, list[Chunk]]]:
    """(layers so far, fused chunks) a step; layers in the order of their numbers."""
    by_layer: dict[int, list[Chunk]] = {layer: [] for layer in layout.layers()}
    for buffer, chunk in zip(layout.buffers, chunks, strict=True):
        by_layer[buffer.layer].append(chunk)
    groups: list[tuple[int, list[Chunk]]] = []
    group: list[Chunk] = []
    for count, layer in enumerate(by_layer.values(), 1):
        group += layer
        if count == len(by_layer) or sum(chunk.nbytes for chunk in group) >= page_bytes_min:
            groups.append((count, fused(group)))
            group = []
    return groups


class _Open:
    """A step that has not landed. `whole`: all of it was submitted."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.in_flight = 0
        self.whole = False


class Progress:
    """How far a load is; mutated by the engine as it submits slices and sees them done.

    `landed`: layers whose pages are all in place. `told`: layers that the counter says.
    """

    def __init__(self, steps: Sequence[Step] | Sequence[PageStep]) -> None:
        self.landed = 0
        self.told = 0
        self.layers = steps[-1].layers if steps else 0
        self._steps = steps
        self._open: deque[_Open] = deque()
        self._by_ticket: dict[Ticket, _Open] = {}

    def slices(
        self, slice_bytes: int, slice_ranges: int, later_bytes: int = 0
    ) -> Iterator[list[RangeBatch] | list[PageBatch]]:
        """The slices of all steps in order; none holds pieces of two steps. Taken once.

        `later_bytes`: of a slice behind the first step, where somebody waits for every byte.
        """
        for part in self._steps:
            step = _Open(part.layers)
            self._open.append(step)
            yield from part.slices(slice_bytes, slice_ranges)
            step.whole = True
            slice_bytes = later_bytes or slice_bytes

    @property
    def leads(self) -> bool:
        """Whether the first step is submitted and has not landed: what follows it would only take
        the bus away from it."""
        return not self.landed and len(self._open) > 1

    def submitted(self, ticket: Ticket) -> None:
        """The slice taken last was submitted; say so before the next one is taken."""
        step = self._open[-1]
        step.in_flight += 1
        self._by_ticket[ticket] = step

    def done(self, ticket: Ticket) -> None:
        """A submission has ended, without an error."""
        self._by_ticket.pop(ticket).in_flight -= 1
        while self._open and self._open[0].whole and not self._open[0].in_flight:
            self.landed = self._open.popleft().layers

    def tell(self, table: TimelineTable | None, landing: Landing, *, hold: bool) -> bool:
        """Let a landing counter say what has landed; False if it said so already, or is to `hold`.

        Raises `TransferError` when it is not where it was left: the counter's owner, or somebody
        before it, has moved it on, so nobody waits for this load any more.
        """
        if table is None:
            raise TransferError(f"pool {landing.pool} has no landing counters")
        stands = table.read(landing.counter)
        if stands != landing.first + self.told:
            raise TransferError(
                f"landing counter {landing.counter} of pool {landing.pool} stands at {stands}, "
                f"not at {landing.first + self.told}: its owner gave the load up"
            )
        if hold or self.landed <= self.told:
            return False
        table.write(landing.counter, landing.first + self.landed)
        self.told = self.landed
        return True

    def __repr__(self) -> str:
        return f"<Progress {self.landed} of {self.layers} layers>"
