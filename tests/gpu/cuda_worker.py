"""The reference scheduler with its pool on a GPU: `python -m tests.gpu.cuda_worker --fd N`.

Owns GPU memory of its own (TREECORED_TEST_MEMORY: "legacy" or "vmm") and the access to its bytes.
It uses no torch: what "computes" a page is a copy from the host, finished before the timelines say
so. Everything else is scheduler_shim's worker as it is.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

import scheduler_shim.worker
from scheduler_shim.content import ChunkView
from scheduler_shim.pools import SharedPool
from transfer.ipc.cuda_driver import Driver, load_api, visible_devices
from transfer.ipc.cuda_export import Exported, VmmAllocation, close_exported, export_tensor

MEMORY_VARIABLE = "TREECORED_TEST_MEMORY"


class DeviceView:
    """Bytes of the GPU behind the slices of a memoryview."""

    def __init__(self, driver: Driver, address: int) -> None:
        self._driver = driver
        self._address = address

    def __getitem__(self, where: slice) -> bytes:
        data = bytearray(where.stop - where.start)
        self._driver.call("cuMemcpyDtoH", data, self._address + where.start, len(data))
        return bytes(data)

    def __setitem__(self, where: slice, data: bytes) -> None:
        assert len(data) == where.stop - where.start
        self._driver.call("cuMemcpyHtoD", self._address + where.start, bytes(data), len(data))
        # A copy from pageable memory may return before its last bytes have arrived.
        self._driver.call("cuCtxSynchronize")


class CudaPool(SharedPool):
    """A reference pool whose pages lie on the first GPU that this process sees."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        while self._mappings:
            self._ipc.close(self._mappings.pop())
        uuid = next(u for u, ordinal in visible_devices(load_api()).items() if ordinal == 0)
        self._driver = Driver.open(uuid)
        self._exported: list[Exported] = []
        self._addresses: list[int] = []
        self._frees: list[Callable[[], object]] = []
        for nbytes in self.layout.allocation_bytes:
            if os.environ.get(MEMORY_VARIABLE) == "vmm":
                self._virtual(nbytes)
            else:
                self._legacy(nbytes)

    @property
    def fds(self) -> list[int]:
        """Descriptors of a registration."""
        memory = [fd for _, fds in self._exported for fd in fds]
        return [*memory, self.timelines.fd, self.words.fd]

    def packed_handles(self) -> bytes:
        """The handles of the GPU's allocations."""
        return msgspec.msgpack.encode(tuple(handle for handle, _ in self._exported))

    def chunks(self) -> list[ChunkView]:
        """Where the chunks of every buffer lie."""
        views: list[Any] = [DeviceView(self._driver, address) for address in self._addresses]
        return [
            ChunkView(views[b.allocation], b.offset, b.page_stride, b.chunk_bytes)
            for b in self.layout.buffers
        ]

    def close(self) -> None:
        """Free everything."""
        super().close()
        close_exported(self._exported)
        self._exported.clear()
        while self._frees:
            self._frees.pop()()

    def _legacy(self, nbytes: int) -> None:
        address = int(self._driver.call("cuMemAlloc", nbytes))
        self._frees.append(lambda: self._driver.call("cuMemFree", address))
        self._addresses.append(address)
        self._exported.append(
            export_tensor(
                self._driver,
                data_ptr=address,
                nbytes=nbytes,
                shape=(nbytes,),
                strides=(1,),
                itemsize=1,
                device=self._driver.uuid,
            )
        )

    def _virtual(self, nbytes: int) -> None:
        memory = VmmAllocation(self._driver, nbytes)
        self._frees.append(memory.close)
        self._addresses.append(memory.address)
        self._exported.append(memory.export())


if __name__ == "__main__":
    vars(scheduler_shim.worker)["SharedPool"] = CudaPool
    sys.exit(scheduler_shim.worker.main())
