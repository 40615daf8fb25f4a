"""Outdated entries of an eviction order go a few at a time, and nothing else changes by it.

Strategy: random uses, losses and leases of a pool's leaves, of which many share a key with what was
there before, beside a plain dict of keys. After every step the leaves come in the order of their
keys, each counting leaf has its one entry, every other entry is counted as outdated, and those are
bounded. No step looks at more entries than its share, those of one key counted as one.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.eviction import CHUNK, LOOKS, OUTDATED_MIN, EvictionOrder
from directory.core.ids import NodeId
from directory.core.namespace import NamespaceKey
from directory.core.node import NOT_FILED, Node, Residency, Space
from directory.core.states import ResidencyState

POOL = 1
SPACE = Space(b"f", NamespaceKey(), 1, 1)


class Nodes(dict[NodeId, Node]):
    """Nodes by id that count how often an entry was looked at."""

    looks = 0

    def get(self, key: NodeId, default: Node | None = None) -> Node | None:  # type: ignore[override]
        """Look one up."""
        self.looks += 1
        return super().get(key, default)


class Pool:
    """An order and its leaves, and the keys that they are known to have."""

    def __init__(self) -> None:
        self.nodes = Nodes()
        self.order = EvictionOrder(POOL)
        self.keys: dict[NodeId, int] = {}
        self.longest = 0
        """Entries that one step has looked at."""

    def use(self, id_: NodeId, tick: int) -> None:
        """A leaf is used, the first time or again."""
        node = self.nodes.setdefault(id_, Node(id_, None, b"", SPACE))
        residency = node.at(POOL)
        if residency is None:
            residency = Residency(POOL, ResidencyState.RESIDENT, b"", (0, 0), tick)
            node.attach(residency)
        residency.tick = self.keys[id_] = tick
        self._file(node, residency)

    def refile(self, id_: NodeId, tick: int) -> None:
        """A leaf has become older than its entry says, as a parent may of which the child goes."""
        node = self.nodes[id_]
        residency = node.there(POOL)
        residency.tick = self.keys[id_] = min(tick, residency.tick)
        self._file(node, residency)

    def lose(self, id_: NodeId) -> None:
        """A leaf goes; its node may stay for another place."""
        residency = self.nodes[id_].there(POOL)
        self.nodes[id_].detach(POOL)
        del self.keys[id_]
        self.nodes.looks = 0
        self.order.forget(residency, self.nodes)
        self.longest = max(self.longest, self.nodes.looks)

    def check(self) -> None:
        """Everything adds up."""
        listed = list(self.order)
        assert [key for key, _ in listed] == sorted(key for key, _ in listed)
        filed = {
            (residency.filed, node.id)
            for node in self.nodes.values()
            if (residency := node.at(POOL)) is not None and residency.filed != NOT_FILED
        }
        assert filed <= set(listed)
        assert len(listed) == self.order.count == len(filed) + self.order.outdated
        most = self.order.count // 2 + self.order.count // LOOKS + OUTDATED_MIN + LOOKS
        assert self.order.outdated <= most

    def _file(self, node: Node, residency: Residency) -> None:
        self.nodes.looks = 0
        self.order.file(node, residency, self.nodes)
        self.longest = max(self.longest, self.nodes.looks)


def _drain(pool: Pool) -> None:
    expected = sorted(pool.keys, key=pool.keys.__getitem__)
    assert pool.order.leaves(pool.nodes) == expected
    for id_ in expected:
        first = pool.order.first(pool.nodes)
        assert first is not None
        assert first.id == id_
        pool.lose(id_)
    assert pool.order.first(pool.nodes) is None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(10, 200), st.floats(0.0, 1.0))
def test_the_order_is_that_of_the_keys_and_entries_that_count_for_nothing_are_bounded(
    seed: int, leaves: int, losses: float
) -> None:
    draw = random.Random(seed)
    pool, tick = Pool(), 10_000
    last: dict[NodeId, int] = {}
    for step in range(1_500):
        id_ = draw.randrange(leaves)
        if id_ in pool.keys and draw.random() < losses:
            last[id_] = pool.keys[id_]
            pool.lose(id_)
        elif id_ in last and draw.random() < 0.3 and last[id_] not in pool.keys.values():
            pool.use(id_, last.pop(id_))  # the key that it had, of which an entry may be there
        elif id_ in pool.keys and draw.random() < 0.2:
            free = pool.keys[id_] - 1
            if free not in pool.keys.values():
                pool.refile(id_, free)
        else:
            tick += 2
            pool.use(id_, tick)
        if step % 50 == 0:
            pool.check()
    pool.check()
    _drain(pool)


@pytest.mark.parametrize("from_the_end", [False, True])
def test_a_hundred_thousand_outdated_entries_go_a_few_at_a_time(from_the_end: bool) -> None:
    """Of a mirrored pool nobody asks the daemon who goes first, so nothing else drops them."""
    count = 100_000
    pool = Pool()
    for id_ in range(count):
        residency = Residency(POOL, ResidencyState.RESIDENT, b"", (0, 0), id_)
        pool.nodes[id_] = Node(id_, None, b"", SPACE)
        pool.nodes[id_].attach(residency)
        pool.keys[id_] = id_
        pool.order.file(pool.nodes[id_], residency, pool.nodes)
    for step in range(count - 1):
        pool.lose(count - 1 - step if from_the_end else step)
        assert pool.order.outdated <= pool.order.count * 5 // 8 + OUTDATED_MIN + LOOKS
    assert pool.longest <= LOOKS <= 64
    assert pool.order.count <= 2 * OUTDATED_MIN + 4 * LOOKS, "what has gone takes no memory"
    pool.check()
    assert pool.order.first(pool.nodes) is pool.nodes[0 if from_the_end else count - 1]


def test_entries_of_one_key_are_dropped_though_they_fill_chunks() -> None:
    """The nodes of a path share their tick: of its entries all but a few may be outdated."""
    pool, count = Pool(), 3 * CHUNK
    counting = {*range(2 * LOOKS), CHUNK + CHUNK // 2, count - 1}
    for id_ in range(count):
        pool.use(id_, 7)
        if id_ not in counting:
            pool.lose(id_)
    for id_ in range(count, count + 4 * CHUNK):
        pool.use(id_, id_)
        pool.lose(id_)
    pool.check()
    assert pool.order.count <= len(counting) + 2 * OUTDATED_MIN + 4 * LOOKS
    assert set(pool.order.leaves(pool.nodes)) == counting
