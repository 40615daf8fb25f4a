"""A scene for tests of lanes: an engine over a page device, pools on two GPUs, and requests."""

from collections.abc import Iterable

from directory.core.actions import SubmitCopy
from directory.core.events import CopyDone
from tests.unit.transfer.support import (
    HOST,
    OwnedPool,
    copy,
    part,
    slot,
    small_layout,
    small_tier,
)
from transfer.device.fake import FakePageDevice
from transfer.engine import Engine, EngineEvent
from transfer.engine_limits import EngineLimits
from transfer.imports import ImportedPool

GPU, OTHER = "GPU-1", "GPU-2"


class Scene:
    """Pools 1 and 2 on one GPU and 3 on another, a tier, a clock that the test turns."""

    def __init__(self, *, computing: bool = False, **limits: int) -> None:
        self.now_us = 1
        self.device = FakePageDevice()
        self.computing = computing
        bounds = EngineLimits(submissions_max=9, lane_submissions_max=3)._replace(**limits)
        self.links = [GPU, OTHER]
        self.engine = Engine(
            self.device, lambda: self.now_us, bounds, lambda: self.computing, self.links
        )
        self.layout = small_layout(16, layers=4)
        self.pools = {n: OwnedPool(self.layout, landings=2) for n in (1, 2, 3)}
        for number, pool in self.pools.items():
            pool.fill(number)
            imported: ImportedPool = pool.import_as(number)
            imported.device = OTHER if number == 3 else GPU
            self.engine.add_pool(imported)
        self.tier = small_tier(self.layout)
        self.engine.open_tier(self.tier)

    def submit(self, *requests: SubmitCopy) -> None:
        for request in requests:
            self.engine.submit(request)
        self.engine.step()

    def ends(self) -> list[int]:
        events: list[EngineEvent] = []
        while not self.engine.idle:
            self.device.step()
            self.now_us += 1_000_000
            events += self.engine.step()
        return [e.op for e in events if isinstance(e, CopyDone) and e.outcome == "ok"]

    def close(self) -> None:
        for number in self.pools:
            self.engine.release_pool(number)
        self.ends()
        self.engine.close()
        for pool in self.pools.values():
            pool.close()
        self.tier.close()


def backup(op: int, pages: Iterable[int], slots: Iterable[int]) -> SubmitCopy:
    return copy(op, "backup", part(1, pages, HOST, map(slot, slots)))


def load(op: int, slots: Iterable[int], pages: Iterable[int], pool: int = 2) -> SubmitCopy:
    return copy(op, "load_back", part(HOST, map(slot, slots), pool, pages))


def peer(op: int, pages: Iterable[int], onto: Iterable[int], target: int = 2) -> SubmitCopy:
    return copy(op, "peer_copy", part(1, pages, target, onto))
