"""Copies between GPU memories by a kernel: scattered chunks at the speed of the memory.

A copy engine begins and ends every chunk by itself: 23 GB/s for chunks of 128 KiB where the memory
does 2,000, and the driver moves large pieces within a GPU by a kernel of its own, too. Owns the
kernel and a table a stream that says where chunks and pages lie. It must never touch the host's
memory: a kernel that waits for that bus holds up the memory system for everybody (docs/gpu.md).
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

from transfer.ipc.cuda_driver import CudaError, Driver
from transfer.plan import Chunk

LANE_BYTES = 16
"""What a thread moves in one access; addresses and strides are multiples of it."""
WARP_BYTES = 32 * LANE_BYTES
UNROLLS = (4, 2, 1)
"""Accesses of a thread at once: as many as a chunk is whole numbers of."""
THREADS = 256
BLOCKS_PER_PROCESSOR = 8
PROCESSORS_ATTRIBUTE = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
TABLE_BYTES = 64 * 1024
"""Of chunks and pages of one launch: so much the driver takes from pageable memory at once."""
CHUNK_ENTRY_BYTES, PAGE_ENTRY_BYTES = 32, 8
CHUNKS_MAX = TABLE_BYTES // 2 // CHUNK_ENTRY_BYTES
ENTRIES_KEPT_MAX = 64
"""Lists of chunks whose entries are remembered; then all are made anew."""


def unroll_of(nbytes: int) -> int:
    """Accesses a thread for chunks of a size; 0: the kernel cannot move such chunks."""
    return next((n for n in UNROLLS if nbytes % (n * WARP_BYTES) == 0), 0)


def moves(chunks: Sequence[Chunk]) -> bool:
    """Whether the kernel can move these chunks, given at addresses."""
    return all(
        unroll_of(c.nbytes)
        and not (c.source_offset | c.target_offset | c.source_stride | c.target_stride) % LANE_BYTES
        for c in chunks
    )


def entry(unroll: int) -> str:
    """The kernel: a warp moves item after item, each `unroll` times 512 bytes of one chunk.

    Item k is part k mod n of chunk (k div n) mod c of page k div n div c, n parts a chunk.
    """
    loads = "".join(
        f"\n    ld.global.v4.u32 {{%a{n}, %b{n}, %c{n}, %d{n}}}, [%source + {n * WARP_BYTES}];"
        for n in range(unroll)
    )
    stores = "".join(
        f"\n    st.global.v4.u32 [%target + {n * WARP_BYTES}], {{%a{n}, %b{n}, %c{n}, %d{n}}};"
        for n in range(unroll)
    )
    words = ", ".join(f"%a{n}, %b{n}, %c{n}, %d{n}" for n in range(unroll))
    return f"""
