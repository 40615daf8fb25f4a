"""An engine with everything around it, for tests that turn the clock and the device by hand."""

from collections.abc import Collection

from directory.core.actions import SubmitCopy
from tests.unit.transfer.support import OwnedPool, slot, small_layout, small_tier
from transfer.device.fake import FakeDevice
from transfer.engine import Engine, EngineEvent
from transfer.engine_limits import EngineLimits

FENCE_DEADLINE_US = 1_000


class Bench:
    """Two pools (1 and 2), a tier, a fake device and a clock that the test turns.

    `named`: pools whose page lists are names; no name stands for a page yet.
    """

    def __init__(
        self, limits: EngineLimits, *, named: Collection[int] = (), engine: type[Engine] = Engine
    ) -> None:
        self.now_us = 1
        self.device = FakeDevice()
        self.engine = engine(self.device, lambda: self.now_us, limits)
        self.layout = small_layout()
        self.pools = {
            number: OwnedPool(self.layout, page_table=number in named) for number in (1, 2)
        }
        for number, pool in self.pools.items():
            pool.fill(number)
            if number in named:
                for name in range(self.layout.page_count):
                    pool.name(name, self.layout.page_count)
            self.engine.add_pool(pool.import_as(number))
        self.tier = small_tier(self.layout)
        self.engine.open_tier(self.tier)

    def run(self, *requests: SubmitCopy) -> list[EngineEvent]:
        for request in requests:
            self.engine.submit(request)
        return self.until_idle()

    def until_idle(self) -> list[EngineEvent]:
        events = self.engine.step()
        while not self.engine.idle:
            self.device.step()
            events += self.engine.step()
        return events

    def host_page(self, index: int) -> bytes:
        page = self.tier.page(slot(index), self.layout.page_bytes)
        try:
            return bytes(page)
        finally:
            page.release()

    def close(self) -> None:
        for number in self.pools:  # which also ends copies whose fences never pass
            self.engine.release_pool(number)
        self.until_idle()
        self.engine.close()
        for pool in self.pools.values():
            pool.close()
        self.tier.close()
