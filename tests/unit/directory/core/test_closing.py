"""The end of a pool, bit by bit: nobody meets what is left of it, and in the end nothing is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import pytest

from directory.core import limits
from directory.core.actions import Matched, MoreToClose, Refused, ReleasePool
from directory.core.closing import LOOKS_A_NODE
from directory.core.errors import InternalError
from directory.core.events import CloseMore, PoolClosed, Stats
from directory.core.ids import HOST
from directory.core.tree import Tree
from tests.unit.directory.core.world import Scheduler, World

PATHS: Final = 9
STEP: Final = 2


@pytest.fixture
def world() -> World:
    return World(host_pages=0, closed_a_step=STEP)


def full(world: World, name: str = "a", mode: str = "thin") -> Scheduler:
    """A scheduler with paths that share a page, one node each below it."""
    who = Scheduler(world, name, mode)  # type: ignore[arg-type]
    for end in range(PATHS):
        who.publish([7, 100 + end])
    return who


def steps(world: World) -> Iterator[None]:
    """Whenever something is left, then one step further."""
    while world.ending:
        yield
        world.close_more()


def nodes_at(world: World, pool: int) -> int:
    return sum(node.at(pool) is not None for node in world.directory.tree.nodes.values())


@pytest.mark.parametrize("mode", ["thin", "mirrored"])
def test_nothing_of_a_dead_pool_is_matched_or_restored_from_its_first_step_on(
    world: World, mode: str
) -> None:
    dead, other = full(world, mode=mode), Scheduler(world, "b")
    before = other.match([7, 100])
    assert before.peer_pages == 2
    assert world.close(dead.pool) == [ReleasePool(dead.pool), MoreToClose()]
    looked = 0
    for _ in steps(world):
        looked += 1
        for end in range(PATHS):
            assert other.match([7, 100 + end], acquire=False).restorable_pages == 0
        answer = other.landed(other.restore([7, 100], before))
        assert answer is not None
        assert not answer.landed, "a lease of a path is no promise of a pool's pages"
        refused = dead.ask(Stats())
        assert isinstance(refused, Refused)
        assert refused.code == "unknown_pool"
    assert looked == (PATHS + 1 - STEP + STEP - 1) // STEP, "a bounded part at a time"
    other.unlock(before.receipt)
    assert not world.directory.tree.nodes
    assert world.directory.pools.keys() == {other.pool}


def test_others_compute_the_same_paths_while_a_pool_is_taken_out(world: World) -> None:
    dead, other = full(world), Scheduler(world, "b")
    world.close(dead.pool)
    for at, _ in enumerate(steps(world)):
        other.publish([7, 100 + PATHS - 1 - at, at])
        other.check()
    for at in range(3):
        assert other.match([7, 100 + PATHS - 1 - at, at], acquire=False).own_pages == 3
    assert nodes_at(world, other.pool) == len(world.directory.tree.nodes)


def test_the_same_instance_comes_back_before_its_last_pool_is_out(world: World) -> None:
    first = full(world)
    world.close(first.pool)
    second = full(world)
    assert second.generation == first.generation + 1
    assert world.ending
    for _ in steps(world):
        assert [second.match([7, 100 + end], acquire=False).own_pages for end in range(PATHS)] == [
            2
        ] * PATHS
    second.check()
    assert world.directory.pools.keys() == {second.pool}


def test_leases_go_first_a_bounded_number_at_a_time() -> None:
    world = World(closed_a_step=STEP)
    dead = full(world)
    world.finish_all()
    held = [dead.match([7, 100 + end]).receipt for end in range(5)]
    assert all(held)
    assert dead.state.locked_pages
    world.close(dead.pool)
    left = [len(world.directory.leases)]
    for _ in steps(world):
        left.append(len(world.directory.leases))
        assert nodes_at(world, dead.pool) == PATHS + 1 or not left[-1]
    assert left[:4] == [3, 3, 1, 0]
    assert not world.directory.pools
    assert len(world.directory.host.nodes) == PATHS + 1, "what the host tier has stays"


def test_leases_of_all_pools_that_have_ended_go_before_any_of_their_nodes() -> None:
    """Those of the last pool too: what they hold of the host tier is in the way of others."""
    world = World(closed_a_step=STEP)
    first, second = full(world, "a"), Scheduler(world, "b")
    world.finish_all()
    receipts = [second.match([7, 100 + end]).receipt for end in range(4)]
    assert all(receipts)
    assert world.directory.host.locked_pages
    world.close(first.pool)
    world.close(second.pool)
    before, took = nodes_at(world, first.pool), 0
    while world.directory.leases and world.ending:
        world.close_more()
        took += 1
    assert took == 4 // STEP
    assert not world.directory.host.locked_pages
    assert nodes_at(world, first.pool) == before
    for _ in steps(world):
        pass
    assert not world.directory.pools


def test_a_copy_out_of_a_pool_that_ends_brings_nothing_however_late(world: World) -> None:
    world = World(closed_a_step=STEP)
    dead = full(world)
    (first, *_) = world.copies
    world.close(dead.pool)
    world.finish(first, "ok")
    world.finish_all()
    assert dead.pool in world.directory.pools, "its nodes are left"
    for _ in steps(world):
        assert not world.directory.host.nodes
    assert not world.directory.pools


def test_a_pool_stays_until_its_last_copy_has_ended_though_its_nodes_are_out() -> None:
    world = World(closed_a_step=STEP)
    dead = full(world)
    world.close(dead.pool)
    for _ in steps(world):
        assert world.copies
    assert not nodes_at(world, dead.pool)
    assert dead.pool in world.directory.pools
    world.finish_all()
    assert not world.directory.pools


def test_pools_that_end_together_are_taken_out_one_after_the_other(world: World) -> None:
    first, second = full(world, "a"), full(world, "b")
    world.close(first.pool)
    # `World` takes a second `MoreToClose` before the first is carried out for a defect.
    assert world.close(second.pool) == [ReleasePool(second.pool)]
    for _ in steps(world):
        pass
    assert not world.directory.pools
    assert not world.directory.tree.nodes


def test_a_pool_without_anything_is_gone_at_once_while_another_one_is_taken_out(
    world: World,
) -> None:
    first, empty = full(world, "a"), Scheduler(world, "b")
    world.close(first.pool)
    world.close(empty.pool)
    assert world.directory.pools.keys() == {first.pool}
    assert not world.directory.closing.holds(empty.pool)
    for _ in steps(world):
        assert world.directory.closing.busy
    assert not world.directory.closing.busy


def test_an_end_of_few_nodes_is_one_event() -> None:
    world = World()
    dead = full(world)
    world.finish_all()
    assert world.close(dead.pool) == [ReleasePool(dead.pool)]
    assert not world.directory.pools


def test_to_go_on_with_nothing_left_does_nothing(world: World) -> None:
    full(world)
    assert world.send(CloseMore()) == []
    assert nodes_at(world, 1) == PATHS + 1


def test_one_event_takes_a_bounded_part_of_a_large_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the product is set; the pool's paths branch and grow at random, and are split."""
    world = World(host_pages=0, checked=False)
    dead, other = Scheduler(world, "a", pages=4_000), Scheduler(world, "b", pages=4_000)
    draw = random.Random(8).randrange
    for _ in range(700):
        dead.publish([draw(3) for _ in range(draw(12))] + [draw(50)])
        if draw(3) == 0:
            dead.evict(1 + draw(9))
        if draw(3) == 0:
            other.publish([draw(3) for _ in range(draw(12))] + [draw(50)])
    dropped: list[int] = []
    real = Tree.drop

    def drop(tree: Tree, *arguments: object) -> bytes:
        dropped[-1] += 1
        return real(tree, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Tree, "drop", drop)
    nodes = nodes_at(world, dead.pool)
    assert nodes > 5 * limits.CLOSED_A_STEP_MAX
    dropped.append(0)
    world.send(PoolClosed(dead.pool, 0))
    for _ in steps(world):
        assert not world.directory.check()
        dropped.append(0)
    assert sum(dropped) <= nodes, "each once, or merged with another before"
    assert max(dropped) == limits.CLOSED_A_STEP_MAX
    assert not nodes_at(world, dead.pool)
    assert not world.directory.check()
    other.check()


