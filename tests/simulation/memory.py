"""Simulated memory: pools, host segments, timelines and span words as plain Python objects.

Owns no behaviour but reading and writing. One byte of a layout is one cell (one layer of one
page), so the real planner's byte ranges address cells. An object outlives its owner as long as a
mover has it mapped, as real shared memory does.
"""

from __future__ import annotations

from typing import cast

from directory.core.ids import CURRENT, FORWARD, PoolId
from tests.simulation.contents import Cell
from transfer.host_tier import HostTierMemory, TierShape
from transfer.imports import ImportedPool
from transfer.ipc.memory import Mapping, SharedMapping
from transfer.ipc.sync import OutOfTable, TimelineTable, WordTable
from transfer.layout import BufferLayout, PoolLayout
from transfer.plan import MemoryKey

RANK_LAYERS = 100
"""Layers of rank r are numbered from r times this on, so that shards cannot be mistaken."""


class Cells:
    """One allocation; implements `Mapping`."""

    def __init__(self, count: int) -> None:
        self.cells: list[Cell | None] = [None] * count

    @property
    def nbytes(self) -> int:
        """Number of cells."""
        return len(self.cells)

    @property
    def address(self) -> int:
        """There is none."""
        return 0

    @property
    def closed(self) -> bool:
        """Never."""
        return False


class SimTimelines(TimelineTable):
    """Timelines without shared memory."""

    def __init__(self) -> None:
        self.values = [0, 0]

    def read(self, index: int) -> int:
        """Value of a timeline."""
        if not 0 <= index < len(self.values):
            raise OutOfTable(f"timeline {index}")
        return self.values[index]

    def write(self, index: int, value: int) -> None:
        """Let a timeline reach a value."""
        self.values[index] = value

    def close(self) -> None:
        """Nothing is to be unmapped."""

    def __repr__(self) -> str:
        return f"<SimTimelines {self.values}>"


class SimWords(WordTable):
    """Span words without shared memory."""

    def __init__(self, count: int) -> None:
        self.values = [0] * count

    def __len__(self) -> int:
        return len(self.values)

    def read(self, index: int) -> int:
        """Value of a word."""
        if not 0 <= index < len(self.values):
            raise OutOfTable(f"word {index}")
        return self.values[index]

    def _store(self, index: int, value: int) -> None:
        self.values[index] = value

    def close(self) -> None:
        """Nothing is to be unmapped."""

    def __repr__(self) -> str:
        return f"<SimWords {len(self.values)}>"


def make_layout(kind: str, *, page_size: int, page_count: int, layers: int) -> PoolLayout:
    """A pool of `layers` cells a page: "layer_first" or "page_first" (they may share pages)."""
    if kind == "page_first":
        buffers = tuple(BufferLayout("kv", at, 0, at, layers, 1, "cell") for at in range(layers))
        return PoolLayout(page_size, page_count, buffers, (layers * page_count,))
    buffers = tuple(BufferLayout("kv", at, at, 0, 1, 1, "cell") for at in range(layers))
    return PoolLayout(page_size, page_count, buffers, (page_count,) * layers)


class PoolMemory:
    """One rank's pool: cells, timelines, words. Its cells are of layers that no other rank has."""

    def __init__(self, layout: PoolLayout, rank: int = 0) -> None:
        self.layout = layout
        self._first = RANK_LAYERS * rank
        self.allocations = [Cells(count) for count in layout.allocation_bytes]
        self.timelines = SimTimelines()
        self.words = SimWords(layout.page_count + 1)
        self._places = [
            (self.allocations[b.allocation].cells, b.offset, b.page_stride) for b in layout.buffers
        ]

    def write(self, page: int, content: int, writer: str) -> None:
        """Fill all layers of a page."""
        for layer, (cells, offset, stride) in enumerate(self._places):
            cells[offset + page * stride] = Cell(content, self._first + layer, writer)

    def wrong(self, page: int, content: int) -> str:
        """What is wrong with a page that must hold `content`; empty if nothing is."""
        for layer, (cells, offset, stride) in enumerate(self._places):
            cell = cells[offset + page * stride]
            if cell is None or cell.content != content or cell.layer != self._first + layer:
                return f"page {page} layer {layer} holds {cell}, must hold {content}"
        return ""

    def passed(self, values: tuple[int, int]) -> bool:
        """Whether both timelines have reached these values."""
        line = self.timelines.values
        return line[FORWARD] >= values[0] and line[CURRENT] >= values[1]


class SimImport(ImportedPool):
    """A pool as a mover has it mapped."""

    def __init__(self, pool: PoolId, memory: PoolMemory) -> None:
        self.pool = pool
        self.layout = memory.layout
        self.timelines = memory.timelines
        self.words = memory.words
        self.mappings: list[Mapping] = list(memory.allocations)
        self.page_table = None
        self.landings = None

    def memories(self) -> list[tuple[MemoryKey, Mapping]]:
        """What to attach to a device."""
        return [((self.pool, number), cells) for number, cells in enumerate(self.mappings)]

    def close(self) -> str:
        """Unmap."""
        self.mappings = []
        return ""

    def __repr__(self) -> str:
        return f"<SimImport {self.pool}>"


class SimTier(HostTierMemory):
    """The host tier of one boot of the daemon. `slot` is `segment << 16 | index`."""

    def __init__(self, shape: TierShape) -> None:
        self.shape = shape
        self.made = [Cells(shape.bytes_of(number)) for number in range(shape.segment_count)]
        self.segments = cast("list[SharedMapping]", self.made)

    def wrong(self, slot: int, page_bytes: int, content: int, ranks: int = 1) -> str:
        """What is wrong with a slot that must hold `content` of so many ranks, one shard behind
        the other; empty if nothing is."""
        segment, offset = self.shape.locate(slot, page_bytes)
        found = self.made[segment].cells[offset : offset + page_bytes]
        shard = page_bytes // ranks
        for at, cell in enumerate(found):
            layer = RANK_LAYERS * (at // shard) + at % shard
            if cell is None or cell.content != content or cell.layer != layer:
                return f"slot {segment}:{offset} layer {layer} holds {cell}, must hold {content}"
        return ""

    def close(self) -> None:
        """Nothing is to be unmapped."""

    def __repr__(self) -> str:
        return f"<SimTier {self.shape}>"
