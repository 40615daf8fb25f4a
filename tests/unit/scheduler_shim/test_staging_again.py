"""From one registration to the next: what is left of a stager that is still at work, and who waits
for it.
"""

import errno
import os
import threading
import time
from collections.abc import Callable

import pytest

from directory.core.errors import TransferError
from scheduler_shim.room import Room
from scheduler_shim.staging import CLOSE_S_MAX, SETTLE_S_MAX, Staging
from tests.descriptors import open_descriptors
from tests.unit.scheduler_shim.test_staging import DEADLINE_S, LAYOUT, MACHINE_S, ROW, pool
from transfer.ipc.memory import MEMFD, MemoryHandle, SharedMemoryIPC
from transfer.ipc.stage_ring import STAGE_BELOW_BYTES, StageRequest, StageRing, wake


def test_a_registration_does_not_wait_for_ever_for_the_stager_of_the_last_one() -> None:
    slab = HeldSlab()
    staging = Staging(LAYOUT, slab)
    assert staging.begin(STAGE_BELOW_BYTES)
    ring = StageRing.take_over(SharedMemoryIPC(), staging.fds[0])
    ring.post(1, StageRequest(True, 0, 0, 0, ROW, [1]))
    wake(staging.fds[1])
    while not slab.made.entered.is_set():
        time.sleep(0.001)
    began = time.monotonic()
    assert not staging.begin(STAGE_BELOW_BYTES), "it still moves bytes: this one has no slab"
    staging.close()
    assert time.monotonic() - began < 2 * CLOSE_S_MAX + MACHINE_S
    assert slab.closings == 0, "its memory is still used"
    slab.made.go.set()
    assert staging.begin(STAGE_BELOW_BYTES), "and the next one has it again"
    assert staging.requests == 1
    staging.settle()
    staging.close()
    assert slab.closings == 1
    ring.close()


def test_a_lost_restore_does_not_wait_for_the_stager_of_the_last_registration() -> None:
    """There is no slab, so nobody was asked for anything; the one that has a slab is waited for."""
    slab = HeldSlab()
    own = pool()
    own.staging = staging = Staging(LAYOUT, slab)
    assert own.begin_staging(STAGE_BELOW_BYTES)
    ring = StageRing.take_over(SharedMemoryIPC(), staging.fds[0])
    ring.post(1, StageRequest(False, 0, 0, 0, ROW, [1]))
    wake(staging.fds[1])
    assert slab.made.entered.wait(DEADLINE_S)
    with pytest.raises(TransferError):
        own.settle()
    assert not own.begin_staging(STAGE_BELOW_BYTES)
    own.settle()
    assert not own.at_rest, "what was in use before stays out of use"
    slab.made.go.set()
    assert own.begin_staging(STAGE_BELOW_BYTES)
    slab.made.go.clear()
    again = StageRing.take_over(SharedMemoryIPC(), staging.fds[0])
    again.post(1, StageRequest(False, 0, 0, 0, ROW, [1]))
    with pytest.raises(TransferError):
        own.settle()
    slab.made.go.set()
    own.settle()
    ring.close()
    again.close()
    own.close()


def test_pages_of_a_stager_that_is_still_at_work_are_let_go_when_it_is_done() -> None:
    slab = HeldSlab()
    own = pool()
    own.staging = Staging(LAYOUT, slab)
    assert own.begin_staging(STAGE_BELOW_BYTES)
    ring = StageRing.take_over(SharedMemoryIPC(), own.staging.fds[0])
    ring.post(1, StageRequest(True, 0, 0, 0, ROW, [1]))
    wake(own.staging.fds[1])
    assert slab.made.entered.wait(DEADLINE_S)
    room = Room(
        own, None, allocator=own.make_allocator(), thin=False,
        before_giving_up=lambda: None, on_evicted=lambda: None, count=lambda *_: None,
    )  # fmt: skip
    told: list[str] = []
    room.on_quiet = lambda: told.append("quiet")
    room.quarantine(room.allocate(2) or room.quarantined)
    assert room.release_late() == 0, "a mover may write into them"
    assert not own.begin_staging(STAGE_BELOW_BYTES)
    began = time.monotonic()
    assert (room.release_quarantine(), room.release_late()) == (0, 0)
    assert time.monotonic() - began < SETTLE_S_MAX / 2, "it is asked, and not waited for"
    assert (told, room.usable_pages) == ([], 6)
    room.quarantine(room.allocate(1) or room.quarantined)  # a row that had one of its targets
    slab.made.go.set()
    while not own.at_rest:
        assert time.monotonic() - began < DEADLINE_S
    assert (room.release_late(), told, room.release_late()) == (3, ["quiet"], 0)
    room.quarantine(room.allocate(1) or room.quarantined)
    room.lose_daemon([])
    assert room.release_late() == 0, "the next daemon's mover may write into what it left"
    ring.close()
    own.close()


def no_descriptor(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("where", "name", "fails"),
    [
        (os, "eventfd", no_descriptor),
        (os, "memfd_create", no_descriptor),
        (threading.Thread, "start", no_thread),
    ],
    ids=["eventfd", "ring", "thread"],
)
def test_a_registration_for_which_nothing_is_left_has_no_slab_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, fails: Callable[..., object]
) -> None:
    slab = HeldSlab()
    staging = Staging(LAYOUT, slab)
    before = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(where, name, fails)
        for _ in range(3):
            assert not staging.begin(STAGE_BELOW_BYTES)
    assert open_descriptors() <= before
    assert slab.made.closings == (0 if name == "memfd_create" else 3)
    assert (staging.fds, staging.at_rest) == ([], True)
    assert staging.begin(STAGE_BELOW_BYTES), "there is room again"
    staging.close()


class HeldPacker:
    """Moves nothing, and is not done with a request before the test lets it go."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.closings = 0

    def begin(self) -> None:
        """Any thread can."""

    def move(self, request: StageRequest) -> None:
        self.entered.set()
        assert self.go.wait(DEADLINE_S)

    def signal(self, ring: StageRing, number: int) -> None:
        ring.finish(number)

    def finish(self) -> None:
        """It is done."""

    def close(self) -> None:
        """Nothing was taken."""
        self.closings += 1


class HeldSlab:
    """A slab of such a packer, without memory."""

    nbytes = 4 * ROW
    handle = MemoryHandle(MEMFD, 4 * ROW, "", b"")
    fds: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.made = HeldPacker()
        self.closings = 0

    def packer(self, ring: StageRing) -> HeldPacker:
        del ring
        return self.made

    def close(self) -> None:
        self.closings += 1
