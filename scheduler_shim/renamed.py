"""A reference pool whose pages have names: what a GPU's scheduler needs, tried without a GPU.

Owns the page table and who has which page. A name gets another page at every allocation, so that
whoever takes names for page numbers, or looks them up too early, reads and writes wrong bytes.
The mapping follows from the calls alone. It must never let two names have one page.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final

from scheduler_shim.pools import Allocator, PageAllocator, SharedPool
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.page_table import PageTable

STRIDE: Final = 7
"""Places by which the queue of free pages is turned before each draw: neighbours part ways."""


class RenamedPool(SharedPool):
    """A `SharedPool` whose page lists are names."""

    def __init__(
        self,
        *,
        page_size: int,
        page_count: int,
        bytes_per_token: int,
        layers: int = 2,
        staging_bytes: int = 0,
    ) -> None:
        super().__init__(
            page_size=page_size,
            page_count=page_count,
            bytes_per_token=bytes_per_token,
            layers=layers,
            staging_bytes=staging_bytes,
        )
        self.page_table = PageTable.create(SharedMemoryIPC(), "treecored-pages", page_count)
        for name in range(page_count):
            self.page_table.write(name, page_count)  # no page: whoever reads it too early is told

    @property
    def named(self) -> bool:
        """Page lists are names."""
        return True

    @property
    def table_fds(self) -> list[int]:
        """Descriptors of timelines, words and page table."""
        return [*super().table_fds, self.page_table.fd]

    def make_allocator(self) -> Allocator:
        """An allocator of names, each with a page of its own while it is not free."""
        return RenamingAllocator(self.page_table)

    def page_of(self, page: int) -> int:
        """Where the page of a name lies now."""
        return self.page_table.read(page)

    def close(self) -> None:
        """Unmap everything here. Repeatable."""
        self.page_table.close()
        super().close()

    def __repr__(self) -> str:
        return f"<RenamedPool {self.page_count} pages of {self.page_bytes} bytes>"


class RenamingAllocator:
    """Names of free pages; each allocation draws other pages for them."""

    def __init__(self, table: PageTable) -> None:
        self._names = PageAllocator(len(table))
        self._table = table
        self._pages = deque(range(len(table)))

    @property
    def page_count(self) -> int:
        """Pages of the pool, free or not."""
        return self._names.page_count

    @property
    def free_count(self) -> int:
        """Pages that can be allocated."""
        return self._names.free_count

    def allocate(self, count: int) -> array[int] | None:
        """Take `count` pages by name, or none at all (None) when there are not enough."""
        names = self._names.allocate(count)
        for name in names or ():
            self._pages.rotate(STRIDE)
            self._table.write(name, self._pages.popleft())
        return names

    def free(self, pages: bytes | array[int]) -> None:
        """Give pages back by name; raises `InternalError` for one that is free already.

        The table keeps the old entry, as it does where a stream writes it.
        """
        names = array("I")
        names.frombytes(bytes(pages))
        self._names.free(names)
        self._pages.extend(self._table.read(name) for name in names)

    def used(self) -> array[int]:
        """Names in use, in order."""
        return self._names.used()

    def expect(self, pages: bytes) -> None:
        """The table is at hand."""

    def __repr__(self) -> str:
        return f"<RenamingAllocator {self.free_count} of {self.page_count} free>"
