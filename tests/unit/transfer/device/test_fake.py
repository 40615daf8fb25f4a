"""The fake device's own powers: to wait, to fail, to reorder."""

from collections.abc import Iterator

import pytest

from transfer.device.fake import FakeDevice
from transfer.device.protocol import Completion, MemoryBusy, UnknownMemory
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.plan import RangeBatch

A, B = (1, 0), (2, 0)


@pytest.fixture
def memory() -> Iterator[SharedMapping]:
    """What B is; A is eight bytes of x."""
    ipc = SharedMemoryIPC()
    made = ipc.create("b", 8)
    yield made
    ipc.close(made)


@pytest.fixture
def device(memory: SharedMapping) -> Iterator[FakeDevice]:
    """A fake with both attached."""
    ipc = SharedMemoryIPC()
    source = ipc.create("a", 8)
    source.view[:] = b"x" * 8
    made = FakeDevice()
    made.attach(A, source)
    made.attach(B, memory)
    yield made
    while made.waiting:
        made.step()
    made.detach(A)
    made.detach(B)
    ipc.close(source)


def submit(device: FakeDevice, *ranges: tuple[int, int, int]) -> int:
    return device.submit([RangeBatch(A, B, list(ranges), sum(r[2] for r in ranges))])


def test_bytes_move_when_the_test_says_so(device: FakeDevice, memory: SharedMapping) -> None:
    submit(device, (0, 0, 8))
    assert device.poll() == []
    assert bytes(memory.view) == bytes(8)
    assert device.step() == 1
    assert bytes(memory.view) == b"x" * 8
    assert device.poll() == [Completion(1)]


def test_a_memory_in_use_is_not_detached(device: FakeDevice) -> None:
    submit(device, (0, 0, 8))
    with pytest.raises(MemoryBusy):
        device.detach(B)


def test_a_failed_copy_may_have_written_something(
    device: FakeDevice, memory: SharedMapping
) -> None:
    device.fail(submit(device, (0, 0, 2), (4, 4, 2)), "lost")
    assert device.poll() == [Completion(1, "lost")]
    assert bytes(memory.view) == b"xx" + bytes(6)


def test_a_delayed_copy_is_passed_over(device: FakeDevice) -> None:
    first, second = submit(device, (0, 0, 1)), submit(device, (1, 1, 1))
    device.delay(first, 1)
    device.step()
    device.step()
    assert [done.ticket for done in device.poll()] == [second, first]


def test_copies_can_complete_in_reverse(device: FakeDevice) -> None:
    for i in range(3):
        submit(device, (i, i, 1))
    device.step(2, newest_first=True)
    assert [done.ticket for done in device.poll()] == [3, 2]
    assert repr(device) == "<FakeDevice 2 memories, 1 waiting>"


def test_a_submission_can_be_refused(device: FakeDevice) -> None:
    device.refuse_next("no")
    with pytest.raises(UnknownMemory, match="no"):
        submit(device, (0, 0, 1))
    assert submit(device, (0, 0, 1)) == 1
