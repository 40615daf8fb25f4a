"""Small pages packed into a staging slab and taken out of it, in the scheduler's own context.

Small chunks starve the copy engines: a page of one token is 64 pieces of 2 KiB, which go at 1 GB/s.
The scheduler itself gathers them into rows of a slab (memory that it exports like a pool; a row is
one whole host page), and the mover moves rows. One launch does it, on a stream of the scheduler's,
so no other process takes a turn on the GPU. Owns the addresses of a pool's buffers and its slab. It
says nothing of when it is done: a timeline behind it on the same stream does. The stream must wait
for whoever wrote the pages, or still reads them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from directory.core.errors import LayoutError
from transfer.device.cuda_kernel import PageKernel, moves
from transfer.ipc.cuda_driver import Driver
from transfer.layout import BufferLayout, PoolLayout
from transfer.plan import Chunk

STAGE_BELOW_BYTES = 64 * 1024
"""Chunks from this size on are moved as they lie."""


class Slab(NamedTuple):
    """Device memory in which each row is one host page."""

    address: int
    rows: int


class SlabStaging:
    """One pool and its slab, both of this process."""

    def __init__(
        self, driver: Driver, layout: PoolLayout, addresses: Sequence[int], slab: Slab
    ) -> None:
        """`addresses`: of the pool's allocations in this process.

        Raises `LayoutError` for chunks that the kernel cannot move, `CudaError` without a kernel.
        """
        starts = [0]
        for buffer in layout.buffers:
            starts.append(starts[-1] + buffer.chunk_bytes)
        self._layout, self._slab = layout, slab
        self._out: list[list[Chunk]] = []
        self._back: list[list[Chunk]] = []
        for nbytes in {buffer.chunk_bytes for buffer in layout.buffers}:
            pairs = [
                (
                    (b.allocation, addresses[b.allocation] + b.offset, b.page_stride),
                    (0, slab.address + start, layout.page_bytes),
                )
                for b, start in zip(layout.buffers, starts, strict=False)
                if b.chunk_bytes == nbytes
            ]
            self._out.append([Chunk(*pool, *row, nbytes) for pool, row in pairs])
            self._back.append([Chunk(*row, *pool, nbytes) for pool, row in pairs])
        if not all(map(moves, self._out)):
            raise LayoutError(
                "chunks, offsets or strides of this pool are not whole numbers of 512 bytes; "
                "register it without a slab"
            )
        self._kernel = PageKernel(driver)

    def pack(self, pages: Sequence[int], first_row: int, stream: Any) -> None:
        """Queue the copy of pages into consecutive rows. Raises `LayoutError`, `CudaError`."""
        rows = self._rows(pages, first_row)
        for chunks in self._out:
            self._kernel.copy(chunks, pages, rows, stream)

    def unpack(self, pages: Sequence[int], first_row: int, stream: Any) -> None:
        """Queue the copy of consecutive rows into pages. Raises `LayoutError`, `CudaError`."""
        rows = self._rows(pages, first_row)
        for chunks in self._back:
            self._kernel.copy(chunks, rows, pages, stream)

    def _rows(self, pages: Sequence[int], first_row: int) -> range:
        rows = range(first_row, first_row + len(pages))
        if rows.start < 0 or rows.stop > self._slab.rows:
            raise LayoutError(f"{rows} are not within the {self._slab.rows} rows of the slab")
        if pages and not 0 <= min(pages) <= max(pages) < self._layout.page_count:
            raise LayoutError(f"pages up to {max(pages)} of {self._layout.page_count}")
        return rows


def slab_layout(pool: PoolLayout, nbytes: int) -> PoolLayout:
    """How a slab of so many bytes is registered: a pool of the same page form, a page a row.

    Raises `LayoutError` where not one row fits.
    """
    row = pool.page_bytes
    if nbytes < row:
        raise LayoutError(f"a slab of {nbytes} bytes has no room for a page of {row}")
    buffers = []
    start = 0
    for b in pool.buffers:
        buffers.append(BufferLayout(b.role, b.layer, 0, start, row, b.chunk_bytes, b.form))
        start += b.chunk_bytes
    return PoolLayout(pool.page_size, nbytes // row, tuple(buffers), (nbytes,))
