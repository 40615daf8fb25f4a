"""Queueing many copies in one driver call: `cuMemcpyBatchAsync`, and a loop where it is missing.

Owns the call through its address, because the bindings would build a Python object for each end of
each range. It must never leave unknown how far a failed call got: the caller then waits for the
stream before it lets go of any page.
"""

import ctypes
from array import array
from collections.abc import Callable
from typing import Any, TypeAlias

from transfer.ipc.cuda_driver import CudaError, Driver, describe, failure

BATCH_SINCE = 12_080
"""CUDA version whose form of the call is asked for; later drivers keep it."""
ACCESS_IN_STREAM_ORDER = 1

CopyRanges: TypeAlias = "Callable[[array[int], array[int], array[int], Any], None]"
"""(targets, sources, sizes, stream): queue the copies; raises `CudaError`. Arrays of u64."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes as CUDA 12.8 laid it out."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_BatchCall = ctypes.CFUNCTYPE(
    ctypes.c_int,  # status
    ctypes.c_void_p,  # targets
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # how many
    ctypes.c_void_p,  # attributes
    ctypes.c_void_p,  # first range of each attribute
    ctypes.c_size_t,  # how many attributes
    ctypes.c_void_p,  # where the number of a failed range is put
    ctypes.c_void_p,  # stream
)


def best_copy(driver: Driver, *, batched: bool = True) -> CopyRanges:
    """The batched call where the driver has it, unless it is not wanted."""
    address = batch_address(driver) if batched else 0
    return batch_copy(driver, address) if address else loop_copy(driver)


def batch_address(driver: Driver) -> int:
    """Address of the driver's batch call, or 0."""
    try:
        found = driver.call("cuGetProcAddress", b"cuMemcpyBatchAsync", BATCH_SINCE, 0)
    except CudaError:
        return 0
    return int(found[0] if isinstance(found, tuple) else found)


def batch_copy(driver: Driver, address: int) -> CopyRanges:
    """Copies by one call a batch."""
    call = _BatchCall(address)
    attributes = _Attributes(source_access_order=ACCESS_IN_STREAM_ORDER)
    first = ctypes.c_size_t(0)
    failed = ctypes.c_size_t(0)

    def copy(
        targets: "array[int]", sources: "array[int]", sizes: "array[int]", stream: Any
    ) -> None:
        status = call(
            targets.buffer_info()[0],
            sources.buffer_info()[0],
            sizes.buffer_info()[0],
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            int(stream),
        )
        if status:
            named = driver.api.CUresult(status)
            where = f"{describe(driver.api, named)}; range {failed.value} of {len(sizes)}"
            raise failure("cuMemcpyBatchAsync", named.name, where)

    return copy


def loop_copy(driver: Driver) -> CopyRanges:
    """Copies one by one."""

    def copy(
        targets: "array[int]", sources: "array[int]", sizes: "array[int]", stream: Any
    ) -> None:
        for target, source, nbytes in zip(targets, sources, sizes, strict=True):
            driver.call("cuMemcpyAsync", target, source, nbytes, stream)

    return copy
