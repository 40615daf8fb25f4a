"""Imported pools: everything that a mover holds of one pool, taken in whole or not at all.

Owns the mappings and tables of the pools that are open in this process. It must never keep a
part of a pool whose import failed, and never trust a size that the exporter announced.
"""

from collections.abc import Sequence

from directory.core.errors import ImportFailed, TransferError
from directory.core.ids import PoolId, is_pool
from transfer.ipc.memory import DeviceMemoryIPC, Mapping, MemoryHandle, SharedMemoryIPC
from transfer.ipc.sync import TIMELINES, TimelineTable, WordTable
from transfer.layout import PoolLayout
from transfer.plan import MemoryKey

TABLE_FDS = 2
"""Descriptors behind those of the allocations: the timelines, then the span words."""


class ImportedPool:
    """One pool's layout, allocations, timelines and words, open in this process."""

    def __init__(
        self,
        pool: PoolId,
        layout: PoolLayout,
        memory: DeviceMemoryIPC,
        mappings: Sequence[Mapping],
        timelines: TimelineTable,
        words: WordTable,
    ) -> None:
        self.pool = pool
        self.layout = layout
        self.mappings = list(mappings)
        self.timelines = timelines
        self.words = words
        self._memory = memory

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
    ) -> "ImportedPool":
        """Check and map a pool. The descriptors stay the caller's, who closes them afterwards.

        `fds`: those of the allocations in order, one for each handle that travels with one, then
        timelines and words. Raises `LayoutError` or `ImportFailed`; nothing stays mapped then.
        """
        if not is_pool(pool):
            raise ImportFailed(f"{pool} is not the id of a pool")
        layout.check()
        _check_handles(layout, handles, fds)
        mappings: list[Mapping] = []
        timelines: TimelineTable | None = None
        try:
            for number, handle in enumerate(handles):
                taken = fds[number : number + 1] if len(fds) > TABLE_FDS else ()
                try:
                    mappings.append(memory.import_memory(handle, tuple(taken)))
                except ImportFailed as error:
                    raise ImportFailed(f"allocation {number}: {error}") from error
            timelines = TimelineTable.open(tables, fds[-2], TIMELINES)
            words = WordTable.open(tables, fds[-1])
        except ImportFailed as error:
            for mapping in mappings:
                memory.close(mapping)
            if timelines is not None:
                timelines.close()
            raise ImportFailed(f"pool {pool} cannot be imported: {error}") from error
        return cls(pool, layout, memory, mappings, timelines, words)

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
        for table in (self.timelines, self.words):
            try:
                table.close()
            except TransferError as error:
                problems.append(f"{table.what} table: {error}")
        return "; ".join(problems)

    def __repr__(self) -> str:
        return f"<ImportedPool {self.pool}, {len(self.mappings)} allocations>"


def _check_handles(layout: PoolLayout, handles: Sequence[MemoryHandle], fds: Sequence[int]) -> None:
    if len(handles) != len(layout.allocation_bytes):
        raise ImportFailed(f"{len(handles)} handles for {len(layout.allocation_bytes)} allocations")
    # Descriptors of allocations come for all handles or, where a driver needs none, for no one.
    if len(fds) not in (TABLE_FDS, len(handles) + TABLE_FDS):
        raise ImportFailed(
            f"{len(fds)} descriptors for {len(handles)} allocations and {TABLE_FDS} tables"
        )
    for number, (handle, nbytes) in enumerate(zip(handles, layout.allocation_bytes, strict=True)):
        if handle.nbytes < nbytes:
            raise ImportFailed(
                f"allocation {number}: the layout needs {nbytes} bytes, the handle covers "
                f"{handle.nbytes}"
            )
