"""CUDA IPC without a GPU: what is refused before a driver sees it, and the guarded waits."""

import enum
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from directory.core.errors import ImportFailed, LayoutError, TransferError
from tests.unit.transfer.device.fake_driver import FakeDriver
from transfer.device.protocol import DeviceLost
from transfer.ipc.backends import MemoryByKind
from transfer.ipc.cuda_driver import CudaError, Driver, format_uuid
from transfer.ipc.cuda_export import check_dense
from transfer.ipc.cuda_memory import (
    CudaMemoryIPC,
    CudaOpaque,
    check_descriptor,
    pack_opaque,
    read_opaque,
)
from transfer.ipc.cuda_sync import CudaTimelines, HostTimelines, StreamWaiter
from transfer.ipc.memory import CUDA_IPC, CUDA_VMM, MemoryHandle, SharedMemoryIPC
from transfer.ipc.sync import TimelineTable

MIB = 1 << 20


def handle(kind: str = CUDA_IPC, nbytes: int = 100, **opaque: object) -> MemoryHandle:
    fields: dict[str, object] = {"offset": 0, "allocation_bytes": MIB}
    fields["handle"] = b"h" * 64 if kind == CUDA_IPC else b""
    return MemoryHandle(
        kind,
        nbytes,
        "GPU-fake",
        pack_opaque(CudaOpaque(**{**fields, **opaque})),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (handle(handle=b"short"), "carries 5 bytes"),
        (handle(handle=bytes(64)), "not all zero"),
        (handle(CUDA_VMM, handle=b"h" * 64), "carries 64 bytes"),
        (handle(offset=MIB), "not within an allocation"),
        (handle(nbytes=MIB + 1), "not within an allocation"),
        (handle(CUDA_VMM, allocation_bytes=MIB + 1), "does not exist"),
        (msgspec.structs.replace(handle(), opaque=b"\xff"), "cannot be decoded"),
        (
            msgspec.structs.replace(handle(), opaque=msgspec.msgpack.encode((-1, MIB, b"h" * 64))),
            "cannot be decoded",
        ),
    ],
)
def test_a_forged_handle_is_refused_before_the_driver_sees_it_f143(
    bad: MemoryHandle, words: str
) -> None:
    with pytest.raises(ImportFailed, match=words):
        read_opaque(bad)
    driver = FakeDriver()
    with pytest.raises(ImportFailed, match=words):
        CudaMemoryIPC(driver).import_memory(bad, (0,) if bad.kind == CUDA_VMM else ())
    assert driver.calls == []


def test_a_handle_of_an_unknown_gpu_or_with_the_wrong_descriptors_is_refused_f38() -> None:
    ipc = CudaMemoryIPC(FakeDriver())
    elsewhere = msgspec.structs.replace(handle(), device="GPU-elsewhere")
    with pytest.raises(ImportFailed, match=r"GPU-elsewhere is not visible .* sees GPU-fake"):
        ipc.import_memory(elsewhere, ())
    for kind, fds in ((CUDA_IPC, (0,)), (CUDA_VMM, ()), ("memfd", (0,))):
        with pytest.raises(ImportFailed, match="is not GPU memory"):
            ipc.import_memory(MemoryHandle(kind, 100, "GPU-fake"), fds)


def test_a_descriptor_of_a_file_is_not_gpu_memory_f143() -> None:
    memfd = os.memfd_create("x")
    reading, writing = os.pipe()
    for fd in (memfd, reading):
        with pytest.raises(ImportFailed, match="not GPU memory"):
            check_descriptor(fd)
    for fd in (memfd, reading, writing):
        os.close(fd)
    with pytest.raises(ImportFailed, match="cannot be looked at"):
        check_descriptor(memfd)


@pytest.mark.parametrize(
    ("shape", "strides", "nbytes"),
    [((4, 3, 2), (6, 2, 1), 48), ((4, 3, 2), (1, 8, 4), 48), ((4, 1, 2), (2, 99, 1), 16)],
    ids=["contiguous", "permuted", "an axis of one"],
)
def test_a_dense_tensor_may_have_its_axes_in_any_order_f44(
    shape: tuple[int, ...], strides: tuple[int, ...], nbytes: int
) -> None:
    check_dense(shape, strides, 2, nbytes)


