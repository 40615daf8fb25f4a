"""A scheduler's own pool and the allocator of its pages: what a shim needs, one in shared memory.

`Pool` and `Allocator` are the seam: the reference scheduler's are here, renamed.py has a pool that
speaks of pages by name, sglang/ has those of a real engine. `SharedPool` owns the memory (one
sealed memfd an allocation, the timelines, the span words), its layout and the list of free pages.
Nothing here decides about the tree: what is evicted or published is the scheduler's business. It
must never let a page be free twice.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import msgspec

from directory.core.errors import InternalError, LayoutError
from directory.core.ids import CURRENT, FORWARD
from directory.core.limits import FDS_PER_FRAME_MAX
from directory.core.namespace import Fingerprint
from directory.core.tokens import unpack_pages
from scheduler_shim.content import ChunkView
from scheduler_shim.staging import SharedSlab, Staging
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.ipc.sync import TimelineTable, WordTable
from transfer.layout import PoolLayout, mha_layer_first, mla

TABLE_FDS = 2
"""Descriptors of a registration beside those of the allocations: timelines and words."""


class Allocator(Protocol):
    """Free pages of a pool. Where pages have names, it speaks of names."""

    @property
    def page_count(self) -> int:
        """Pages of the pool, free or not."""
        ...

    @property
    def free_count(self) -> int:
        """Pages that can be allocated."""
        ...

    def allocate(self, count: int) -> array[int] | None:
        """Take `count` pages, or none at all (None) when there are not enough."""
        ...

    def free(self, pages: bytes | array[int]) -> None:
        """Give pages back (packed or not); raises `InternalError` for one that is free already."""
        ...

    def used(self) -> array[int]:
        """Pages that are not free, in order."""
        ...

    def expect(self, pages: bytes) -> None:
        """Where just these pages (packed) lie is going to be asked for: find it out now, if that
        takes any time."""
        ...


class Pool(Protocol):
    """A scheduler's KV pool as its shim sees it: what is registered, and its counters.

    Closed by its scheduler after the daemon session has ended.
    """

    words: WordTable

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        ...

    @property
    def page_count(self) -> int:
        """Pages of the layout; page numbers and names are below it."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all buffers."""
        ...

    @property
    def fingerprint(self) -> bytes:
        """What must agree before another pool's bytes are this pool's, in full."""
        ...

    @property
    def named(self) -> bool:
        """Whether page lists are names, looked up in a page table by the mover."""
        ...

    @property
    def fds(self) -> list[int]:
        """Descriptors of a registration in order: allocations, timelines, words, and the page
        table where pages are named."""
        ...

    def packed_layout(self) -> bytes:
        """The layout as it stands in a registration."""
        ...

    def packed_handles(self) -> bytes:
        """The memory handles as they stand in a registration, one an allocation."""
        ...

    def packed_sync(self) -> bytes:
        """How the timelines are to be read, as it stands in a registration."""
        ...

    def now(self) -> tuple[int, int]:
        """Where the timelines stand (forward, current)."""
        ...

    def advance(self) -> tuple[int, int]:
        """Let both timelines pass everything written so far; returns the values that say so. They
        may be reached later, when the streams get there."""
        ...

    def begin_staging(self, below_bytes: int) -> bool:
        """Before a registration: whether it offers a staging slab, which it does where chunks are
        smaller than so many bytes and the pool has one. Layout, handles and `fds` have it then."""
        ...

    @property
    def stage_requests(self) -> int:
        """So many times movers had pages packed or unpacked."""
        ...

    @property
    def at_rest(self) -> bool:
        """Whether `settle` would not wait: nothing that movers asked of this process is to come."""
        ...

    def settle(self) -> None:
        """Return once everything is done that movers have asked this process for until now: only
        then may targets of a restore that was lost be used for something else."""
        ...

    def close(self) -> None:
        """Give everything back. Repeatable."""
        ...


def choose_layout(
    *, page_size: int, page_count: int, bytes_per_token: int, layers: int
) -> PoolLayout:
    """Lay a token's bytes out as one K and one V buffer a layer.

    `bytes_per_token` is the total over all buffers. Where it does not divide by 2 * layers, the
    largest number of layers below is taken by which it does; an odd number of bytes makes one
    single buffer. Raises `LayoutError` for sizes that make no pool.
    """
    if min(page_size, page_count, bytes_per_token, layers) < 1:
        raise LayoutError(
            f"page_size {page_size}, page_count {page_count}, bytes_per_token {bytes_per_token} "
            f"and layers {layers} must be at least 1"
        )
    while layers and bytes_per_token % (2 * layers):
        layers -= 1
    if not layers:
        layout = mla(
            layers=1,
            page_size=page_size,
            page_count=page_count,
            latent_dim=bytes_per_token,
            itemsize=1,
        )
    else:
        layout = mha_layer_first(
            layers=layers,
            page_size=page_size,
            page_count=page_count,
            heads=1,
            head_dim=bytes_per_token // (2 * layers),
            itemsize=1,
            separate=2 * layers + TABLE_FDS <= FDS_PER_FRAME_MAX,
        )
    layout.check()
    return layout


