"""The device contract: the same tests over every device that this machine has."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import pytest

from transfer.device.cpu import CpuDevice
from transfer.device.cuda import CudaDevice
from transfer.device.fake import FakeDevice
from transfer.device.protocol import Completion, Device, MemoryBusy, UnknownMemory
from transfer.ipc.memory import Mapping, SharedMapping, SharedMemoryIPC
from transfer.plan import RangeBatch

SOURCE, TARGET = (1, 0), (-1, 0)
SIZE = 4096
POLLS_MAX = 10_000


class Memory(Protocol):
    """A memory that can be attached, and the test's own access to it."""

    @property
    def mapping(self) -> Mapping:
        """What is attached."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Bytes of it."""
        ...

    def write(self, start: int, data: bytes) -> None:
        """Put bytes into it."""
        ...

    def close(self) -> None:
        """Unmap it; fails while it is attached."""
        ...


class HostMemory:
    """Shared memory."""

    ipc = SharedMemoryIPC()

    def __init__(self, name: str) -> None:
        self.mapping: Mapping = self.ipc.create(name, SIZE)
        assert isinstance(self.mapping, SharedMapping)
        self.view = self.mapping.view

    def read(self, start: int, stop: int) -> bytes:
        return bytes(self.view[start:stop])

    def write(self, start: int, data: bytes) -> None:
        self.view[start : start + len(data)] = data

    def close(self) -> None:
        self.ipc.close(self.mapping)


@dataclass
class Case:
    """A device with two attached memories; `advance` lets an asynchronous one go on."""

    device: Device
    advance: Callable[[], object]
    source: Memory
    target: Memory
    make_memory: Callable[[str], Memory]

    def finish(self) -> list[Completion]:
        """Everything in flight."""
        done: list[Completion] = []
        for _ in range(POLLS_MAX):
            if not self.device.in_flight:
                return done
            self.advance()
            done += self.device.poll()
        raise AssertionError("the device does not finish")


def make_cpu() -> tuple[Device, Callable[[], object], Callable[[str], Memory]]:
    return CpuDevice(), lambda: None, HostMemory


def make_fake() -> tuple[Device, Callable[[], object], Callable[[str], Memory]]:
    device = FakeDevice()
    return device, device.step, HostMemory


def make_cuda(
    gpu_memory: Sequence[str], *, batched: bool, beside: bool = False
) -> tuple[Device, Callable[[], object], Callable[[str], Memory]]:
    cuda = pytest.importorskip("tests.gpu.memory")
    device, make_memory = cuda.device_with_memory(SIZE, gpu_memory, batched=batched)
    if beside:
        device.submit_beside(1)
    return device, lambda: time.sleep(0), make_memory


CUDA_CASES = {
    "cuda-backup": partial(make_cuda, ("source", "again"), batched=True),
    "cuda-load": partial(make_cuda, ("target",), batched=True),
    "cuda-peer": partial(make_cuda, ("source", "target", "again"), batched=True),
    "cuda-backup-loop": partial(make_cuda, ("source", "again"), batched=False),
    "cuda-load-loop": partial(make_cuda, ("target",), batched=False),
    "cuda-backup-beside": partial(make_cuda, ("source", "again"), batched=True, beside=True),
    "cuda-load-beside": partial(make_cuda, ("target",), batched=True, beside=True),
}


@pytest.fixture(
    params=[
        pytest.param(make_cpu, id="cpu"),
        pytest.param(make_fake, id="fake"),
        *(pytest.param(m, id=name, marks=pytest.mark.gpu) for name, m in CUDA_CASES.items()),
    ]
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """A device of each kind."""
    device, advance, make_memory = request.param()
    source, target = make_memory("source"), make_memory("target")
    source.write(0, bytes(i * 7 % 256 for i in range(SIZE)))
    target.write(0, b"\xee" * SIZE)
    device.attach(SOURCE, source.mapping)
    device.attach(TARGET, target.mapping)
    made = Case(device, advance, source, target, make_memory)
    yield made
    made.finish()
    for key in (SOURCE, TARGET):
        device.detach(key)
    if isinstance(device, CudaDevice):
        device.close()
    made.source.close()
    made.target.close()


def batch(*ranges: tuple[int, int, int]) -> RangeBatch:
    return RangeBatch(SOURCE, TARGET, list(ranges), sum(n for _, _, n in ranges))


def test_a_completed_copy_has_moved_its_ranges_and_nothing_else(case: Case) -> None:
    ticket = case.device.submit([batch((0, 100, 50), (1000, 10, 3))])
    assert case.finish() == [Completion(ticket)]
    expected = bytearray(b"\xee" * SIZE)
    expected[100:150] = case.source.read(0, 50)
    expected[10:13] = case.source.read(1000, 1003)
    assert case.target.read(0, SIZE) == bytes(expected)


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
    assert case.target.read(64, 80) == case.source.read(64, 80)
    assert case.source.read(0, 16) == b"\xee" * 16


def test_the_last_byte_can_be_copied(case: Case) -> None:
    case.device.submit([batch((SIZE - 1, SIZE - 1, 1))])
    case.finish()
    assert case.target.read(SIZE - 1, SIZE) == case.source.read(SIZE - 1, SIZE)


@pytest.mark.parametrize("bad", [(SIZE - 1, 0, 2), (0, SIZE - 1, 2), (0, SIZE, 1)])
def test_a_range_beyond_the_end_is_refused_before_anything_is_copied(
    case: Case, bad: tuple[int, int, int]
) -> None:
    with pytest.raises(UnknownMemory):
        case.device.submit([batch((0, 0, 8)), batch(bad)])
    assert case.device.in_flight == 0
    assert case.target.read(0, SIZE) == b"\xee" * SIZE


def test_a_memory_that_is_not_attached_is_refused(case: Case) -> None:
    with pytest.raises(UnknownMemory):
        case.device.submit([RangeBatch((9, 0), TARGET, [(0, 0, 1)], 1)])
    with pytest.raises(UnknownMemory):
        case.device.detach((9, 0))


def test_a_key_names_one_memory_at_a_time(case: Case) -> None:
    with pytest.raises(MemoryBusy):
        case.device.attach(SOURCE, case.target.mapping)


def test_a_detached_memory_can_be_closed_and_its_key_used_again(case: Case) -> None:
    case.device.submit([batch((0, 0, 8))])
    case.finish()
    case.device.detach(SOURCE)
    case.source.close()
    case.source = case.make_memory("again")
    case.source.write(0, b"new data")
    case.device.attach(SOURCE, case.source.mapping)
    case.device.submit([batch((0, 0, 8))])
    case.finish()
    assert case.target.read(0, 8) == b"new data"
