"""What the bus does by itself with rows of a slab, in one process: where orders differ.

Owns a device of its own over the benchmark's tier, and memory of the GPU in the place of a slab,
while it measures. Rows are pages of one token (128 KiB, as an 8B model has them); nobody packs them
and no mover's loop stands between them, so what these rows show beyond the staged ones is the
loop's, and what one order shows beyond another is the bus's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.copy_pages import parts_of, scattered, slots_of
from benchmarks.copy_rows import COPIES_AT_ONCE, Bench, Row
from directory.core.ids import HOST, Place
from transfer.device.cuda import CudaDevice
from transfer.ipc.cuda_driver import Driver
from transfer.ipc.cuda_memory import CudaMapping, Physical
from transfer.pages import PageBatch, Pattern
from transfer.plan import Chunk

SLAB: Place = (1 << 62) - 2
SLAB_BYTES = 256 << 20
SLICE_BYTES = 16 << 20
IN_FLIGHT = 6

Order = Callable[[Sequence[int]], list[int]]
ORDERS: tuple[tuple[str, Order], ...] = (
    ("scattered", list),
    ("each copy's in order", lambda s: [n for p in parts_of(s, COPIES_AT_ONCE) for n in sorted(p)]),
    ("all in order", sorted),
)


def bus_rows(bench: Bench, gpu: str) -> Iterator[Row]:
    """GB/s each way in each order, and the processor's time for the calls of a slice."""
    driver = Driver.open(gpu)
    driver.make_current()
    address = int(driver.call("cuMemAlloc", SLAB_BYTES))
    device = CudaDevice(driver)
    physical = Physical(b"", address, SLAB_BYTES, lambda: None)
    device.attach((SLAB, 0), CudaMapping(physical, 0, SLAB_BYTES, driver.uuid))
    segments = bench.rig.tier.segments
    for number, mapping in enumerate(segments):
        device.attach((HOST, number), mapping)
    try:
        yield from ordered_rows(bench, device)
    finally:
        device.detach((SLAB, 0))
        for number in range(len(segments)):
            device.detach((HOST, number))
        driver.call("cuMemFree", address)


def ordered_rows(bench: Bench, device: CudaDevice) -> Iterator[Row]:
    """The same on a device that knows the tier and the slab."""
    row, each = bench.page_bytes(1), bench.per_segment(1)
    slots = each * bench.rig.tier.shape.segment_count
    count = min(slots, bench.sizes.base_bytes // row)
    chosen = slots_of(scattered(slots, count, bench.rng), each)
    pattern = Pattern([Chunk(0, 0, row, 0, 0, row, row)])
    for direction in ("from_host", "to_host"):
        for name, order in ORDERS:
            ordered = order(chosen)
            rounds = range(1 + bench.rounds)
            found = [_round(device, direction, pattern, ordered) for _ in rounds][1:]
            rate, own_us = (statistics.median(column) for column in zip(*found, strict=True))
            base = bench.base_gbps[direction]
            yield Row(f"the bus alone, {direction}, {name}", rate, "GB/s", base, rate / base)
            yield Row("its calls, a slice of 16 MiB", own_us, "us")


def _round(
    device: CudaDevice, direction: str, pattern: Pattern, slots: Sequence[int]
) -> tuple[float, float]:
    """(GB/s, microseconds of this thread for each slice's calls) of all rows once."""
    at_once = SLICE_BYTES // pattern.nbytes
    parts = SLAB_BYTES // SLICE_BYTES
    own_ns = taken = 0
    started = time.perf_counter()
    for taken, start in enumerate(range(0, len(slots), at_once), 1):
        here = slots[start : start + at_once]
        first = (taken % parts) * at_once
        rows = range(first, first + len(here))
        batch = (
            PageBatch(SLAB, HOST, None, pattern, rows, here)
            if direction == "to_host"
            else PageBatch(HOST, SLAB, None, pattern, here, rows)
        )
        before = time.thread_time_ns()
        device.submit_pages([batch], urgent=direction == "from_host")
        own_ns += time.thread_time_ns() - before
        while device.in_flight >= IN_FLIGHT:
            _poll(device)
    while device.in_flight:
        _poll(device)
    took = time.perf_counter() - started
    return len(slots) * pattern.nbytes / took / 1e9, own_ns / taken / 1000


def _poll(device: CudaDevice) -> None:
    for _, error in device.poll():
        if error:
            raise RuntimeError(error)
