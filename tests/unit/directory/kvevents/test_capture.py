"""The daemon's notes: bounded, and never naming what the reader was not told."""

import pytest

from directory.core.events import Flush
from directory.kvevents import capture as capture_module
from directory.kvevents.capture import Capture
from directory.kvevents.records import (
    AnyRecord,
    Begin,
    Changed,
    Closed,
    Forget,
    Opened,
    SpaceNamed,
    Whole,
)
from tests.unit.directory.core.world import Scheduler, World


def watched(**bounds: int) -> tuple[World, Capture]:
    """A world and its notes, which have begun."""
    world = World()
    directory = world.directory
    capture = Capture(directory.tree, directory.pools, **bounds)
    directory.tree.tap = capture
    capture.begin()
    return world, capture


def kinds(records: list[AnyRecord]) -> list[type]:
    return [type(record) for record in records]


def test_what_is_there_at_the_beginning_is_told_between_begin_and_whole() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3])
    directory = world.directory
    capture = directory.tree.tap = Capture(directory.tree, directory.pools)
    assert capture.lost
    assert not capture.busy
    capture.begin()
    assert kinds(capture.take()) == [Begin, Opened, SpaceNamed, Changed, Whole]
    assert not capture.busy


def test_a_node_is_named_below_the_nearest_that_was_told_before() -> None:
    world, capture = watched()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    a.publish([1, 2, 3])
    first, second = [record for record in capture.take() if isinstance(record, Changed)]
    assert (first.base, first.above) == (0, ())
    assert (second.base, second.above) == (first.node, ())


def test_ancestors_that_were_not_told_are_named_with_their_tokens() -> None:
    world, capture = watched()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3])
    capture.take()
    a.publish([1, 2, 4])  # splits: the upper half has a new id
    (branch,) = [record for record in capture.take() if isinstance(record, Changed)]
    assert branch.base == 0
    assert [len(edge) for _, edge in branch.above] == [8]


def test_a_pool_that_never_has_a_page_is_told_and_so_is_its_end() -> None:
    world, capture = watched()
    capture.take()
    a = Scheduler(world, "a")
    capture.meet_pools()
    assert kinds(capture.take()) == [Opened]
    world.close(a.pool)
    capture.meet_pools()
    assert kinds(capture.take()) == [Closed]


def test_a_queue_that_is_full_is_dropped_and_nothing_is_noted_until_it_begins_again() -> None:
    world, capture = watched(records_max=4)
    a = Scheduler(world, "a")
    for token in range(6):
        a.publish([token])
    assert capture.lost
    assert not capture.busy
    a.publish([9])
    assert not capture.busy
    capture.begin()
    told: list[AnyRecord] = []
    for _ in range(9):
        told += capture.take()
    assert kinds(told).count(Changed) == 7
    assert kinds(told)[-1] is Whole
    assert capture.times_lost == 1


def test_a_queue_that_was_dropped_is_let_go_of_little_by_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture_module, "DROPPED_A_STEP", 2)
    world, capture = watched(records_max=8)
    a = Scheduler(world, "a", pages=64)
    page = 0
    while not capture.lost:
        page += 1
        a.publish([page])
    left = len(capture._dropped)
    assert left > 8
    for _ in range(3):
        page += 1
        a.publish([page])
        left -= 2
        assert len(capture._dropped) == left
    capture.begin()
    while capture.busy:
        capture.take()
    page += 1
    a.publish([page])
    assert len(capture._dropped) == 0
    assert len(capture.take()) == 1


def test_tokens_that_wait_are_bounded_too() -> None:
    world, capture = watched(bytes_max=100)
    a = Scheduler(world, "a")
    a.publish(list(range(20)))
    assert not capture.lost
    assert capture.crowded
    a.publish(list(range(50, 60)))
    assert capture.lost


def test_what_nobody_took_is_taken_again_first() -> None:
    world, capture = watched()
    a = Scheduler(world, "a")
    a.publish([1])
    taken = capture.take()
    a.publish([2])
    capture.put_back(taken)
    assert capture.take()[: len(taken)] == taken


def test_names_of_what_is_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "FORGET_ABOVE", 4)
    world, capture = watched()
    a = Scheduler(world, "a")
    told: list[AnyRecord] = []
    for token in range(10):
        a.publish([token])
        a.ask(Flush("pool"))
        world.finish_all()
        a.ask(Flush("host"))
        told += capture.take()
    forgotten = [node for record in told if isinstance(record, Forget) for node in record.nodes]
    named = [record.node for record in told if isinstance(record, Changed)]
    assert forgotten
    assert set(forgotten) <= set(named)


def test_the_ranks_of_a_group_are_one_scheduler() -> None:
    world, capture = watched()
    capture.take()
    for rank in range(2):
        world.register("g", world_size=2, rank=rank)
        capture.meet_pools()
    (opened,) = capture.take()
    assert isinstance(opened, Opened)
    assert opened.instance == "g"


def test_what_was_given_up_is_let_go_of_though_nothing_more_happens() -> None:
    world, capture = watched()
    a = Scheduler(world, "a")
    for first in range(1, 30):
        a.publish([first])
    capture.lose()
    capture.begin()
    while capture.busy:
        capture.take()
    assert capture._dropped == []
    capture._dropped = [Begin()] * (3 * capture_module.DROPPED_A_STEP)
    for left in (2, 1, 0):
        assert capture.take() == []
        assert capture.busy == (left > 0)