@pytest.mark.parametrize(
    ("shape", "strides", "nbytes"),
    [
        ((4, 3), (6, 1), 24),
        ((4, 3), (0, 1), 24),
        ((4, 3), (3, 1), 26),
        ((4, 0), (3, 1), 0),
        ((4,), (3, 1), 8),
    ],
    ids=["sliced", "expanded", "too long", "empty", "axes"],
)
def test_any_other_tensor_is_refused_with_its_shape_and_strides_f44(
    shape: tuple[int, ...], strides: tuple[int, ...], nbytes: int
) -> None:
    with pytest.raises(LayoutError) as caught:
        check_dense(shape, strides, 2, nbytes)
    assert f"shape {shape}, strides {strides}" in str(caught.value)


def test_memory_goes_to_the_backend_of_its_kind_and_back() -> None:
    tables = SharedMemoryIPC()
    memory = MemoryByKind({"memfd": tables})
    made = tables.create("x", 4096)
    exported, fds = tables.export(made)
    first, second = (memory.import_memory(exported, fds) for _ in range(2))
    assert first is second
    assert memory.export(first) == (exported, fds)
    memory.close(first)
    memory.close(second)
    with pytest.raises(TransferError, match="closed"):
        memory.close(first)
    with pytest.raises(ImportFailed, match="of the kinds memfd, not 'cuda-ipc'"):
        memory.import_memory(handle(), ())
    tables.close(made)
    assert tables.open_count == 0


