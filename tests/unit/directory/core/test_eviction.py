"""The eviction order of one place."""

from directory.core.eviction import EvictionOrder


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
