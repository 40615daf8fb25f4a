"""Fences between a GPU's streams and other processes, without a wait that nobody here can end.

Owns the registration of counter tables with the driver. A producer's *stream* writes a timeline
when it gets there (`CudaTimelines`), or its thread waits for the stream and writes it
(`HostTimelines`). A stream that has to wait for a counter (`StreamWaiter`) is always guarded by a
watchdog of this process: no device may be left waiting for another process that can die.
"""

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
RELEASE_AGAIN_S = 0.001
LOST_KEPT_MAX = 4_096


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
        try:
            self._device = int(driver.call("cuMemHostGetDevicePointer", self._host, 0))
        except BaseException:  # else it stays registered when it is unmapped
            driver.call("cuMemHostUnregister", self._host)
            raise
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

    def __init__(
        self,
        driver: DriverCalls,
        table: TimelineTable,
        registered: RegisteredTable | None = None,
    ) -> None:
        """`registered`: the table, where somebody else has registered it and will close that."""
        self._driver = driver
        self._own = registered is None
        self._registered = registered or RegisteredTable(driver, table)

    @property
    def registered(self) -> RegisteredTable:
        """The table as the GPU reaches it, for others that need it, too: it is registered once."""
        return self._registered

    def signal(self, stream: int, index: int, value: int) -> None:
        """Queue the write; returns at once."""
        address = self._registered.address(index)
        self._driver.call("cuStreamWriteValue64", stream, address, value, WRITE_AFTER_EVERYTHING)

    def close(self) -> None:
        """Unregister the table, if that was done here. Repeatable."""
        if self._own:
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
    owner has to end what depended on it. A counter serves one load at a time, so one wait over its
    deadline loses all that wait on the counter.
    """

    def __init__(
        self,
        driver: DriverCalls,
        table: TimelineTable,
        registered: RegisteredTable | None = None,
    ) -> None:
        """`registered`: the table, where somebody else has registered it and will close that."""
        self._driver = driver
        self._table = table
        self._own = registered is None
        self._registered = registered or RegisteredTable(driver, table)
        self._guard = threading.Condition()
        # Everything below is touched under the guard only.
        self._waits: dict[int, list[tuple[float, int]]] = {}  # (deadline, value) by counter
        self._released: dict[int, int] = {}  # what streams were let go with, until `answered`
        self._lost: dict[tuple[int, int], None] = {}
        self._closing = False
        self._wakes: float | None = None  # when the watchdog looks next; None: once it is told to
        self._watchdog = threading.Thread(target=self._watch, name="stream-watchdog", daemon=True)
        self._watchdog.start()

    def wait(self, stream: int, index: int, value: int, deadline_s: float) -> None:
        """Let the stream wait until the counter has reached the value, or the deadline is over."""
        address = self._registered.address(index)
        with self._guard:
            # Guarded before it is queued: there is no moment at which nobody can release it.
            waits = self._waits.setdefault(index, [])
            due = time.monotonic() + deadline_s
            waits.append((due, value))
            # A forward pass waits for each of its layers: a watchdog that woke up for each would
            # take the interpreter from it as often.
            if self._wakes is None or due < self._wakes:
                self._wakes = due
                self._guard.notify()
        self._driver.call("cuStreamWaitValue64", stream, address, value, WAIT_GREATER_OR_EQUAL)

    def answered(self, index: int, value: int, *, landed: bool) -> None:
        """The load on a counter has ended: nobody else writes the counter any more.

        It is brought to `value`, its last; where the load was lost, so are all waits for it.
        """
        with self._guard:
            if not landed:
                self._let_go(index, value)
            elif self._table.read(index) < value:
                self._table.write(index, value)
            self._waits.pop(index, None)
            self._released.pop(index, None)

    def lost(self, index: int, value: int) -> bool:
        """Whether the wait for this value ended without what it waited for."""
        with self._guard:
            return (index, value) in self._lost

    def close(self) -> None:
        """Release every stream that still waits, and unregister the table. Repeatable.

        Only once no mover has the pool: it could still lower what is written here.
        """
        with self._guard:
            self._closing = True
            self._guard.notify()
        self._watchdog.join()
        if self._own:
            self._registered.close()

    def _watch(self) -> None:
        with self._guard:
            while not self._closing:
                now = time.monotonic()
                for index, waits in list(self._waits.items()):
                    # What has come needs no guard any more.
                    stands = self._table.read(index)
                    waits[:] = [wait for wait in waits if wait[1] > stands]
                    if not waits:
                        del self._waits[index]
                    elif min(waits)[0] <= now:
                        self._let_go(index, max(value for _, value in waits))
                for index, value in self._released.items():
                    # The mover may have looked just before the release and stored just after it.
                    if self._table.read(index) < value:
                        self._table.write(index, value)
                due = min((min(waits)[0] for waits in self._waits.values()), default=None)
                if self._released:
                    due = now + RELEASE_AGAIN_S
                self._wakes = due
                self._guard.wait(None if due is None else max(0.0, due - now))
            for index, waits in list(self._waits.items()):
                self._let_go(index, max(value for _, value in waits))

    def _let_go(self, index: int, value: int) -> None:
        """Release whoever waits for a counter, and remember that nothing has come."""
        stands = self._table.read(index)
        for _, waited in self._waits.pop(index, ()):
            if waited > stands:
                self._lost[index, waited] = None
        while len(self._lost) > LOST_KEPT_MAX:
            del self._lost[next(iter(self._lost))]
        if stands < value:
            self._table.write(index, value)
            self._released[index] = max(value, self._released.get(index, 0))