.visible .entry copy_pages_{unroll}(
    .param .u64 p_chunks, .param .u64 p_pages,
    .param .u32 p_items, .param .u32 p_parts, .param .u32 p_count)
{{
    .reg .pred %more;
    .reg .u32 %k, %q, %part, %page, %chunk, %step, %items, %parts, %count;
    .reg .u32 %thread, %threads, %block, %lane, %from, %to, {words};
    .reg .u64 %chunks, %pages, %at, %off, %sbase, %sstride, %tbase, %tstride;
    .reg .u64 %source, %target, %wide;
    ld.param.u64 %chunks, [p_chunks];
    ld.param.u64 %pages, [p_pages];
    ld.param.u32 %items, [p_items];
    ld.param.u32 %parts, [p_parts];
    ld.param.u32 %count, [p_count];
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %block, %ctaid.x;
    and.b32 %lane, %thread, 31;
    mad.lo.u32 %k, %block, %threads, %thread;
    shr.u32 %k, %k, 5;
    mov.u32 %step, %nctaid.x;
    mul.lo.u32 %step, %step, %threads;
    shr.u32 %step, %step, 5;
again:
    setp.lt.u32 %more, %k, %items;
    @!%more bra done;
    div.u32 %q, %k, %parts;
    mul.lo.u32 %part, %q, %parts;
    sub.u32 %part, %k, %part;
    div.u32 %page, %q, %count;
    mul.lo.u32 %chunk, %page, %count;
    sub.u32 %chunk, %q, %chunk;
    mul.wide.u32 %at, %chunk, {CHUNK_ENTRY_BYTES};
    add.u64 %at, %chunks, %at;
    ld.global.v2.u64 {{%sbase, %sstride}}, [%at];
    ld.global.v2.u64 {{%tbase, %tstride}}, [%at + 16];
    mul.wide.u32 %at, %page, {PAGE_ENTRY_BYTES};
    add.u64 %at, %pages, %at;
    ld.global.v2.u32 {{%from, %to}}, [%at];
    mul.wide.u32 %off, %part, {unroll * WARP_BYTES};
    mul.wide.u32 %wide, %lane, {LANE_BYTES};
    add.u64 %off, %off, %wide;
    cvt.u64.u32 %wide, %from;
    mad.lo.u64 %source, %wide, %sstride, %sbase;
    add.u64 %source, %source, %off;
    cvt.u64.u32 %wide, %to;
    mad.lo.u64 %target, %wide, %tstride, %tbase;
    add.u64 %target, %target, %off;{loads}{stores}
    add.u32 %k, %k, %step;
    bra again;
done:
    ret;
}}
"""


def ptx() -> bytes:
    """One module with a kernel for every unrolling."""
    head = ".version 7.0\n.target sm_70\n.address_size 64\n"
    return (head + "".join(map(entry, UNROLLS)) + "\0").encode()


class PageKernel:
    """Queues copies of chunks of pages on streams. Belongs to one thread and one context."""

    def __init__(self, driver: Driver, blocks_per_processor: int = BLOCKS_PER_PROCESSOR) -> None:
        """Load the kernels; raises `CudaError`."""
        self._driver = driver
        module = driver.call("cuModuleLoadData", ptx())
        self._kernels = {
            n: driver.call("cuModuleGetFunction", module, f"copy_pages_{n}".encode())
            for n in UNROLLS
        }
        processors = int(driver.call("cuDeviceGetAttribute", PROCESSORS_ATTRIBUTE, driver.device))
        self._blocks = processors * blocks_per_processor
        self._tables: dict[int, int] = {}
        self._entries: dict[int, tuple[Sequence[Chunk], array[int]]] = {}

    def copy(
        self, chunks: Sequence[Chunk], starts: Sequence[int], stops: Sequence[int], stream: Any
    ) -> None:
        """Queue the copies of chunks (one size, at addresses) of pages.

        Raises `CudaError`; some may have been queued.
        """
        for first in range(0, len(chunks), CHUNKS_MAX):
            # The same list again and again where one launch takes all: its table is kept.
            some = chunks if len(chunks) <= CHUNKS_MAX else chunks[first : first + CHUNKS_MAX]
            at_once = (TABLE_BYTES - len(some) * CHUNK_ENTRY_BYTES) // PAGE_ENTRY_BYTES
            for page in range(0, len(starts), at_once):
                here = slice(page, page + at_once)
                self._launch(some, starts[here], stops[here], stream)

    def _launch(
        self, chunks: Sequence[Chunk], starts: Sequence[int], stops: Sequence[int], stream: Any
    ) -> None:
        table = self._table(stream)
        entries = self._chunk_entries(chunks) + _page_entries(starts, stops)
        call = self._driver.call
        # Behind the last launch of this stream, which is done with the table then; and taken from
        # here, pageable as it is, when the call returns.
        address, words = entries.buffer_info()
        call("cuMemcpyHtoDAsync", table, address, 8 * words, stream)
        unroll = unroll_of(chunks[0].nbytes)
        parts = chunks[0].nbytes // (unroll * WARP_BYTES)
        items = parts * len(chunks) * len(starts)
        blocks = min(self._blocks, -(-items * 32 // THREADS))
        values = (table, table + len(chunks) * CHUNK_ENTRY_BYTES, items, parts, len(chunks))
        kinds = (ctypes.c_uint64,) * 2 + (ctypes.c_uint32,) * 3
        kernel = self._kernels[unroll]
        call("cuLaunchKernel", kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, (values, kinds), 0)

    def _chunk_entries(self, chunks: Sequence[Chunk]) -> "array[int]":
        known = self._entries.get(id(chunks))
        if known is None:
            if len(self._entries) >= ENTRIES_KEPT_MAX:
                self._entries.clear()
            # The list itself is kept, so that its id is not another's.
            known = self._entries[id(chunks)] = (chunks, _entries_of(chunks))
        return known[1]

    def prepare(self, stream: Any) -> None:
        """Make what launches on a stream need, before the first one."""
        self._table(stream)

    def _table(self, stream: Any) -> int:
        key = int(stream)
        if key not in self._tables:
            self._tables[key] = int(self._driver.call("cuMemAlloc", TABLE_BYTES))
        return self._tables[key]

    def __repr__(self) -> str:
        return f"<PageKernel on {self._blocks} blocks>"


def _entries_of(chunks: Sequence[Chunk]) -> "array[int]":
    """Where each chunk lies on both sides; lists of chunks are not changed once they are made."""
    return array(
        "Q",
        [
            number
            for c in chunks
            for number in (c.source_offset, c.source_stride, c.target_offset, c.target_stride)
        ],
    )


def _page_entries(starts: Sequence[int], stops: Sequence[int]) -> "array[int]":
    """Both numbers of each page, in one word: the first one below."""
    halves = array("I", bytes(PAGE_ENTRY_BYTES * len(starts)))
    halves[::2], halves[1::2] = array("I", starts), array("I", stops)
    return array("Q", halves.tobytes())


def page_kernel(driver: Driver) -> PageKernel | None:
    """The kernel, or None where the driver cannot load it (then such copies are slower)."""
    try:
        return PageKernel(driver)
    except CudaError:
        return None
