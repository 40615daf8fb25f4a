"""Counters that two processes share: timelines (fences) and span words.

Owns the layout of both tables (u64 words, native order, eight bytes each) and how they are read
and written: every access is one aligned eight-byte load or store, so a reader never sees half a
value. Each counter has one writer. Nothing here blocks, except `wait` with its deadline.
"""

import platform
import threading
import time
from collections.abc import Iterable
from collections.abc import Mapping as MappingOf
from typing import Annotated, Protocol, Self

import msgspec

from directory.core.actions import Fence
from directory.core.errors import ImportFailed, TransferError
from directory.core.ids import CURRENT, LANDINGS, POOL_WORD, PoolId
from transfer.fence import pending
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC

COUNTER_BYTES = 8
TIMELINES = CURRENT + 1
WAIT_POLL_S = 50e-6


TIMELINE_SYNC = "timeline"
EVENT_SYNC = "cuda-events"


class SyncHandle(msgspec.Struct, frozen=True, array_like=True):
    """How a pool's fences are to be read; chosen by its scheduler at registration.

    "timeline": the counters say it all, whoever writes them (a stream, or a thread that has
    waited for one). "cuda-events": the counters say what was recorded, IPC events whether it was
    reached; their handles are `opaque`.
    """

    kind: Annotated[str, msgspec.Meta(max_length=32)] = TIMELINE_SYNC
    opaque: Annotated[bytes, msgspec.Meta(max_length=16 * 1024)] = b""


class Timelines(Protocol):
    """What the engine needs of a pool's timelines, however they are kept."""

    what: str

    def read(self, index: int) -> int:
        """Highest value that a timeline has passed; never blocks."""
        ...

    def close(self) -> None:
        """Give everything back. Repeatable."""
        ...


class OutOfTable(TransferError):
    """A counter index beyond the table that the pool registered."""


class CounterTable:
    """A table of u64 counters over shared memory."""

    what = "counter"

    def __init__(self, ipc: SharedMemoryIPC, mapping: SharedMapping) -> None:
        """Take over one reference to the mapping."""
        self._ipc = ipc
        self.mapping = mapping
        usable = mapping.nbytes - mapping.nbytes % COUNTER_BYTES
        self._counters = mapping.view[:usable].cast("Q")
        self._closed = False

    @classmethod
    def create(cls, ipc: SharedMemoryIPC, name: str, count: int) -> Self:
        """Make a table of zeros."""
        return cls(ipc, ipc.create(name, count * COUNTER_BYTES))

    @classmethod
    def open(cls, ipc: SharedMemoryIPC, fd: int, count_min: int = 1) -> Self:
        """Map a table of at least `count_min` counters; raises `ImportFailed`."""
        try:
            return cls(ipc, ipc.import_fd(fd, count_min * COUNTER_BYTES))
        except ImportFailed as error:
            raise ImportFailed(f"{cls.what} table: {error}") from error

    @property
    def fd(self) -> int:
        """The descriptor to send to the other side."""
        return self.mapping.fd

    def __len__(self) -> int:
        return len(self._counters)

    def read(self, index: int) -> int:
        """Value of a counter. What was written before it by its writer is visible afterwards."""
        if not 0 <= index < len(self._counters):
            raise OutOfTable(f"{self.what} {index} of a table of {len(self._counters)}")
        value = self._counters[index]
        full_barrier()
        return value

    def _store(self, index: int, value: int) -> None:
        if not 0 <= index < len(self._counters):
            raise OutOfTable(f"{self.what} {index} of a table of {len(self._counters)}")
        full_barrier()
        self._counters[index] = value
        full_barrier()

    def close(self) -> None:
        """Give the memory back. Repeatable."""
        if not self._closed:
            self._closed = True
            self._counters.release()
            self._ipc.close(self.mapping)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.mapping!r}>"


class TimelineTable(CounterTable):
    """A pool's timelines: index FORWARD and CURRENT, written by the scheduler only.

    From LANDINGS on: landing counters. While a load that names one is under way the mover alone
    writes it, before and afterwards its owner. An owner that will not wait for the load may take
    it over: the mover looks before each store, and gives the load up.
    """

    what = "timeline"

    @classmethod
    def create(
        cls, ipc: SharedMemoryIPC, name: str, count: int = TIMELINES, *, landings: int = 0
    ) -> Self:
        """Make the timelines of a pool, all at 0; at least `count`, and so many landing counters.

        `landings`: as many loads may land layer by layer at the same time.
        """
        return super().create(ipc, name, max(count, LANDINGS + landings if landings else 0))

    def write(self, index: int, value: int) -> None:
        """Let a timeline reach a value; everything that the writer wrote before is visible."""
        self._store(index, value)


class WordTable(CounterTable):
    """A pool's span words: slot 0 is the pool word, the others name one span each."""

    what = "word"

    def bump(self, slot: int) -> int:
        """Void every reader of the span; returns the new value. Before its pages are freed."""
        value = self.read(slot) + 1
        self._store(slot, value)
        return value

    def bump_pool(self) -> int:
        """Void every reader of the whole pool; returns the new value."""
        return self.bump(POOL_WORD)

    def set_at_least(self, slot: int, value: int) -> int:
        """Raise a word to a value decided elsewhere, never lower it; returns what it is now."""
        now = self.read(slot)
        if now < value:
            self._store(slot, value)
            return value
        return now


class DeviceSyncIPC(Protocol):
    """Contract of a sync backend: how a consumer learns that a producer's stream got there.

    A fence names a pool, a timeline and a value. No wait may be queued on a device that only
    another process can end: the consumer polls on the host and submits work afterwards.
    """

    def query(self, fences: Iterable[Fence]) -> tuple[Fence, ...]:
        """Fences that have not passed yet; never blocks. Raises `TransferError` if unknown."""
        ...

    def wait(self, fences: Iterable[Fence], deadline_s: float) -> tuple[Fence, ...]:
        """Block until all have passed or the deadline is over; returns those that have not."""
        ...


class TimelineSync:
    """Fences over the timelines of several pools; the table of tables is the caller's."""

    def __init__(self, timelines: MappingOf[PoolId, Timelines]) -> None:
        self._timelines = timelines

    def read(self, pool: PoolId, index: int) -> int:
        """Value of a pool's timeline."""
        table = self._timelines.get(pool)
        if table is None:
            raise TransferError(f"pool {pool} has no timelines here")
        return table.read(index)

    def query(self, fences: Iterable[Fence]) -> tuple[Fence, ...]:
        """Fences that have not passed yet."""
        return pending(fences, self.read)

    def wait(self, fences: Iterable[Fence], deadline_s: float) -> tuple[Fence, ...]:
        """Block until all have passed or the deadline is over; returns those that have not."""
        give_up = time.monotonic() + deadline_s
        left = self.query(fences)
        while left and time.monotonic() < give_up:
            time.sleep(WAIT_POLL_S)
            left = self.query(left)
        return left


_FENCE_LOCK = threading.Lock()


def _lock_barrier() -> None:
    # A release followed by an acquire is not reordered on processors with weak ordering, so two
    # pairs keep everything before them apart from everything after them.
    for _ in range(2):
        with _FENCE_LOCK:
            pass


def _no_barrier() -> None:
    """x86 keeps loads in order and stores in order; nothing here needs store-load order."""


full_barrier = _no_barrier if platform.machine() in ("x86_64", "AMD64") else _lock_barrier
"""Keep memory accesses before this call apart from those after it."""
