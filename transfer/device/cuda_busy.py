"""Whether a GPU computes: what the driver's management library counts of every process's kernels.

Owns one answer and what it was based on. The library takes its time, so it is asked beside the
copies, and until it has answered the GPU counts as computing. A mover's own copies between GPU
memories are counted, too, so while they go on the answer from before them stands, for a second;
then the GPU counts as computing, until there was a pause. Where the library is missing it always
does: copies within it are paced then, which is slow and never wrong.
"""

import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from transfer.ipc.marks import mark

PAUSE_US = 400_000
"""The library's figure is an average of a sixth of a second to a second; on an H200 it forgot
within 350 ms."""
TRUSTED_US = 1_000_000
PERCENT_MIN = 10

log = logging.getLogger("treecored.cuda")


def beside(work: Callable[[], None]) -> None:
    """Have it done by a thread of its own."""
    threading.Thread(target=work, name="computing", daemon=True).start()


class Computing:
    """Ask it whenever a slice of such a copy is about to go: `computing()`."""

    def __init__(
        self,
        uuid: str,
        clock_us: Callable[[], int],
        library: Any = None,
        begin: Callable[[Callable[[], None]], None] = beside,
    ) -> None:
        """`library`: stands in for pynvml in tests; `begin`: how a look is begun."""
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
            except RuntimeError as error:  # this process may have no more threads
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
