"""Landing counters: which loads tell layer by layer what has landed, and which must not."""

from __future__ import annotations

import pytest

from directory.core import limits
from directory.core.actions import Landing, Refused, Restored, SubmitCopy
from directory.core.events import Flush, Restore
from directory.core.ids import HOST, LANDINGS
from directory.core.tokens import pack_pages
from tests.unit.directory.core.ranks import Group, evict, group_world, publish
from tests.unit.directory.core.world import Scheduler, World


def only(world: World) -> SubmitCopy:
    (copy,) = world.copies.values()
    return copy


def backed_up(world: World, *, evicted: bool) -> tuple[Scheduler, Scheduler]:
    """A path of two pages in the host tier, and in the first pool unless that evicted it."""
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    world.finish_all()
    if evicted:
        a.flush()
    return a, b


def load(b: Scheduler, landing: tuple[int, int], targets: list[int] | None = None) -> object:
    got = b.match([1, 2])
    pages = pack_pages(targets or [3, 4])
    return b.ask(Restore("r", 1, got.receipt, 0, pages, (0, 0), landing))


def test_a_load_of_host_pages_is_told_where_to_tell_its_layers() -> None:
    world = World()
    _, b = backed_up(world, evicted=True)
    assert load(b, (LANDINGS + 2, 40)) is None
    copy = only(world)
    assert {part.source for part in copy.parts} == {HOST}
    assert copy.landing == Landing(b.pool, LANDINGS + 2, 40)


def test_with_a_counter_the_host_tier_comes_first_though_another_pool_has_the_pages() -> None:
    """Two schedulers whose streams wait for layers out of one another's pools would wait for ever:
    a pool's pages are read when its own stream has got there."""
    world = World()
    a, b = backed_up(world, evicted=False)
    assert load(b, (LANDINGS, 0)) is None
    assert only(world).kind == "load_back"
    assert only(world).landing == Landing(b.pool, LANDINGS, 0)
    assert a.pool not in {fence.pool for fence in only(world).fences}
    world.finish_all()
    assert load(b, (0, 0), [5, 6]) is None, "without a counter the other pool does"
    assert only(world).kind == "peer_copy"


def lost(answer: object) -> bool:
    return isinstance(answer, Restored) and not answer.landed and "nowhere" in answer.detail


@pytest.mark.parametrize("backed_up_pages", [0, 1])
def test_with_a_counter_what_the_host_tier_does_not_have_is_lost_and_no_pool_is_read(
    backed_up_pages: int,
) -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    if backed_up_pages:
        a.publish([1])
        world.finish_all()
    a.publish([1, 2])  # and the backup of it is under way
    assert lost(load(b, (LANDINGS, 0)))
    assert {copy.kind for copy in world.copies.values()} == {"backup"}
    assert load(b, (0, 0)) is None, "without a counter the other pool does, and lands whole"
    (copy,) = [copy for copy in world.copies.values() if copy.kind != "backup"]
    assert a.pool in {part.source for part in copy.parts}
    assert copy.landing is None


def test_with_a_counter_no_pool_is_read_for_what_a_flush_took_from_a_leased_path() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    world.finish_all()
    got = b.match([1, 2])
    assert got.host_reach == 2, "the host has all of it, and the lease holds it there"
    b.ask(Flush("host"))
    body = Restore("r", 1, got.receipt, 0, pack_pages([3, 4]), (0, 0), (LANDINGS, 0))
    assert lost(b.ask(body))
    assert not world.copies


def test_without_a_counter_nothing_is_told() -> None:
    world = World()
    _, b = backed_up(world, evicted=True)
    assert load(b, (0, 7)) is None
    assert only(world).landing is None


@pytest.mark.parametrize(
    "landing",
    [
        (1, 0),
        (LANDINGS - 1, 0),
        (-1, 0),
        (LANDINGS + limits.LANDING_COUNTERS_MAX, 0),
        (LANDINGS, -1),
        (LANDINGS, limits.LANDING_VALUE_MAX),
    ],
)
def test_a_counter_that_cannot_be_is_refused_and_nothing_begins(landing: tuple[int, int]) -> None:
    world = World()
    _, b = backed_up(world, evicted=True)
    answer = load(b, landing)
    assert isinstance(answer, Refused)
    assert answer.code == "bad_message"
    assert not world.copies


def test_a_counter_serves_one_restore_at_a_time() -> None:
    world = World()
    _, b = backed_up(world, evicted=True)
    assert load(b, (LANDINGS, 0)) is None
    answer = load(b, (LANDINGS, 0), [5, 6])
    assert isinstance(answer, Refused)
    assert "has not been answered" in answer.message
    assert load(b, (LANDINGS + 1, 0), [5, 6]) is None, "another counter does"
    world.finish(next(iter(world.copies)))
    assert isinstance(world.answers[b.pool, b.seq - 4], Restored)
    assert load(b, (LANDINGS, 2), [7, 8]) is None, "answered: the counter is free again"


def test_another_pools_counters_are_its_own() -> None:
    world = World()
    a, b = backed_up(world, evicted=True)
    assert load(b, (LANDINGS, 0)) is None
    assert load(a, (LANDINGS, 0)) is None
    assert {c.landing.pool for c in world.copies.values() if c.landing} == {a.pool, b.pool}


def test_every_rank_of_a_group_is_told_at_its_own_counter() -> None:
    world = group_world()
    group, other = Group(world, "g", 2), Group(world, "h", 2)
    group.all_do(publish(1, 2))
    world.finish_all()
    group.all_do(evict(2))
    for rank in other.ranks:
        load(rank, (LANDINGS, 6))
    landings = [copy.landing for copy in world.copies.values()]
    assert landings == [Landing(rank.pool, LANDINGS, 6) for rank in other.ranks]
