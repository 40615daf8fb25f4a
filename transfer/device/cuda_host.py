"""Host memory made known to the GPU's copy engines, in chunks, all of it or none.

Owns which chunks are registered. A failure undoes what was registered before it and says what was
asked for, what the limit is and how to look at it: pinning fails for reasons outside this process.
"""

import resource
from collections.abc import Sequence

from directory.core.errors import TransferError
from directory.core.limits import MIB
from transfer.ipc.cuda_driver import CudaError, DriverCalls

CHUNK_BYTES = 1024 * MIB
"""Some drivers refuse larger registrations in one call."""
PORTABLE = 1
CHECK = "`ulimit -l` and `grep -e VmLck -e VmPin /proc/self/status`"


class NotPinned(TransferError):
    """Host memory could not be registered; nothing of it is."""


class PinnedMemory:
    """One registered range of host memory."""

    def __init__(self, driver: DriverCalls, address: int, chunks: Sequence[int]) -> None:
        """`chunks`: sizes in order, from `address` on; use `pin`."""
        self._driver = driver
        self._address = address
        self._chunks = list(chunks)

    def unpin(self) -> None:
        """Unregister all chunks. Repeatable; raises `CudaError` for the first that fails."""
        failure: CudaError | None = None
        while self._chunks:
            self._chunks.pop()
            try:
                self._driver.call("cuMemHostUnregister", self._address + sum(self._chunks))
            except CudaError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def pin(
    driver: DriverCalls, address: int, nbytes: int, chunk_bytes: int = CHUNK_BYTES
) -> PinnedMemory:
    """Register a range of host memory chunk by chunk. Raises `NotPinned`; nothing stays then."""
    sizes = [min(chunk_bytes, nbytes - start) for start in range(0, nbytes, chunk_bytes)]
    done = 0
    for number, size in enumerate(sizes):
        try:
            driver.call("cuMemHostRegister", address + done, size, PORTABLE)
        except CudaError as error:
            PinnedMemory(driver, address, sizes[:number]).unpin()
            raise NotPinned(
                f"{nbytes} bytes of host memory cannot be pinned: chunk {number + 1} of "
                f"{len(sizes)} ({size} bytes, after {done}) failed with {error}; the limit of "
                f"locked memory is {memlock_limit()}: look at {CHECK}, raise it, make the host "
                "tier smaller, or go on with --unpinned (slower copies)"
            ) from error
        done += size
    return PinnedMemory(driver, address, sizes)


def memlock_limit() -> str:
    """The soft limit of locked memory in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
