"""Where the host tier's memory lies and in how large pages: asked of the kernel, never required.

Owns the requests: the memory of the node that a GPU hangs on, and large pages for a range of shared
memory, which are asked for where the kernel's setting grants them and made at once where it does
not. All are wishes: what the kernel does not do is said once and costs speed only. No byte changes:
data that is there already stays, or is moved by the kernel under everybody's addresses.
"""

import ctypes
import errno
import logging
import mmap
import platform
from pathlib import Path

from directory.core.errors import TransferError
from directory.core.limits import MIB
from transfer.ipc.aligned import LARGE_BYTES
from transfer.ipc.cuda_driver import DriverCalls

MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22
MADV_COLLAPSE = 25
"""Since Linux 6.1; of the setting it heeds "deny" only."""
PIECE_BYTES = 64 * MIB
"""Made of large pages by one call: little is done in vain where the next one fails."""
TRIES = 3
"""Where the kernel says "again": somebody else held a page."""
MPOL_PREFERRED = 1
NODES_MAX = 64
MBIND_CALL = {"x86_64": 237, "aarch64": 235}
"""Number of the system call; libc has no function for it."""
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
GRANTING = ("always", "within_size", "advise", "force")
BUS_ID_CHARS = 32
DEVICES = Path("/sys/bus/pci/devices")

log = logging.getLogger("treecored.host")
_LIBC = ctypes.CDLL(None, use_errno=True)


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


def place(address: int, nbytes: int, node: int | None) -> str:
    """Wish for a node's memory; returns why that was not granted (empty: it was, or no wish)."""
    if node is None:
        return ""
    number = MBIND_CALL.get(platform.machine())
    if number is None:
        return f"no preferred node: unknown on {platform.machine()}"
    mask = ctypes.c_ulong(1 << node)
    failed = _LIBC.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_ulong(MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(NODES_MAX),
        ctypes.c_ulong(0),
    )
    return f"no preferred node {node}: errno {ctypes.get_errno()}" if failed else ""


def collapse(address: int, nbytes: int) -> tuple[int, str]:
    """Have large pages made of a range now, whatever it holds: (bytes that lie in them, why not
    all of the range that can). Stops at the first that cannot be made: the next would take long.

    Takes the memory that pinning would take anyway. The first byte of each is asked for before: of
    a range in which there is nothing at all the kernel makes none.
    """
    if address % LARGE_BYTES:
        return 0, "the memory does not begin at a large page's border"
    end = (address + nbytes) // LARGE_BYTES * LARGE_BYTES
    for piece in range(address, end, PIECE_BYTES):
        stop = min(piece + PIECE_BYTES, end)
        if why := _make(piece, stop):
            return piece - address, why
    return end - address, ""


def _make(begin: int, end: int) -> str:
    """Have large pages made of a range that begins and ends with one; returns what failed."""
    for page in range(begin, end, LARGE_BYTES):
        if why := _advise(page, mmap.PAGESIZE, MADV_POPULATE_READ):
            return why
    return _advise(begin, end - begin, MADV_COLLAPSE)


def _advise(address: int, nbytes: int, advice: int) -> str:
    """Say something to the kernel of a range; returns why it refused."""
    for _ in range(TRIES):
        if not _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice):
            return ""
        if ctypes.get_errno() != errno.EAGAIN:
            break
    return f"madvise {advice}: errno {ctypes.get_errno()}"


class HostPages:
    """Prepares host memory before it is pinned. Says once what is not granted."""

    def __init__(self, node: int | None, setting: Path = SHMEM_HUGE) -> None:
        self._node = node
        self._setting = setting
        self._collapses = True  # until it was tried in vain
        self._said: set[str] = set()

    def prepare(self, address: int, nbytes: int) -> None:
        """Wish, and go on either way."""
        # First where it is to lie: what is made of large pages is there from then on.
        self._say(place(address, nbytes, self._node))
        why = huge_pages(self._setting)
        if not why:
            refused = _advise(address, nbytes, MADV_HUGEPAGE)
            self._say(refused and f"no large pages: {refused}")
        elif nbytes < LARGE_BYTES or not self._collapses:
            self._say(f"no large pages: {why}")
        else:
            self._collapse(address, nbytes, why)

    def _collapse(self, address: int, nbytes: int, why: str) -> None:
        if address % LARGE_BYTES:  # which says nothing about the next mapping
            self._say(f"no large pages: {why}")
            return
        large, refused = collapse(address, nbytes)
        came = f"{large // MIB} of {nbytes // MIB} MiB lie in large pages"
        if not refused:
            log.info("host tier: %s, made at once", came)
            return
        self._collapses = False
        self._say(f"no large pages for all: {came}, then {refused}; {why}")

    def _say(self, refused: str) -> None:
        if refused and refused not in self._said:
            self._said.add(refused)
            log.warning("host tier: %s", refused)
