"""What a mover is made of, and its end when the device breaks."""

import gc
import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from directory.core.errors import ImportFailed, ProtocolError, TreecoredError
from directory.core.events import CopyDone
from tests.heeding import heeding
from tests.unit.transfer.device.fake_driver import RESULTS, FakeDriver
from tests.unit.transfer.support import OwnedPool, copy, part, small_layout
from transfer import mover
from transfer.device import cuda
from transfer.device.fake import FakeDevice
from transfer.device.protocol import Completion, DeviceLost, PageDevice, Ticket
from transfer.engine_limits import CUDA_LIMITS, EngineLimits
from transfer.ipc.channel import ChannelClosed, FdChannel
from transfer.ipc.memory import CUDA_IPC, CUDA_VMM, Mapping, MemoryHandle
from transfer.ipc.sync import SyncHandle
from transfer.messages import (
    Expect,
    Imported,
    ImportPool,
    Ping,
    Rejected,
    Shutdown,
    decode_reply,
    encode,
)
from transfer.mover_backend import Backend, make_device
from transfer.plan import MemoryKey, RangeBatch

POISONED = "fake is lost: CUDA_ERROR_ILLEGAL_ADDRESS"


class BrokenDevice(FakeDevice):
    """A device whose context is poisoned; `when`: which call finds that out."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def poll(self) -> list[Completion]:
        """What was submitted."""
        if self.when == "poll":
            raise DeviceLost(POISONED)
        return super().poll()

    def submit(self, batches: Sequence[RangeBatch], *, urgent: bool = False) -> Ticket:
        """Take a copy."""
        if self.when == "submit":
            raise DeviceLost(POISONED)
        return super().submit(batches, urgent=urgent)

    def attach(self, key: MemoryKey, mapping: Mapping) -> None:
        """Take a memory."""
        if self.when == "attach":
            raise DeviceLost(POISONED)
        super().attach(key, mapping)


@contextmanager
def as_before() -> Iterator[None]:
    """A mover ignores signals and raises limits: here it must not, for whatever this process starts
    later, or does, has the same."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    thresholds = gc.get_threshold()
    try:
        with heeding(*mover.DAEMONS_SIGNALS):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@pytest.mark.parametrize("when", ["poll", "submit", "attach"])
def test_a_mover_ends_with_its_device_and_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    ended: list[int] = []
    backend = Backend(BrokenDevice(when), {}, {})
    monkeypatch.setattr(mover, "make_device", lambda *_, **__: backend)
    monkeypatch.setattr(mover, "die_with_parent", lambda _: None)
    monkeypatch.setattr(mover, "leave_at_once", ended.append)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    client = FdChannel(ours)
    owned = OwnedPool(small_layout())
    for number in (1, 2):
        client.send(encode(ImportPool(number, owned.layout, owned.handles)), owned.fds)
    client.send(encode(copy(1, "peer_copy", part(1, [0], 2, [3]))))
    client.send(encode(Ping(1)))
    with as_before():
        status = mover.main(["--fd", str(theirs.detach()), "--parent", "1"])
    assert status == mover.EXIT_DEVICE_LOST
    assert ended == [mover.EXIT_DEVICE_LOST]
    assert "ILLEGAL_ADDRESS" in caplog.text
    replies = [decode_reply(payload) for payload, _ in client.receive()]
    assert not any(isinstance(reply, CopyDone | Rejected) for reply in replies), "nothing is said"
    client.close()
    owned.close()


def test_a_sync_that_the_mover_does_not_know_is_refused() -> None:
    owned = OwnedPool(small_layout())
    ours, theirs = FdChannel.pair()
    made = mover.Mover(theirs, Backend(FakeDevice(), {}, {}))
    request = ImportPool(1, owned.layout, owned.handles, SyncHandle("cuda-events"))
    made._handle(request, owned.fds)
    reply = decode_reply(ours.wait_frame(5.0)[0])
    assert isinstance(reply, Imported)
    assert (reply.ok, reply.code) == (False, ImportFailed.code)
    assert "knows the syncs timeline, not 'cuda-events'" in reply.detail
    owned.close()
    for channel in (ours, theirs):
        channel.close()


def test_a_device_name_says_what_it_may_be() -> None:
    assert make_device("cpu").device.name == "cpu"
    with pytest.raises(SystemExit, match="cuda:<UUID of a GPU>"):
        make_device("cuda-0")


def test_the_backend_of_a_gpu_is_made_whole_and_knows_its_rates_links_and_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    driver.visible = {driver.uuid: 0, "GPU-other": 1}
    monkeypatch.setitem(RESULTS, "cuDeviceGetAttribute", 3_000)
    driver.reached = True
    monkeypatch.setitem(RESULTS, "cuDeviceGetP2PAttribute", 0)
    monkeypatch.setattr(
        cuda, "open_device", lambda _uuid, **options: (cuda.CudaDevice(driver, **options), driver)
    )
    backend = make_device("cuda:GPU-fake")
    assert isinstance(backend.device, PageDevice)
    assert backend.limits.alone_bytes_per_us > 0
    assert backend.limits.link_bytes_per_us == 0, "the two are no peers"
    assert backend.limits == CUDA_LIMITS._replace(
        alone_bytes_per_us=backend.limits.alone_bytes_per_us
    )
    assert set(backend.memory) == {CUDA_IPC, CUDA_VMM}
    assert backend.computing(), "there is nobody here who could say otherwise"
    assert driver.named("cuMemcpyAsync"), "it was calibrated"
    before = threading.active_count()
    backend.submit_beside(1)
    assert threading.active_count() == before + 1
    backend.close()
    assert threading.active_count() == before
    with pytest.raises(ImportFailed, match="no peers"):
        backend.memory[CUDA_IPC].import_memory(MemoryHandle(CUDA_IPC, 1, "GPU-other"), ())


