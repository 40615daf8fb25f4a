"""Where the host tier's memory lies and in how large pages: asked of the kernel, never required.

Owns the two requests: large pages for a range of shared memory, and the memory of the node that a
GPU hangs on. Both are wishes: what the kernel does not grant is said once and costs speed only.
Data that is there already stays where it is.
"""

import ctypes
import logging
import platform
from pathlib import Path

from directory.core.errors import TransferError
from transfer.ipc.cuda_driver import DriverCalls

MADV_HUGEPAGE = 14
MPOL_PREFERRED = 1
NODES_MAX = 64
MBIND_CALL = {"x86_64": 237, "aarch64": 235}
"""Number of the system call; libc has no function for it."""
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
GRANTING = ("always", "within_size", "advise", "force")
BUS_ID_CHARS = 32
DEVICES = Path("/sys/bus/pci/devices")

log = logging.getLogger("treecored.host")


def chosen(text: str) -> str:
    """The word in brackets of a kernel setting ("always [never]" is never)."""
    return text.partition("[")[2].partition("]")[0]


def huge_pages(setting: Path = SHMEM_HUGE) -> str:
    """Empty if shared memory gets large pages on request; else why not, and the cure."""
    try:
        mode = chosen(setting.read_text(encoding="ascii"))
    except OSError:
        return "this kernel has no large pages for shared memory"
    if mode in GRANTING:
        return ""
    return f"{setting} says {mode!r}; write 'advise' into it for large pages of the host tier"


def node_of_gpu(driver: DriverCalls, device: object, devices: Path = DEVICES) -> int | None:
    """The memory node that a GPU hangs on; None where that is unknown or there is only one."""
    try:
        name = driver.call("cuDeviceGetPCIBusId", BUS_ID_CHARS, device)
        text = name.split(b"\0")[0].decode().lower()
        node = int((devices / text / "numa_node").read_text(encoding="ascii"))
    except (TransferError, OSError, ValueError, AttributeError):
        return None
    return node if 0 <= node < NODES_MAX else None


def prepare(address: int, nbytes: int, node: int | None) -> list[str]:
    """Wish for large pages and for a node's memory; returns what was not granted, in words."""
    libc = ctypes.CDLL(None, use_errno=True)
    refused = []
    why = huge_pages()
    if not why and libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), MADV_HUGEPAGE):
        why = f"madvise: errno {ctypes.get_errno()}"
    if why:
        refused.append(f"no large pages: {why}")
    if node is None:
        return refused
    number = MBIND_CALL.get(platform.machine())
    if number is None:
        return [*refused, f"no preferred node: unknown on {platform.machine()}"]
    mask = ctypes.c_ulong(1 << node)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_ulong(MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(NODES_MAX),
        ctypes.c_ulong(0),
    )
    if failed:
        refused.append(f"no preferred node {node}: errno {ctypes.get_errno()}")
    return refused


class HostPages:
    """Prepares host memory before it is pinned. Says once what is not granted."""

    def __init__(self, node: int | None) -> None:
        self._node = node
        self._said: set[str] = set()

    def prepare(self, address: int, nbytes: int) -> None:
        """Wish, and go on either way."""
        for refused in prepare(address, nbytes, self._node):
            if refused not in self._said:
                self._said.add(refused)
                log.warning("host tier: %s", refused)
