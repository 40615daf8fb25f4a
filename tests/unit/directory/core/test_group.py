"""Groups: one decision for all ranks, whatever their order, their timing and losses (F107)."""

from __future__ import annotations

from itertools import permutations

import pytest

from directory.core import limits
from directory.core.actions import (
    Answer,
    Done,
    Refused,
    Registered,
    RegistrationRefused,
    ReleasePool,
)
from directory.core.events import (
    Asked,
    Evict,
    Evicted,
    Insert,
    Live,
    Match,
    Restore,
    Stats,
)
from directory.core.group import GroupLog, Turn
from directory.core.tokens import pack_pages
from tests.unit.directory.core.mirror import PAGE_BYTES
from tests.unit.directory.core.ranks import Group, evict, fetch, group_world, land, publish
from tests.unit.directory.core.world import KEY, Scheduler, World


def refused(answer: object, code: str) -> Refused:
    assert isinstance(answer, Refused), answer
    assert answer.code == code
    return answer


# Registration.


def test_every_rank_has_a_number_of_its_own_and_the_group_one_generation() -> None:
    world = World()
    ranks = [world.register("g", world_size=3, rank=rank) for rank in (2, 0, 1)]
    alone = world.register("a", fingerprint=b"g")
    said = [one for one in (*ranks, alone) if isinstance(one, Registered)]
    assert len({one.pool for one in said}) == 4
    assert [one.generation for one in said] == [1, 1, 1, 1]
    (group, single) = world.directory.pools.values()
    assert group.members == [said[1].pool, said[2].pool, said[0].pool]
    assert single.members == [said[3].pool]
    assert group.page_bytes == 3 * PAGE_BYTES
    assert "ranks=[" in repr(group)
    assert "ranks" not in repr(single)


def test_nothing_is_done_for_a_group_before_all_of_its_ranks_are_there() -> None:
    world = group_world()
    first = Scheduler(world, "g", world_size=2)
    refused(first.ask(Evict(1)), "group_incomplete")
    second = Scheduler(world, "g", world_size=2, rank=1)
    refused(second.ask(Evict(1)), "group_incomplete")
    assert world.answers[first.pool, 1] == world.answers[second.pool, 1]
    for rank in (first, second):
        rank.publish([1, 2])
    assert first.state.pages == 2


@pytest.mark.parametrize(
    ("difference", "name"),
    [
        ({"world_size": 3}, "world_size 3, the ranks before it 2"),
        ({"fingerprint": b"other"}, "fingerprint b'other', the ranks before it b'f'"),
        ({"fingerprint": b"o" * 999}, "oooo..., the ranks before it b'f'"),
        ({"pages": 16}, "page_count 16, the ranks before it 32"),
        ({"page_bytes": 32}, "page_bytes 32, the ranks before it 64"),
        ({"page_size": 2}, "page_size 2, the ranks before it 1"),
        ({"mode": "mirrored"}, "mode 'mirrored', the ranks before it 'thin'"),
    ],
)
def test_a_rank_that_differs_from_the_others_is_refused_with_both_values(
    difference: dict[str, object], name: str
) -> None:
    world = World()
    world.register("g", world_size=2)
    got = world.register("g", **{"world_size": 2, "rank": 1, **difference})  # type: ignore[arg-type]
    assert isinstance(got, RegistrationRefused)
    assert got.code == "group_mismatch"
    assert name in got.message


def test_a_rank_that_is_alive_is_not_taken_over() -> None:
    world = World()
    world.register("g", world_size=2)
    got = world.register("g", world_size=2, fingerprint=b"other")
    assert isinstance(got, RegistrationRefused)
    assert got.code == "instance_live"
    assert got.message.startswith("rank 0 of instance 'g'")


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1), (65, 0)])
def test_ranks_out_of_range_are_refused(size: int, rank: int) -> None:
    got = World().register("g", world_size=size, rank=rank)
    assert isinstance(got, RegistrationRefused)
    assert got.code == "bad_message"


def test_pools_of_one_fingerprint_have_as_many_ranks() -> None:
    world = World()
    world.register("g", world_size=2, page_bytes=32)
    got = world.register("a", page_bytes=64)
    assert isinstance(got, RegistrationRefused)
    assert "(1, 32, 2), this one (1, 64, 1)" in got.message


def test_each_rank_counts_as_a_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POOLS_MAX", 2)
    world = World()
    world.register("g", world_size=3)
    world.register("g", world_size=3, rank=1)
    got = world.register("g", world_size=3, rank=2)
    assert isinstance(got, RegistrationRefused)
    assert got.code == "too_many"


# Messages.


@pytest.mark.parametrize("mode", ["thin", "mirrored"])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_ranks_are_told_the_same_in_whatever_order_they_ask_f107(
    order: tuple[int, ...], mode: str
) -> None:
    world = group_world(3)
    group = Group(world, "g", 3, "thin" if mode == "thin" else "mirrored", pages=4)
    other = Group(world, "h", 3)
    other.all_do(publish(1, 2, 3), order=list(order))
    world.finish_all()
    steps = [publish(7), fetch(1, 2, 3), land, publish(8, 9), evict(1)]
    for step in steps:
        group.all_do(step, order=list(order))
        world.finish_all()
        group.all_do(order=list(order))
    group.check()
    other.check()


