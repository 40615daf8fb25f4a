"""The CUDA device and driver in this process: pinning in chunks, what can be asked of memory."""

from collections.abc import Iterator

import pytest

from directory.core.limits import MIB
from tests.gpu.memory import DeviceMemory
from transfer.device.cuda import CudaDevice
from transfer.device.cuda_host import NotPinned, pin
from transfer.device.protocol import Completion
from transfer.ipc.cuda_driver import Driver
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.plan import RangeBatch

SIZE = 64 * MIB
GPU, HOST = (1, 0), (-1, 0)


@pytest.fixture(scope="module")
def driver(uuids: list[str]) -> Driver:
    """The first GPU."""
    return Driver.open(uuids[0])


@pytest.fixture
def host() -> Iterator[SharedMapping]:
    """Host memory."""
    ipc = SharedMemoryIPC()
    mapping = ipc.create("host", SIZE)
    yield mapping
    ipc.close(mapping)


def test_a_chunk_that_the_driver_refuses_undoes_those_before_it_f132(
    driver: Driver, host: SharedMapping
) -> None:
    # What is registered already cannot be registered again: the third chunk fails.
    taken = pin(driver, host.address + 40 * MIB, 4 * MIB)
    with pytest.raises(NotPinned, match=r"chunk 3 of 4 .*ALREADY_REGISTERED.*--unpinned"):
        pin(driver, host.address, SIZE, 16 * MIB)
    first = pin(driver, host.address, 32 * MIB)  # which fails if anything was left
    first.unpin()
    taken.unpin()
    pin(driver, host.address, SIZE, 16 * MIB).unpin()


@pytest.mark.parametrize("batched", [True, False], ids=["batch", "loop"])
def test_copies_across_the_borders_of_registered_chunks_are_whole(
    driver: Driver, host: SharedMapping, batched: bool
) -> None:
    device = CudaDevice(driver, batched=batched, chunk_bytes=MIB)
    memory = DeviceMemory(driver, SIZE)
    pattern = bytes(range(251)) * (SIZE // 251 + 1)
    memory.write(0, pattern[:SIZE])
    device.attach(GPU, memory.mapping)
    device.attach(HOST, host)
    ranges = [(3, MIB - 5, 3 * MIB), (7 * MIB + 1, 9 * MIB, MIB + 1)]
    ticket = device.submit([RangeBatch(GPU, HOST, ranges, sum(r[2] for r in ranges))])
    done: list[Completion] = []
    while not done:
        done = device.poll()
    assert done == [Completion(ticket)]
    for source, target, nbytes in ranges:
        assert bytes(host.view[target : target + nbytes]) == pattern[source : source + nbytes]
    device.detach(GPU)
    device.detach(HOST)
    memory.close()


def test_own_memory_is_known_by_its_gpu(uuids: list[str]) -> None:
    for uuid in uuids:
        driver = Driver.open(uuid)
        with driver.current():
            address = int(driver.call("cuMemAlloc", MIB))
            assert driver.device_of(address) == uuid
            driver.call("cuMemFree", address)
        driver.close()
