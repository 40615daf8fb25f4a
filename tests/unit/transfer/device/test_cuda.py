"""The CUDA device without a GPU: what it asks of the driver, and what it says when that fails."""

from collections.abc import Iterator

import pytest

from tests.unit.transfer.device.fake_driver import FakeDriver
from transfer.device.cuda import CudaDevice
from transfer.device.cuda_host import NotPinned, pin
from transfer.device.protocol import Completion, DeviceLost, MemoryBusy, UnknownMemory
from transfer.device.work import cut_at
from transfer.ipc.cuda_driver import CudaError
from transfer.ipc.cuda_memory import CudaMapping, Physical
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.plan import RangeBatch

SIZE = 1 << 20
GPU, HOST = (1, 0), (-1, 0)
BATCH = RangeBatch(GPU, HOST, [(0, 0, 16), (64, 32, 8)], 24)


def gpu_memory(nbytes: int = SIZE) -> CudaMapping:
    return CudaMapping(Physical(b"", 0x7000_0000, nbytes, lambda: None), 0, nbytes, "GPU-fake")


@pytest.fixture
def host() -> Iterator[SharedMapping]:
    """Host memory."""
    ipc = SharedMemoryIPC()
    mapping = ipc.create("host", SIZE)
    yield mapping
    ipc.close(mapping)


@pytest.fixture
def driver() -> FakeDriver:
    """A driver in order."""
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver, host: SharedMapping) -> CudaDevice:
    """A device with a memory of each kind."""
    made = CudaDevice(driver)
    made.attach(GPU, gpu_memory())
    made.attach(HOST, host)
    return made


def test_ranges_become_addresses_and_an_event_follows(
    device: CudaDevice, driver: FakeDriver, host: SharedMapping
) -> None:
    ticket = device.submit([BATCH])
    copies = driver.named("cuMemcpyAsync")
    assert [c[:3] for c in copies] == [
        (host.address, 0x7000_0000, 16),
        (host.address + 32, 0x7000_0000 + 64, 8),
    ]
    assert driver.calls[-1][0] == "cuEventRecord"
    assert driver.calls[-1][2] == copies[0][3], "on the stream of the copies"
    assert device.poll() == []
    driver.reached = True
    assert device.poll() == [Completion(ticket)]


def test_urgent_copies_have_streams_of_their_own(device: CudaDevice, driver: FakeDriver) -> None:
    for urgent in (False, False, True, True):
        device.submit([BATCH._replace(ranges=[(0, 0, 1)])], urgent=urgent)
    streams = [call[3] for call in driver.named("cuMemcpyAsync")]
    assert len(set(streams)) == 4
    priorities = [call[1] for call in driver.named("cuStreamCreateWithPriority")]
    assert priorities == [-5] * 4 + [0] * 8
    assert {streams[2], streams[3]} == {1, 2}, "the high ones are the urgent ones"


def test_events_are_used_again(device: CudaDevice, driver: FakeDriver) -> None:
    driver.reached = True
    for _ in range(5):
        device.submit([BATCH])
        device.poll()
    assert len(driver.named("cuEventCreate")) == 1


def test_a_copy_that_the_driver_refuses_ends_with_an_error_once_its_stream_got_there(
    device: CudaDevice, driver: FakeDriver
) -> None:
    driver.fail("cuMemcpyAsync", "", "CUDA_ERROR_INVALID_VALUE")
    ticket = device.submit([BATCH])
    assert device.poll() == [], "its first range may be under way"
    with pytest.raises(MemoryBusy):
        device.detach(GPU)
    driver.reached = True
    ((done, error),) = device.poll()
    assert done == ticket
    assert "CUDA_ERROR_INVALID_VALUE" in error


