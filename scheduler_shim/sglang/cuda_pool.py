"""SGLang's KV tensors on a GPU: exported as they are, with counters that its streams write.

Owns the handles, and the registration of the small tables with the driver. It never waits for the
device, except when it is closed: nothing may be queued then that writes into the tables.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from directory.core.ids import FORWARD
from scheduler_shim.sglang.buffers import KvTensor
from transfer.ipc.cuda_driver import Driver
from transfer.ipc.cuda_export import Exported, close_exported, export_tensor
from transfer.ipc.cuda_mapped import MappedMemory
from transfer.ipc.cuda_staging import CudaSlab
from transfer.ipc.cuda_sync import CudaTimelines, StreamWaiter
from transfer.ipc.memory import MemoryHandle
from transfer.ipc.page_table import PageTable
from transfer.ipc.sync import TimelineTable
from transfer.layout import PoolLayout


def uuid_of(device: torch.device) -> str:
    """The UUID of a device in the form of nvidia-smi."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}".replace("GPU-GPU-", "GPU-")


class ExportedTensors:
    """A pool's tensors by the storages that they lie in, one allocation each."""

    def __init__(self, driver: Driver, tensors: Sequence[KvTensor]) -> None:
        """Export them; raises `ImportFailed` with the cure for memory that cannot be shared."""
        self._driver = driver
        self._exported: list[Exported] = []
        self._numbers: dict[int, int] = {}
        sizes: list[int] = []
        try:
            for part in tensors:
                storage = part.tensor.untyped_storage()
                if storage.data_ptr() in self._numbers:
                    continue
                self._numbers[storage.data_ptr()] = len(sizes)
                sizes.append(storage.nbytes())
                self._exported.append(
                    export_tensor(
                        driver,
                        data_ptr=storage.data_ptr(),
                        nbytes=storage.nbytes(),
                        shape=(storage.nbytes(),),
                        strides=(1,),
                        itemsize=1,
                        device=driver.uuid,
                    )
                )
        except BaseException:
            close_exported(self._exported)
            raise
        self.allocation_bytes = tuple(sizes)

    @property
    def fds(self) -> list[int]:
        """Descriptors, one an allocation whose kind has one."""
        return [fd for _, fds in self._exported for fd in fds]

    @property
    def handles(self) -> tuple[MemoryHandle, ...]:
        """One an allocation."""
        return tuple(handle for handle, _ in self._exported)

    def where(self, part: KvTensor) -> tuple[int, int]:
        """Allocation and byte offset of a tensor's first element."""
        base = part.tensor.untyped_storage().data_ptr()
        return self._numbers[base], part.tensor.data_ptr() - base

    def make_slab(self, layout: PoolLayout, nbytes: int) -> CudaSlab:
        """A staging slab beside them."""
        return CudaSlab(self._driver, layout, list(self._numbers), nbytes)

    def close(self) -> None:
        """Close the descriptors: they keep the memory alive. Repeatable."""
        exported, self._exported = self._exported, []
        for _, fds in exported:
            for fd in fds:
                os.close(fd)

    def __repr__(self) -> str:
        return f"<ExportedTensors, {len(self.allocation_bytes)} allocations>"


class StreamSignals:
    """The streams write timelines and page table as they get there. Implements `Signals`.

    `forward_stream`: where the engine runs its forward passes (None: on the current stream).
    """

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        timelines: TimelineTable,
        page_table: PageTable,
        forward_stream: Any = None,
    ) -> None:
        self._device = device
        self._forward_stream = forward_stream
        self._driver = driver
        self._table = timelines
        self._timelines = CudaTimelines(driver, timelines)
        self._waiter: StreamWaiter | None = None
        self._mapped = MappedMemory(driver, page_table.mapping)
        entries = self._mapped.array(len(page_table), "<i4", 4)
        self.table = torch.as_tensor(entries, device=device)

    @property
    def streams(self) -> StreamWaiter:
        """How streams wait for landing counters; with its watchdog from the first call on."""
        if self._waiter is None:
            registered = self._timelines.registered
            self._waiter = StreamWaiter(self._driver, self._table, registered)
        return self._waiter

    def current_stream(self) -> int:
        """The stream that work is given to now."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def signal(self, index: int, value: int) -> None:
        """Queue the write behind all that is in the timeline's stream now."""
        stream = torch.cuda.current_stream(self._device)
        if index == FORWARD and self._forward_stream is not None:
            stream = self._forward_stream
        self._timelines.signal(stream.cuda_stream, index, value)

    def close(self) -> None:
        """Wait for the device, then unregister the tables. Repeatable."""
        if self._waiter is not None:
            self._waiter.close()  # lets go whatever still waits, or the device never comes to rest
        torch.cuda.synchronize(self._device)
        self._timelines.close()
        self._mapped.close()

    def __repr__(self) -> str:
        return f"<StreamSignals of {self._device}>"
