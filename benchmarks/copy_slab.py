"""Small pages through a staging slab, end to end, beside the same pages as they lie.

Owns the slab's parts and who has which: the scheduler packs into one while the mover empties
another. A pack is a fence for the mover's copy; a part is packed again only after that copy ended.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator

from benchmarks import copy_messages as m
from benchmarks.copy_layouts import TOKEN_BYTES
from benchmarks.copy_pages import packed, scattered, slots_of
from benchmarks.copy_rows import Bench, Row, at_least
from directory.core.actions import Fence
from directory.core.ids import FORWARD, HOST
from transfer.ipc.cuda_staging import slab_layout

PAGE_SIZES = (1, 16)
GOAL = 0.80


class Stager:
    """Pages of one size through the slab."""

    def __init__(self, bench: Bench, page_size: int) -> None:
        sizes = bench.sizes
        self._bench, self._page_size = bench, page_size
        self._pool = bench.pool("A", page_size)
        layout = slab_layout(bench.layouts["A", page_size], sizes.slab_bytes)
        self._slab = bench.import_as(("slab", page_size), layout)
        self._rows = max(1, sizes.stage_bytes // bench.page_bytes(page_size))
        self._parts = max(2, layout.page_count // self._rows)
        slots = bench.per_segment(page_size) * bench.rig.tier.shape.segment_count
        room = min(bench.pages(page_size), slots)
        count = min(bench.sizes.round_bytes // bench.page_bytes(page_size), room)
        self.count = count // self._rows * self._rows
        self.pages = scattered(bench.pages(page_size), self.count, bench.rng)
        numbers = scattered(slots, self.count, bench.rng)
        self.slots = slots_of(numbers, bench.per_segment(page_size))
        self._timelines = bench.scheduler.timelines("A")
        self._value = self._timelines.read(FORWARD)

    def pieces(self) -> list[tuple[int, list[int], list[int]]]:
        """(part, pages, slots) of each turn."""
        each = self._rows
        return [
            (turn % self._parts, self.pages[at : at + each], self.slots[at : at + each])
            for turn, at in enumerate(range(0, self.count, each))
        ]

    def backup(self) -> float:
        """Pack and copy, overlapped; GB/s."""
        started = time.perf_counter()
        under_way: deque[int] = deque()
        for part, pages, slots in self.pieces():
            if len(under_way) == self._parts:
                self._bench.rig.done(under_way.popleft())
            self._stage(part, pages, pack=True)
            rows = range(part * self._rows, part * self._rows + len(pages))
            fences = (Fence(self._pool, FORWARD, self._value),)
            submit = self._bench.rig.submit
            under_way.append(submit("backup", self._slab, rows, HOST, slots, fences=fences))
        for op in under_way:
            self._bench.rig.done(op)
        return self._rate(started)

    def load_back(self) -> float:
        """Copy and unpack, overlapped; ends when the last page is in place; GB/s."""
        started = time.perf_counter()
        under_way: deque[tuple[int, int, list[int]]] = deque()
        unpacked: dict[int, int] = {}
        for part, pages, slots in self.pieces():
            if len(under_way) == self._parts - 1:
                self._unpack(under_way.popleft(), unpacked)
            self._reached(unpacked.get(part, 0))
            rows = range(part * self._rows, part * self._rows + len(pages))
            op = self._bench.rig.submit("load_back", HOST, slots, self._slab, rows)
            under_way.append((op, part, pages))
        while under_way:
            self._unpack(under_way.popleft(), unpacked)
        self._reached(self._value)
        return self._rate(started)

    def _unpack(self, piece: tuple[int, int, list[int]], unpacked: dict[int, int]) -> None:
        op, part, pages = piece
        self._bench.rig.done(op)
        self._stage(part, pages, pack=False)
        unpacked[part] = self._value

    def _stage(self, part: int, pages: list[int], *, pack: bool) -> None:
        self._value += 1
        self._bench.scheduler.ask(
            m.Stage(
                "A", "slab", self._page_size * TOKEN_BYTES, packed(pages), part * self._rows, pack,
                self._value,
            ),
            m.Done,
        )  # fmt: skip

    def _reached(self, value: int) -> None:
        give_up = time.monotonic() + 30
        while self._timelines.read(FORWARD) < value:
            if time.monotonic() > give_up:
                raise RuntimeError("the scheduler's stream does not get there")

    def _rate(self, started: float) -> float:
        nbytes = self.count * self._bench.page_bytes(self._page_size)
        return nbytes / (time.perf_counter() - started) / 1e9

    def close(self) -> None:
        """Let go of the table."""
        self._timelines.close()


def staged_rows(bench: Bench) -> Iterator[Row]:
    """Staged with the goal, as they lie without one; the better of the two is what counts."""
    sizes = bench.sizes
    slab = m.MakeMemory("slab", sizes.buffers, sizes.slab_bytes // sizes.buffers, whole=True)
    bench.scheduler.make(slab)
    for page_size in PAGE_SIZES:
        stager = Stager(bench, page_size)
        _check(bench, stager, page_size)
        ways: tuple[tuple[str, Callable[[], float]], ...] = (
            ("from_host", stager.load_back),
            ("to_host", stager.backup),
        )
        for direction, staged in ways:
            kind: str = "load_back" if direction == "from_host" else "backup"
            plain = bench.round_of(kind, page_size)  # type: ignore[arg-type]
            base = bench.base_gbps[direction]
            name = f"{direction}, page {page_size} ({page_size * TOKEN_BYTES >> 10} KiB)"
            direct = statistics.median([plain() for _ in range(3)])
            yield at_least(f"{name}, as they lie", direct, base, 0)
            yield at_least(f"{name}, staged", bench.rate(staged), base, GOAL)
        stager.close()


def _check(bench: Bench, stager: Stager, page_size: int) -> None:
    """Out through the slab, overwritten, and back: the same bytes, or the figures are void."""
    ask = bench.scheduler.ask
    ask(m.Fill("A", page_size), m.Done)
    some = stager.pages[:: max(1, stager.count // 64)]
    digest = m.Digest("A", page_size * TOKEN_BYTES, packed(some))
    before = ask(digest, m.Digested).digest
    stager.backup()
    ask(m.Fill("A", page_size + 1000), m.Done)
    if ask(digest, m.Digested).digest == before:
        raise RuntimeError("the check cannot fail")
    stager.load_back()
    if ask(digest, m.Digested).digest != before:
        raise RuntimeError("pages that went through the slab came back different")