def test_a_uuid_looks_as_the_tools_write_it() -> None:
    assert format_uuid(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.fixture
def table() -> Iterator[TimelineTable]:
    """Timelines in shared memory."""
    made = TimelineTable.create(SharedMemoryIPC(), "timelines")
    yield made
    made.close()


def test_a_stream_writes_its_timeline_in_registered_memory(table: TimelineTable) -> None:
    driver = FakeDriver()
    timelines = CudaTimelines(driver, table)
    timelines.signal(77, 1, 5)
    ((address, nbytes, _),) = driver.named("cuMemHostRegister")
    assert (address, nbytes % 4096) == (table.mapping.address, 0)
    assert driver.named("cuStreamWriteValue64") == [(77, 0x1000 + 8, 5, 0)]
    timelines.close()
    timelines.close()
    assert len(driver.named("cuMemHostUnregister")) == 1
    with pytest.raises(IndexError):
        timelines.signal(77, 1, 6)


def test_the_host_writes_a_timeline_only_after_the_stream_is_done(table: TimelineTable) -> None:
    driver = FakeDriver()
    driver.fail("cuStreamSynchronize", "CUDA_ERROR_LAUNCH_FAILED")
    timelines = HostTimelines(driver, table)
    with pytest.raises(DeviceLost):
        timelines.signal(77, 0, 3)
    assert table.read(0) == 0
    timelines.signal(77, 0, 3)
    assert table.read(0) == 3


def test_a_wait_that_nobody_ends_is_ended_by_the_watchdog_and_counts_as_lost_f63(
    table: TimelineTable,
) -> None:
    waiter = StreamWaiter(FakeDriver(), table)
    waiter.wait(77, 0, 5, deadline_s=3600)
    waiter.wait(77, 1, 9, deadline_s=0.01)
    released = threading.Event()
    for _ in range(10_000):
        if waiter.lost(1, 9) or released.wait(0.001):
            break
    assert table.read(1) == 9
    assert not waiter.lost(0, 5)
    assert table.read(0) == 0
    waiter.close()
    assert table.read(0) == 5, "closing leaves no stream behind"
    assert waiter.lost(0, 5)


def test_a_wait_that_was_answered_in_time_is_not_lost(table: TimelineTable) -> None:
    waiter = StreamWaiter(FakeDriver(), table)
    waiter.wait(77, 0, 5, deadline_s=3600)
    table.write(0, 6)
    waiter.close()
    assert not waiter.lost(0, 5)
    assert table.read(0) == 6, "a timeline never goes back"


def test_one_registration_serves_whoever_needs_the_table(table: TimelineTable) -> None:
    driver = FakeDriver()
    timelines = CudaTimelines(driver, table)
    waiter = StreamWaiter(driver, table, timelines.registered)
    waiter.wait(77, 1, 5, deadline_s=3600)
    waiter.close()
    assert not driver.named("cuMemHostUnregister")
    timelines.close()
    assert len(driver.named("cuMemHostRegister")) == len(driver.named("cuMemHostUnregister")) == 1


def until_lost(waiter: StreamWaiter, index: int, value: int) -> None:
    pause = threading.Event()
    for _ in range(10_000):
        if waiter.lost(index, value) or pause.wait(0.001):
            return
    raise AssertionError("not lost")


def test_the_watchdog_is_not_woken_for_every_layer_but_for_an_earlier_deadline(
    table: TimelineTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[None] = []
    notify = threading.Condition.notify

    def counted(condition: threading.Condition, n: int = 1) -> None:
        woken.append(None)
        notify(condition, n)

    waiter = StreamWaiter(FakeDriver(), table)
    monkeypatch.setattr(threading.Condition, "notify", counted)
    for value in range(1, 33):
        waiter.wait(77, 1, value, deadline_s=3600)
    assert len(woken) == 1
    waiter.wait(77, 0, 5, deadline_s=0.01)
    assert len(woken) == 2
    until_lost(waiter, 0, 5)
    assert not waiter.lost(1, 32)
    waiter.wait(77, 0, 9, deadline_s=0.01)
    until_lost(waiter, 0, 9)
    waiter.close()


def test_one_wait_over_its_deadline_loses_all_that_wait_on_its_counter_f63(
    table: TimelineTable,
) -> None:
    waiter = StreamWaiter(FakeDriver(), table)
    waiter.wait(77, 1, 6, deadline_s=3600)
    waiter.wait(77, 1, 7, deadline_s=0.01)
    waiter.wait(77, 0, 2, deadline_s=3600)
    until_lost(waiter, 1, 7)
    assert waiter.lost(1, 6)
    assert not waiter.lost(0, 2)
    assert (table.read(0), table.read(1)) == (0, 7)
    waiter.close()


def test_a_release_stands_though_the_mover_stores_a_lower_value_behind_it_f63(
    table: TimelineTable,
) -> None:
    waiter = StreamWaiter(FakeDriver(), table)
    waiter.wait(77, 1, 9, deadline_s=0.01)
    until_lost(waiter, 1, 9)
    table.write(1, 4)  # it had looked before the release
    pause = threading.Event()
    for _ in range(10_000):
        if table.read(1) == 9 or pause.wait(0.001):
            break
    assert table.read(1) == 9
    waiter.answered(1, 9, landed=False)
    table.write(1, 12)
    assert waiter.lost(1, 9)
    waiter.close()
    assert table.read(1) == 12, "after the answer nobody else writes"


@pytest.mark.parametrize("landed", [True, False])
def test_the_answer_releases_whoever_still_waits_and_says_whether_that_is_a_loss(
    table: TimelineTable, landed: bool
) -> None:
    waiter = StreamWaiter(FakeDriver(), table)
    waiter.wait(77, 1, 3, deadline_s=3600)
    waiter.wait(77, 1, 5, deadline_s=3600)
    table.write(1, 3)
    waiter.answered(1, 5, landed=landed)
    assert table.read(1) == 5
    assert not waiter.lost(1, 3), "it had come"
    assert waiter.lost(1, 5) is not landed
    waiter.close()


def test_only_so_many_losses_are_remembered(
    table: TimelineTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.ipc.cuda_sync.LOST_KEPT_MAX", 2)
    waiter = StreamWaiter(FakeDriver(), table)
    for value in (1, 2, 3):
        waiter.wait(77, 1, value, deadline_s=3600)
        waiter.answered(1, value, landed=False)
    assert [waiter.lost(1, value) for value in (1, 2, 3)] == [False, True, True]
    waiter.close()


class Status(enum.IntEnum):
    """Some of the bindings' statuses."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_INVALID_HANDLE = 400


class AskedDriver(Driver):
    """A driver whose bindings know one answer, and count how often it is put into words."""

    def __init__(self, status: Status) -> None:
        self.described = 0

        def describe(_: object) -> tuple[int, bytes]:
            self.described += 1
            return 0, b"in words"

        self.api = SimpleNamespace(  # type: ignore[assignment]
            cuEventQuery=lambda _: (status,), cuGetErrorString=describe
        )


def test_an_event_that_is_not_reached_makes_no_error() -> None:
    for status, reached in ((Status.CUDA_SUCCESS, True), (Status.CUDA_ERROR_NOT_READY, False)):
        driver = AskedDriver(status)
        assert driver.ready(1) is reached
        assert driver.described == 0


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (Status.CUDA_ERROR_INVALID_HANDLE, CudaError),
        (Status.CUDA_ERROR_ILLEGAL_ADDRESS, DeviceLost),
    ],
)
def test_an_event_that_cannot_be_asked_is_an_error(status: Status, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"cuEventQuery: {status.name}"):
        AskedDriver(status).ready(1)
