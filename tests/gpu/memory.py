"""A CUDA device with memories of this process: for the device contract."""

from collections.abc import Callable, Sequence

import pytest

from directory.core.errors import TransferError
from tests.contract.test_device import HostMemory, Memory
from transfer.device.cuda import CudaDevice
from transfer.ipc.cuda_driver import Driver, load_api, visible_devices
from transfer.ipc.cuda_memory import CudaMapping, Physical
from transfer.ipc.memory import Mapping


class DeviceMemory:
    """Memory of the GPU."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self._driver = driver
        self._address = int(driver.call("cuMemAlloc", nbytes))
        physical = Physical(b"", self._address, nbytes, lambda: None)
        self.mapping: Mapping = CudaMapping(physical, 0, nbytes, driver.uuid)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of it."""
        data = bytearray(stop - start)
        self._driver.call("cuMemcpyDtoH", data, self._address + start, len(data))
        return bytes(data)

    def write(self, start: int, data: bytes) -> None:
        """Put bytes into it; there when this returns.

        A copy from pageable memory may return before its last bytes have arrived.
        """
        self._driver.call("cuMemcpyHtoD", self._address + start, data, len(data))
        self._driver.call("cuCtxSynchronize")

    def close(self) -> None:
        """Free it."""
        self._driver.call("cuMemFree", self._address)


def device_with_memory(
    nbytes: int, gpu_memory: Sequence[str], *, batched: bool
) -> tuple[CudaDevice, Callable[[str], Memory]]:
    """A device, and a maker of memories: of the GPU for the names given, else of the host."""
    try:
        uuid = next(iter(visible_devices(load_api())), "")
    except TransferError:
        uuid = ""
    if not uuid:
        pytest.skip("no CUDA device here")
    driver = Driver.open(uuid)
    # Chunks smaller than the memories: copies across their borders have to be cut.
    device = CudaDevice(driver, batched=batched, chunk_bytes=nbytes)

    def make_memory(name: str) -> Memory:
        return DeviceMemory(driver, nbytes) if name in gpu_memory else HostMemory(name)

    return device, make_memory
