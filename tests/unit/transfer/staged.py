"""A pool with a staging slab whose scheduler packs and unpacks when the test says so."""

import os
from collections.abc import Iterable

import msgspec

from directory.core.actions import Landing, SubmitCopy
from directory.core.events import CopyDone
from directory.core.ids import LANDINGS
from scheduler_shim.staging import HostPacker
from tests.unit.transfer.support import HOST, OwnedPool, copy, part, slot, small_tier
from transfer.device.fake import FakeDevice, FakePageDevice
from transfer.engine import Engine, EngineEvent
from transfer.engine_limits import EngineLimits
from transfer.imports import ImportedPool
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.stage_ring import StageRequest, StageRing
from transfer.layout import PoolLayout, mha_layer_first, page_first

LAYERS, PAGES = 4, 16
SPREAD = mha_layer_first(
    layers=LAYERS, page_size=2, page_count=PAGES, heads=1, head_dim=16, itemsize=2
)
TOGETHER = page_first(
    layers=LAYERS, page_size=2, page_count=PAGES, heads=1, head_dim=16, itemsize=2
)
SLAB = 8 * 512
DEADLINE_US = 1_000


class StagedPool(OwnedPool):
    """`own`: the layout without the slab. `carry_out` is the scheduler's stager, step by step."""

    def __init__(self, own: PoolLayout, slab_bytes: int, *, landings: int = 0) -> None:
        sizes = (*own.allocation_bytes, slab_bytes)
        whole = PoolLayout(own.page_size, own.page_count, own.buffers, sizes)
        super().__init__(whole, landings=landings)
        self.own = own
        self.ring = StageRing.make(self.ipc)
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.carried_out: list[StageRequest] = []

    @property
    def fds(self) -> list[int]:
        """The descriptors to send, those of ring and event at the end."""
        return [*super().fds, self.ring.fd, self.event]

    @property
    def open_requests(self) -> int:
        """What was asked for and is not done."""
        return self.ring.head - self.ring.done

    def import_as(self, pool: int) -> ImportedPool:
        """Import it a second time, as a mover would."""
        ipc = SharedMemoryIPC()
        return ImportedPool.open(
            pool, self.layout, self.handles, self.fds, memory=ipc, tables=ipc, staging=True
        )

    def carry_out(self, count: int = 1_000, *, fail: bool = False) -> int:
        """Do up to so many requests in order; returns how many."""
        views = [m.view for m in self.allocations]
        packer = HostPacker(self.own, views[:-1], views[-1])
        done = 0
        while done < count and self.open_requests:
            number = self.ring.done + 1
            request = self.ring.taken(number)
            if fail:
                self.ring.fail(number)
            else:
                packer.move(request)
            self.carried_out.append(request)
            self.ring.finish(number)
            done += 1
        return done

    def close(self) -> None:
        """Give everything back."""
        self.ring.close()
        os.close(self.event)
        super().close()


class Scene:
    """Pool 1 with a slab, pool 2 without one, a tier, and a clock that the test turns."""

    def __init__(
        self, *, paged: bool = True, own: PoolLayout = SPREAD, slab: int = SLAB, **limits: int
    ) -> None:
        self.now_us = 1
        self.device = FakePageDevice() if paged else FakeDevice()
        chosen = EngineLimits(stage_bytes=512, fence_deadline_us=DEADLINE_US)._replace(**limits)
        self.engine = Engine(self.device, lambda: self.now_us, chosen)
        self.pool = StagedPool(own, slab, landings=4)
        self.plain = OwnedPool(own)
        self.pool.fill(1)
        self.plain.fill(2)
        self.engine.add_pool(self.pool.import_as(1))
        self.engine.add_pool(self.plain.import_as(2))
        self.tier = small_tier(own)
        self.engine.open_tier(self.tier)
        self.events: list[EngineEvent] = []

    def submit(self, *requests: SubmitCopy) -> None:
        for request in requests:
            self.engine.submit(request)
        self.step()

    def step(self) -> None:
        self.events += self.engine.step()

    def move(self) -> None:
        """Let the device do what it has."""
        self.device.step(1_000)
        self.step()

    def stage(self, count: int = 1_000, *, fail: bool = False) -> None:
        """Let the scheduler do what it was asked for."""
        self.pool.carry_out(count, fail=fail)
        self.step()

    def finish(self) -> list[tuple[int, str]]:
        """Until nothing is under way; returns ends."""
        for _ in range(500):
            if self.engine.idle:
                break
            self.stage()
            self.move()
        assert self.engine.idle, self.engine
        return [(e.op, e.outcome) for e in self.events if isinstance(e, CopyDone)]

    def host_page(self, index: int) -> bytes:
        page = self.tier.page(slot(index), self.pool.own.page_bytes)
        try:
            return bytes(page)
        finally:
            page.release()

    def rests(self) -> bool:
        """Whether the engine has nothing to do but to look again."""
        return self.engine.only_fences

    def parts_spare(self) -> int:
        slab = self.engine._pools[1].slab
        assert slab is not None
        return len(slab._spare)

    def close(self) -> None:
        for number in (1, 2):
            self.engine.release_pool(number)
        for _ in range(100):
            self.move()
        assert self.engine.idle
        self.engine.close()
        self.pool.close()
        self.plain.close()
        self.tier.close()


def backup(op: int, pages: Iterable[int], slots: Iterable[int], **more: object) -> SubmitCopy:
    return copy(op, "backup", part(1, pages, HOST, map(slot, slots)), **more)  # type: ignore[arg-type]


def load(op: int, slots: Iterable[int], pages: Iterable[int], pool: int = 1) -> SubmitCopy:
    return copy(op, "load_back", part(HOST, map(slot, slots), pool, pages))


def layer_wise(scene: Scene, request: SubmitCopy) -> SubmitCopy:
    stands = scene.pool.timelines.read(LANDINGS)
    return msgspec.structs.replace(request, landing=Landing(1, LANDINGS, stands))
