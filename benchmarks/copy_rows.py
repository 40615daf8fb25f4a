"""The rows of the copy benchmark: what is copied, what it is compared with, and the goals.

Owns the rig and the rates of copies without anything beside them. Each row is the median of some
rounds; a round moves as much as the large copy that it is compared with, submitted as a few copies
at once.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from benchmarks import copy_messages as m
from benchmarks.copy_layouts import TOKEN_BYTES, pool_layout
from benchmarks.copy_pages import allocated, parts_of, scattered, slots_of
from benchmarks.copy_rig import MoverRig, SchedulerProcess
from directory.core.actions import CopyKind, Landing
from directory.core.ids import HOST, LANDINGS
from transfer.device.protocol import DeviceLost

COPIES_AT_ONCE = 4
ONE_PAGE_TIMES = 60
CALM_S = 0.6
"""Before copies between GPU memories: the mover looks whether anybody computes, and its own
copies count as that for a while."""
LANDING_SPIN_S = 10.0
STAGED = "staged"
"""The first pool, with a staging slab."""


class Row(NamedTuple):
    """One line. `base`: what the figure is compared with; `met`: None where there is no goal."""

    name: str
    figure: float
    unit: str
    base: float | None = None
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None


class Sizes(NamedTuple):
    """How large everything is."""

    buffers: int
    buffer_bytes: int
    tier_bytes: int
    segment_bytes: int
    base_bytes: int
    restore_pages: int
    slab_bytes: int
    steps_s: float

    @classmethod
    def of_gpu(cls) -> Sizes:
        """32 layers of an 8B model, 4 GiB a pool; a restore of 8 k tokens is 1 GiB."""
        mib = 1 << 20
        return cls(64, 64 * mib, 4096 * mib, 64 * mib, 1024 * mib, 128, 256 * mib, 0.9)

    @classmethod
    def of_dry_run(cls) -> Sizes:
        """Small enough for any machine."""
        mib = 1 << 20
        return cls(4, 4 * mib, 32 * mib, 8 * mib, 16 * mib, 8, 4 * mib, 0.1)


def at_least(name: str, figure: float, base: float, goal: float, unit: str = "GB/s") -> Row:
    """A row whose ratio to its base is to be at least the goal (0: no goal)."""
    ratio = figure / base
    met = ratio >= goal if goal else None
    return Row(name, figure, unit, base, ratio, f">= {goal}" if goal else "", met)


def at_most(name: str, figure: float, base: float, goal: float, unit: str = "us") -> Row:
    """A row whose ratio to its base is to be at most the goal."""
    return Row(name, figure, unit, base, figure / base, f"<= {goal}", figure / base <= goal)


def below(name: str, figure: float, goal: float, unit: str = "us") -> Row:
    """A row whose figure is to be at most the goal."""
    return Row(name, figure, unit, None, None, f"<= {goal:,.0f} {unit}", figure <= goal)


PLAIN: tuple[tuple[str, CopyKind, int, float], ...] = (
    ("from_host", "load_back", 64, 0.92),
    ("to_host", "backup", 64, 0.84),
    ("from_host", "load_back", 512, 0.93),
    ("to_host", "backup", 512, 0.93),
    ("within", "peer_copy", 64, 0.7),
    ("within", "peer_copy", 512, 0.7),
    ("peer", "peer_copy", 64, 0.85),
    ("peer", "peer_copy", 512, 0.85),
)
"""(direction, kind, page size in tokens of 2 KiB a buffer, goal)."""


class Bases(Protocol):
    """What copies are compared with."""

    def measure(self) -> dict[str, float]:
        """GB/s by direction."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Bench:
    """The rig: pools A and B on the first GPU, C on the second one, each in several page sizes."""

    def __init__(
        self, gpus: list[str], sizes: Sizes, base: Bases, rounds: int, limits: Sequence[str] = ()
    ) -> None:
        """`limits`: of the mover, instead of its own."""
        self.sizes, self.base, self.rounds = sizes, base, rounds
        self.rng = random.Random(7)
        made_up = gpus == ["model"]
        device = gpus[0] if made_up or gpus == ["cpu"] else f"cuda:{gpus[0]}"
        program = "benchmarks.copy_model" if made_up else "transfer.mover"
        self.two_gpus = len(gpus) > 1
        self.scheduler = SchedulerProcess(gpus[0])
        self.far = SchedulerProcess(gpus[1]) if self.two_gpus else None
        self.rig = MoverRig(device, sizes.tier_bytes, sizes.segment_bytes, limits, program)
        self._numbers: dict[tuple[str, int], int] = {}
        self.scheduler.ready()
        self.versions = self.scheduler.versions
        make = m.MakeMemory("A", sizes.buffers, sizes.buffer_bytes)
        self.scheduler.make(make)
        self.scheduler.make(m.MakeMemory("B", sizes.buffers, sizes.buffer_bytes))
        if self.far is not None:
            self.far.ready()
            self.far.make(m.MakeMemory("C", sizes.buffers, sizes.buffer_bytes))
        self.base_gbps = base.measure()

    def pool(self, name: str, page_size: int) -> int:
        """Number of a pool in pages of a size; imported when it is first asked for. `STAGED` is
        the first pool again, with a staging slab."""
        key = (name, page_size)
        if key not in self._numbers:
            sizes = self.sizes
            layout = pool_layout(sizes.buffers, sizes.buffer_bytes, page_size)
            number = len(self._numbers) + 1
            owner = self.far if name == "C" and self.far is not None else self.scheduler
            if name == STAGED:
                self.rig.add_staged(number, owner, "A", layout, sizes.slab_bytes)
            else:
                self.rig.add(number, owner, name, layout)
            self._numbers[key] = number
        return self._numbers[key]

    def page_bytes(self, page_size: int) -> int:
        """Of a page over all buffers."""
        return page_size * TOKEN_BYTES * self.sizes.buffers

    def pages(self, page_size: int) -> int:
        """Of a pool."""
        return self.sizes.buffer_bytes // (page_size * TOKEN_BYTES)

    def per_segment(self, page_size: int) -> int:
        """Slots of a segment."""
        return self.rig.tier.shape.slots_of(0, self.page_bytes(page_size))

    def round_of(
        self,
        kind: CopyKind,
        page_size: int,
        *,
        churned: bool = False,
        near: str = "A",
        pool: str = "A",
    ) -> Callable[[], float]:
        """A function that moves a round's bytes once and returns GB/s.

        backup: `pool` to the host; load_back: the host to it; peer_copy: to B, or to C as `near`.
        """
        choose = allocated if churned else scattered
        nbytes = self.page_bytes(page_size)
        slots = self.per_segment(page_size) * self.rig.tier.shape.segment_count
        room = min(self.pages(page_size), slots)
        # Between GPU memories a GiB is over in less than the messages about it take.
        enough = room if kind == "peer_copy" else self.sizes.base_bytes // nbytes
        count = max(1, min(enough, room))
        pages = choose(self.pages(page_size), count, self.rng)
        own = self.pool(pool, page_size)
        if kind == "peer_copy":
            other = self.pool("B" if near == "A" else near, page_size)
            onto = choose(self.pages(page_size), count, self.rng)
            source, target, pages_from, pages_to = own, other, pages, onto
        else:
            host = slots_of(choose(slots, count, self.rng), self.per_segment(page_size))
            if kind == "backup":
                source, target, pages_from, pages_to = own, HOST, pages, host
            else:
                source, target, pages_from, pages_to = HOST, own, host, pages
        pieces = list(
            zip(
                parts_of(pages_from, COPIES_AT_ONCE),
                parts_of(pages_to, COPIES_AT_ONCE),
                strict=True,
            )
        )

        def once() -> float:
            started = time.perf_counter()
            ops = [self.rig.submit(kind, source, a, target, b) for a, b in pieces]
            for op in ops:
                self.rig.done(op)
            return count * nbytes / (time.perf_counter() - started) / 1e9

        return once

    def rate(self, once: Callable[[], float]) -> float:
        """The median of the rounds, after one that does not count."""
        return statistics.median([once() for _ in range(1 + self.rounds)][1:])

    def plain_rows(self) -> Iterator[Row]:
        """Pages as they lie, nothing beside them."""
        for direction, rate in self.base_gbps.items():
            yield Row(f"one large copy, {direction}", rate, "GB/s")
        for direction, kind, page_size, goal in PLAIN:
            base = self.base_gbps.get(direction)
            if base is None or not self.pages(page_size):
                continue
            near = "C" if direction == "peer" else "A"
            for churned in (False, True):
                if kind == "peer_copy":
                    time.sleep(CALM_S)
                once = self.round_of(kind, page_size, churned=churned, near=near)
                what = "allocated" if churned else "scattered"
                chunk = page_size * TOKEN_BYTES >> 10
                yield at_least(f"{direction}, {chunk} KiB, {what}", self.rate(once), base, goal)

    def restore_rows(self) -> Iterator[Row]:
        """A long prompt, whole and by layers, and one page."""
        peak = self.base_gbps["from_host"]
        times = [self.restore() for _ in range(2 + 2 * self.rounds)][2:]
        pure_us = self.restore_bytes() / peak / 1000
        yield at_most("restore of 8 k tokens", statistics.median(times), pure_us, 1.10)
        layered = [self.layered() for _ in range(2 + 2 * self.rounds)][2:]
        whole, first = (statistics.median(column) for column in zip(*layered, strict=True))
        yield at_most("the same by layers", whole, pure_us, 1.10)
        yield below("its first layer", first, 1200)
        one = [self.one_page() for _ in range(ONE_PAGE_TIMES)][5:]
        yield below("restore of one page of 16 tokens, p50", statistics.median(one), 350)

    def restore_bytes(self) -> int:
        """Of the long prompt."""
        return self.sizes.restore_pages * self.page_bytes(64)

    def restore(self, name: str = "A", page_size: int = 64) -> float:
        """Microseconds of the long prompt's restore, from the submission to the answer."""
        pages, slots = self._restored(page_size)
        target = self.pool(name, page_size)
        started = time.perf_counter()
        self.rig.done(self.rig.submit("load_back", HOST, slots, target, pages))
        return (time.perf_counter() - started) * 1e6

    def layered(self, name: str = "A", page_size: int = 64) -> tuple[float, float]:
        """Microseconds until the answer, and until the first layer's landing is seen."""
        pages, slots = self._restored(page_size)
        target = self.pool(name, page_size)
        table = self.scheduler.timelines("A")
        try:
            before = table.read(LANDINGS)
            started = time.perf_counter()
            landing = Landing(target, LANDINGS, before)
            op = self.rig.submit("load_back", HOST, slots, target, pages, landing=landing)
            while table.read(LANDINGS) == before:
                if time.perf_counter() - started > LANDING_SPIN_S:
                    raise DeviceLost(f"no layer within {LANDING_SPIN_S} s")
            first = time.perf_counter() - started
            self.rig.done(op)
            return (time.perf_counter() - started) * 1e6, first * 1e6
        finally:
            table.close()

    def one_page(self) -> float:
        """Microseconds of the round trip of one small page."""
        target = self.pool("A", 16)
        page, slot = self.rng.randrange(self.pages(16)), self.rng.randrange(self.per_segment(16))
        started = time.perf_counter()
        self.rig.done(self.rig.submit("load_back", HOST, [slot], target, [page]))
        return (time.perf_counter() - started) * 1e6

    def _restored(self, page_size: int) -> tuple[list[int], list[int]]:
        count = self.sizes.restore_pages * 64 // page_size
        each = self.per_segment(page_size)
        slots = each * self.rig.tier.shape.segment_count
        host = slots_of(scattered(slots, count, self.rng), each)
        return scattered(self.pages(page_size), count, self.rng), host

    def close(self) -> None:
        """End everything that was started."""
        self.rig.close()
        self.scheduler.close()
        if self.far is not None:
            self.far.close()
        self.base.close()
