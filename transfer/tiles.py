"""How the chunks of a page lie: rows at equal distances on both sides, copied as one rectangle.

Pure. Owns two questions: which chunks make rectangles (`tiles_of`), and whether rectangles or
single ranges are the faster way for chunks of a size in a direction (`Rates`). A rectangle never
reaches a byte that is not one of its rows; what lies between rows is skipped on both sides.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from directory.core.limits import KIB, MIB
from transfer.plan import Chunk

Direction: TypeAlias = Literal["to_host", "from_host", "within", "peer"]
"""Of bytes seen from a GPU: within it, or to or from the host's or another GPU's memory."""

Method: TypeAlias = Literal["batch", "tile"]
"""A list of ranges in one driver call, or one rectangle a call."""

PITCH_BYTES_MAX = (1 << 31) - 1
"""The widest distance of rows that every GPU takes (CU_DEVICE_ATTRIBUTE_MAX_PITCH)."""


class Tile(NamedTuple):
    """Rows of `width` bytes of a page: where the first one of page 0 lies, how far apart rows are
    (pitch), and how far apart pages are (stride). Addresses or offsets, whatever came in."""

    source: int
    source_pitch: int
    source_stride: int
    target: int
    target_pitch: int
    target_stride: int
    width: int
    rows: int


def tiles_of(chunks: Sequence[Chunk], pitch_max: int = PITCH_BYTES_MAX) -> list[Tile]:
    """The fewest rectangles that were found to hold exactly these chunks of a page.

    A rectangle lies within one allocation a side. Chunks of one size and of equal strides are
    taken in the order of one side and then of the other: a host page has K and V in turn, a pool
    may have all K before all V.
    """
    ways = (
        _rectangles(sorted(chunks, key=_by_source), pitch_max),
        _rectangles(sorted(chunks, key=_by_target), pitch_max),
    )
    return min(ways, key=len)


def _by_source(chunk: Chunk) -> tuple[int, ...]:
    return (*_kind(chunk), chunk.source_offset)


def _by_target(chunk: Chunk) -> tuple[int, ...]:
    return (*_kind(chunk), chunk.target_offset)


def _kind(chunk: Chunk) -> tuple[int, int, int, int, int]:
    allocations = chunk.source_allocation, chunk.target_allocation
    return chunk.nbytes, chunk.source_stride, chunk.target_stride, *allocations


def _rectangles(chunks: Iterable[Chunk], pitch_max: int) -> list[Tile]:
    found: list[Tile] = []
    for (width, *_), alike in groupby(chunks, _kind):
        first, *others = alike
        begin, last, rows, pitches = first, first, 1, (width, width)
        for chunk in others:
            steps = (
                chunk.source_offset - last.source_offset,
                chunk.target_offset - last.target_offset,
            )
            fits = width <= min(steps) and max(steps) <= pitch_max
            if fits and (rows == 1 or steps == pitches):
                rows, pitches = rows + 1, steps
            else:
                found.append(_tile(begin, pitches, rows))
                begin, rows, pitches = chunk, 1, (width, width)
            last = chunk
        found.append(_tile(begin, pitches, rows))
    return found


def _tile(first: Chunk, pitches: tuple[int, int], rows: int) -> Tile:
    return Tile(
        first.source_offset, pitches[0], first.source_stride,
        first.target_offset, pitches[1], first.target_stride,
        first.nbytes, rows,
    )  # fmt: skip


class Rates:
    """Which way was how fast, by direction and chunk size: measured at start, or assumed."""

    def __init__(self, gbps: Mapping[tuple[Direction, Method, int], float]) -> None:
        """`gbps`: GB/s by direction, method and bytes a chunk. Both methods of a direction are to
        be there for the same sizes."""
        self._gbps = dict(gbps)
        self._sizes: dict[Direction, list[int]] = {}
        for direction, _, nbytes in gbps:
            sizes = self._sizes.setdefault(direction, [])
            if nbytes not in sizes:
                sizes.append(nbytes)
                sizes.sort()

    def method(self, direction: Direction, nbytes: int, rows: int) -> Method:
        """The faster way for chunks of a size of which so many lie in a rectangle.

        Of the sizes that were measured the next smaller one counts, or the smallest. A rectangle of
        few rows is a call for few bytes: then it is the list, except within a GPU, where every
        entry of a list is a copy that the GPU begins and ends by itself.
        """
        if rows < (ROWS_MIN_WITHIN if direction in ("within", "peer") else ROWS_MIN):
            return "batch"
        sizes = self._sizes.get(direction)
        if not sizes:
            return "tile"
        size = sizes[max(0, bisect_right(sizes, nbytes) - 1)]
        batch = self._gbps.get((direction, "batch", size), 0.0)
        return "tile" if self._gbps.get((direction, "tile", size), 0.0) >= batch else "batch"

    def as_rows(self) -> list[tuple[str, str, int, float]]:
        """(direction, method, bytes a chunk, GB/s) of everything measured."""
        return [(*key, round(rate, 2)) for key, rate in sorted(self._gbps.items())]

    @classmethod
    def measured(
        cls,
        directions: Sequence[Direction],
        sizes: Sequence[int],
        measure: Callable[[Direction, Method, int], float],
    ) -> "Rates":
        """Measure both ways for every direction and size."""
        methods: tuple[Method, Method] = ("batch", "tile")
        return cls(
            {(d, way, n): measure(d, way, n) for d in directions for n in sizes for way in methods}
        )

    def __repr__(self) -> str:
        return f"<Rates {len(self._gbps)} measured>"


ROWS_MIN = 8
ROWS_MIN_WITHIN = 2

ASSUMED = Rates(
    {
        ("to_host", "batch", 32 * KIB): 26.9,
        ("to_host", "tile", 32 * KIB): 35.5,
        ("to_host", "batch", 128 * KIB): 47.3,
        ("to_host", "tile", 128 * KIB): 48.6,
        ("to_host", "batch", MIB): 52.4,
        ("to_host", "tile", MIB): 52.4,
        ("from_host", "batch", 32 * KIB): 32.0,
        ("from_host", "tile", 32 * KIB): 38.3,
        ("from_host", "batch", 128 * KIB): 51.3,
        ("from_host", "tile", 128 * KIB): 53.7,
        ("from_host", "batch", MIB): 52.7,
        ("from_host", "tile", MIB): 52.7,
        ("within", "batch", 128 * KIB): 31.0,
        ("within", "tile", 128 * KIB): 343.0,
    }
)
"""What one H200 did (PCIe 5 x16, driver 580), for where nothing was measured."""
