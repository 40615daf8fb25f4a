"""The CUDA device: copies on a GPU's copy engines, between its memory, peers' and the host's.

Owns the streams, the events and the registration of host memory. Restores and backups have
streams of their own, so that an urgent copy never queues behind a backup. Completion is an event
that is asked, never waited for. It must never report a submission whose copies may still run: what
the driver cannot say for certain ends this device (`DeviceLost`), and with it this process.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from directory.core.errors import TransferError
from transfer.device.cuda_batch import best_copy
from transfer.device.cuda_host import CHUNK_BYTES, PinnedMemory, pin
from transfer.device.protocol import (
    Completion,
    DeviceLost,
    MemoryBusy,
    Ticket,
    UnknownMemory,
)
from transfer.ipc.cuda_driver import CudaError, Driver
from transfer.ipc.cuda_memory import CudaMapping
from transfer.ipc.memory import Mapping, SharedMapping
from transfer.plan import MemoryKey, Range, RangeBatch

STREAMS_PER_LANE = 2
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2


class Attached(NamedTuple):
    """An attached memory. `chunk_bytes`: no copy may cross a multiple of it (0: any may)."""

    address: int
    nbytes: int
    chunk_bytes: int
    pinned: PinnedMemory | None


class InFlight(NamedTuple):
    """A submission that is not known to be done. `error`: why its bytes are lost already."""

    ticket: Ticket
    event: Any
    keys: frozenset[MemoryKey]
    error: str


class CudaDevice:
    """Implements `Device` for one GPU. Belongs to one thread."""

    def __init__(
        self,
        driver: Driver,
        *,
        pinned: bool = True,
        batched: bool = True,
        streams_per_lane: int = STREAMS_PER_LANE,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`pinned`: register host memory. `batched`: one driver call a submission."""
        self._driver = driver
        self._pinned = pinned
        self._chunk_bytes = chunk_bytes
        self._memories: dict[MemoryKey, Attached] = {}
        self._in_flight: dict[Ticket, InFlight] = {}
        self._spare_events: list[Any] = []
        self._last_ticket = 0
        # Only registered memory is asynchronous for the batched call, and safe to hand to it.
        self._copy = best_copy(driver, batched=batched and pinned)
        lowest, highest = driver.call("cuCtxGetStreamPriorityRange")
        self._urgent = self._streams(streams_per_lane, int(highest))
        self._others = self._streams(streams_per_lane, int(lowest))

    @property
    def name(self) -> str:
        """UUID of the GPU."""
        return self._driver.uuid

    @property
    def in_flight(self) -> int:
        """Submissions that `poll` has not reported."""
        return len(self._in_flight)

    def attach(self, key: MemoryKey, mapping: Mapping) -> None:
        """Make a memory known; host memory is registered. Raises `NotPinned` if it cannot be."""
        if key in self._memories:
            raise MemoryBusy(f"memory {key} is attached already")
        if isinstance(mapping, SharedMapping):
            self._memories[key] = self._attach_host(mapping)
        elif isinstance(mapping, CudaMapping):
            self._memories[key] = Attached(mapping.address, mapping.nbytes, 0, None)
        else:
            raise UnknownMemory(f"memory {key} is neither the host's nor a GPU's")

    def detach(self, key: MemoryKey) -> None:
        """Forget a memory that no submission in flight touches."""
        if key not in self._memories:
            raise UnknownMemory(f"memory {key} is not attached")
        if any(key in submission.keys for submission in self._in_flight.values()):
            raise MemoryBusy(f"memory {key} is used by a copy in flight")
        memory = self._memories.pop(key)
        if memory.pinned is not None:
            memory.pinned.unpin()

    def submit(self, batches: Sequence[RangeBatch], *, urgent: bool = False) -> Ticket:
        """Queue the copies on one stream, and behind them an event."""
        targets, sources, sizes = array("Q"), array("Q"), array("Q")
        for batch in batches:
            self._add_ranges(batch, targets, sources, sizes)
        lane = self._urgent if urgent else self._others
        stream = lane[0]
        lane.rotate(-1)
        error = ""
        try:
            self._copy(targets, sources, sizes, stream)
        except CudaError as failure:
            # Some of it may have been queued. The event behind it tells when that is over; if
            # even that cannot be queued, nobody can tell.
            error = str(failure)
        try:
            event = self._spare_events.pop() if self._spare_events else self._new_event()
            self._driver.call("cuEventRecord", event, stream)
        except CudaError as failure:
            raise DeviceLost(f"{self.name} is lost: {error or failure}") from failure
        self._last_ticket += 1
        keys = frozenset(key for batch in batches for key in (batch.source, batch.target))
        self._in_flight[self._last_ticket] = InFlight(self._last_ticket, event, keys, error)
        return self._last_ticket

    def poll(self) -> list[Completion]:
        """Ask the events. Raises `DeviceLost` when the context is broken."""
        done: list[Completion] = []
        for submission in list(self._in_flight.values()):
            try:
                reached = self._driver.ready(submission.event)
            except CudaError as error:
                raise DeviceLost(f"{self.name} is lost: {error}") from error
            if reached:
                del self._in_flight[submission.ticket]
                self._spare_events.append(submission.event)
                done.append(Completion(submission.ticket, submission.error))
        return done

    def _attach_host(self, mapping: SharedMapping) -> Attached:
        if not self._pinned:
            return Attached(mapping.address, mapping.nbytes, 0, None)
        pinned = pin(self._driver, mapping.address, mapping.nbytes, self._chunk_bytes)
        # A copy must not begin in one registration and end in the next.
        crossing = self._chunk_bytes if mapping.nbytes > self._chunk_bytes else 0
        return Attached(mapping.address, mapping.nbytes, crossing, pinned)

    def _add_ranges(
        self, batch: RangeBatch, targets: "array[int]", sources: "array[int]", sizes: "array[int]"
    ) -> None:
        source, target = self._memory(batch.source), self._memory(batch.target)
        ranges: Sequence[Range] = batch.ranges
        for key, memory, side in ((batch.source, source, 0), (batch.target, target, 1)):
            end = max(r[side] + r[2] for r in ranges)
            if end > memory.nbytes or min(map(min, ranges)) < 0:
                raise UnknownMemory(
                    f"a range reaches byte {end} of {key}, which has {memory.nbytes}"
                )
            if memory.chunk_bytes:
                ranges = cut_at(ranges, side, memory.chunk_bytes)
        targets.extend([target.address + r[1] for r in ranges])
        sources.extend([source.address + r[0] for r in ranges])
        sizes.extend([r[2] for r in ranges])

    def _memory(self, key: MemoryKey) -> Attached:
        memory = self._memories.get(key)
        if memory is None:
            raise UnknownMemory(f"memory {key} is not attached")
        return memory

    def _streams(self, count: int, priority: int) -> deque[Any]:
        create = self._driver.call
        return deque(
            create("cuStreamCreateWithPriority", STREAM_NON_BLOCKING, priority)
            for _ in range(count)
        )

    def _new_event(self) -> Any:
        return self._driver.call("cuEventCreate", EVENT_DISABLE_TIMING)

    def __repr__(self) -> str:
        return (
            f"<CudaDevice {self.name}, {len(self._memories)} memories, {self.in_flight} in flight>"
        )


def cut_at(ranges: Sequence[Range], side: int, chunk_bytes: int) -> list[Range]:
    """Cut ranges so that none crosses a multiple of `chunk_bytes` on one side."""
    pieces: list[Range] = []
    for source, target, nbytes in ranges:
        while nbytes:
            start = (source, target)[side]
            piece = min(nbytes, chunk_bytes - start % chunk_bytes)
            pieces.append((source, target, piece))
            source, target, nbytes = source + piece, target + piece, nbytes - piece
    return pieces


def open_device(uuid: str, *, pinned: bool = True) -> tuple[CudaDevice, Driver]:
    """The device of a GPU and the context that its memory is imported into.

    Raises `TransferError` with the cure where the GPU or the driver is not there.
    """
    driver = Driver.open(uuid)
    try:
        return CudaDevice(driver, pinned=pinned), driver
    except CudaError as error:
        raise TransferError(f"GPU {uuid} cannot be used: {error}") from error
