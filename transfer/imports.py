"""Imported pools: everything that a mover holds of one pool, taken in whole or not at all.

Owns the mappings and tables of the pools that are open in this process. It must never keep a
part of a pool whose import failed, and never trust a size that the exporter announced.
"""

from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf

from directory.core.actions import CopyPart, SubmitCopy
from directory.core.errors import ImportFailed, TransferError
from directory.core.ids import HOST, Place, PoolId, is_pool
from transfer.copies import CPU
from transfer.ipc.memory import (
    DRIVER_KINDS,
    DeviceMemoryIPC,
    Mapping,
    MemoryHandle,
    SharedMemoryIPC,
)
from transfer.ipc.page_table import PageTable
from transfer.ipc.stage_ring import StageRing, check_wake
from transfer.ipc.sync import TIMELINES, Timelines, TimelineTable, WordTable
from transfer.layout import PoolLayout
from transfer.plan import MemoryKey
from transfer.staging import Slab, moved_chunks

TABLE_FDS = 2
"""Descriptors behind those of the allocations: the timelines, then the span words. A pool whose
pages are named has one more behind them: the page table."""
STAGE_FDS = 2
"""Descriptors at the end of a pool with a staging slab: the stage ring, and what wakes its
scheduler."""

ReadTimelines = Callable[[TimelineTable], Timelines]
"""Takes a table over, or closes it and raises `ImportFailed`."""


class ImportedPool:
    """One pool's layout, allocations, timelines, words and page table, open in this process.

    `device`: UUID of the GPU that its memory lies on, as its scheduler announced it.
    """

    device: str = CPU

    def __init__(
        self,
        pool: PoolId,
        layout: PoolLayout,
        memory: DeviceMemoryIPC,
        mappings: Sequence[Mapping],
        timelines: Timelines,
        words: WordTable,
        page_table: PageTable | None = None,
        landings: TimelineTable | None = None,
        device: str = CPU,
    ) -> None:
        self.pool = pool
        self.layout = layout
        self.mappings = list(mappings)
        self.timelines = timelines
        self.words = words
        self.page_table = page_table
        """Where named pages lie; None: page numbers are page numbers."""
        self.landings = landings
        """Where landing counters are written: the timelines' own table, which closes it."""
        self.device = device
        self._memory = memory

    slab: Slab | None = None
    """For small chunks, where the scheduler offers one."""

    @classmethod
    def open(
        cls,
        pool: PoolId,
        layout: PoolLayout,
        handles: Sequence[MemoryHandle],
        fds: Sequence[int],
        *,
        memory: DeviceMemoryIPC,
        tables: SharedMemoryIPC,
        read_timelines: ReadTimelines | None = None,
        page_table: bool = False,
        staging: bool = False,
    ) -> "ImportedPool":
        """Check and map a pool. The descriptors stay the caller's, who closes them afterwards.

        `fds`: those of the allocations in order, one for each handle that travels with one, then
        timelines and words, with `page_table` that, and with `staging` the stage ring and what
        wakes its scheduler: the last allocation is the slab then. `read_timelines`: makes of the
        table what the pool chose as its sync (it closes the table). Raises `LayoutError` or
        `ImportFailed`; nothing stays mapped then.
        """
        if not is_pool(pool):
            raise ImportFailed(f"{pool} is not the id of a pool")
        layout.check()
        stage_fds = STAGE_FDS * staging
        table_fds = TABLE_FDS + page_table + stage_fds
        _check_handles(layout, handles, fds, table_fds)
        mappings: list[Mapping] = []
        opened: list[Timelines | WordTable | PageTable] = []
        left = list(fds[:-table_fds])
        try:
            for number, handle in enumerate(handles):
                taken = () if handle.kind in DRIVER_KINDS or not left else (left.pop(0),)
                try:
                    mappings.append(memory.import_memory(handle, taken))
                except ImportFailed as error:
                    raise ImportFailed(f"allocation {number}: {error}") from error
            table = TimelineTable.open(tables, fds[-table_fds], TIMELINES)
            timelines = table if read_timelines is None else read_timelines(table)
            opened.append(timelines)
            words = WordTable.open(tables, fds[1 - table_fds])
            opened.append(words)
            pages = None
            if page_table:
                pages = PageTable.open(tables, fds[-1 - stage_fds], layout.page_count)
                opened.append(pages)
            slab = open_slab(pool, layout, tables, fds[-STAGE_FDS:]) if staging else None
        except ImportFailed as error:
            for mapping in mappings:
                memory.close(mapping)
            for part in opened:
                part.close()
            raise ImportFailed(f"pool {pool} cannot be imported: {error}") from error
        device = handles[0].device
        made = cls(pool, layout, memory, mappings, timelines, words, pages, table, device)
        made.slab = slab
        return made

    def memories(self) -> list[tuple[MemoryKey, Mapping]]:
        """What to attach to a device."""
        return [((self.pool, number), mapping) for number, mapping in enumerate(self.mappings)]

    def close(self) -> str:
        """Unmap everything; returns what could not be closed and why (empty: all closed)."""
        problems = []
        for number, mapping in enumerate(self.mappings):
            try:
                self._memory.close(mapping)
            except TransferError as error:
                problems.append(f"allocation {number}: {error}")
        self.mappings.clear()
        for table in (self.timelines, self.words, self.page_table, self.slab):
            try:
                if table is not None:
                    table.close()
            except TransferError as error:
                problems.append(f"{table!r}: {error}")
        return "; ".join(problems)

    def __repr__(self) -> str:
        return f"<ImportedPool {self.pool}, {len(self.mappings)} allocations>"


