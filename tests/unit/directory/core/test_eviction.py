"""The eviction order of one place."""

import random

from directory.core.eviction import (
    CHUNK,
    ONLY_COPY_SPARED,
    OUTDATED_MIN,
    SECOND_CLASS,
    EvictionOrder,
)
from directory.core.ids import HOST
from directory.core.namespace import NamespaceKey
from directory.core.node import Node, Residency, Space
from directory.core.states import ResidencyState

POOL = 1
SPACE = Space(b"f", NamespaceKey(), 1, 1)


class Leaves:
    """Nodes by id, and the order of a place that they have pages at."""

    def __init__(self, place: int = POOL) -> None:
        self.nodes: dict[int, Node] = {}
        self.order = EvictionOrder(place)

    def use(self, id_: int, tick: int, *, mirror: bool = False) -> Residency:
        """Use a node's pages, the first time or again."""
        node = self.nodes.get(id_)
        if node is None:
            node = self.nodes[id_] = Node(id_, None, b"", SPACE)
            place = self.order.place
            node.places[place] = Residency(place, ResidencyState.RESIDENT, b"", (0, 0), tick)
        residency = node.at(self.order.place)
        assert residency is not None
        residency.tick = tick
        if mirror != (POOL in node.places) and self.order.place == HOST:
            if mirror:
                node.places[POOL] = Residency(POOL, ResidencyState.RESIDENT, b"", (0, 0), 1)
            else:
                del node.places[POOL]
        self.order.file(node, residency, self.nodes)
        return residency

    def lose(self, id_: int) -> None:
        """Have a node no more."""
        node = self.nodes[id_]
        residency = node.at(self.order.place)
        assert residency is not None
        del node.places[self.order.place]
        self.order.forget(residency, self.nodes)
        del self.nodes[id_]

    def first(self, now: int = 0) -> int | None:
        """Which one goes first."""
        node = self.order.first(self.nodes, now)
        return None if node is None else node.id

    def check(self) -> None:
        """The entries are in order and counted."""
        listed = list(self.order)
        assert listed == sorted(listed, key=lambda entry: entry[0])
        held = [node.at(self.order.place) for node in self.nodes.values()]
        filed = sum(residency is not None and residency.filed >= 0 for residency in held)
        assert len(listed) == self.order.count == filed + self.order.outdated


def test_at_the_host_an_only_copy_outlives_mirrors_that_are_not_much_younger() -> None:
    leaves = Leaves(HOST)
    now = 1_000
    unit = 10
    for node, age, mirror in [
        (1, ONLY_COPY_SPARED * unit, False), (2, 1, True), (3, unit, True),
        (4, ONLY_COPY_SPARED * unit + 1, False),
    ]:  # fmt: skip
        leaves.use(node, now - age, mirror=mirror)
    assert leaves.first(now) == 4, "too old beside the oldest mirror"
    assert leaves.order.leaves(leaves.nodes, now) == [4, 3, 1, 2]
    leaves.lose(4)
    assert leaves.first(now) == 3, "spared"
    leaves.use(1, now - ONLY_COPY_SPARED * unit, mirror=True)
    assert leaves.first(now) == 1, "it is a mirror now, and of those the oldest"
    leaves.use(1, now - ONLY_COPY_SPARED * unit, mirror=False)
    assert leaves.first(now) == 3
    leaves.check()


def test_a_leaf_that_is_used_again_costs_no_entry_and_goes_later() -> None:
    leaves = Leaves()
    leaves.use(1, 1)
    leaves.use(2, 2)
    leaves.use(1, 3)
    assert leaves.order.count == 2
    assert leaves.order.leaves(leaves.nodes) == [2, 1]
    assert leaves.first() == 2
    leaves.lose(2)
    assert leaves.first() == 1
    leaves.check()


def test_what_is_leased_or_has_children_or_is_gone_does_not_go() -> None:
    leaves = Leaves()
    leased, parent = leaves.use(1, 1), leaves.use(2, 2)
    leaves.use(3, 3)
    leaves.use(4, 4).state = ResidencyState.DRAINING
    leaves.use(5, 5)
    leased.locks, parent.children = 1, 1
    leaves.lose(3)
    assert leaves.first() == 5
    leased.locks = 0
    leaves.use(1, 1)
    assert leaves.first() == 1
    leaves.check()


def test_a_node_that_came_back_does_not_go_by_its_old_entry() -> None:
    leaves = Leaves()
    leaves.use(1, 1)
    leaves.use(2, 2)
    leaves.lose(1)
    leaves.use(1, 3)
    assert leaves.first() == 2
    leaves.check()


def _goes_first(keys: dict[int, int], now: int) -> int | None:
    """By the rule itself: of the oldest of each class."""
    mirrors = {n: key for n, key in keys.items() if key < SECOND_CLASS}
    only = {n: key - SECOND_CLASS for n, key in keys.items() if key >= SECOND_CLASS}
    mirror = min(mirrors, key=mirrors.__getitem__, default=None)
    other = min(only, key=only.__getitem__, default=None)
    if mirror is None or other is None:
        return other if mirror is None else mirror
    age, others_age = now - mirrors[mirror], now - only[other]
    return other if others_age > ONLY_COPY_SPARED * age else mirror


def test_the_order_is_that_of_the_rule_whatever_came_before() -> None:
    draw = random.Random(5)
    leaves, keys = Leaves(HOST), dict[int, int]()
    went: set[bool] = set()
    for tick in range(1, 12_000):
        node = draw.randrange(4 * CHUNK)
        if draw.random() < 0.75:
            mirror = draw.random() < 0.5
            keys[node] = tick if mirror else tick + SECOND_CLASS
            leaves.use(node, tick, mirror=mirror)
        elif node in keys:
            del keys[node]
            leaves.lose(node)
        if draw.random() < 0.2:
            first = leaves.first(tick + 1)
            assert first == _goes_first(keys, tick + 1)
            if first is not None:
                went.add(keys[first] < SECOND_CLASS)
                if draw.random() < 0.5:
                    del keys[first]
                    leaves.lose(first)
        if tick % 1_000 == 0:
            leaves.check()
    assert went == {True, False}
    listed = leaves.order.leaves(leaves.nodes, 12_000)
    for expected in listed:
        first = leaves.first(12_000)
        assert first == expected == _goes_first(keys, 12_000)
        leaves.lose(first)
        del keys[first]
    assert leaves.first(12_000) is None
    assert not keys


def test_what_came_and_went_leaves_no_growing_list() -> None:
    leaves = Leaves()
    leaves.use(8, 1)
    for tick in range(2, 10_000):
        leaves.use(7, tick)
        leaves.lose(7)
        leaves.use(8, tick)
    assert leaves.order.count <= 2 * (OUTDATED_MIN + 2)
    leaves.check()
