"""GPU memory of this process: exported to a mover without a copy and without torch.

Owns nothing of a client's memory; `VmmAllocation` is the exception, a virtual-memory pool that
this process makes itself. A tensor that cannot be exported exactly is refused with its shape and
strides, memory that cannot be shared with the setting that made it so and the cure.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from directory.core.errors import ImportFailed, LayoutError
from transfer.ipc.cuda_driver import HANDLE_BYTES as IPC_HANDLE_BYTES
from transfer.ipc.cuda_driver import CudaError, Driver, raw_bytes
from transfer.ipc.cuda_memory import CudaOpaque, access_of, pack_opaque
from transfer.ipc.memory import CUDA_IPC, CUDA_VMM, MemoryHandle

EXPANDABLE = (
    "memory of PyTorch's expandable segments (PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF has "
    "expandable_segments:True)"
)
CURE = (
    "allocate the pool with expandable_segments:False "
    '(torch.cuda.memory._set_allocator_settings("expandable_segments:False") around it is '
    "enough), or go on without the daemon"
)


class Exported(NamedTuple):
    """A handle and the descriptors that travel with it. The receiver of this closes them."""

    handle: MemoryHandle
    fds: tuple[int, ...]


def check_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int, nbytes: int) -> None:
    """Raise `LayoutError` unless a tensor is contiguous after a permutation of its axes.

    `strides` in elements; `itemsize` and `nbytes` in bytes.
    """
    what = f"tensor of shape {tuple(shape)}, strides {tuple(strides)}, {itemsize}-byte items"
    if len(shape) != len(strides) or itemsize <= 0 or any(extent <= 0 for extent in shape):
        raise LayoutError(f"{what}: give one positive extent and one stride for each axis")
    expected = 1
    for stride, extent in sorted((s, e) for e, s in zip(shape, strides, strict=True) if e > 1):
        if stride != expected:
            raise LayoutError(
                f"{what}: it is not contiguous, whichever way its axes are ordered; export the "
                "tensor itself, not a slice, an expansion or a strided view of it"
            )
        expected *= extent
    if expected * itemsize != nbytes:
        raise LayoutError(f"{what}: {expected * itemsize} bytes, {nbytes} were announced")


def export_tensor(
    driver: Driver,
    *,
    data_ptr: int,
    nbytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    device: str,
) -> Exported:
    """Export the memory of a tensor, of any allocator. `device`: its UUID; `strides` in elements.

    Raises `LayoutError` for a tensor that is not dense, `ImportFailed` for memory that cannot be
    shared. The memory must outlive the daemon's import: release the pool first, then free it.
    """
    check_dense(shape, strides, itemsize, nbytes)
    with driver.current():
        try:
            real = driver.device_of(data_ptr)
            if real != device:
                raise ImportFailed(f"the tensor lies on {real}, not on {device} as announced")
            if _legacy_capable(driver, data_ptr):
                return _export_legacy(driver, data_ptr, nbytes, device)
            return _export_descriptor(driver, data_ptr, nbytes, device)
        except CudaError as error:
            raise ImportFailed(f"the memory cannot be exported: {error}; {CURE}") from error


def _legacy_capable(driver: Driver, address: int) -> bool:
    attribute = driver.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    return bool(driver.call("cuPointerGetAttribute", attribute, address))


def _export_legacy(driver: Driver, address: int, nbytes: int, device: str) -> Exported:
    base, total = driver.address_range(address)
    _check_within(address, nbytes, base, total)
    raw = raw_bytes(driver.call("cuIpcGetMemHandle", base), IPC_HANDLE_BYTES)
    opaque = pack_opaque(CudaOpaque(address - base, total, raw))
    return Exported(MemoryHandle(CUDA_IPC, nbytes, device, opaque), ())


def _export_descriptor(driver: Driver, address: int, nbytes: int, device: str) -> Exported:
    """Export virtual memory. One tensor may lie in many physical pieces; only one can be named."""
    base, total = driver.address_range(address)
    if address + nbytes > base + total:
        raise ImportFailed(
            f"{nbytes} bytes of {EXPANDABLE} lie in physical pieces of {total} bytes, which "
            f"cannot be exported as one; {CURE}"
        )
    memory = driver.call("cuMemRetainAllocationHandle", address)
    try:
        fd = _export_handle(driver, memory)
    except CudaError as error:
        raise ImportFailed(f"{EXPANDABLE} cannot be exported: {error}; {CURE}") from error
    finally:
        driver.call("cuMemRelease", memory)
    opaque = pack_opaque(CudaOpaque(address - base, total))
    return Exported(MemoryHandle(CUDA_VMM, nbytes, device, opaque), (fd,))


def _export_handle(driver: Driver, memory: Any) -> int:
    kind = driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return int(driver.call("cuMemExportToShareableHandle", memory, kind, 0))


def _check_within(address: int, nbytes: int, base: int, total: int) -> None:
    if not base <= address <= address + nbytes <= base + total:
        raise ImportFailed(
            f"{nbytes} bytes at offset {address - base} are not within one allocation of {total}"
        )


class VmmAllocation:
    """Virtual memory made by this process to be shared: a pool that needs no torch."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        """Make at least `nbytes`, rounded up to the driver's granularity; raises `CudaError`."""
        api = driver.api
        self._driver = driver
        prop = api.CUmemAllocationProp()
        prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = int(driver.device)
        prop.requestedHandleTypes = (
            api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        with driver.current():
            unit = int(driver.call("cuMemGetAllocationGranularity", prop, minimum))
            self.nbytes = -(-nbytes // unit) * unit
            self._memory = driver.call("cuMemCreate", self.nbytes, prop, 0)
            self.address = int(driver.call("cuMemAddressReserve", self.nbytes, 0, 0, 0))
            driver.call("cuMemMap", self.address, self.nbytes, 0, self._memory, 0)
            driver.call("cuMemSetAccess", self.address, self.nbytes, [access_of(driver)], 1)
        self._closed = False

    def export(self) -> Exported:
        """A handle of the whole allocation and a descriptor to send beside it."""
        with self._driver.current():
            fd = _export_handle(self._driver, self._memory)
        opaque = pack_opaque(CudaOpaque(0, self.nbytes))
        return Exported(MemoryHandle(CUDA_VMM, self.nbytes, self._driver.uuid, opaque), (fd,))

    def close(self) -> None:
        """Give the memory back here. Repeatable; importers keep it alive while they map it."""
        if self._closed:
            return
        self._closed = True
        with self._driver.current():
            self._driver.call("cuMemUnmap", self.address, self.nbytes)
            self._driver.call("cuMemAddressFree", self.address, self.nbytes)
            self._driver.call("cuMemRelease", self._memory)

    def __repr__(self) -> str:
        return f"<VmmAllocation {self.nbytes} bytes of {self._driver.uuid}>"


def close_exported(exported: Sequence[Exported]) -> None:
    """Close the descriptors of exports once they have been sent."""
    for _, fds in exported:
        for fd in fds:
            os.close(fd)
