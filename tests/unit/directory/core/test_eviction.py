"""The eviction order of one place."""

import random

from directory.core.eviction import OUTDATED_MIN, EvictionOrder


def test_the_class_goes_before_the_tick_and_the_tick_before_the_id() -> None:
    order = EvictionOrder()
    for node, rank, tick in [(1, 1, 1), (2, 0, 9), (3, 0, 2), (4, 0, 2)]:
        order.put(node, rank, tick)
    assert list(order) == [3, 4, 2, 1]
    assert order.first() == 3


def test_a_node_moves_when_it_is_put_again() -> None:
    order = EvictionOrder()
    order.put(1, 0, 1)
    order.put(2, 0, 2)
    order.put(1, 0, 3)
    order.put(1, 0, 3)
    assert list(order) == [2, 1]
    assert (len(order), order.key(1)) == (2, (0, 3, 1))


def test_discarding_what_is_not_there_is_harmless() -> None:
    order = EvictionOrder()
    order.discard(7)
    order.put(7, 0, 1)
    order.discard(7)
    assert order.first() is None
    assert order.key(7) is None


def test_the_order_is_that_of_the_keys_whatever_came_before() -> None:
    draw = random.Random(5)
    order, keys = EvictionOrder(), dict[int, tuple[int, int, int]]()
    for tick in range(1, 4_000):
        node = draw.randrange(40)
        if draw.random() < 0.6:
            rank = draw.randrange(2)
            keys[node] = (rank, tick, node)
            order.put(node, rank, tick)
        else:
            keys.pop(node, None)
            order.discard(node)
        if draw.random() < 0.2:
            first = min(keys.values(), default=None)
            assert order.first() == (None if first is None else first[2])
    assert list(order) == [key[2] for key in sorted(keys.values())]


def test_what_was_put_and_taken_out_again_leaves_no_growing_list() -> None:
    order = EvictionOrder()
    for tick in range(10_000):
        order.put(7, 0, tick)
        order.discard(7)
        order.put(8, 0, tick)
    assert len(order._entries) <= 2 * len(order) + OUTDATED_MIN + 1
