"""The scheduler's side of staging: requests in order, what cannot be done, and coming to rest."""

import threading
import time
from collections.abc import Iterator

import pytest

from directory.core.errors import LayoutError, TransferError
from scheduler_shim.pools import SharedPool
from scheduler_shim.renamed import RenamedPool
from scheduler_shim.room import Room
from scheduler_shim.staging import (
    CLOSE_S_MAX,
    REST_EVERY_S,
    SETTLE_S_MAX,
    HostPacker,
    SharedSlab,
    Stager,
    Staging,
)
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.ipc.stage_ring import STAGE_BELOW_BYTES, StageRequest, StageRing, wake
from transfer.layout import PoolLayout, mha_layer_first

LAYOUT = mha_layer_first(layers=4, page_size=2, page_count=8, heads=1, head_dim=32, itemsize=1)
ROW = LAYOUT.page_bytes
DEADLINE_S = 60.0
MACHINE_S = 5.0
"""What a busy machine may add to what is waited for."""


class SlowPacker(HostPacker):
    """Waits for the test before it moves anything; may be told to break, and what it has queued
    not to end."""

    def __init__(self, layout: PoolLayout, pool: list[memoryview], slab: memoryview) -> None:
        super().__init__(layout, pool, slab)
        self.go = threading.Semaphore(0)
        self.broken: Exception | None = None
        self.unknown = False

    def move(self, request: StageRequest) -> None:
        assert self.go.acquire(timeout=DEADLINE_S)
        super().move(request)

    def signal(self, ring: StageRing, number: int) -> None:
        if self.broken:
            raise self.broken
        super().signal(ring, number)

    def finish(self) -> None:
        if self.unknown:
            raise TransferError("nobody can say")


class Scene:
    """A pool, a slab of four rows, a ring and its stager."""

    def __init__(self) -> None:
        self.ipc = SharedMemoryIPC()
        sizes = LAYOUT.allocation_bytes
        self.pool: list[SharedMapping] = [self.ipc.create("pool", n) for n in sizes]
        self.slab = self.ipc.create("slab", 4 * ROW)
        for number, mapping in enumerate(self.pool):
            mapping.view[:] = bytes((number * 37 + at) % 256 for at in range(mapping.nbytes))
        self.ring = StageRing.make(self.ipc)
        self.packer = SlowPacker(LAYOUT, [m.view for m in self.pool], self.slab.view)
        self.stager = Stager(self.ring, self.packer)
        self.posted = 0

    def post(self, pages: list[int], *, pack: bool = True, offset: int = 0, go: bool = True) -> int:
        self.posted += 1
        self.ring.post(self.posted, StageRequest(pack, 0, 0, offset, ROW, pages))
        wake(self.stager.fds[1])
        if go:
            self.packer.go.release()
        return self.posted

    def done(self, number: int) -> bool:
        give_up = time.monotonic() + DEADLINE_S
        while self.ring.done < number:
            assert time.monotonic() < give_up
            time.sleep(0.001)
        return not self.ring.failed(number)

    def page(self, page: int) -> bytes:
        return b"".join(
            bytes(self.pool[b.allocation].view[at : at + b.chunk_bytes])
            for b in LAYOUT.buffers
            for at in (b.offset + page * b.page_stride,)
        )

    def close(self) -> None:
        self.packer.go.release(100)
        self.packer.unknown = False
        for _ in range(2):
            assert self.stager.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_pages_go_into_rows_and_rows_into_pages(scene: Scene) -> None:
    wanted = scene.page(5), scene.page(2)
    assert scene.done(scene.post([5, 2], offset=ROW))
    assert bytes(scene.slab.view[ROW : 3 * ROW]) == b"".join(wanted)
    assert scene.done(scene.post([7, 0], pack=False, offset=ROW))
    assert (scene.page(7), scene.page(0)) == wanted
    assert scene.stager.taken == 2


@pytest.mark.parametrize(
    ("pages", "offset"), [([8], 0), ([0], 4 * ROW), ([0, 1], 3 * ROW), ([0], 1), ([0], 16)], ids=str
)
def test_a_request_that_is_not_within_pool_and_slab_fails_and_the_next_is_carried_out(
    scene: Scene, pages: list[int], offset: int
) -> None:
    before = bytes(scene.slab.view), [scene.page(n) for n in range(8)]
    assert not scene.done(scene.post(pages, pack=False, offset=offset))
    assert (bytes(scene.slab.view), [scene.page(n) for n in range(8)]) == before
    assert scene.done(scene.post([1]))


def test_settling_waits_for_everything_that_was_posted(scene: Scene) -> None:
    scene.stager.settle()
    scene.post([1], go=False)
    scene.post([2], go=False)
    waiting = threading.Thread(target=scene.stager.settle)
    waiting.start()
    scene.packer.go.release()
    time.sleep(0.05)
    assert waiting.is_alive(), "the second is still to come"
    scene.packer.go.release()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    assert scene.ring.done == 2