def test_a_broken_context_is_the_end_of_the_device(device: CudaDevice, driver: FakeDriver) -> None:
    device.submit([BATCH])
    driver.fail("cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DeviceLost, match=r"context is broken: .*ILLEGAL_ADDRESS"):
        device.poll()
    driver.fail("cuMemcpyAsync", "CUDA_ERROR_ECC_UNCORRECTABLE")
    with pytest.raises(DeviceLost, match="ECC_UNCORRECTABLE"):
        device.submit([BATCH])


def test_a_device_that_cannot_say_when_a_copy_ends_is_lost(
    device: CudaDevice, driver: FakeDriver
) -> None:
    driver.fail("cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE")
    driver.fail("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE")
    with pytest.raises(DeviceLost, match=r"GPU-fake is lost: .*INVALID_VALUE"):
        device.submit([BATCH])
    device.submit([BATCH])
    driver.fail("cuEventQuery", "CUDA_ERROR_INVALID_HANDLE")
    with pytest.raises(DeviceLost, match=r"GPU-fake is lost: .*INVALID_HANDLE"):
        device.poll()


def test_no_range_beyond_a_memory_reaches_the_driver(
    device: CudaDevice, driver: FakeDriver
) -> None:
    for bad in ((SIZE - 1, 0, 2), (0, SIZE, 1), (-1, 0, 1)):
        with pytest.raises(UnknownMemory):
            device.submit([BATCH._replace(ranges=[(0, 0, 8), bad])])
    assert driver.named("cuMemcpyAsync") == []


def test_host_memory_is_registered_in_chunks_and_no_copy_crosses_one(
    driver: FakeDriver, host: SharedMapping
) -> None:
    device = CudaDevice(driver, chunk_bytes=SIZE // 4)
    device.attach(GPU, gpu_memory())
    device.attach(HOST, host)
    registered = driver.named("cuMemHostRegister")
    assert [(a - host.address, n) for a, n, _ in registered] == [
        (i * SIZE // 4, SIZE // 4) for i in range(4)
    ]
    device.submit([BATCH._replace(ranges=[(0, SIZE // 4 - 10, 30)])])
    assert [c[2] for c in driver.named("cuMemcpyAsync")] == [10, 20]
    driver.reached = True
    device.poll()
    device.detach(HOST)
    undone = [a - host.address for (a,) in driver.named("cuMemHostUnregister")]
    assert sorted(undone) == [i * SIZE // 4 for i in range(4)]


def test_a_chunk_that_cannot_be_pinned_undoes_those_before_it_f132(driver: FakeDriver) -> None:
    driver.fail("cuMemHostRegister", "", "", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(NotPinned) as caught:
        pin(driver, 0x10000, 1000, chunk_bytes=300)
    message = str(caught.value)
    for words in (
        "1000 bytes",
        "chunk 3 of 4 (300 bytes, after 600)",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "limit of locked memory is",
        "ulimit -l",
        "--unpinned",
    ):
        assert words in message
    assert sorted(driver.named("cuMemHostUnregister")) == [(0x10000,), (0x10000 + 300,)]


def test_a_memory_that_cannot_be_pinned_is_not_attached(
    driver: FakeDriver, host: SharedMapping
) -> None:
    device = CudaDevice(driver)
    driver.fail("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(NotPinned):
        device.attach(HOST, host)
    device.attach(HOST, host)


def test_an_unpinned_device_registers_nothing_f132(driver: FakeDriver, host: SharedMapping) -> None:
    device = CudaDevice(driver, pinned=False)
    device.attach(HOST, host)
    device.detach(HOST)
    assert driver.named("cuMemHostRegister") == driver.named("cuMemHostUnregister") == []


def test_what_cannot_be_unregistered_is_reported_after_all_was_tried(driver: FakeDriver) -> None:
    pinned = pin(driver, 0, 900, chunk_bytes=300)
    driver.fail("cuMemHostUnregister", "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(CudaError):
        pinned.unpin()
    assert len(driver.named("cuMemHostUnregister")) == 3
    pinned.unpin()


@pytest.mark.parametrize("side", [0, 1])
def test_cut_ranges_cover_the_same_bytes_without_crossing(side: int) -> None:
    ranges = [(0, 0, 5), (7, 7, 30), (40, 40, 10)]
    pieces = cut_at(ranges, side, 10)
    assert sum(n for _, _, n in pieces) == 45
    assert all(p[side] // 10 == (p[side] + p[2] - 1) // 10 for p in pieces)
    covered = [byte for s, t, n in pieces for byte in range(s, s + n) if s == t]
    assert covered == [byte for s, _, n in ranges for byte in range(s, s + n)]
