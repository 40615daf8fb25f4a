"""What the mover's and the stager's own time costs, without a GPU: the driver and the bus made up.

The product's own mover, engine, device and stager, in processes of their own; only the driver's
calls are not real. A call takes the processor as long as it is said to take, a copy is done when
the made-up bus has carried it, and no byte moves. So `bench_copy --device model` says which share
of a bus the loop around it can fill, on this machine's processors; never what a real bus does.
Owns that driver, and how a mover and a scheduler are made on it (`--fd ...`: be the mover).
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import zlib
from array import array
from collections.abc import Callable
from typing import Any, Final

from benchmarks.copy_host import HostSubstrate
from benchmarks.copy_layouts import pool_layout
from benchmarks.copy_messages import MakeSlab
from directory.core.ids import HOST
from scheduler_shim.staging import SharedSlab, Staging
from transfer import mover
from transfer.device.cuda import Attached, CudaDevice
from transfer.device.cuda_kernel import PageKernel
from transfer.engine_limits import CUDA_LIMITS
from transfer.ipc.cuda_driver import CudaError
from transfer.ipc.cuda_staging import BLOCKS_PER_PROCESSOR, CudaPacker
from transfer.ipc.cuda_sync import RegisteredTable
from transfer.ipc.memory import Mapping, SharedMapping
from transfer.ipc.stage_ring import STAGE_BELOW_BYTES, StageRing
from transfer.mover_backend import Backend
from transfer.plan import MemoryKey

OUTSIDE_BYTES: Final = 1 << 20
OUTSIDE_BYTES_MIN: Final = 6 << 10
"""For fewer the interpreter is not let go."""
NAME: Final = "model"
COSTS: Final = "COSTS_OF_THE_MODEL"
"""The variable by which a mover and a scheduler are told what the benchmark was told."""
BATCH_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int, *(ctypes.c_void_p,) * 3, ctypes.c_size_t, *(ctypes.c_void_p,) * 2,
    ctypes.c_size_t, *(ctypes.c_void_p,) * 2,
)  # fmt: skip


class Costs:
    """GB/s of the bus, and microseconds of processor time that calls take. `range_us`: each range
    of a list; `call_us`: any call that queues; `pack_us`: the GPU's, of a request."""

    def __init__(
        self, bus_gbps: float = 50.0, range_us: float = 0.7, call_us: float = 4.0,
        pack_us: float = 60.0,
    ) -> None:  # fmt: skip
        self.bus_gbps, self.range_us, self.call_us = bus_gbps, range_us, call_us
        self.pack_us = pack_us

    def to_environment(self) -> None:
        """Let the processes that are started from here on know them."""
        numbers = self.bus_gbps, self.range_us, self.call_us, self.pack_us
        os.environ[COSTS] = " ".join(map(str, numbers))

    @classmethod
    def of_environment(cls) -> Costs:
        """What this process was told."""
        return cls(*map(float, os.environ[COSTS].split()))


def spend(microseconds: float) -> None:
    """Keep the processor and the interpreter busy."""
    end = time.perf_counter_ns() + int(microseconds * 1000)
    while time.perf_counter_ns() < end:
        pass


class Outside:
    """Keeps the processor busy outside of the interpreter, as a long call of the driver does."""

    def __init__(self) -> None:
        self._bytes = bytes(OUTSIDE_BYTES)
        took = []
        for _ in range(20):
            began = time.perf_counter_ns()
            zlib.crc32(self._bytes)
            took.append(time.perf_counter_ns() - began)
        self._bytes_per_ns = OUTSIDE_BYTES / min(took)

    def spend(self, microseconds: float) -> None:
        """So long, or a little longer where the processor is shared."""
        left = microseconds * 1000
        while left > 0:
            began = time.perf_counter_ns()
            some = min(OUTSIDE_BYTES, max(OUTSIDE_BYTES_MIN, int(left * self._bytes_per_ns)))
            zlib.crc32(memoryview(self._bytes)[:some])
            left -= time.perf_counter_ns() - began


