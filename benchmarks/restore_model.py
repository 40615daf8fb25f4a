"""The mover of bench_restore without a GPU: the product's own, on a made-up driver (copy_model.py).

A kernel's bytes take as long as the memory is said to take, and behind one another; calls take the
processor as long as they are said to. No byte moves. Owns that, and being the mover (`--fd ...`).
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

from benchmarks.copy_model import Costs, ModelDevice, ModelDriver, spend
from transfer import mover
from transfer.device.cuda_kernel import WARP_BYTES
from transfer.engine_limits import CUDA_LIMITS
from transfer.ipc.backends import NamedMemory
from transfer.ipc.memory import MEMFD
from transfer.mover_backend import Backend

ANNOUNCED: Final = "cpu:made-up"
"""What pools say that they lie on: shared memory that is taken for a GPU's."""
MEMORY_GBPS: Final = 1_500.0
"""Of a copy within an H200, as it was measured."""
ALONE_BYTES_PER_US: Final = 1_350_000
"""What `alone_bytes_per_us` makes of an H200's figures."""


class KernelDriver(ModelDriver):
    """The same with launches that take their time."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self._call_us = costs.call_us
        self._calls["cuLaunchKernel"] = self._launch

    def _launch(self, *arguments: Any) -> None:
        values, _ = arguments[9]
        _, _, items, parts, _ = values
        nbytes = items * WARP_BYTES * (4 if parts else 1)
        self._bus_free_ns = max(self._bus_free_ns, time.perf_counter_ns()) + int(
            nbytes / MEMORY_GBPS
        )
        spend(self._call_us)


def backend(name: str, *, pinned: bool = True) -> Backend:
    """Of a GPU that has computed lately, as far as anybody knows, and does not now."""
    assert pinned, name
    driver: Any = KernelDriver(Costs.of_environment())
    limits = CUDA_LIMITS
    if "alone_bytes_per_us" in limits._fields:  # a checkout that stands beside may not have it
        limits = limits._replace(alone_bytes_per_us=ALONE_BYTES_PER_US)
    return Backend(ModelDevice(driver), {MEMFD: NamedMemory(ANNOUNCED)}, {}, limits)


if __name__ == "__main__":
    mover.make_device = backend  # type: ignore[attr-defined]
    sys.exit(mover.main())
