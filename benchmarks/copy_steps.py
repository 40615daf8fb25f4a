"""What a decode-like step feels of copies beside it, and what the copies lose by it.

Owns windows of time: steps run all through one, and copies of one kind begin again and again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks import copy_messages as m
from benchmarks.copy_rows import Bench, Row, at_least, at_most, below
from benchmarks.report import percentile

WARM_S = 0.15
STEPS_SKIPPED = 8
"""At the ends of a window: the first steps warm up, the last ones run beside nothing."""
PAGE_SIZE = 64
TURNS = 3
"""Of copies alone and beside steps."""


class Window(NamedTuple):
    """What was seen: steps in us, rates of the copies in GB/s."""

    steps_us: list[float]
    rates: list[float]

    @property
    def p50(self) -> float:
        """Median step."""
        return percentile(self.steps_us, 50)

    @property
    def p99(self) -> float:
        """99th percentile."""
        return percentile(self.steps_us, 99)


def window(bench: Bench, *copies: Callable[[], float], share: int = 1) -> Window:
    """Steps for a while, and copies one after the other beside them. `share`: so many such windows
    are as long as one."""
    bench.scheduler.ask(m.StartSteps(), m.Done)
    _rates(WARM_S, copies)
    bench.scheduler.steps_us()
    bench.scheduler.ask(m.StartSteps(), m.Done)
    rates = _rates(bench.sizes.steps_s / share, copies)
    steps = bench.scheduler.steps_us()
    return Window(steps[STEPS_SKIPPED:-STEPS_SKIPPED] or steps, rates)


def _rates(seconds: float, copies: Sequence[Callable[[], float]]) -> list[float]:
    """Of copies one after the other for so long."""
    rates: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rates += [once() for once in copies]
        if not copies:
            time.sleep(seconds)
    return rates


def alone_and_beside(bench: Bench, once: Callable[[], float]) -> tuple[float, Window]:
    """The median rate of copies beside nothing, and what was seen of them beside steps.

    The two take turns and have as much time each: what else a machine does in a second, clocks of
    GPU and processors included, falls on both. (A base of five rounds before the steps was 84 GB/s
    in one run and 48 in another, and the ratio 0.83 and 1.25.)
    """
    idle: list[float] = []
    beside = Window([], [])
    for _ in range(TURNS):
        _rates(WARM_S, [once])
        idle += _rates(bench.sizes.steps_s / TURNS, [once])
        seen = window(bench, once, share=TURNS)
        beside = Window(beside.steps_us + seen.steps_us, beside.rates + seen.rates)
    return statistics.median(idle), beside


def both(bench: Bench) -> Callable[[], float]:
    """Backups and restores at once, of different pages; the sum of both in GB/s."""
    rig, rng, page_size = bench.rig, bench.rng, PAGE_SIZE
    count = min(
        bench.pages(page_size) // 2, bench.sizes.base_bytes // 2 // bench.page_bytes(page_size)
    )
    slots_each = bench.per_segment(page_size)
    if rig.tier.shape.segment_count * slots_each < 2 * count:
        count = rig.tier.shape.segment_count * slots_each // 2
    pages = rng.sample(range(bench.pages(page_size)), 2 * count)
    numbers = rng.sample(range(rig.tier.shape.segment_count * slots_each), 2 * count)
    slots = [(n // slots_each) << 16 | n % slots_each for n in numbers]
    pool = bench.pool("A", page_size)

    def once() -> float:
        started = time.perf_counter()
        half = count // 2
        ops = []
        for at in (0, half):
            mine = slice(at, at + half)
            other = slice(count + at, count + at + half)
            ops.append(rig.submit("backup", pool, pages[mine], -1, slots[mine]))
            ops.append(rig.submit("load_back", -1, slots[other], pool, pages[other]))
        for op in ops:
            rig.done(op)
        return 4 * half * bench.page_bytes(page_size) / (time.perf_counter() - started) / 1e9

    return once


def step_rows(bench: Bench) -> Iterator[Row]:
    """Steps alone, beside backups, beside restores, beside both, beside copies within the GPU."""
    alone = window(bench)
    yield Row("step alone, p50", alone.p50, "us")
    yield Row("step alone, p99", alone.p99, "us")
    cases = (
        ("backups", bench.round_of("backup", PAGE_SIZE), 1.04, 1.07),
        ("restores", bench.round_of("load_back", PAGE_SIZE), 1.04, 1.07),
        ("both", both(bench), 1.05, 1.08),
    )
    for name, once, p50, p99 in cases:
        idle, seen = alone_and_beside(bench, once)
        yield at_least(f"{name} beside steps", statistics.median(seen.rates), idle, 0.85)
        yield at_most(f"step beside {name}, p50", seen.p50, alone.p50, p50)
        yield at_most(f"step beside {name}, p99", seen.p99, alone.p99, p99)
    within = bench.round_of("peer_copy", PAGE_SIZE)
    idle = bench.rate(within)
    seen = window(bench, within)
    yield at_least("copy within the GPU beside steps", statistics.median(seen.rates), idle, 0)
    yield at_most("step beside it, p50", seen.p50, alone.p50, 2.0)
    yield at_most("step beside it, the longest", max(seen.steps_us), alone.p50, 2.0)
    yield from restores_beside(bench)
    again = window(bench)
    yield Row("step alone again, p50", again.p50, "us")
    yield Row("step alone again, p99", again.p99, "us")


def restores_beside(bench: Bench) -> Iterator[Row]:
    """The long prompt again, beside steps."""
    pure_us = bench.restore_bytes() / bench.base_gbps["from_host"] / 1000
    bench.scheduler.ask(m.StartSteps(), m.Done)
    time.sleep(WARM_S)
    count = 1 + 2 * bench.rounds
    whole = statistics.median([bench.restore() for _ in range(count)][1:])
    layered = [bench.layered() for _ in range(count)][1:]
    bench.scheduler.steps_us()
    yield at_most("restore of 8 k tokens beside steps", whole, pure_us, 1.25)
    entire, first = (statistics.median(column) for column in zip(*layered, strict=True))
    yield at_most("the same by layers beside steps", entire, pure_us, 1.25)
    yield below("its first layer beside steps", first, 2000)