def test_span_numbers_far_apart_are_passed_over_a_bounded_number_at_a_time() -> None:
    world = World(host_pages=0, closed_a_step=1)
    pages = 10 * LOOKS_A_NODE
    dead = Scheduler(world, "a", pages=pages)
    for end in range(pages):
        dead.publish([end])
    dead.evict(pages - 1)
    assert list(dead.state.spans) == [pages]
    world.close(dead.pool)
    assert len(list(steps(world))) == 9
    assert not world.directory.pools


def test_a_long_path_that_was_taken_out_in_part_is_found_again() -> None:
    """Each page a span and a node of its own, the numbers rising towards the root or from it."""
    for rising in (True, False):
        world = World(host_pages=0, closed_a_step=4)
        dead = Scheduler(world, "a", pages=40)
        if not rising:
            dead.live = dict.fromkeys(range(1, 30), 1)
        for end in range(1, 24):
            if not rising:
                del dead.live[30 - end]
            dead.publish(range(end))
        assert nodes_at(world, dead.pool) == 23
        world.close(dead.pool)
        for _ in steps(world):
            pass
        assert not world.directory.pools
        assert not world.directory.tree.nodes


@pytest.mark.parametrize("rising", [True, False])
def test_a_long_path_goes_on_where_a_step_broke_off_on_it(rising: bool) -> None:
    """Else each step would go through all numbers of spans to find the one node that is a leaf."""
    world = World(host_pages=0, closed_a_step=4)
    nodes, numbers = 30, 100 * 4 * LOOKS_A_NODE
    dead = Scheduler(world, "a", pages=numbers)
    for end in range(1, nodes + 1):
        dead.live = dict.fromkeys(range(1, 60), 1)  # so that these numbers are not taken
        dead.live.pop(end if rising else 60 - end)
        dead.publish(range(end))
    assert nodes_at(world, dead.pool) == nodes
    world.close(dead.pool)
    assert len(list(steps(world))) == nodes // 4
    assert not world.directory.pools


