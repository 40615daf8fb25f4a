"""Two registered pools on a daemon in the same process, and the client of the second."""

from __future__ import annotations

from directory.core.events import Insert, Match
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.pools import SharedPool
from tests.unit.scheduler_shim.support import BYTES_PER_TOKEN, PAGE_SIZE, FakeDaemon, tokens

KEY = NamespaceKey()
QUICK = Deadlines(call_ms=1_000, restore_ms=5_000, connect_ms=1_000, misses_max=3)


class Pair:
    """Two registered pools: what the first publishes, the second can have restored."""

    def __init__(self) -> None:
        self.daemon = FakeDaemon()
        self.pools = [
            SharedPool(page_size=PAGE_SIZE, page_count=8, bytes_per_token=BYTES_PER_TOKEN)
            for _ in range(2)
        ]
        self.source, _ = self.daemon.connect(self.pools[0], instance="a")
        self.client, self.link = self.daemon.connect(self.pools[1], instance="b", deadlines=QUICK)

    def publish(self) -> None:
        insert = Insert("r", 0, KEY, tokens(1, 2, 3), pack_pages([0, 1, 2]), 1, 0, (0, 0))
        self.source.report(insert)
        self.daemon.run()

    def later(self, seconds: float) -> None:
        self.daemon.clock_us += int(seconds * 1e6)

    def close(self) -> None:
        self.client.close()
        self.source.close()
        self.daemon.run_copies()
        for pool in self.pools:
            pool.close()
        self.daemon.close()


def question() -> Match:
    """What the second pool lacks and the first may have."""
    return Match("q", 0, KEY, tokens(1, 2, 3))