def translated(part: CopyPart, pools: MappingOf[PoolId, ImportedPool]) -> CopyPart:
    """The part with page numbers where its pool speaks of pages by name.

    Only once the fences have passed and the words are as reported: earlier, an entry may not be
    written yet. Raises `LayoutError` for a name or an entry that is no page of its pool.
    """
    return CopyPart(
        part.source,
        _pages(part.source, part.source_pages, pools),
        part.target,
        _pages(part.target, part.target_pages, pools),
    )


def devices_of(request: SubmitCopy, pools: MappingOf[PoolId, ImportedPool]) -> set[str]:
    """Where the pages of a copy lie: UUIDs of GPUs, and "cpu" for host memory."""
    places = {place for part in request.parts for place in (part.source, part.target)}
    return {pools[place].device if is_pool(place) else CPU for place in places}


def slab_for(
    parts: Sequence[CopyPart], pools: MappingOf[PoolId, ImportedPool], chunks_min: int
) -> Slab | None:
    """The slab through which a copy goes: of a pool with small chunks, where it moves so many."""
    places = {
        place
        for part in parts
        if HOST in (part.source, part.target)
        for place in (part.source, part.target)
    } - {HOST}
    pool = pools.get(places.pop()) if len(places) == 1 else None
    if pool is None or pool.slab is None or not pool.slab.fits(pool.layout):
        return None
    return pool.slab if moved_chunks(parts, pool.layout) >= chunks_min else None


def open_slab(
    pool: PoolId, layout: PoolLayout, tables: SharedMemoryIPC, fds: Sequence[int]
) -> Slab:
    """The last allocation as a slab; raises `ImportFailed`. `fds`: ring, event descriptor."""
    number = len(layout.allocation_bytes) - 1
    if any(buffer.allocation == number for buffer in layout.buffers):
        raise ImportFailed("the last allocation is to be the slab, and buffers lie in it")
    ring = StageRing.take_over(tables, fds[0])
    try:
        head = ring.check()
        wake_fd = check_wake(fds[1])
    except (ImportFailed, OSError) as error:
        ring.close()
        raise ImportFailed(f"stage ring: {error}") from error
    return Slab(pool, number, layout.allocation_bytes[number], ring, wake_fd, head)


def _pages(place: Place, pages: bytes, pools: MappingOf[PoolId, ImportedPool]) -> bytes:
    pool = pools.get(place)
    table = pool.page_table if pool is not None else None
    return pages if table is None else table.translate(pages)


def _check_handles(
    layout: PoolLayout, handles: Sequence[MemoryHandle], fds: Sequence[int], table_fds: int
) -> None:
    if len(handles) != len(layout.allocation_bytes):
        raise ImportFailed(f"{len(handles)} handles for {len(layout.allocation_bytes)} allocations")
    # An allocation comes with a descriptor, unless its handle is bytes of a driver's.
    needed = sum(handle.kind not in DRIVER_KINDS for handle in handles)
    if len(fds) not in (table_fds, needed + table_fds):
        raise ImportFailed(
            f"{len(fds)} descriptors for {len(handles)} allocations and {table_fds} tables"
        )
    for number, (handle, nbytes) in enumerate(zip(handles, layout.allocation_bytes, strict=True)):
        if handle.nbytes < nbytes:
            raise ImportFailed(
                f"allocation {number}: the layout needs {nbytes} bytes, the handle covers "
                f"{handle.nbytes}"
            )
