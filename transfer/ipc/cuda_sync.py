"""Fences between a GPU's streams and other processes, without a wait that nobody here can end.

Owns the registration of counter tables with the driver. A producer's *stream* writes a timeline
when it gets there (`CudaTimelines`), or its thread waits for the stream and writes it
(`HostTimelines`). A stream that has to wait for a counter (`StreamWaiter`) is always guarded by a
watchdog of this process: no device may be left waiting for another process that can die.
"""

import heapq
import mmap
import threading
import time
from typing import Protocol

from transfer.ipc.cuda_driver import DriverCalls
from transfer.ipc.sync import COUNTER_BYTES, CounterTable, TimelineTable

HOST_REGISTER_PORTABLE = 1
HOST_REGISTER_DEVICEMAP = 2
WRITE_AFTER_EVERYTHING = 0
"""cuStreamWriteValue's default: what the stream did before is visible before the value is."""
WAIT_GREATER_OR_EQUAL = 0


class ProducerTimelines(Protocol):
    """How a scheduler lets its timelines advance; which way is chosen at registration."""

    def signal(self, stream: int, index: int, value: int) -> None:
        """Let the timeline reach a value once all work now in the stream is done."""
        ...

    def close(self) -> None:
        """Give everything back but the table. Repeatable."""
        ...


class RegisteredTable:
    """A counter table that the GPU can reach. Registered once; closed before its table."""

    def __init__(self, driver: DriverCalls, table: CounterTable) -> None:
        self._driver = driver
        self._host = table.mapping.address
        nbytes = -(-table.mapping.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP
        driver.call("cuMemHostRegister", self._host, nbytes, flags)
        self._device = int(driver.call("cuMemHostGetDevicePointer", self._host, 0))
        self.count = len(table)
        self._closed = False

    def address(self, index: int) -> int:
        """Device address of a counter."""
        if self._closed or not 0 <= index < self.count:
            raise IndexError(f"counter {index} of {self.count}, closed: {self._closed}")
        return self._device + index * COUNTER_BYTES

    def close(self) -> None:
        """Unregister. Repeatable; only when no stream has a write or wait pending."""
        if not self._closed:
            self._closed = True
            self._driver.call("cuMemHostUnregister", self._host)


class CudaTimelines:
    """The streams themselves write the counters. The fast way, and the default."""

    def __init__(self, driver: DriverCalls, table: TimelineTable) -> None:
        self._driver = driver
        self._registered = RegisteredTable(driver, table)

    def signal(self, stream: int, index: int, value: int) -> None:
        """Queue the write; returns at once."""
        address = self._registered.address(index)
        self._driver.call("cuStreamWriteValue64", stream, address, value, WRITE_AFTER_EVERYTHING)

    def close(self) -> None:
        """Unregister the table. Repeatable."""
        self._registered.close()


class HostTimelines:
    """The fallback: this thread waits for the stream and writes the counter itself."""

    def __init__(self, driver: DriverCalls, table: TimelineTable) -> None:
        self._driver = driver
        self._table = table

    def signal(self, stream: int, index: int, value: int) -> None:
        """Wait for the stream, then write; as slow as the work that is in the stream."""
        self._driver.call("cuStreamSynchronize", stream)
        self._table.write(index, value)

    def close(self) -> None:
        """Nothing to give back."""


class StreamWaiter:
    """Lets streams of this process wait for counters that a mover writes.

    Each wait has a deadline at which the watchdog writes the value itself: the stream goes on, and
    `lost` says that what it waited for has not come. The data is then whatever lies there, so the
    owner has to end what depended on it.
    """

    def __init__(self, driver: DriverCalls, table: TimelineTable) -> None:
        self._driver = driver
        self._table = table
        self._registered = RegisteredTable(driver, table)
        self._guard = threading.Condition()
        # Everything below is touched under the guard only.
        self._waits: list[tuple[float, int, int]] = []  # (deadline, index, value), a heap
        self._lost: set[tuple[int, int]] = set()
        self._closing = False
        self._watchdog = threading.Thread(target=self._watch, name="stream-watchdog", daemon=True)
        self._watchdog.start()

    def wait(self, stream: int, index: int, value: int, deadline_s: float) -> None:
        """Let the stream wait until the counter has reached the value, or the deadline is over."""
        address = self._registered.address(index)
        with self._guard:
            # Guarded before it is queued: there is no moment at which nobody can release it.
            heapq.heappush(self._waits, (time.monotonic() + deadline_s, index, value))
            self._guard.notify()
        self._driver.call("cuStreamWaitValue64", stream, address, value, WAIT_GREATER_OR_EQUAL)

    def lost(self, index: int, value: int) -> bool:
        """Whether the watchdog had to release the wait for this value."""
        with self._guard:
            return (index, value) in self._lost

    def close(self) -> None:
        """Release every stream that still waits, and unregister the table. Repeatable."""
        with self._guard:
            self._closing = True
            self._guard.notify()
        self._watchdog.join()
        self._registered.close()

    def _watch(self) -> None:
        with self._guard:
            while self._waits or not self._closing:
                now = time.monotonic()
                while self._waits and (self._waits[0][0] <= now or self._closing):
                    _, index, value = heapq.heappop(self._waits)
                    self._release(index, value)
                if self._closing:
                    continue
                self._guard.wait(self._waits[0][0] - now if self._waits else None)

    def _release(self, index: int, value: int) -> None:
        # The mover may write the same value at the same moment, which changes nothing: the wait
        # counts as lost all the same, and a lost load is never used.
        if self._table.read(index) < value:
            self._lost.add((index, value))
            self._table.write(index, value)