def test_the_recount_finds_an_end_that_nobody_sees_to(world: World) -> None:
    dead = full(world)
    world.close(dead.pool)
    directory = world.directory
    assert not directory.check()
    pool = directory.closing._left.pop(dead.pool).pool
    assert any("nobody sees to it" in line for line in directory.check())
    directory.closing.begin(pool)
    pool.owned.add(3)
    assert any("owns 1, nodes hold" in line for line in directory.check())


def test_the_recount_finds_a_copy_of_the_dead_that_counts_and_a_pool_that_stays() -> None:
    world = World(closed_a_step=STEP)
    dead = full(world)
    directory = world.directory
    pool = dead.state
    directory.registry.begin_close(pool)
    directory.closing.begin(pool)
    assert any("count" in line and "copies" in line for line in directory.check())
    directory.transfers.doom(pool)
    assert not directory.check()
    world.finish_all()
    while directory.closing.busy:
        directory.closing.step()
    assert any("nothing left, and is still there" in line for line in directory.check())
    directory.registry.forget_closed()
    assert not directory.check()


def test_a_page_that_is_held_by_nobody_alive_is_no_hit_beside_one_that_is(world: World) -> None:
    """Both pools had it; the one that died is not chosen, before and after its node is out."""
    dead, alive, asks = full(world, "a"), full(world, "b"), Scheduler(world, "c")
    world.close(dead.pool)
    for _ in steps(world):
        got = asks.match([7, 104])
        assert isinstance(got, Matched)
        assert got.peer_pages == 2
        seq = asks.restore([7, 104], got)
        (op,) = world.copies
        assert {part.source for part in world.copies[op].parts} == {alive.pool}
        world.finish(op)
        landed = asks.landed(seq)
        assert landed is not None
        assert landed.landed
        asks.unlock(got.receipt)
        asks.flush()
    assert HOST in world.directory.tree.places


def test_a_defect_of_the_tree_is_not_passed_over(world: World) -> None:
    """A lock that nobody has counted: the epoch ends rather than the pool."""
    dead = full(world)
    leaf = world.directory.tree.node(max(world.directory.tree.nodes))
    leaf.there(dead.pool).locks += 1
    world.checked = False
    world.close(dead.pool)
    with pytest.raises(InternalError, match="cannot detach"):
        for _ in steps(world):
            pass
