"""What a mover is made of for a device of each kind: memory, fences, limits, and who looks at it.

Owns the choice by the device's name. It imports CUDA only for a mover of a GPU.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from transfer.device.cpu import CpuDevice
from transfer.device.protocol import Device
from transfer.engine_limits import CUDA_LIMITS, EngineLimits
from transfer.ipc.backends import NamedMemory
from transfer.ipc.memory import CUDA_IPC, CUDA_VMM, MEMFD, DeviceMemoryIPC
from transfer.ipc.sync import EVENT_SYNC, SyncHandle, Timelines, TimelineTable

CUDA_PREFIX = "cuda:"

log = logging.getLogger("treecored.mover")


def nothing() -> None:
    """Where there is nothing to be done beside the copies."""


def nothing_beside(_ranges_min: int) -> None:
    """Where there are no calls that take long."""


class Backend(NamedTuple):
    """What a mover is made of for one kind of device.

    `memory`: imports by kind of handle, beside shared memory. `syncs`: how to read the timelines
    of a pool, by the kind that its scheduler chose, beside plain timelines. `computing`: whether
    the GPU has computed lately. `beside`: has what that has put off done by a thread; called when
    slices have gone, for a copy is not to wait for it. `submit_beside`: has lists of so many
    ranges handed to the driver by a thread. `close`: ends that, within a bounded time. `links`:
    GPUs that are as fast to reach as `limits` say.
    """

    device: Device
    memory: Mapping[str, DeviceMemoryIPC]
    syncs: Mapping[str, Callable[[TimelineTable, SyncHandle], Timelines]]
    limits: EngineLimits = EngineLimits()
    computing: Callable[[], bool] = lambda: True
    beside: Callable[[], None] = nothing
    submit_beside: Callable[[int], None] = nothing_beside
    close: Callable[[], None] = nothing
    links: frozenset[str] = frozenset()


def now_us() -> int:
    """Monotonic microseconds."""
    return time.monotonic_ns() // 1000


def make_device(name: str, *, pinned: bool = True) -> Backend:
    """The backend of a mover by its device's name on the command line: cpu, or cuda:<UUID>; also
    cpu:<name>, which reaches only pools that announce that name.

    Raises `SystemExit` for a name that means nothing, `TransferError` for a GPU that is not there.
    """
    if name.partition(":")[0] == "cpu":
        return Backend(CpuDevice(), {MEMFD: NamedMemory(name)} if ":" in name else {}, {})
    if name.startswith(CUDA_PREFIX):
        return _cuda_backend(name.removeprefix(CUDA_PREFIX), pinned=pinned)
    raise SystemExit(f"there is no device {name!r}; known: cpu, {CUDA_PREFIX}<UUID of a GPU>")


def _cuda_backend(uuid: str, *, pinned: bool) -> Backend:
    # Imported here: a mover of CPU pools runs without CUDA's bindings.
    from transfer.device.cuda import open_device
    from transfer.device.cuda_busy import Beside, Computing, alone_bytes_per_us
    from transfer.device.cuda_calibrate import calibrate
    from transfer.device.cuda_links import link_bytes_per_us, over_nvlink
    from transfer.ipc.cuda_events import EventReader
    from transfer.ipc.cuda_memory import CudaMemoryIPC
    from transfer.topology import Topology

    beside = Beside()
    computing = Computing(uuid, now_us, None, beside.put)
    device, driver = open_device(uuid, pinned=pinned, computing=computing)
    if pinned:
        log.info("calibrated: %s", calibrate(device, driver).as_rows())
    topology = Topology.probe(driver, driver.devices())
    for text in topology.describe():
        log.info("links of %s", text)
    memory = CudaMemoryIPC(driver, topology)
    limits = CUDA_LIMITS._replace(
        alone_bytes_per_us=alone_bytes_per_us(driver),
        link_bytes_per_us=link_bytes_per_us(uuid, topology),
    )
    log.info(
        "a copy that shares GPU %s with nobody is known by %d bytes a microsecond within it and by "
        "%d over its links", uuid, limits.alone_bytes_per_us, limits.link_bytes_per_us,
    )  # fmt: skip
    return Backend(
        device,
        {CUDA_IPC: memory, CUDA_VMM: memory},
        {EVENT_SYNC: lambda table, sync: EventReader.open(driver, table, sync)},
        limits,
        computing,
        beside.go,
        device.submit_beside,
        device.close,
        frozenset(over_nvlink(uuid, topology)),
    )
