"""The device contract: the same tests over every device that this machine has."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from transfer.device.cpu import CpuDevice
from transfer.device.fake import FakeDevice
from transfer.device.protocol import Completion, Device, MemoryBusy, UnknownMemory
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.plan import RangeBatch

SOURCE, TARGET = (1, 0), (-1, 0)
SIZE = 4096
POLLS_MAX = 10_000


@dataclass
class Case:
    """A device with two attached memories; `advance` lets an asynchronous one go on."""

    device: Device
    advance: Callable[[], object]
    ipc: SharedMemoryIPC
    source: SharedMapping
    target: SharedMapping

    def finish(self) -> list[Completion]:
        """Everything in flight."""
        done: list[Completion] = []
        for _ in range(POLLS_MAX):
            if not self.device.in_flight:
                return done
            self.advance()
            done += self.device.poll()
        raise AssertionError("the device does not finish")


def make_cpu() -> tuple[Device, Callable[[], object]]:
    return CpuDevice(), lambda: None


def make_fake() -> tuple[Device, Callable[[], object]]:
    device = FakeDevice()
    return device, device.step


@pytest.fixture(params=[make_cpu, make_fake], ids=["cpu", "fake"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """A device of each kind."""
    device, advance = request.param()
    ipc = SharedMemoryIPC()
    source, target = ipc.create("source", SIZE), ipc.create("target", SIZE)
    source.view[:] = bytes(i * 7 % 256 for i in range(SIZE))
    target.view[:] = b"\xee" * SIZE
    device.attach(SOURCE, source)
    device.attach(TARGET, target)
    made = Case(device, advance, ipc, source, target)
    yield made
    made.finish()
    for key in (SOURCE, TARGET):
        device.detach(key)
    ipc.close(made.source)
    ipc.close(made.target)


def batch(*ranges: tuple[int, int, int]) -> RangeBatch:
    return RangeBatch(SOURCE, TARGET, list(ranges), sum(n for _, _, n in ranges))


def test_a_completed_copy_has_moved_its_ranges_and_nothing_else(case: Case) -> None:
    ticket = case.device.submit([batch((0, 100, 50), (1000, 10, 3))])
    assert case.finish() == [Completion(ticket)]
    expected = bytearray(b"\xee" * SIZE)
    expected[100:150] = case.source.view[0:50]
    expected[10:13] = case.source.view[1000:1003]
    assert bytes(case.target.view) == bytes(expected)


def test_every_ticket_completes_exactly_once(case: Case) -> None:
    tickets = [case.device.submit([batch((i, i, 1))], urgent=i % 2 == 0) for i in range(5)]
    assert case.device.in_flight == 5
    assert sorted(done.ticket for done in case.finish()) == sorted(set(tickets))
    assert case.device.in_flight == 0
    assert case.device.poll() == []


def test_one_submission_may_have_several_batches_in_both_directions(case: Case) -> None:
    back = RangeBatch(TARGET, SOURCE, [(0, 0, 16)], 16)
    case.device.submit([batch((64, 64, 16)), back])
    case.finish()
    assert bytes(case.target.view[64:80]) == bytes(case.source.view[64:80])
    assert bytes(case.source.view[0:16]) == b"\xee" * 16


def test_the_last_byte_can_be_copied(case: Case) -> None:
    case.device.submit([batch((SIZE - 1, SIZE - 1, 1))])
    case.finish()
    assert case.target.view[SIZE - 1] == case.source.view[SIZE - 1]


@pytest.mark.parametrize("bad", [(SIZE - 1, 0, 2), (0, SIZE - 1, 2), (0, SIZE, 1)])
def test_a_range_beyond_the_end_is_refused_before_anything_is_copied(
    case: Case, bad: tuple[int, int, int]
) -> None:
    with pytest.raises(UnknownMemory):
        case.device.submit([batch((0, 0, 8)), batch(bad)])
    assert case.device.in_flight == 0
    assert bytes(case.target.view) == b"\xee" * SIZE


def test_a_memory_that_is_not_attached_is_refused(case: Case) -> None:
    with pytest.raises(UnknownMemory):
        case.device.submit([RangeBatch((9, 0), TARGET, [(0, 0, 1)], 1)])
    with pytest.raises(UnknownMemory):
        case.device.detach((9, 0))


def test_a_key_names_one_memory_at_a_time(case: Case) -> None:
    with pytest.raises(MemoryBusy):
        case.device.attach(SOURCE, case.target)


def test_a_detached_memory_can_be_closed_and_its_key_used_again(case: Case) -> None:
    case.device.submit([batch((0, 0, 8))])
    case.finish()
    case.device.detach(SOURCE)
    case.ipc.close(case.source)
    case.source = case.ipc.create("again", SIZE)
    case.source.view[:8] = b"new data"
    case.device.attach(SOURCE, case.source)
    case.device.submit([batch((0, 0, 8))])
    case.finish()
    assert bytes(case.target.view[:8]) == b"new data"
