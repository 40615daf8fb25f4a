"""What a mover is made of, and its end when the device breaks."""

import signal
import socket

import pytest

from directory.core.errors import ImportFailed
from tests.unit.transfer.support import OwnedPool, small_layout
from transfer import mover
from transfer.device.fake import FakeDevice
from transfer.device.protocol import Completion, DeviceLost
from transfer.ipc.channel import FdChannel
from transfer.ipc.sync import SyncHandle
from transfer.messages import Imported, ImportPool, Ping, decode_reply, encode


class BrokenDevice(FakeDevice):
    """A device whose context is poisoned."""

    def poll(self) -> list[Completion]:
        """Never again."""
        raise DeviceLost("fake is lost: CUDA_ERROR_ILLEGAL_ADDRESS")


def test_a_mover_ends_with_its_device_and_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []
    backend = mover.Backend(BrokenDevice(), {}, {})
    monkeypatch.setattr(mover, "make_device", lambda *_, **__: backend)
    monkeypatch.setattr(mover, "die_with_parent", lambda _: None)
    monkeypatch.setattr(mover, "leave_at_once", ended.append)
    before = signal.getsignal(signal.SIGINT)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    client = FdChannel(ours)
    client.send(encode(Ping(1)))
    try:
        status = mover.main(["--fd", str(theirs.detach()), "--parent", "1"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == mover.EXIT_DEVICE_LOST
    assert ended == [mover.EXIT_DEVICE_LOST]
    assert "ILLEGAL_ADDRESS" in caplog.text
    client.close()


def test_a_sync_that_the_mover_does_not_know_is_refused() -> None:
    owned = OwnedPool(small_layout())
    ours, theirs = FdChannel.pair()
    made = mover.Mover(theirs, mover.Backend(FakeDevice(), {}, {}))
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
    assert mover.make_device("cpu").device.name == "cpu"
    with pytest.raises(SystemExit, match="cuda:<UUID of a GPU>"):
        mover.make_device("cuda-0")
