"""Loads that land layer by layer: their order, and how far one is at every moment.

Owns the division of a load into steps of whole layers and the count of what has landed. A load
goes layer by layer over all of its pages, and a step has landed when nothing of it and of all steps
before is still under way. It writes no counter: the engine does, and only as long as the load is
not lost. Peer copies have no steps: what comes out of a pool counts when all of it is validated.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from directory.core.actions import CopyPart, Landing
from directory.core.errors import LayoutError
from directory.core.ids import HOST, LANDINGS, PoolId
from transfer.device.protocol import Ticket
from transfer.host_tier import TierShape
from transfer.layout import PoolLayout
from transfer.plan import (
    WHOLE,
    Chunk,
    RangeBatch,
    Segments,
    Shard,
    buffer_chunks,
    check_pages,
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
    if landing.counter < LANDINGS:
        raise LayoutError(f"counter {landing.counter} is no landing counter")
    if any(part.source != HOST or part.target != landing.pool for part in parts):
        raise LayoutError("only pages of the host tier land layer by layer, in the counter's pool")
    checked = [(part, check_pages(part, layouts, tier, shard)) for part in parts]
    pages = sum(len(starts) for _, segments in checked for _, starts, _ in segments)
    if not pages:
        raise LayoutError("a load of no page at all has no layers")
    layout = layouts[landing.pool]
    chunks = buffer_chunks(None, layout, shard)
    step_bytes = max(step_bytes, -(-pages * layout.page_bytes // STEPS_MAX))
    groups = _groups(layout, chunks, -(-step_bytes // pages))
    return [Step(layers, _batches(checked, group)) for layers, group in groups]


def _batches(
    checked: Sequence[tuple[CopyPart, Segments]], chunks: Sequence[Chunk]
) -> Iterator[RangeBatch]:
    """The same chunks of all parts' pages."""
    return chain.from_iterable(part_batches(part, segments, chunks) for part, segments in checked)


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

    def __init__(self, steps: Sequence[Step]) -> None:
        self.landed = 0
        self.told = 0
        self.layers = steps[-1].layers if steps else 0
        self._steps = steps
        self._open: deque[_Open] = deque()
        self._by_ticket: dict[Ticket, _Open] = {}

    def slices(self, slice_bytes: int, slice_ranges: int) -> Iterator[list[RangeBatch]]:
        """The slices of all steps in order; none holds pieces of two steps. Taken once."""
        for layers, batches in self._steps:
            step = _Open(layers)
            self._open.append(step)
            yield from slices(batches, slice_bytes, slice_ranges)
            step.whole = True

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

    def __repr__(self) -> str:
        return f"<Progress {self.landed} of {self.layers} layers>"
