"""Whether a GPU computes: what the driver's management library counts of every process's kernels.

Owns one answer and what it was based on. The library takes its time, so it is asked beside the
copies, and until it has answered the GPU counts as computing. A mover's own copies between GPU
memories are counted, too, so while they go on the answer from before them stands, for a second;
then the GPU counts as computing, until there was a pause. Where the library is missing it always
does: copies within it are paced then, which is slow and never wrong. A look is begun only when the
slices that it was wanted for have gone, by a thread that is there already: starting one, and what
the two then take of one another's time, are a third of a millisecond of a restore's way.
"""

import importlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from transfer.ipc.cuda_driver import CudaError, Driver
from transfer.ipc.marks import mark

PAUSE_US = 400_000
"""The library's figure is an average of a sixth of a second to a second; on an H200 it forgot
within 350 ms."""
TRUSTED_US = 1_000_000
PERCENT_MIN = 10

log = logging.getLogger("treecored.cuda")


MEMORY_CLOCK_ATTRIBUTE = 36  # CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, kHz
MEMORY_BUS_ATTRIBUTE = 37  # CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, bits
ALONE_PERCENT = 55
"""Of what the memory could do, that a copy does which has it to itself: 62 to 70 on an H200."""


def alone_bytes_per_us(driver: Driver) -> int:
    """So many bytes a microsecond are moved at least by a copy within a GPU that computes nothing
    else; 0 where the driver does not say how fast its memory is."""
    try:
        clock_khz, bus_bits = (
            int(driver.call("cuDeviceGetAttribute", attribute, driver.device))
            for attribute in (MEMORY_CLOCK_ATTRIBUTE, MEMORY_BUS_ATTRIBUTE)
        )
    except CudaError as error:
        log.info("nobody knows how fast memory is here: %s", error)
        return 0
    # Two bits a line and clock; every byte is read and written.
    peak_bytes_per_us = 2 * clock_khz * bus_bits // 8 // 1_000
    return peak_bytes_per_us * ALONE_PERCENT // 100 // 2


class Beside:
    """A thread that does what was put off. `go` costs hardly anything where nothing was."""

    def __init__(self) -> None:
        self._put_off: list[Callable[[], None]] = []
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        thread = threading.Thread(target=_do, args=(self._queue,), name="computing", daemon=True)
        try:
            thread.start()
            self._problem = ""
        except RuntimeError as error:  # this process may have no more threads
            self._problem = str(error)

    def put(self, work: Callable[[], None]) -> None:
        """Have it done once `go` is called. Raises `RuntimeError` where there is no thread."""
        if self._problem:
            raise RuntimeError(self._problem)
        self._put_off.append(work)

    def go(self) -> None:
        """Have done what was put off."""
        while self._put_off:
            self._queue.put(self._put_off.pop())


def _do(queue: "SimpleQueue[Callable[[], None]]") -> None:
    while True:
        queue.get()()


class Computing:
    """Ask it whenever a slice of such a copy is about to go: `computing()`."""

    def __init__(
        self,
        uuid: str,
        clock_us: Callable[[], int],
        library: Any,
        begin: Callable[[Callable[[], None]], None],
    ) -> None:
        """`library`: stands in for pynvml in tests (None: that itself); `begin`: has a look done,
        now or soon."""
        self._clock_us = clock_us
        self._begin = begin
        self._library: Any = None
        self._device: Any = None
        self._called_us = -PAUSE_US
        self._looked_us = 0
        self._looks = False
        self._answer = True
        try:
            self._library = library or importlib.import_module("pynvml")
            self._library.nvmlInit()
            self._device = self._library.nvmlDeviceGetHandleByUUID(uuid)
        except Exception as error:  # noqa: BLE001 - the library's errors have no common base
            log.info("GPU %s counts as computing, nobody can say otherwise: %s", uuid, error)

    def __call__(self) -> bool:
        """Whether others' kernels ran lately, as far as that is known."""
        now = self._clock_us()
        if now - self._called_us >= PAUSE_US and not self._looks and self._device is not None:
            self._answer, self._looks = True, True
            self._looked_us = now
            try:
                self._begin(self._look)
            except RuntimeError as error:
                log.warning("cannot look whether the GPU computes: %s", error)
                self._looks = False
        self._called_us = now
        return self._answer or now - self._looked_us > TRUSTED_US

    def _look(self) -> None:
        """Ask the library. Everything that it writes is one assignment, read by one thread."""
        mark("looks")
        try:
            rates = self._library.nvmlDeviceGetUtilizationRates(self._device)
            self._answer = rates.gpu >= PERCENT_MIN
        except Exception as error:  # noqa: BLE001
            log.warning("cannot ask whether the GPU computes: %s", error)
            self._device, self._answer = None, True
        mark("looked", not self._answer)
        self._looks = False
