"""What a slice of small pages by way of a slab costs the mover's processor, in one process.

The product's own engine and device on the made-up driver; the stager takes no time, and the bus
none. Processor time is counted in the turns of the loop in which something was submitted or ended,
so that it says the same on busy cores. Owns the engine, its pool and its tier while it measures.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.copy_layouts import pool_layout
from benchmarks.copy_model import Costs, ModelDevice, ModelDriver
from benchmarks.copy_pages import allocated, packed, parts_of, scattered, slots_of
from benchmarks.copy_rows import COPIES_AT_ONCE, Row
from directory.core.actions import CopyKind, CopyPart, SubmitCopy
from directory.core.ids import HOST
from directory.core.limits import MIB
from transfer.device.protocol import Ticket
from transfer.engine import Engine
from transfer.engine_limits import CUDA_LIMITS
from transfer.host_tier import HostTierMemory
from transfer.imports import ImportedPool
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.stage_ring import StageRing
from transfer.ipc.sync import TimelineTable, WordTable
from transfer.layout import PoolLayout
from transfer.pages import PageBatch

BUFFERS, BUFFER_BYTES = 64, 64 * MIB
SLAB_BYTES, TIER_BYTES, SEGMENT_BYTES = 256 * MIB, 4096 * MIB, 64 * MIB
PAGES = 8_192
UNIT_BYTES = 16 * MIB
NO_TIME_GBPS = 1e6


class CountedDevice(ModelDevice):
    """Knows whether anything was submitted."""

    submissions = 0

    def submit_pages(self, batches: Sequence[PageBatch], **how: bool) -> Ticket:
        """As the product does."""
        self.submissions += 1
        return super().submit_pages(batches, **how)


class Loop:
    """A mover's engine with one staged pool of pages of one token."""

    def __init__(self, costs: Costs, limits: Sequence[str]) -> None:
        chosen = CUDA_LIMITS.changed(limits)
        free = Costs(NO_TIME_GBPS, costs.range_us, costs.call_us, pack_us=0.0)
        driver: Any = ModelDriver(free)
        self._device = CountedDevice(driver)
        if chosen.submit_beside:
            self._device.submit_beside(chosen.submit_beside)
        self._engine = Engine(self._device, lambda: time.monotonic_ns() // 1000, chosen)
        ipc = SharedMemoryIPC()
        sizes = [BUFFER_BYTES] * BUFFERS + [SLAB_BYTES]
        memory = [ipc.create("loop", nbytes) for nbytes in sizes]
        layout = pool_layout(BUFFERS, BUFFER_BYTES, 1)
        self._page_bytes, self._page_count = layout.page_bytes, layout.page_count
        tables = TimelineTable.create(ipc, "timelines", landings=1), WordTable.create(ipc, "w", 1)
        self._ring = StageRing.make(ipc)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        own = SharedMemoryIPC()
        fds = [*(m.fd for m in memory), *(t.fd for t in tables), self._ring.fd, self._wake]
        whole = PoolLayout(1, layout.page_count, layout.buffers, tuple(sizes))
        handles = tuple(ipc.export(m)[0] for m in memory)
        self._engine.open_tier(HostTierMemory.create(TIER_BYTES, SEGMENT_BYTES))
        self._engine.add_pool(
            ImportedPool.open(1, whole, handles, fds, memory=own, tables=own, staging=True)
        )
        self._rng = random.Random(1)
        self._last_op = 0

    def round(self, kind: CopyKind, *, churned: bool) -> tuple[float, float]:
        """Microseconds of processor time a UNIT_BYTES: of the loop, and of other threads."""
        requests = list(self._requests(kind, churned=churned))
        others = time.process_time() - time.thread_time()
        began = time.thread_time()
        for request in requests:
            self._engine.submit(request)
        spent = time.thread_time() - began
        done = 0
        while done < len(requests):
            before, began = self._device.submissions, time.thread_time()
            events = self._engine.step()
            if events or self._device.submissions != before:
                spent += time.thread_time() - began
            done += len(events)
            self._ring.finish(self._ring.head)
            time.sleep(0)  # as the mover's look at its channel, lets others have the interpreter
        others = time.process_time() - time.thread_time() - others
        units = PAGES * self._page_bytes / UNIT_BYTES
        return spent / units * 1e6, others / units * 1e6

    def _requests(self, kind: CopyKind, *, churned: bool) -> Iterator[SubmitCopy]:
        choose = allocated if churned else scattered
        each = SEGMENT_BYTES // self._page_bytes
        slots = TIER_BYTES // self._page_bytes
        pages = choose(self._page_count, PAGES, self._rng)
        places = slots_of(choose(slots, PAGES, self._rng), each)
        parts = zip(parts_of(pages, COPIES_AT_ONCE), parts_of(places, COPIES_AT_ONCE), strict=True)
        for some, onto in parts:
            self._last_op += 1
            ends = (1, packed(some), HOST, packed(onto))
            if kind == "load_back":
                ends = (HOST, packed(onto), 1, packed(some))
            yield SubmitCopy(self._last_op, kind, (CopyPart(*ends),), (), ())

    def close(self) -> None:
        """End its thread; its memory goes with this process."""
        self._device.close()
        os.close(self._wake)


def processor_rows(costs: Costs, rounds: int, limits: Sequence[str]) -> Iterator[Row]:
    """Both ways, scattered and allocated."""
    loop = Loop(costs, limits)
    ways: tuple[tuple[str, CopyKind], ...] = (("from_host", "load_back"), ("to_host", "backup"))
    try:
        for direction, kind in ways:
            for churned in (False, True):
                found = [loop.round(kind, churned=churned) for _ in range(1 + rounds)][1:]
                own, others = (statistics.median(column) for column in zip(*found, strict=True))
                name = f"{direction}, page 1, {'allocated' if churned else 'scattered'}"
                yield Row(f"{name}: the loop's processor, 16 MiB", own, "us")
                yield Row(f"{name}: its thread's, 16 MiB", others, "us")
    finally:
        loop.close()