class ModelDriver:
    """Stands in for `Driver`. Streams share one bus, which carries what is queued in order."""

    uuid = "GPU-made-up"
    device = 0

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._outside = Outside()
        self._handles = 0
        self._bus_free_ns = 0
        self._events: dict[int, int] = {}  # when each is reached
        self._batch = BATCH_CALL(self._queue_list)  # kept: the driver's caller has its address
        self._calls: dict[str, Callable[..., Any]] = {
            "cuCtxGetStreamPriorityRange": lambda: (0, -5),
            "cuStreamCreateWithPriority": self._handle,
            "cuEventCreate": self._handle,
            "cuEventRecord": self._record,
            "cuMemAlloc": self._handle,
            "cuMemHostRegister": lambda *_: None,
            "cuMemHostGetDevicePointer": lambda address, _: address,
            "cuModuleLoadData": self._handle,
            "cuModuleGetFunction": self._handle,
            "cuDeviceGetAttribute": lambda *_: 132,
            "cuMemcpyHtoDAsync": lambda *_: spend(costs.call_us),
            "cuLaunchKernel": lambda *_: spend(costs.call_us),
            "cuStreamWriteValue64": self._write_value,
            "cuStreamSynchronize": lambda _: None,
            "cuGetProcAddress": self._address_of,
        }

    def call(self, function: str, *arguments: Any) -> Any:
        """As `Driver.call`; a function that nobody made up is one that this driver has not."""
        made_up = self._calls.get(function)
        if made_up is None:
            raise CudaError(function, "CUDA_ERROR_NOT_SUPPORTED", "made up")
        return made_up(*arguments)

    def ready(self, event: int) -> bool:
        """Whether the bus has carried what stands before an event."""
        return time.perf_counter_ns() >= self._events[event]

    def make_current(self) -> None:
        """There are no contexts."""

    def _handle(self, *_: Any) -> int:
        self._handles += 1
        return self._handles

    def _address_of(self, name: bytes, *_: Any) -> int:
        if name != b"cuMemcpyBatchAsync":
            raise CudaError("cuGetProcAddress", "CUDA_ERROR_NOT_FOUND", name.decode())
        return ctypes.cast(self._batch, ctypes.c_void_p).value or 0

    def _queue_list(self, _targets: int, _sources: int, sizes: int, count: int, *_: int) -> int:
        began = time.perf_counter_ns()
        nbytes = sum(array("Q", ctypes.string_at(sizes, 8 * count)))
        carried = int(nbytes / self._costs.bus_gbps)
        self._bus_free_ns = max(self._bus_free_ns, began) + carried
        took = (time.perf_counter_ns() - began) / 1000
        self._outside.spend(self._costs.call_us + count * self._costs.range_us - took)
        return 0

    def _record(self, event: int, _stream: int) -> None:
        self._events[event] = self._bus_free_ns

    def _write_value(self, _stream: int, address: int, value: int, _flags: int) -> None:
        """The stager's thread does not wait for the GPU; here it does, in its place."""
        spend(self._costs.pack_us)
        ctypes.c_uint64.from_address(address).value = value


class ModelDevice(CudaDevice):
    """The product's device on that driver. What is not the host's is the GPU's, as it were."""

    def attach(self, key: MemoryKey, mapping: Mapping) -> None:
        """Know an address; nothing of it is read."""
        if key[0] == HOST:
            super().attach(key, mapping)
            return
        assert isinstance(mapping, SharedMapping)
        address = mapping.address
        self._memories[key] = Attached(address, mapping.nbytes, 0, None, self.name, address)


class ModelSlab(SharedSlab):
    """A slab whose requests are prepared as for a GPU. Nothing is packed."""

    def packer(self, ring: StageRing) -> CudaPacker:
        """The product's own on the made-up driver."""
        driver: Any = ModelDriver(Costs.of_environment())
        kernel = PageKernel(driver, BLOCKS_PER_PROCESSOR)
        addresses = [mapping.address for mapping in self._pool]
        slab = self._slab.address, self.nbytes
        table = RegisteredTable(driver, ring)
        return CudaPacker(driver, kernel, 1, self._layout, addresses, slab, table)


class ModelSubstrate(HostSubstrate):
    """Implements `Substrate`; its memory is never touched."""

    device = NAME

    def make_slab(self, request: MakeSlab) -> Staging:
        """As a scheduler's shim does, in its stager's thread."""
        mappings = self._mappings[request.name]
        layout = pool_layout(len(mappings), mappings[0].nbytes, request.page_size)
        staging = Staging(layout, ModelSlab(self._ipc, layout, mappings, request.nbytes))
        self._stagings.append(staging)
        staging.begin(STAGE_BELOW_BYTES)
        return staging


class ModelBase:
    """Stands in for `Base`: the bus is as fast as it is said to be."""

    def __init__(self, costs: Costs) -> None:
        self._gbps = costs.bus_gbps

    def measure(self) -> dict[str, float]:
        """By direction."""
        return {"to_host": self._gbps, "from_host": self._gbps}

    def close(self) -> None:
        """Nothing was taken."""


def _backend(name: str, *, pinned: bool = True) -> Backend:
    assert name == NAME
    assert pinned
    driver: Any = ModelDriver(Costs.of_environment())
    device = ModelDevice(driver)
    return Backend(
        device, {}, {}, CUDA_LIMITS, submit_beside=device.submit_beside, close=device.close
    )


if __name__ == "__main__":
    mover.make_device = _backend  # type: ignore[attr-defined]
    sys.exit(mover.main())
