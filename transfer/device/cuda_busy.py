"""Whether a GPU computes: what the driver's management library counts of every process's kernels.

Owns one answer and what it was based on. A mover's own copies between GPU memories are counted,
too, so while they go on the answer from before them stands, for a second; then the GPU counts as
computing, until there was a pause. Where the library is missing it always does: copies within it
are paced then, which is slow and never wrong.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Any

PAUSE_US = 400_000
"""The library's figure is an average of a sixth of a second to a second; on an H200 it forgot
within 350 ms."""
TRUSTED_US = 1_000_000
PERCENT_MIN = 10

log = logging.getLogger("treecored.cuda")


class Computing:
    """Ask it whenever a slice of such a copy is about to go: `computing()`."""

    def __init__(self, uuid: str, clock_us: Callable[[], int], library: Any = None) -> None:
        """`library`: stands in for pynvml in tests."""
        self._clock_us = clock_us
        self._library: Any = None
        self._device: Any = None
        self._called_us = -PAUSE_US
        self._looked_us = 0
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
        if now - self._called_us >= PAUSE_US:
            self._look(now)
        self._called_us = now
        return self._answer or now - self._looked_us > TRUSTED_US

    def _look(self, now: int) -> None:
        self._looked_us = now
        if self._device is None:
            return
        try:
            rates = self._library.nvmlDeviceGetUtilizationRates(self._device)
            self._answer = rates.gpu >= PERCENT_MIN
        except Exception as error:  # noqa: BLE001
            log.warning("cannot ask whether the GPU computes: %s", error)
            self._device, self._answer = None, True
