"""Queueing a rectangle of bytes in one driver call: `cuMemcpy2DAsync`.

Owns the call through its address and the layout of its argument, because the bindings would build
an object a call and take each of its 16 fields by name. It decides nothing about which bytes: the
caller hands in addresses whose whole rectangle it has checked.
"""

import ctypes
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from transfer.ipc.cuda_driver import CudaError, Driver, describe, failure

TILE_SINCE = 12_000
"""CUDA version whose form of the call is asked for; it has been the same since 3.2."""
PITCH_BYTES_MAX = (1 << 31) - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU of the last ten years."""
HOST_MEMORY = 1
DEVICE_MEMORY = 2

_SOURCE_TYPE, _SOURCE_HOST, _SOURCE_DEVICE, _SOURCE_PITCH = 2, 3, 4, 6
_TARGET_TYPE, _TARGET_HOST, _TARGET_DEVICE, _TARGET_PITCH = 9, 10, 11, 13
_WIDTH, _ROWS = 14, 15
_WORDS = 16
"""CUDA_MEMCPY2D as 64-bit words: the two memory types are 32-bit and padded."""

_TileCall = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Corner(NamedTuple):
    """Where a rectangle begins on one side: an address, and the bytes from row to row."""

    address: int
    pitch: int
    host: bool


CopyTile: TypeAlias = Callable[[Corner, Corner, int, int, Any], None]
"""(source, target, bytes a row, rows, stream): queue the copy; raises `CudaError`."""


def tile_copy(driver: Driver) -> CopyTile | None:
    """The call, or None where the driver has none (then ranges are copied one by one)."""
    try:
        found = driver.call("cuGetProcAddress", b"cuMemcpy2DAsync", TILE_SINCE, 0)
    except CudaError:
        return None
    address = int(found[0] if isinstance(found, tuple) else found)
    if not address:
        return None
    call = _TileCall(address)
    words = array("Q", bytes(8 * _WORDS))
    argument = words.buffer_info()[0]

    def copy(source: Corner, target: Corner, width: int, rows: int, stream: Any) -> None:
        fill(words, source, target, width, rows)
        status = call(argument, int(stream))
        if status:
            named = driver.api.CUresult(status)
            where = f"{describe(driver.api, named)}; {rows} rows of {width} bytes"
            raise failure("cuMemcpy2DAsync", named.name, where)

    return copy


def fill(words: "array[int]", source: Corner, target: Corner, width: int, rows: int) -> None:
    """Write the call's argument into its 16 words."""
    words[_SOURCE_TYPE] = HOST_MEMORY if source.host else DEVICE_MEMORY
    words[_SOURCE_HOST if source.host else _SOURCE_DEVICE] = source.address
    words[_SOURCE_PITCH] = source.pitch
    words[_TARGET_TYPE] = HOST_MEMORY if target.host else DEVICE_MEMORY
    words[_TARGET_HOST if target.host else _TARGET_DEVICE] = target.address
    words[_TARGET_PITCH] = target.pitch
    words[_WIDTH], words[_ROWS] = width, rows
