"""A thin pool and a mirrored one, given the same operations, are told the same things.

Strategy: two directories, one scheduler each, the same steps with the same choices. Compared after
every step: own matches page by page, duplicates, evicted pages in order, totals, free lists.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.node import Node
from tests.property.history import Pick
from tests.unit.directory.core.world import KEY, Scheduler, World

PAGES = 14


class Pair:
    """The two schedulers and the paths they hold leases on."""

    def __init__(self, page_size: int, host_pages: int) -> None:
        self.page_size = page_size
        self.thin = Scheduler(
            World(host_pages=host_pages), "a", "thin", pages=PAGES, page_size=page_size
        )
        self.mirrored = Scheduler(
            World(host_pages=host_pages), "a", "mirrored", pages=PAGES, page_size=page_size
        )
        self.leases: list[tuple[int, Node]] = []

    def step(self, pick: Pick) -> None:
        """One operation on both."""
        mirror = self.mirrored.mirror
        assert mirror is not None
        pages = [pick(3) for _ in range(pick(7))]
        tokens = [t for page in pages for t in [5] * (self.page_size - 1) + [page]]
        tokens += [9] * pick(self.page_size)
        kind = pick(9)
        if kind <= 3:
            blind = pick(3) == 0
            one = self.thin.publish(tokens, fresh_all=blind)
            assert one == self.mirrored.publish(tokens, fresh_all=blind)
        elif kind <= 5:
            got = self.thin.match(tokens)
            mine = mirror.match(KEY, self.mirrored.pack(tokens))
            assert (got.own, got.own_pages) == (mine.pages, mine.page_count)
            if mine.node.parent is not None:
                mirror.lock(mine.node)
                self.leases.append((got.receipt, mine.node))
            elif got.receipt:
                self.thin.unlock(got.receipt)
        elif kind == 6 and self.leases:
            receipt, node = self.leases.pop(pick(len(self.leases)))
            self.thin.unlock(receipt)
            mirror.unlock(node)
        elif kind == 7:
            count = 1 + pick(PAGES)
            assert self.thin.evict(count) == self.mirrored.evict(count)
        else:
            ways = pick(2)
            for who in (self.thin, self.mirrored):
                for op in list(who.world.copies):
                    who.world.finish(op, "ok" if ways else "failed")
        assert self.thin.totals() == self.mirrored.totals()
        assert self.thin.free == self.mirrored.free
        owned = mirror.pool.owned
        assert self.thin.world.directory.pools[1].owned == owned
        assert self.mirrored.world.directory.pools[1].owned == owned
        mirror.check()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 32),
    page_size=st.integers(1, 4),
    host_pages=st.sampled_from([0, 8, 64]),
)
def test_thin_and_mirrored_pools_are_told_the_same(
    seed: int, page_size: int, host_pages: int
) -> None:
    pair = Pair(page_size, host_pages)
    pick = random.Random(seed).randrange
    for _ in range(60):
        pair.step(pick)
