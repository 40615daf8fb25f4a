"""A group's copies and its end: what one rank loses is lost for all, and only when it is quiet."""

from __future__ import annotations

import pytest

from directory.core.actions import Matched, Refused, Registered, ReleasePool, Restored
from directory.core.events import MoverLost, PoolClosed, Stats
from directory.core.ids import HOST
from tests.unit.directory.core.mirror import PAGE_BYTES
from tests.unit.directory.core.ranks import Group, Rank, evict, fetch, group_world, land, publish
from tests.unit.directory.core.world import Scheduler, World


def refused(answer: object, code: str) -> Refused:
    assert isinstance(answer, Refused), answer
    assert answer.code == code
    return answer


def test_a_copy_has_a_part_for_every_rank_in_its_own_place_of_the_slot() -> None:
    world = group_world()
    group, other = Group(world, "g", 2), Group(world, "h", 2)
    group.all_do(publish(1, 2))
    backups = list(world.copies.values())
    assert [copy.parts[0].source for copy in backups] == [rank.pool for rank in group.ranks]
    assert [(copy.slot_bytes, copy.shard_offset) for copy in backups] == [(128, 0), (128, 64)]
    assert len({copy.op for copy in backups}) == 2
    for copy, rank in zip(backups, group.ranks, strict=True):
        assert {fence.pool for fence in copy.fences} == {rank.pool}
        assert {word.pool for word in copy.words} == {rank.pool}
    world.finish_all()
    group.all_do(evict(2))
    other.all_do(fetch(1, 2))
    loads = list(world.copies.values())
    assert [copy.parts[0].target for copy in loads] == [rank.pool for rank in other.ranks]
    world.finish_all()
    other.all_do(land)
    other.check()


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_copy_lands_when_all_ranks_have_theirs_and_not_before_f107(last: int) -> None:
    world = group_world(3)
    group, other = Group(world, "g", 3), Group(world, "h", 3)
    group.all_do(publish(1, 2))
    ops = list(world.copies)
    for op in ops[:last] + ops[last + 1 :]:
        world.finish(op)
        assert world.directory.host.pages == 0
    world.finish(ops[last])
    assert world.directory.host.pages == 2
    group.all_do(evict(2))
    other.all_do(fetch(1, 2))
    ops = list(world.copies)
    for op in ops[:last] + ops[last + 1 :]:
        world.finish(op)
    other.all_do(land)
    assert [rank.done for rank in other.ranks] == [1, 1, 1], "no rank was told anything yet"
    world.finish(ops[last])
    other.all_do()
    restored = [answer for answer in world.answers.values() if isinstance(answer, Restored)]
    assert [(one.landed, one.nbytes) for one in restored] == [(True, 3 * 2 * PAGE_BYTES)] * 3
    other.check()


@pytest.mark.parametrize("outcome", ["void", "failed"])
@pytest.mark.parametrize("bad", [0, 1])
def test_one_ranks_lost_copy_is_lost_for_all_and_frees_nothing_early_f107(
    bad: int, outcome: str
) -> None:
    world = group_world()
    group, other = Group(world, "g", 2), Group(world, "h", 2)
    group.all_do(publish(1, 2))
    ops = list(world.copies)
    world.finish(ops[bad], "void" if outcome == "void" else "failed")
    assert HOST in next(iter(world.directory.tree.nodes.values())).places
    world.finish(ops[1 - bad])
    assert world.directory.host.pages == 0
    assert len(world.directory.slots.free_slots(2 * PAGE_BYTES)) == 4
    other.all_do(fetch(1, 2), land)
    ops = list(world.copies)
    world.finish(ops[bad], "failed")
    assert len(world.directory.pools[other.ranks[0].pool].filling) == 2
    world.finish(ops[1 - bad])
    other.all_do()
    restored = [answer for answer in world.answers.values() if isinstance(answer, Restored)]
    assert [one.landed for one in restored] == [False, False]
    other.check()


def test_a_void_peer_copy_of_one_rank_is_tried_again_from_the_host_by_all() -> None:
    world = group_world()
    group, other = Group(world, "g", 2), Group(world, "h", 2)
    group.all_do(publish(1, 2))
    world.finish_all()
    other.all_do(fetch(1, 2), land)
    first, second = list(world.copies)
    assert world.copies[first].kind == "peer_copy"
    world.finish(first)
    world.finish(second, "void")
    assert [copy.kind for copy in world.copies.values()] == ["load_back", "load_back"]
    world.finish_all()
    other.all_do()
    other.check()
    restored = [answer for answer in world.answers.values() if isinstance(answer, Restored)]
    assert [(one.landed, one.host_pages) for one in restored] == [(True, 2), (True, 2)]


