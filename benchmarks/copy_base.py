"""What the bus and the memory themselves do: single large copies in this very run, to compare with.

Owns one context a GPU and scratch memory while it measures. Without a GPU: one memory copy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from transfer.ipc.cuda_driver import Driver, load_api, visible_devices

REPEATS = 5
FLAGS_PORTABLE = 1


class Base:
    """GB/s of one large copy of `nbytes` each way."""

    def __init__(self, gpus: list[str], nbytes: int) -> None:
        self._nbytes = nbytes
        self._drivers = [Driver.open(gpu) for gpu in gpus]
        self._host = bytearray(nbytes), bytearray(nbytes)
        if self._drivers:
            self._host = bytearray(), bytearray()
            driver = self._drivers[0]
            driver.make_current()
            self._pinned = driver.call("cuMemHostAlloc", nbytes, FLAGS_PORTABLE)
            self._memory = [int(driver.call("cuMemAlloc", nbytes)) for _ in range(2)]
            self._stream = driver.call("cuStreamCreate", 1)
            self._far = self._far_memory()

    def _far_memory(self) -> int:
        """Memory of the second GPU that the first one reaches, or 0."""
        if len(self._drivers) < 2:
            return 0
        near, far = self._drivers[:2]
        with far.current():
            address = int(far.call("cuMemAlloc", self._nbytes))
        near.call("cuCtxEnablePeerAccess", far.context, 0)
        return address

    def measure(self) -> dict[str, float]:
        """GB/s by direction: to_host, from_host, within, and peer where there are two GPUs."""
        if not self._drivers:
            rate = self._rate(self._copy_host)
            return {"to_host": rate, "from_host": rate, "within": rate}
        call = self._drivers[0].call
        one, other = self._memory
        host, size, stream = self._pinned, self._nbytes, self._stream
        ways: dict[str, Callable[[], Any]] = {
            "to_host": lambda: call("cuMemcpyDtoHAsync", host, one, size, stream),
            "from_host": lambda: call("cuMemcpyHtoDAsync", one, host, size, stream),
            "within": lambda: call("cuMemcpyDtoDAsync", other, one, size, stream),
        }
        if self._far:
            ways["peer"] = lambda: call("cuMemcpyDtoDAsync", self._far, one, size, stream)
        return {name: self._rate(partial(self._waited, way)) for name, way in ways.items()}

    def _waited(self, queue: Callable[[], Any]) -> None:
        queue()
        self._drivers[0].call("cuStreamSynchronize", self._stream)

    def _copy_host(self) -> None:
        self._host[1][:] = self._host[0]

    def _rate(self, carry_out: Callable[[], None]) -> float:
        times = []
        for _ in range(1 + REPEATS):
            started = time.perf_counter()
            carry_out()
            times.append(time.perf_counter() - started)
        return self._nbytes / statistics.median(times[1:]) / 1e9

    def close(self) -> None:
        """Give the memory back."""
        if not self._drivers:
            return
        call = self._drivers[0].call
        call("cuMemFreeHost", self._pinned)
        for address in self._memory:
            call("cuMemFree", address)


def gpus() -> list[str]:
    """UUIDs of the GPUs that this process sees."""
    return list(visible_devices(load_api()))