def test_a_mover_looks_for_the_next_copy_for_a_while_before_it_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_000_000
    monkeypatch.setattr(mover, "now_us", lambda: now)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    made = mover.Mover(FdChannel(theirs), FakeDevice(), EngineLimits(idle_spin_us=500))
    assert made._patience_ms() is None, "there was nothing to do yet"
    owned = OwnedPool(small_layout())
    made._engine.add_pool(owned.import_as(1))
    made._engine.submit(copy(1, "peer_copy", part(1, [0], 1, [3])))
    assert made._patience_ms() == 0
    made._engine.release_pool(1)
    while not made._engine.idle:
        made._engine.step()
    now += 499
    assert made._patience_ms() == 0
    now += 1
    assert made._patience_ms() is None
    owned.close()
    ours.close()
    theirs.close()


def test_a_mover_that_expects_a_copy_looks_for_it_longer_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_000_000
    monkeypatch.setattr(mover, "now_us", lambda: now)
    ours, theirs = FdChannel.pair()
    made = mover.Mover(theirs, FakeDevice(), EngineLimits(idle_spin_us=500))
    made._handle(Expect(), ())
    now += mover.EXPECTED_SPIN_US - 1
    assert made._patience_ms() == 0
    now += 1
    assert made._patience_ms() is None
    sleepy = mover.Mover(theirs, FakeDevice(), EngineLimits())
    sleepy._handle(Expect(), ())
    assert sleepy._patience_ms() is None, "who may not spin does not, whatever is expected"
    for channel in (ours, theirs):
        channel.close()


@pytest.mark.parametrize("spins", [True, False])
def test_fences_are_looked_at_without_a_sleep_at_first_where_a_mover_may_spin(
    monkeypatch: pytest.MonkeyPatch, spins: bool
) -> None:
    now, slept = 1_000_000, list[float]()
    monkeypatch.setattr(mover, "now_us", lambda: now)
    monkeypatch.setattr("transfer.mover.time.sleep", slept.append)
    ours, theirs = FdChannel.pair()
    made = mover.Mover(theirs, FakeDevice(), EngineLimits(idle_spin_us=500 * spins))
    owned = OwnedPool(small_layout())
    made._engine.add_pool(owned.import_as(1))
    made._engine.submit(copy(1, "peer_copy", part(1, [0], 1, [3]), fences=[(1, 0, 9)]))
    made._engine.step()
    assert made._patience_ms() == 0
    now += mover.FENCE_LOOK_US
    assert made._patience_ms() == 0
    assert bool(slept) is not spins
    now += 1
    assert made._patience_ms() == 0
    assert slept, "it does not keep a core to itself for a fence that is late"
    now += mover.FENCE_SPIN_US
    assert made._patience_ms() == mover.FENCE_POLL_MS
    owned.close()
    for channel in (ours, theirs):
        channel.close()


def test_what_was_put_off_is_begun_once_slices_have_gone() -> None:
    gone: list[int] = []
    device = FakeDevice()
    ours, theirs = FdChannel.pair()

    def begin() -> None:
        gone.append(len(device.history))
        raise ChannelClosed("enough was seen")

    backend = Backend(device, {}, {}, beside=begin)
    made = mover.Mover(theirs, backend)
    owned = OwnedPool(small_layout())
    made._engine.add_pool(owned.import_as(1))
    ours.send(encode(copy(1, "peer_copy", part(1, [0], 1, [3]))))
    with as_before(), pytest.raises(ChannelClosed, match="enough"):
        made.run()
    assert gone == [1], "not before the slice"
    owned.close()
    for channel in (ours, theirs):
        channel.close()


@pytest.mark.parametrize("wanted", [0, 7])
def test_lists_go_beside_where_that_is_asked_for_and_the_end_is_told(wanted: int) -> None:
    said: list[str] = []
    ours, theirs = FdChannel.pair()
    backend = Backend(
        FakeDevice(), {}, {}, submit_beside=lambda n: said.append(f"beside {n}"),
        close=lambda: said.append("close"),
    )  # fmt: skip
    made = mover.Mover(theirs, backend, EngineLimits(submit_beside=wanted))
    ours.send(encode(Shutdown()))
    with as_before():
        made.run()
    assert said == ["beside 7", "close"][not wanted :]
    for channel in (ours, theirs):
        channel.close()


@pytest.mark.parametrize(
    ("end", "closed"), [(ChannelClosed, True), (ProtocolError, True), (DeviceLost, False)]
)
def test_what_ends_a_mover_ends_its_thread_but_for_a_lost_device_that_nobody_waits_for(
    end: type[TreecoredError], closed: bool
) -> None:
    said: list[str] = []
    ours, theirs = FdChannel.pair()

    def fail() -> None:
        raise end("as it were")

    backend = Backend(FakeDevice(), {}, {}, beside=fail, close=lambda: said.append("close"))
    made = mover.Mover(theirs, backend)
    owned = OwnedPool(small_layout())
    made._engine.add_pool(owned.import_as(1))
    ours.send(encode(copy(1, "peer_copy", part(1, [0], 1, [3]))))
    with as_before(), pytest.raises(end, match="as it were"):
        made.run()
    assert said == ["close"] * closed
    owned.close()
    for channel in (ours, theirs):
        channel.close()
