"""Small pages through a staging slab, end to end, beside the same pages as they lie.

Owns the rows. The slab is the product's own: the mover asks, the scheduler packs and unpacks on a
stream of its own while the mover empties and fills other parts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.copy_check import check_copies
from benchmarks.copy_layouts import TOKEN_BYTES
from benchmarks.copy_rows import STAGED, Bench, Row, at_least
from directory.core.actions import CopyKind

PAGE_SIZES = (1, 16)
GOAL = 0.80
WAYS: tuple[tuple[str, CopyKind], ...] = (("from_host", "load_back"), ("to_host", "backup"))


def staged_rows(bench: Bench) -> Iterator[Row]:
    """Staged with the goal, as they lie without one; and a long prompt of such pages."""
    pure_us = bench.restore_bytes() / bench.base_gbps["from_host"] / 1000
    for page_size in PAGE_SIZES:
        check_copies(bench, page_size, STAGED)
        for direction, kind in WAYS:
            base = bench.base_gbps[direction]
            name = f"{direction}, page {page_size} ({page_size * TOKEN_BYTES >> 10} KiB)"
            as_they_lie = bench.round_of(kind, page_size)
            direct = statistics.median([as_they_lie() for _ in range(3)])
            yield at_least(f"{name}, as they lie", direct, base, 0)
            for churned in (False, True):
                staged = bench.round_of(kind, page_size, pool=STAGED, churned=churned)
                how = "allocated" if churned else "scattered"
                yield at_least(f"{name}, staged, {how}", bench.rate(staged), base, GOAL)
        times = [bench.restore(STAGED, page_size) for _ in range(1 + bench.rounds)][1:]
        whole = statistics.median(times)
        yield Row(
            f"restore of 8 k tokens, page {page_size}, staged",
            whole,
            "us",
            pure_us,
            whole / pure_us,
        )
        layered = [bench.layered(STAGED, page_size) for _ in range(1 + bench.rounds)][1:]
        entire, first = (statistics.median(column) for column in zip(*layered, strict=True))
        yield Row("the same by layers", entire, "us", pure_us, entire / pure_us)
        yield Row("its first layer", first, "us")


def loop_rows(bench: Bench) -> Iterator[Row]:
    """Staged pages alone, no byte of them compared: what the loop around a bus costs."""
    for page_size in PAGE_SIZES:
        for direction, kind in WAYS:
            for churned in (False, True):
                staged = bench.round_of(kind, page_size, pool=STAGED, churned=churned)
                how = "allocated" if churned else "scattered"
                name = f"{direction}, page {page_size}, staged, {how}"
                yield at_least(name, bench.rate(staged), bench.base_gbps[direction], 0)
