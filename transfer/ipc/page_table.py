"""The page table: where the pages lie that a pool's scheduler speaks of by name.

Owns the layout (one u32 a name: the number of the page) and how a list of names is looked up. The
scheduler writes it, on a GPU by its own streams, so an entry is right once the fences of the copy
that names it have passed, and means something only while its span's word is as reported. It must
never let an entry through that is none of the pool's pages: whatever a scheduler writes here, it
harms nobody's copies but its own.
"""

from __future__ import annotations

from array import array

from directory.core.errors import ImportFailed, LayoutError
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.ipc.sync import full_barrier

ENTRY_BYTES = 4


class PageTable:
    """A table of page numbers by name over shared memory."""

    def __init__(self, ipc: SharedMemoryIPC, mapping: SharedMapping, page_count: int) -> None:
        """Take over one reference to the mapping, which has room for `page_count` entries."""
        self._ipc = ipc
        self.mapping = mapping
        self._entries = mapping.view[: page_count * ENTRY_BYTES].cast("I")
        self._closed = False

    @classmethod
    def create(cls, ipc: SharedMemoryIPC, name: str, page_count: int) -> PageTable:
        """Make a table of zeros."""
        return cls(ipc, ipc.create(name, page_count * ENTRY_BYTES), page_count)

    @classmethod
    def open(cls, ipc: SharedMemoryIPC, fd: int, page_count: int) -> PageTable:
        """Map a table with an entry for each of a pool's pages; raises `ImportFailed`."""
        try:
            return cls(ipc, ipc.import_fd(fd, page_count * ENTRY_BYTES), page_count)
        except ImportFailed as error:
            raise ImportFailed(f"page table: {error}") from error

    @property
    def fd(self) -> int:
        """The descriptor to send to the other side."""
        return self.mapping.fd

    def __len__(self) -> int:
        return len(self._entries)

    def write(self, name: int, page: int) -> None:
        """Let a name stand for a page."""
        self._entries[name] = page

    def read(self, name: int) -> int:
        """The page that a name stands for."""
        return self._entries[name]

    def translate(self, names: bytes) -> bytes:
        """The pages of packed names, packed; raises `LayoutError` for what is no page.

        What was written before the fences and words that the caller has looked at is seen.
        """
        if len(names) % ENTRY_BYTES:
            raise LayoutError(f"a list of names has {len(names)} bytes, no multiple of 4")
        full_barrier()
        wanted = array("I")
        wanted.frombytes(names)
        try:
            pages = array("I", map(self._entries.__getitem__, wanted))
        except IndexError:
            raise LayoutError(
                f"name {max(wanted)} is beyond the {len(self)} entries of the page table"
            ) from None
        if pages and max(pages) >= len(self):
            at, page = next((at, page) for at, page in enumerate(pages) if page >= len(self))
            raise LayoutError(
                f"name {wanted[at]} stands for page {page}, beyond the {len(self)} of the pool"
            )
        return pages.tobytes()

    def close(self) -> None:
        """Give the memory back. Repeatable."""
        if not self._closed:
            self._closed = True
            self._entries.release()
            self._ipc.close(self.mapping)

    def __repr__(self) -> str:
        return f"<PageTable {self.mapping!r}>"
