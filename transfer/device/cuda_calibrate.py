"""A short look at a GPU at start: which shape of copy is the faster one here?

Owns some scratch memory while it measures and gives it back. It measures through the device
itself, so what it compares is what copies will get, and moves 0.2 GB. A GPU that has no room for
8 MiB, or a host that cannot pin them, is left with what is assumed.
"""

import logging
import statistics
import time
from collections.abc import Iterator

from directory.core.errors import TransferError
from directory.core.ids import HOST, Place
from directory.core.limits import KIB, MIB
from transfer.device.cuda import CudaDevice
from transfer.ipc.aligned import aligned_room
from transfer.ipc.cuda_driver import CudaError, Driver
from transfer.ipc.cuda_memory import CudaMapping, Physical
from transfer.ipc.memory import Mapping, SharedMemoryIPC
from transfer.pages import PageBatch, Pattern, page_slices
from transfer.plan import Chunk
from transfer.tiles import ASSUMED, Direction, Method, Rates

SCRATCH_BYTES = 8 * MIB
SLICE_BYTES = 2 * MIB
ROWS = 16
SIZES = (32 * KIB, 128 * KIB)
REPEATS = 2
SCRATCH_POOL: Place = (1 << 62) - 1
SCRATCH_SEGMENT = -1

log = logging.getLogger("treecored.cuda")


def calibrate(device: CudaDevice, driver: Driver, *, repeats: int = REPEATS) -> Rates:
    """Measure both shapes to and from the host for some sizes; the device uses what was found.

    Raises `DeviceLost` as any use of the device does.
    """
    ipc = SharedMemoryIPC()
    with aligned_room(SCRATCH_BYTES):  # as the host tier's segments are
        host = ipc.create("treecored-calibration", SCRATCH_BYTES)
    keys = ((HOST, SCRATCH_SEGMENT), (SCRATCH_POOL, 0))
    address = 0
    attached = []
    try:
        address = int(driver.call("cuMemAlloc", SCRATCH_BYTES))
        physical = Physical(b"", address, SCRATCH_BYTES, lambda: None)
        memory = CudaMapping(physical, 0, SCRATCH_BYTES, driver.uuid)
        mappings: tuple[Mapping, Mapping] = (host, memory)
        for key, mapping in zip(keys, mappings, strict=True):
            device.attach(key, mapping)
            attached.append(key)

        def measure(direction: Direction, method: Method, nbytes: int) -> float:
            other: Method = "tile" if method == "batch" else "batch"
            device.use_rates(Rates({(direction, method, 0): 1.0, (direction, other, 0): 0.0}))
            times = [_once(device, direction, nbytes) for _ in range(1 + repeats)]
            return SCRATCH_BYTES / statistics.median(times[1:]) / 1e9

        rates = Rates.measured(("to_host", "from_host"), SIZES, measure)
    except TransferError as error:
        log.warning("no calibration, the usual figures are assumed: %s", error)
        rates = ASSUMED
    finally:
        for key in attached:
            device.detach(key)
        if address:
            driver.call("cuMemFree", address)
        ipc.close(host)
    device.use_rates(rates)
    return rates


def _once(device: CudaDevice, direction: Direction, nbytes: int) -> float:
    """Move the scratch memory once in scattered chunks of a size; seconds."""
    started = time.perf_counter()
    for batches in page_slices([scattered(direction, nbytes)], SLICE_BYTES):
        device.submit_pages(batches)
    while device.in_flight:
        for _, error in device.poll():
            if error:
                raise CudaError("calibration", "failed", error)
    return time.perf_counter() - started


def scattered(direction: Direction, nbytes: int) -> PageBatch:
    """All of the scratch memory as pages of ROWS chunks: far apart on the GPU, together on the
    host, no two pages beside one another."""
    pages = SCRATCH_BYTES // ROWS // nbytes
    chunks = []
    for row in range(ROWS):
        pool = (0, row * (SCRATCH_BYTES // ROWS), nbytes)
        slot = (0, row * nbytes, ROWS * nbytes)
        chunks.append(
            Chunk(*slot, *pool, nbytes) if direction == "from_host" else Chunk(*pool, *slot, nbytes)
        )
    places = (HOST, SCRATCH_POOL) if direction == "from_host" else (SCRATCH_POOL, HOST)
    order = list(_apart(pages))
    return PageBatch(*places, SCRATCH_SEGMENT, Pattern(chunks), order, order[::-1])


def _apart(count: int) -> Iterator[int]:
    """Every number below `count`, the even ones first."""
    yield from range(0, count, 2)
    yield from range(1, count, 2)
