"""What several tests of transfer need: small layouts, packed lists, pools of shared memory."""

from array import array
from collections.abc import Iterable

from directory.core.actions import CopyKind, CopyPart, Fence, SubmitCopy, Word
from transfer.host_tier import HostTierMemory
from transfer.imports import ImportedPool
from transfer.ipc.memory import MemoryHandle, SharedMapping, SharedMemoryIPC
from transfer.ipc.page_table import PageTable
from transfer.ipc.sync import TimelineTable, WordTable
from transfer.layout import PoolLayout, mha_layer_first

HOST = -1


def packed(pages: Iterable[int]) -> bytes:
    """A packed page list."""
    return array("I", pages).tobytes()


def part(source: int, source_pages: Iterable[int], target: int, pages: Iterable[int]) -> CopyPart:
    """A part of a copy from lists of page numbers."""
    return CopyPart(source, packed(source_pages), target, packed(pages))


def copy(
    op: int,
    kind: CopyKind,
    *parts: CopyPart,
    fences: Iterable[tuple[int, int, int]] = (),
    words: Iterable[tuple[int, int, int]] = (),
) -> SubmitCopy:
    """A copy with its fences and words given as tuples."""
    return SubmitCopy(
        op, kind, parts, tuple(Fence(*f) for f in fences), tuple(Word(*w) for w in words)
    )


def small_layout(page_count: int = 16, *, layers: int = 2, head_dim: int = 8) -> PoolLayout:
    """An MHA pool, layer first, a few bytes a chunk."""
    return mha_layer_first(
        layers=layers,
        page_size=2,
        page_count=page_count,
        heads=1,
        head_dim=head_dim,
        itemsize=2,
        separate=True,
    )


def page_pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that differ between pages and within a page."""
    return bytes((seed * 131 + i * 7 + i // 251 + 1) % 256 for i in range(nbytes))


class OwnedPool:
    """A pool as its scheduler has it: memory, timelines and words of its own."""

    def __init__(
        self,
        layout: PoolLayout,
        *,
        word_count: int = 16,
        landings: int = 0,
        page_table: bool = False,
    ) -> None:
        self.ipc = SharedMemoryIPC()
        self.layout = layout
        self.allocations: list[SharedMapping] = [
            self.ipc.create(f"pool-{number}", nbytes)
            for number, nbytes in enumerate(layout.allocation_bytes)
        ]
        self.timelines = TimelineTable.create(self.ipc, "timelines", landings=landings)
        self.words = WordTable.create(self.ipc, "words", word_count)
        self.page_table: PageTable | None = None
        if page_table:
            self.page_table = PageTable.create(self.ipc, "pages", layout.page_count)

    @property
    def handles(self) -> tuple[MemoryHandle, ...]:
        """What the exporter announces."""
        return tuple(self.ipc.export(mapping)[0] for mapping in self.allocations)

    @property
    def fds(self) -> list[int]:
        """The descriptors to send, in the order of an import message."""
        tables = [self.timelines.fd, self.words.fd]
        if self.page_table is not None:
            tables.append(self.page_table.fd)
        return [*(m.fd for m in self.allocations), *tables]

    def name(self, name: int, page: int) -> None:
        """Let a name stand for a page."""
        assert self.page_table is not None
        self.page_table.write(name, page)

    def write_page(self, page: int, content: bytes) -> None:
        """Fill a page, given as a host page."""
        start = 0
        for b in self.layout.buffers:
            at = b.offset + page * b.page_stride
            piece = content[start : start + b.chunk_bytes]
            self.allocations[b.allocation].view[at : at + b.chunk_bytes] = piece
            start += b.chunk_bytes

    def read_page(self, page: int) -> bytes:
        """A page as a host page."""
        return b"".join(
            bytes(self.allocations[b.allocation].view[at : at + b.chunk_bytes])
            for b in self.layout.buffers
            for at in (b.offset + page * b.page_stride,)
        )

    def fill(self, seed: int) -> None:
        """Give every page a pattern of its own."""
        for page in range(self.layout.page_count):
            self.write_page(page, self.pattern(seed, page))

    def pattern(self, seed: int, page: int) -> bytes:
        """What `fill` wrote into a page."""
        return page_pattern(seed * 1000 + page, self.layout.page_bytes)

    def import_as(self, pool: int) -> ImportedPool:
        """Import it into this process a second time, as a mover would."""
        ipc = SharedMemoryIPC()
        return ImportedPool.open(
            pool,
            self.layout,
            self.handles,
            self.fds,
            memory=ipc,
            tables=ipc,
            page_table=self.page_table is not None,
        )

    def close(self) -> None:
        """Give everything back."""
        self.timelines.close()
        self.words.close()
        if self.page_table is not None:
            self.page_table.close()
        for mapping in self.allocations:
            self.ipc.close(mapping)


def small_tier(layout: PoolLayout, *, slots: int = 32, per_segment: int = 8) -> HostTierMemory:
    """A tier of a few segments."""
    return HostTierMemory.create(slots * layout.page_bytes, per_segment * layout.page_bytes)


def slot(index: int, per_segment: int = 8) -> int:
    """Slot id of the index-th page of a tier with so many pages a segment."""
    return (index // per_segment) << 16 | index % per_segment