def test_what_one_rank_gave_up_is_not_backed_up_through_another_that_has_not_yet() -> None:
    """The slow rank's pages are filled anew while its words still stand."""
    world = group_world()
    group = Group(world, "g", 2, "mirrored", pages=2)
    other = Group(world, "h", 2)
    other.all_do(publish(5, 6))
    world.finish_all()
    group.all_do(publish(1, 2))
    fast, slow = list(world.copies)
    world.finish(fast)
    group.program += [fetch(5, 6), land]
    assert group.advance(0), "it evicts 1, 2 and restores into their pages"
    restore = [op for op in world.copies if op != slow]
    assert len(restore) == 2
    for op in restore:
        assert world.ready(op)
        world.finish(op)
    world.finish(slow)
    group.all_do()
    tokens = {content[1] for page, content in world.memory[HOST].items()}
    assert world.directory.host.pages == 2, f"only 5, 6 count; the slots hold {tokens}"
    group.check()


def test_a_lost_mover_ends_every_ranks_part() -> None:
    world = group_world()
    group, other = Group(world, "g", 2), Group(world, "h", 2)
    group.all_do(publish(1, 2))
    other.all_do(fetch(1, 2), land)
    assert len(world.copies) == 4
    world.copies.clear()
    world.send(MoverLost(0))
    other.all_do()
    other.check()
    assert not world.directory.transfers.copies
    assert not world.directory.transfers.shards


def test_a_part_that_is_reported_twice_counts_once() -> None:
    world = group_world()
    Group(world, "g", 2).all_do(publish(1, 2))
    first, second = list(world.copies)
    done = world.finish(first)
    assert done == []
    world.directory.handle(world.last_done)
    assert world.directory.counters["late_completions"] == 1
    assert world.directory.host.pages == 0
    world.finish(second)
    world.directory.handle(world.last_done)
    assert world.directory.counters["late_completions"] == 2
    assert world.directory.host.pages == 2


# Endings.


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_lost_rank_takes_its_whole_group_along_f107(dead: int) -> None:
    world = group_world(3)
    group, other = Group(world, "g", 3), Group(world, "h", 3)
    other.all_do(publish(1, 2))
    world.finish_all()
    group.all_do(publish(7, 8), fetch(1, 2), land)
    gone = group.ranks[dead]
    rest = [rank for rank in group.ranks if rank is not gone]
    actions = world.close(gone.pool)
    assert {a.pool for a in actions if isinstance(a, ReleasePool)} == {
        rank.pool for rank in group.ranks
    }
    for rank in rest:
        refused(rank.ask(Stats()), "unknown_pool")
        assert rank.restoring is not None
        assert (rank.pool, rank.restoring[0]) not in world.answers, "its pages are not quiet yet"
    world.finish_all()
    assert gone.restoring is not None
    assert (gone.pool, gone.restoring[0]) not in world.answers
    for rank in rest:
        assert rank.restoring is not None
        lost = world.answers[rank.pool, rank.restoring[0]]
        assert isinstance(lost, Restored)
        assert not lost.landed
    assert [pool.instance for pool in world.directory.pools.values()] == ["h"]
    assert world.directory.host.pages == 2
    for rank in rest:
        assert world.send(PoolClosed(rank.pool, 0)) == []
    again = [world.register("g", world_size=3, rank=rank) for rank in range(3)]
    assert [one.generation for one in again if isinstance(one, Registered)] == [2, 2, 2]
    other.check()


def test_a_group_that_was_never_complete_ends_with_its_first_rank() -> None:
    world = World()
    first = Scheduler(world, "g", world_size=2)
    second = Scheduler(world, "h", world_size=2)
    assert world.close(first.pool) == [ReleasePool(first.pool)]
    assert list(world.directory.pools) == [second.pool]
    assert world.directory.registry.groups == 1


def test_receipts_are_the_groups_and_work_once() -> None:
    world = group_world()
    group, other = Group(world, "g", 2), Group(world, "h", 2)
    other.all_do(publish(1, 2))
    world.finish_all()
    receipts: list[int] = []

    def match_and_unlock(rank: Rank) -> bool:
        got = rank.match([1, 2])
        assert isinstance(got, Matched)
        receipts.append(got.receipt)
        rank.unlock(got.receipt)
        return True

    group.all_do(match_and_unlock)
    assert len(set(receipts)) == 1
    assert len(world.directory.leases) == 0
    group.check()
