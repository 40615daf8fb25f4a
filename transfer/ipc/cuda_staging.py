"""A staging slab on a GPU: small pages packed into rows and taken out, in the scheduler's context.

Small chunks starve the copy engines: a page of one token is 64 pieces of 2 KiB, which go at 1 GB/s.
The scheduler itself gathers them into rows of a slab (memory that it exports beside its pool), and
the mover moves rows. A request is one launch, on a stream of the scheduler's, so no other process
takes a turn on the GPU. Owns the slab, that stream, and the ring's registration with the driver.
The stream orders requests and writes `done` behind each; nothing waits for it but `finish`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from directory.core.errors import LayoutError
from transfer.device.cuda_kernel import PageKernel, moves
from transfer.ipc.cuda_driver import Driver
from transfer.ipc.cuda_export import Exported, export_tensor
from transfer.ipc.cuda_sync import WRITE_AFTER_EVERYTHING, RegisteredTable
from transfer.ipc.memory import MemoryHandle
from transfer.ipc.stage_ring import DONE, StageRequest, StageRing, check_request
from transfer.layout import BufferLayout, PoolLayout
from transfer.plan import Chunk

BLOCKS_PER_PROCESSOR: Final = 1
"""Few pieces at a time: 16 MiB of pages of 2 KiB a chunk, which lie all over the pool, take the GPU
49 us, with eight times as many 78; and the engine's own kernels find room beside it."""
STREAM_NON_BLOCKING = 1
PLACED_MAX = 4_096


class CudaSlab:
    """A slab in memory of its own, and what packs it. Made and closed by the scheduler's thread."""

    def __init__(
        self, driver: Driver, layout: PoolLayout, addresses: Sequence[int], nbytes: int
    ) -> None:
        """`layout`, `addresses`: of the pool, its allocations in this process.

        Raises `LayoutError` for chunks that the kernel cannot move, `CudaError` without a kernel or
        memory.
        """
        if not moves([_chunk(b, addresses, 0, layout.page_bytes) for b in layout.buffers]):
            raise LayoutError(
                "chunks, offsets or strides of this pool are not whole numbers of 512 bytes; "
                "register it without a slab"
            )
        if nbytes < layout.page_bytes:
            raise LayoutError(f"a slab of {nbytes} bytes has no room for {layout.page_bytes}")
        self._driver = driver
        self._layout = layout
        self._addresses = list(addresses)
        self._kernel = PageKernel(driver, BLOCKS_PER_PROCESSOR)
        # Streams of one priority share the hardware's queues once there are many: behind a forward
        # pass that waits for the very layer that is to be unpacked here, nothing would ever land.
        _, highest = driver.call("cuCtxGetStreamPriorityRange")
        create = "cuStreamCreateWithPriority"
        self._stream = driver.call(create, STREAM_NON_BLOCKING, int(highest))
        self._kernel.prepare(self._stream)
        self.nbytes = nbytes
        self._address = int(driver.call("cuMemAlloc", nbytes))
        self._exported: Exported | None = None
        try:
            self._exported = export_tensor(
                driver,
                data_ptr=self._address,
                nbytes=nbytes,
                shape=(nbytes,),
                strides=(1,),
                itemsize=1,
                device=driver.uuid,
            )
        except BaseException:
            driver.call("cuMemFree", self._address)
            raise

    @property
    def handle(self) -> MemoryHandle:
        """What the mover imports."""
        assert self._exported is not None, "it is closed"
        return self._exported.handle

    @property
    def fds(self) -> Sequence[int]:
        """Its descriptor, where its kind has one."""
        return self._exported.fds if self._exported is not None else ()

    def packer(self, ring: StageRing) -> CudaPacker:
        """What carries the requests of a ring out; one at a time."""
        return CudaPacker(
            self._driver, self._kernel, self._stream, self._layout, self._addresses,
            (self._address, self.nbytes), RegisteredTable(self._driver, ring),
        )  # fmt: skip

    def close(self) -> None:
        """Give the memory back; when no packer is left. Repeatable."""
        exported, self._exported = self._exported, None
        if exported is not None:
            for fd in exported.fds:
                os.close(fd)
            self._driver.call("cuMemFree", self._address)


class CudaPacker:
    """Carries out one ring's requests on one stream, as a thread's only user of it."""

    def __init__(
        self,
        driver: Driver,
        kernel: PageKernel,
        stream: Any,
        layout: PoolLayout,
        addresses: Sequence[int],
        slab: tuple[int, int],
        registered: RegisteredTable,
    ) -> None:
        """`slab`: address and size; `registered`: the ring, which is closed with this."""
        self._driver = driver
        self._kernel = kernel
        self._stream = stream
        self._layout = layout
        self._addresses = addresses
        self._slab, self._slab_bytes = slab
        self._registered = registered
        self._placed: dict[tuple[bool, int, int, int], list[list[Chunk]]] = {}

    def begin(self) -> None:
        """Make the context this thread's."""
        self._driver.make_current()

    def move(self, request: StageRequest) -> None:
        """Queue one launch for each size of chunk."""
        buffers = check_request(request, self._layout, self._slab_bytes)
        key = request.pack, request.first_layer, request.layers, request.offset
        groups = self._placed.get(key)
        if groups is None:
            if len(self._placed) >= PLACED_MAX:
                self._placed.clear()
            groups = self._placed[key] = self._place(request, buffers)
        rows = range(len(request.pages))
        starts, stops = (request.pages, rows) if request.pack else (rows, request.pages)
        for chunks in groups:
            self._kernel.copy(chunks, starts, stops, self._stream)

    def _place(self, request: StageRequest, buffers: Sequence[BufferLayout]) -> list[list[Chunk]]:
        """Chunks by size, between pool and rows at their addresses."""
        groups: dict[int, list[Chunk]] = {}
        at = self._slab + request.offset
        for buffer in buffers:
            chunk = _chunk(buffer, self._addresses, at, request.row_bytes)
            if not request.pack:
                chunk = Chunk(*chunk[3:6], *chunk[:3], chunk.nbytes)
            groups.setdefault(chunk.nbytes, []).append(chunk)
            at += buffer.chunk_bytes
        return list(groups.values())

    def signal(self, ring: StageRing, number: int) -> None:
        """Let the stream write it."""
        del ring
        address = self._registered.address(DONE)
        write = "cuStreamWriteValue64"
        self._driver.call(write, self._stream, address, number, WRITE_AFTER_EVERYTHING)

    def finish(self) -> None:
        """Wait for the stream."""
        self._driver.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Let go of the ring. Repeatable."""
        self._registered.close()


def _chunk(buffer: BufferLayout, addresses: Sequence[int], row: int, row_bytes: int) -> Chunk:
    """Pool to row."""
    pool = addresses[buffer.allocation] + buffer.offset
    return Chunk(0, pool, buffer.page_stride, 0, row, row_bytes, buffer.chunk_bytes)
