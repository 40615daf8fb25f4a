"""Host memory that a GPU of this process can write: small tables that the mover reads.

Owns the registration with the driver and nothing of the memory. What a kernel writes there is seen
by other processes once the stream has written a timeline behind it. Meant for a few words a step:
a kernel that writes much to host memory slows every step of the engine down.
"""

import mmap
from typing import Any

from transfer.ipc.cuda_driver import DriverCalls
from transfer.ipc.cuda_sync import HOST_REGISTER_DEVICEMAP, HOST_REGISTER_PORTABLE
from transfer.ipc.memory import SharedMapping


class MappedMemory:
    """A mapping that is registered once; closed before the mapping is."""

    def __init__(self, driver: DriverCalls, mapping: SharedMapping) -> None:
        """Register it; raises `CudaError`."""
        self._driver = driver
        self._host = mapping.address
        self.nbytes = mapping.nbytes
        whole = -(-mapping.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP
        driver.call("cuMemHostRegister", self._host, whole, flags)
        self.address = int(driver.call("cuMemHostGetDevicePointer", self._host, 0))
        """Of the first byte, for the device."""
        self._closed = False

    def array(self, count: int, typestr: str, itemsize: int) -> "DeviceArray":
        """The first `count` items as an array of the device; valid until this is closed."""
        if self._closed or not 0 < count * itemsize <= self.nbytes:
            raise IndexError(f"{count} items of {itemsize} bytes of {self.nbytes}")
        return DeviceArray(self.address, count, typestr)

    def close(self) -> None:
        """Unregister. Repeatable; only when no kernel that writes here is queued any more."""
        if not self._closed:
            self._closed = True
            self._driver.call("cuMemHostUnregister", self._host)

    def __repr__(self) -> str:
        return f"<MappedMemory {self.nbytes} bytes{', closed' if self._closed else ''}>"


class DeviceArray:
    """Memory as array libraries take it over: the CUDA array interface, version 3."""

    def __init__(self, address: int, count: int, typestr: str) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
