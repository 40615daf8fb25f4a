"""Host memory that a GPU writes, without a GPU: registered once, within bounds, given back once."""

import mmap
from collections.abc import Iterator

import pytest

from tests.unit.transfer.device.fake_driver import FakeDriver
from transfer.ipc.cuda_mapped import MappedMemory
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC


@pytest.fixture
def mapping() -> Iterator[SharedMapping]:
    """Room for five 32-bit words."""
    ipc = SharedMemoryIPC()
    mapping = ipc.create("words", 20)
    yield mapping
    ipc.close(mapping)


def names(driver: FakeDriver) -> list[str]:
    return [call[0] for call in driver.calls]


def test_memory_is_registered_in_whole_pages_and_unregistered_once(mapping: SharedMapping) -> None:
    driver = FakeDriver()
    mapped = MappedMemory(driver, mapping)
    register = driver.calls[0]
    assert register[:3] == ("cuMemHostRegister", mapping.address, mmap.PAGESIZE)
    mapped.close()
    mapped.close()
    assert names(driver).count("cuMemHostUnregister") == 1
    assert driver.calls[-1][1] == mapping.address


def test_an_array_says_where_it_lies_in_the_form_of_array_libraries(
    mapping: SharedMapping,
) -> None:
    mapped = MappedMemory(FakeDriver(), mapping)
    said = mapped.array(5, "<i4", 4).__cuda_array_interface__
    assert said["data"] == (mapped.address, False), "writable"
    assert (said["shape"], said["typestr"], said["version"]) == ((5,), "<i4", 3)
    mapped.close()


@pytest.mark.parametrize("count", [0, 6, -1])
def test_no_array_reaches_beyond_the_memory(mapping: SharedMapping, count: int) -> None:
    mapped = MappedMemory(FakeDriver(), mapping)
    with pytest.raises(IndexError, match=f"{count} items of 4 bytes of 20"):
        mapped.array(count, "<i4", 4)
    mapped.close()
    with pytest.raises(IndexError):
        mapped.array(1, "<i4", 4)
