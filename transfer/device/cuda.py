"""The CUDA device: copies between a GPU's memory, its peers' and the host's.

To and from the host on the copy engines alone; between GPU memories by a kernel where that is the
only fast way, or where nothing else computes.

Owns the streams, the events and the registration of host memory. Restores and backups have
streams of their own, so that an urgent copy never queues behind a backup. Completion is an event
that is asked, never waited for. It must never report a submission whose copies may still run: what
the driver cannot say for certain ends this device (`DeviceLost`), and with it this process.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple

from directory.core.errors import TransferError
from transfer.device.cuda_calls import Beside, Calls, Queued
from transfer.device.cuda_host import CHUNK_BYTES, PinnedMemory, pin
from transfer.device.cuda_kernel import page_kernel
from transfer.device.host_pages import HostPages, node_of_gpu
from transfer.device.protocol import (
    Completion,
    DeviceLost,
    MemoryBusy,
    Ticket,
    UnknownMemory,
)
from transfer.device.shapes import Shapes
from transfer.device.work import Work, cut_at
from transfer.ipc.cuda_driver import CudaError, Driver
from transfer.ipc.cuda_memory import CudaMapping
from transfer.ipc.memory import Mapping, SharedMapping
from transfer.pages import PageBatch
from transfer.plan import MemoryKey, Range, RangeBatch
from transfer.tiles import ASSUMED, Direction, Rates

STREAMS_PER_LANE = 4
"""Lists of 128 KiB copies are some 15 % faster on two to four streams than on one."""
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
ASK_NS = 300_000
"""So long events are not asked for while a thread makes calls. As it seems both take one lock of
the driver's: beside a loop that asks all the time a call of 130 us took up to 590, and of many
short calls most waited for milliseconds."""

log = logging.getLogger("treecored.device")


class Attached(NamedTuple):
    """An attached memory. `chunk_bytes`: no copy may cross a multiple of it (0: any may).
    `device`: UUID of its GPU, empty for the host's. `base`: address of the allocation that it is
    a part of (the host's: 0, rectangles there are cut at `chunk_bytes`)."""

    address: int
    nbytes: int
    chunk_bytes: int
    pinned: PinnedMemory | None
    device: str = ""
    base: int = 0


class InFlight(NamedTuple):
    """A submission that is not known to be done, be its calls made or not."""

    ticket: Ticket
    queued: Queued
    keys: set[MemoryKey]


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
        rates: Rates = ASSUMED,
        computing: Callable[[], bool] = lambda: True,
    ) -> None:
        """`pinned`: register host memory. `batched`: one driver call for many ranges, and
        rectangles. `rates`: which of the two is faster. `computing`: whether the GPU computes."""
        self._driver = driver
        self._pinned = pinned
        self._chunk_bytes = chunk_bytes
        self._memories: dict[MemoryKey, Attached] = {}
        self._host_pages = HostPages(node_of_gpu(driver, driver.device))
        self._in_flight: dict[Ticket, InFlight] = {}
        self._spare_events: list[Any] = []
        self._last_ticket = 0
        # Only registered memory is asynchronous for the batched call, and safe to hand to it.
        self._batched = batched and pinned
        lowest, highest = driver.call("cuCtxGetStreamPriorityRange")
        self._urgent = self._streams(streams_per_lane, int(highest))
        self._others = self._streams(streams_per_lane, int(lowest))
        # What goes between GPUs must not stand before a load from the host: its bus is free.
        self._peers = self._streams(streams_per_lane, int(lowest))
        self._kernel = page_kernel(driver) if batched else None
        self._calls = Calls(driver, batched=self._batched, kernel=self._kernel)
        self._beside: Beside | None = None
        self._asked_ns = 0  # when events were asked for last
        self._timed: set[Ticket] = set()  # of those in flight; how long they take says something
        self._computing = computing
        self._calm = False  # of the submission that is being made
        self._shapes = Shapes(
            self._memory,
            driver.uuid,
            rates,
            can_tile=self._calls.can_tile,
            kernel_moves=self._kernel_moves,
        )

    @property
    def name(self) -> str:
        """UUID of the GPU."""
        return self._driver.uuid

    def use_rates(self, rates: Rates) -> None:
        """Choose shapes by these figures from now on."""
        self._shapes.rates = rates
        self._shapes.forget()

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
            device = mapping.device or self.name
            base = mapping.physical.address
            memory = Attached(mapping.address, mapping.nbytes, 0, None, device, base)
            self._memories[key] = memory
        else:
            raise UnknownMemory(f"memory {key} is neither the host's nor a GPU's")

    def detach(self, key: MemoryKey) -> None:
        """Forget a memory that no submission in flight touches."""
        if key not in self._memories:
            raise UnknownMemory(f"memory {key} is not attached")
        if any(key in submission.keys for submission in self._in_flight.values()):
            raise MemoryBusy(f"memory {key} is used by a copy in flight")
        memory = self._memories.pop(key)
        self._shapes.forget()
        if memory.pinned is not None:
            memory.pinned.unpin()

    def submit(self, batches: Sequence[RangeBatch], *, urgent: bool = False) -> Ticket:
        """Queue the copies on one stream, and behind them an event."""
        work = Work()
        for batch in batches:
            self._add_ranges(batch, work)
            work.keys |= {batch.source, batch.target}
        return self._queue(work, self._urgent if urgent else self._others)

    def submit_pages(
        self,
        batches: Sequence[PageBatch],
        *,
        urgent: bool = False,
        calm: bool = False,
        beside: bool = False,
    ) -> Ticket:
        """Queue the copies of whole pages, each in the shape that is the fastest."""
        work = Work()
        self._calm = calm
        between_gpus: tuple[Direction, Direction] = ("within", "peer")
        lane = self._urgent if urgent else self._others
        for batch in batches:
            if self._shapes.add(batch, work) in between_gpus:
                lane = self._peers
        return self._queue(work, lane, beside=beside)

    def _kernel_moves(self, direction: Direction) -> bool:
        """Within a GPU there is nothing else that is fast. Over a link the copy engines are slower
        than a kernel, but a computation beside them feels nothing."""
        if self._kernel is None:
            return False
        return direction == "within" or self._calm or not self._computing()

    def _queue(self, work: Work, lane: deque[Any], *, beside: bool = True) -> Ticket:
        stream = lane[0]
        lane.rotate(-1)
        thread = self._beside if lane is not self._peers else None
        try:
            event = self._spare_events.pop() if self._spare_events else self._new_event()
        except CudaError as failure:
            raise DeviceLost(f"{self.name} is lost: {failure}") from failure
        queued = Queued(work, stream, event)
        self._last_ticket += 1
        if thread is not None and thread.wants(work, stream, beside=beside):
            thread.hand_over(queued, urgent=lane is self._urgent)
        else:
            self._calls.make(queued)
        if lane is self._peers:
            self._timed.add(self._last_ticket)
        self._in_flight[self._last_ticket] = InFlight(self._last_ticket, queued, work.keys)
        return self._last_ticket

    def poll(self) -> list[Completion]:
        """Ask the events. Raises `DeviceLost` when the context is broken."""
        if self._beside is not None:
            self._beside.check()
            now = monotonic_ns()
            if self._beside.calling and now < self._asked_ns + ASK_NS and not self._timed:
                return []
            self._asked_ns = now
        done: list[Completion] = []
        waiting: list[Any] = []
        for ticket, queued, _ in list(self._in_flight.values()):
            if queued.stream in waiting:
                continue  # what stands before it on its stream is not done
            try:
                reached = queued.made and self._driver.ready(queued.event)
            except CudaError as error:
                raise DeviceLost(f"{self.name} is lost: {error}") from error
            if reached:
                del self._in_flight[ticket]
                self._timed.discard(ticket)
                self._spare_events.append(queued.event)
                done.append(Completion(ticket, queued.error))
            else:
                waiting.append(queued.stream)
        return done

    def submit_beside(self, ranges_min: int) -> None:
        """Have a thread make the calls of lists of so many ranges to and from the host, of pages
        where `submit_pages` is told so; without a thread they are made as before."""
        if self._beside is None:
            calls = Calls(self._driver, batched=self._batched, kernel=None)
            try:
                self._beside = Beside(self._driver, calls, ranges_min)
            except RuntimeError as error:
                log.warning("calls of the driver are made by the loop: %s", error)

    def close(self) -> None:
        """End that thread, if there is one."""
        if self._beside is not None:
            self._beside.close()

    def _attach_host(self, mapping: SharedMapping) -> Attached:
        if not self._pinned:
            return Attached(mapping.address, mapping.nbytes, 0, None)
        self._host_pages.prepare(mapping.address, mapping.nbytes)
        pinned = pin(self._driver, mapping.address, mapping.nbytes, self._chunk_bytes)
        # A copy must not begin in one registration and end in the next.
        crossing = self._chunk_bytes if mapping.nbytes > self._chunk_bytes else 0
        return Attached(mapping.address, mapping.nbytes, crossing, pinned)

    def _add_ranges(self, batch: RangeBatch, work: Work) -> None:
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
        work.add_ranges(source.address, target.address, ranges)

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


def open_device(
    uuid: str, *, pinned: bool = True, computing: Callable[[], bool] = lambda: True
) -> tuple[CudaDevice, Driver]:
    """The device of a GPU and the context that its memory is imported into.

    Raises `TransferError` with the cure where the GPU or the driver is not there.
    """
    driver = Driver.open(uuid)
    try:
        return CudaDevice(driver, pinned=pinned, computing=computing), driver
    except CudaError as error:
        raise TransferError(f"GPU {uuid} cannot be used: {error}") from error