def test_settling_does_not_wait_for_ever(scene: Scene) -> None:
    scene.post([1], go=False)
    began = time.monotonic()
    with pytest.raises(TransferError, match="at 0 of 1 requests"):
        scene.stager.settle()
    assert time.monotonic() - began < SETTLE_S_MAX + MACHINE_S
    scene.packer.go.release()
    assert scene.done(1)


@pytest.mark.parametrize("error", [TransferError("the device is gone"), KeyError("a defect")])
def test_a_stager_that_breaks_says_of_every_request_that_it_has_failed(
    scene: Scene, error: Exception
) -> None:
    scene.packer.broken = error
    scene.post([1])
    scene.post([2], go=False)
    assert not scene.done(2)
    assert scene.ring.failed(1)
    assert not scene.done(scene.post([3], go=False)), "nor does a load that comes later wait"
    scene.stager.settle()


def test_a_stager_that_breaks_says_nothing_before_what_it_had_queued_is_over(scene: Scene) -> None:
    scene.packer.broken, scene.packer.unknown = TransferError("the device is gone"), True
    scene.post([1])
    time.sleep(3 * REST_EVERY_S)
    assert scene.ring.done == 0, "pages may still be written"
    with pytest.raises(TransferError, match="at 0 of 1"):
        scene.stager.settle()
    scene.packer.unknown = False
    assert not scene.done(1)


def test_a_stager_whose_last_work_is_unknown_keeps_its_ring_and_its_slab(scene: Scene) -> None:
    scene.packer.broken, scene.packer.unknown = TransferError("the device is gone"), True
    scene.post([1])
    time.sleep(2 * REST_EVERY_S)
    began = time.monotonic()
    assert not scene.stager.close()
    assert time.monotonic() - began < CLOSE_S_MAX + MACHINE_S
    with pytest.raises(TransferError):
        scene.stager.settle()
    scene.packer.unknown = False
    scene.stager._ended = True  # as a later look would find


def test_what_is_posted_after_the_end_is_never_carried_out(scene: Scene) -> None:
    slab = bytes(scene.slab.view)
    ring = StageRing.take_over(SharedMemoryIPC(), scene.ring.fd)
    scene.close()
    ring.post(1, StageRequest(True, 0, 0, 0, ROW, [3]))
    time.sleep(0.05)
    assert (bytes(scene.slab.view), ring.done) == (slab, 0)
    ring.close()


def pool(**options: int) -> SharedPool:
    return SharedPool(page_size=4, page_count=8, bytes_per_token=64, **options)


@pytest.mark.parametrize("kind", [SharedPool, RenamedPool])
def test_a_pool_offers_its_slab_only_where_chunks_are_small(kind: type[SharedPool]) -> None:
    with_slab = kind(page_size=4, page_count=8, bytes_per_token=64, staging_bytes=1024)
    plain = with_slab.fds, with_slab.packed_layout(), with_slab.packed_handles()
    assert not with_slab.begin_staging(0), "this daemon stages nothing"
    assert not with_slab.begin_staging(4 * 64 // 4)
    assert (with_slab.fds, with_slab.packed_layout(), with_slab.packed_handles()) == plain
    assert with_slab.begin_staging(STAGE_BELOW_BYTES)
    first = with_slab.fds
    assert len(first) == len(plain[0]) + 3
    assert with_slab.packed_layout() != plain[1]
    assert with_slab.begin_staging(STAGE_BELOW_BYTES), "each registration has a ring of its own"
    with_slab.close()
    without = pool()
    assert not without.begin_staging(STAGE_BELOW_BYTES)
    without.settle()
    without.close()


def test_a_slab_without_room_for_a_page_is_refused() -> None:
    ipc = SharedMemoryIPC()
    with pytest.raises(LayoutError, match="no room"):
        SharedSlab(ipc, LAYOUT, [], ROW - 1)
    slab = SharedSlab(ipc, LAYOUT, [], ROW)
    staging = Staging(LAYOUT, slab)
    assert staging.layout.allocation_bytes == (*LAYOUT.allocation_bytes, ROW)
    for _ in range(2):
        staging.close()
    assert ipc.open_count == 0


def test_no_page_leaves_quarantine_before_the_stager_is_at_rest() -> None:
    own = SharedPool(page_size=4, page_count=8, bytes_per_token=64, staging_bytes=1024)
    told: list[str] = []
    room = Room(
        own, None, allocator=own.make_allocator(), thin=False,
        before_giving_up=lambda: None, on_evicted=lambda: None, count=lambda *_: None,
    )  # fmt: skip
    room.on_quiet = lambda: told.append("quiet")
    room.quarantine(room.allocate(2) or room.quarantined)
    assert own.begin_staging(STAGE_BELOW_BYTES)
    assert own.staging is not None
    ring = StageRing.take_over(SharedMemoryIPC(), own.staging.fds[0])
    assert own.staging.at_rest
    ring.post(1, StageRequest(True, 0, 0, 0, own.page_bytes, [1]))  # and does not say so
    began = time.monotonic()
    while not room.release_quarantine():
        assert not own.at_rest or ring.done == 1
        assert time.monotonic() - began < DEADLINE_S
    assert (ring.done, told, len(room.quarantined)) == (1, ["quiet"], 0)
    ring.close()
    own.close()