class SharedPool:
    """One pool's memory. Closed by its scheduler after the daemon session has ended."""

    def __init__(
        self,
        *,
        page_size: int,
        page_count: int,
        bytes_per_token: int,
        layers: int = 2,
        landings: int = 0,
        staging_bytes: int = 0,
    ) -> None:
        """`landings`: so many loads may land layer by layer at the same time; `staging_bytes`: of
        a staging slab (0: none)."""
        self.layout = choose_layout(
            page_size=page_size,
            page_count=page_count,
            bytes_per_token=bytes_per_token,
            layers=layers,
        )
        self._ipc = SharedMemoryIPC()
        self._mappings: list[SharedMapping] = [
            self._ipc.create(f"treecored-pool-{number}", nbytes)
            for number, nbytes in enumerate(self.layout.allocation_bytes)
        ]
        self.timelines = TimelineTable.create(self._ipc, "treecored-timelines", landings=landings)
        self.words = WordTable.create(self._ipc, "treecored-words", page_count + 1)
        self.staging: Staging | None = None
        self._staged = False  # in the present registration
        if staging_bytes:
            slab = SharedSlab(self._ipc, self.layout, self._mappings, staging_bytes)
            self.staging = Staging(self.layout, slab)

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.layout.page_size

    @property
    def page_count(self) -> int:
        """Pages of the pool."""
        return self.layout.page_count

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all buffers."""
        return self.layout.page_bytes

    @property
    def fingerprint(self) -> bytes:
        """What must agree before another pool's bytes are this pool's, in full."""
        return Fingerprint(
            model="treecored-reference",
            layer_count=len(self.layout.buffers),
            page_size=self.page_size,
            layout=self.layout.canonical(),
        ).encode()

    @property
    def named(self) -> bool:
        """Page numbers are page numbers here."""
        return False

    @property
    def table_fds(self) -> list[int]:
        """Descriptors of timelines and words."""
        return [self.timelines.fd, self.words.fd]

    @property
    def fds(self) -> list[int]:
        """Descriptors of a registration in order: allocations, tables, what staging needs."""
        pool, tables, staging = (m.fd for m in self._mappings), self.table_fds, self._offered
        if staging is None:
            return [*pool, *tables]
        return [*pool, *staging.slab_fds, *tables, *staging.fds]

    def packed_layout(self) -> bytes:
        """The layout as it stands in a registration."""
        staging = self._offered
        return msgspec.msgpack.encode(self.layout if staging is None else staging.layout)

    def packed_handles(self) -> bytes:
        """The memory handles as they stand in a registration, one an allocation."""
        handles = [self._ipc.export(mapping)[0] for mapping in self._mappings]
        if self._offered is not None:
            handles.append(self._offered.handle)
        return msgspec.msgpack.encode(tuple(handles))

    def packed_sync(self) -> bytes:
        """The timelines say it all."""
        return b""

    def make_allocator(self) -> Allocator:
        """An allocator with all pages free; one at a time."""
        return PageAllocator(self.page_count)

    def page_of(self, page: int) -> int:
        """Where a page of a page list lies: at its number."""
        return page

    def chunks(self) -> list[ChunkView]:
        """Where the chunks of every buffer lie, in host page order."""
        return [
            ChunkView(
                self._mappings[buffer.allocation].view,
                buffer.offset,
                buffer.page_stride,
                buffer.chunk_bytes,
            )
            for buffer in self.layout.buffers
        ]

    def now(self) -> tuple[int, int]:
        """Where the timelines stand (forward, current)."""
        return self.timelines.read(FORWARD), self.timelines.read(CURRENT)

    def advance(self) -> tuple[int, int]:
        """Let both timelines pass everything written so far; returns their new values."""
        forward, current = self.now()
        self.timelines.write(FORWARD, forward + 1)
        self.timelines.write(CURRENT, current + 1)
        return forward + 1, current + 1

    @property
    def _offered(self) -> Staging | None:
        return self.staging if self._staged else None

    def begin_staging(self, below_bytes: int) -> bool:
        """Make a ring for the registration that follows, where there are a slab and small chunks;
        whatever served the last one is over."""
        staging = self.staging
        if staging is not None:
            self._staged = staging.begin(below_bytes)
        return self._staged

    @property
    def stage_requests(self) -> int:
        """So many times movers had pages packed or unpacked."""
        return self.staging.requests if self.staging is not None else 0

    @property
    def at_rest(self) -> bool:
        """Whether the stager is."""
        return self.staging is None or self.staging.at_rest

    def settle(self) -> None:
        """Wait for the stager."""
        if self.staging is not None:
            self.staging.settle()

    def close(self) -> None:
        """Unmap everything here. Repeatable."""
        if self.staging is not None:
            self.staging.close()
        self.timelines.close()
        self.words.close()
        while self._mappings:
            self._ipc.close(self._mappings.pop())

    def __repr__(self) -> str:
        return f"<SharedPool {self.page_count} pages of {self.page_bytes} bytes>"


class PageAllocator:
    """Free pages of a pool: last freed, first reused; the same calls give the same pages."""

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self._free = list(range(page_count - 1, -1, -1))
        self._is_free = bytearray(b"\1") * page_count

    @property
    def free_count(self) -> int:
        """Pages that can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> array[int] | None:
        """Take `count` pages, or none at all (None) when there are not enough."""
        if count > len(self._free):
            return None
        cut = len(self._free) - count
        taken = array("I", self._free[cut:])
        del self._free[cut:]
        taken.reverse()
        for page in taken:
            self._is_free[page] = 0
        return taken

    def free(self, pages: bytes | array[int]) -> None:
        """Give pages back (packed or not); raises `InternalError` for one that is free already."""
        back = unpack_pages(pages) if isinstance(pages, bytes) else pages
        for page in reversed(back):
            if page >= self.page_count or self._is_free[page]:
                raise InternalError(f"page {page} is freed twice, or is none of the pool")
            self._is_free[page] = 1
            self._free.append(page)

    def used(self) -> array[int]:
        """Pages that are not free, in order."""
        return array("I", (page for page in range(self.page_count) if not self._is_free[page]))

    def expect(self, pages: bytes) -> None:
        """A page lies where its number says."""

    def __repr__(self) -> str:
        return f"<PageAllocator {self.free_count} of {self.page_count} free>"