def test_the_first_rank_decides_and_the_others_change_nothing() -> None:
    world = group_world()
    group = Group(world, "g", 2)
    group.all_do(publish(1, 2, 3))
    world.finish_all()
    group.program.append(evict(2))
    assert group.advance(1)
    assert group.ranks[0].state.pages == 1
    assert group.advance(0)
    assert group.ranks[0].state.pages == 1
    group.check()


def test_a_rank_is_not_answered_before_it_has_asked() -> None:
    world = group_world()
    group = Group(world, "g", 2)
    asked, late = group.ranks
    world.send(Asked(asked.pool, 1, 0, Stats()))
    assert set(world.answers) == {(asked.pool, 1)}
    assert len(group.ranks[0].state.log or ()) == 1
    (answer,) = world.send(Asked(late.pool, 1, 0, Stats()))
    assert answer == Answer(late.pool, 1, world.answers[asked.pool, 1])
    assert len(group.ranks[0].state.log or ()) == 0


def test_a_rank_that_never_asks_holds_nobody_up_and_misses_nothing() -> None:
    world = group_world(3)
    group = Group(world, "g", 3)
    group.program += [publish(n, n + 1) for n in range(1, 12, 2)]
    for rank in (0, 1):
        while group.advance(rank):
            pass
    assert group.ranks[0].state.pages == 12
    assert not any(pool == group.ranks[2].pool for pool, _ in world.answers)
    assert len(group.ranks[0].state.log or ()) == group.ranks[0].seq
    while group.advance(2):
        pass
    world.finish_all()
    group.check()


def test_a_message_that_comes_again_has_no_second_effect() -> None:
    world = group_world()
    group = Group(world, "g", 2)
    group.all_do(publish(1, 2, 3))
    for rank in group.ranks:
        rank.ask(Evict(1))
    pages = group.ranks[0].state.pages
    seq = group.ranks[0].seq
    assert world.directory.handle(Asked(group.ranks[0].pool, seq, 0, Evict(1))) == []
    assert group.ranks[0].state.pages == pages == 2


def test_a_rank_that_says_something_else_ends_its_group() -> None:
    world = group_world()
    group = Group(world, "g", 2)
    group.all_do(publish(1, 2, 3))
    world.finish_all()
    first, second = group.ranks
    first.ask(Evict(1))
    second.seq += 1
    actions = world.send(Asked(second.pool, second.seq, 0, Evict(2)))
    refused(world.answers[second.pool, second.seq], "diverged")
    assert [a.pool for a in actions if isinstance(a, ReleasePool)] == [first.pool, second.pool]
    for rank in group.ranks:
        refused(rank.ask(Stats()), "unknown_pool")
    assert not world.directory.pools
    assert world.directory.host.pages == 3, "what the host holds was validated"
    assert isinstance(world.register("g", world_size=2), Registered)


@pytest.mark.parametrize(
    ("limit", "most"), [("GROUP_LAG_MESSAGES_MAX", 2), ("GROUP_LAG_BYTES_MAX", 20)]
)
def test_ranks_that_are_too_far_apart_are_no_group_any_more(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    world = group_world()
    first = Group(world, "g", 2).ranks[0]
    monkeypatch.setattr(limits, limit, most)
    bodies = [Restore("r", 1, 9, 0, pack_pages([page, page + 1]), (0, 0)) for page in range(3)]
    refused(first.ask(bodies[0]), "stale_receipt")
    refused(first.ask(bodies[1]), "stale_receipt")
    refused(first.ask(bodies[2]), "too_many")
    refused(first.ask(Stats()), "unknown_pool")
    assert not world.directory.pools


def test_what_a_client_chooses_the_size_of_is_counted_until_every_rank_has_sent_it() -> None:
    log = GroupLog(2)
    bodies = [
        Insert("r", 0, KEY, b"tokens", b"pages", 1, 0, (0, 0)),
        Match("r", 0, KEY, b"tokens"),
        Restore("r", 0, 1, 0, b"pages", (0, 0)),
        Evicted(((1, 0, 1),), ()),
        Live((("request", 1),)),
        Stats(),
    ]
    for seq, body in enumerate(bodies, 1):
        assert log.arrive(1, seq, body) is Turn.FIRST
        log.settle(seq)
    assert log._nbytes == 11 + 6 + 5 + 24 + 7
    for seq, body in enumerate(bodies, 1):
        assert log.arrive(2, seq, body) is Turn.LATER
        assert log.again(2, seq) is None
    assert (log._nbytes, len(log)) == (0, 0)
    assert log.reply(1, Done()) == [], "nobody waits for what is over"
    assert log.arrive(1, 3, bodies[2]) is Turn.OVER


def test_what_only_a_rank_that_is_gone_still_waited_for_is_forgotten() -> None:
    log = GroupLog(2)
    restore = Restore("r", 0, 1, 0, pack_pages([0]), (0, 0))
    assert [log.arrive(member, 1, restore) for member in (5, 6)] == [Turn.FIRST, Turn.LATER]
    log.leave(5)
    assert (len(log), log.violations()) == (1, [])
    log.leave(6)
    assert (len(log), log.violations()) == (0, [])
