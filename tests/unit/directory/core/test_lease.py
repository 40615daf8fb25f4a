"""Leases and receipts."""

from __future__ import annotations

import pytest

from directory.core import limits
from directory.core.actions import Done, Locked, Matched, Refused
from directory.core.events import Evicted, Live, Lock, Match, Unlock
from tests.unit.directory.core.world import KEY, Scheduler, World


def leased(who: Scheduler, request: str, tokens: list[int]) -> int:
    """Match and acquire for a named request; returns the receipt."""
    answer = who.ask(Match(request, 1, KEY, who.pack(tokens)))
    assert isinstance(answer, Matched)
    assert answer.receipt
    return answer.receipt


def code(answer: object) -> str:
    assert isinstance(answer, Refused), answer
    return answer.code


def test_a_receipt_works_once_and_only_for_its_own_scheduler_f18() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2, 3, 4])
    receipt = a.match([1, 2, 3, 4]).receipt
    other = a.match([1, 2, 3, 4]).receipt
    assert code(b.unlock(receipt)) == "stale_receipt"
    assert code(a.unlock(999)) == "stale_receipt"
    assert code(a.unlock(0)) == "stale_receipt"
    assert a.totals() == (0, 4)
    assert a.unlock(receipt) is None, "a release is acknowledged, as reports are"
    assert code(a.unlock(receipt)) == "stale_receipt"
    assert a.totals() == (0, 4), "the second request still holds its own lease"
    a.unlock(other)
    assert a.totals() == (4, 0)


def test_a_receipt_survives_splits_and_releases_exactly_what_it_took_f18() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish(list(range(8)))
    receipt = a.match(list(range(8))).receipt
    for cut in (6, 3, 5):
        a.publish([*range(cut), 100 + cut])
    assert a.totals() == (3, 8)
    a.unlock(receipt)
    assert a.totals() == (11, 0)
    pool = world.directory.pools[a.pool]
    assert all(node.places[a.pool].locks == 0 for node in pool.nodes.values())


def test_a_dead_generations_receipts_mean_nothing_to_the_next_f18() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1])
    receipt = a.match([1]).receipt
    world.close(a.pool)
    again = Scheduler(world, "a")
    assert code(again.unlock(receipt)) == "stale_receipt"
    assert code(a.ask(Unlock(receipt))) == "unknown_pool"


def test_a_lease_protects_its_path_and_nothing_below() -> None:
    world = World(host_pages=0)
    a = Scheduler(world, "a")
    a.publish([1, 2, 3, 4])
    receipt = a.match([1, 2]).receipt
    assert a.totals() == (2, 2)
    assert len(a.evict(10)) == 2
    a.unlock(receipt)
    assert len(a.evict(10)) == 2


def test_a_node_can_be_locked_by_its_id() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    node = a.match([1, 2], acquire=False).node
    locked = a.ask(Lock("r", 1, node))
    assert isinstance(locked, Locked)
    assert a.totals() == (0, 2)
    assert code(b.ask(Lock("r", 1, node))) == "bad_message"
    assert code(a.ask(Lock("r", 1, 99))) == "stale_node"
    assert code(a.ask(Lock("r", 1, 0))) == "stale_node"
    a.unlock(locked.receipt)
    assert a.totals() == (2, 0)


def test_leases_of_a_pool_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEASES_PER_POOL_MAX", 2)
    world = World()
    a = Scheduler(world, "a")
    a.publish([1])
    held = [a.match([1]).receipt for _ in range(2)]
    with pytest.raises(AssertionError, match="too_many"):
        a.match([1])
    a.unlock(held[0])
    assert a.match([1]).receipt


def test_a_lease_moves_with_a_request_that_grows() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    receipt = a.match([1, 2]).receipt
    a.publish([1, 2, 3], receipt=receipt)
    assert a.totals() == (0, 3)
    a.publish([7], receipt=receipt)
    assert a.totals() == (3, 1)
    a.publish([], receipt=receipt)
    assert a.totals() == (4, 0)
    a.unlock(receipt)


def test_every_lease_falls_with_its_owner() -> None:
    world = World()
    a, b, c = (Scheduler(world, name) for name in "abc")
    a.publish([1, 2])
    world.finish_all()
    b.match([1, 2])
    c.match([1, 2])
    a.match([1, 2])
    assert world.directory.host.locked_pages == 2
    world.close(b.pool)
    assert world.directory.host.locked_pages == 2
    world.close(c.pool)
    assert world.directory.host.locked_pages == 0, "a has all of it in its own pool"
    assert a.totals() == (0, 2)
    world.close(a.pool)
    assert not len(world.directory.leases)


def test_leases_of_requests_that_are_not_listed_as_alive_fall() -> None:
    world = World()
    a, b = Scheduler(world, "a", "mirrored"), Scheduler(world, "b")
    b.publish([1, 2])
    world.finish_all()
    lost, kept = leased(a, "lost", [1, 2]), leased(a, "kept", [1, 2])
    other = leased(b, "lost", [1, 2])
    assert a.ask(Live((("kept", 1), ("unknown", 7)))) is None
    held = {lease.id for lease in world.directory.leases}
    assert held == {kept, other}
    assert lost not in held
    assert world.directory.check() == []


def test_another_attempt_of_a_living_request_is_not_alive() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    b.publish([1, 2])
    leased(a, "r", [1, 2])
    answer = a.ask(Live((("r", 2),)))
    assert isinstance(answer, Done)
    assert len(world.directory.leases) == 0


def test_a_list_in_parts_lets_leases_fall_with_its_last_part() -> None:
    world = World()
    a, b = Scheduler(world, "a", "mirrored"), Scheduler(world, "b")
    b.publish([1, 2])
    receipts = {name: leased(a, name, [1, 2]) for name in ("one", "two", "lost", "released")}
    assert a.ask(Live((("one", 1),), last=False)) is None
    assert len(world.directory.leases) == 4
    late = leased(a, "later than the list", [1, 2])
    assert a.ask(Live((("unknown", 7),), first=False, last=False)) is None
    a.unlock(receipts["released"])
    assert len(world.directory.leases) == 4
    assert a.ask(Live((("two", 1),), first=False)) is None
    held = {lease.id for lease in world.directory.leases}
    assert held == {receipts["one"], receipts["two"], late}
    assert world.directory.check() == []


def test_a_list_begins_anew_where_the_one_before_was_not_ended() -> None:
    world = World()
    a, b = Scheduler(world, "a", "mirrored"), Scheduler(world, "b")
    b.publish([1, 2])
    leased(a, "first", [1, 2])
    kept = leased(a, "second", [1, 2])
    a.ask(Live((("first", 1),), last=False))
    a.ask(Live((("second", 1),)))
    assert [lease.id for lease in world.directory.leases] == [kept]


def test_a_list_that_goes_on_without_having_begun_is_refused() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    leased(a, "r", [1, 2])
    assert code(a.ask(Live((), first=False))) == "bad_message"
    assert isinstance(a.ask(Live((("r", 1),))), Done)
    assert code(a.ask(Live((), first=False))) == "bad_message", "it has ended"
    assert len(world.directory.leases) == 1


def test_too_long_a_list_or_report_is_refused_by_the_core_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LIVE_REQUESTS_MAX", 1)
    monkeypatch.setattr(limits, "GAVE_UP_PAGES_MAX", 1)
    a = Scheduler(World(), "a", "mirrored")
    a.publish([1, 2])
    assert code(a.ask(Live((("r", 1), ("s", 1))))) == "too_large"
    assert code(a.ask(Evicted(((1, 1, 1), (1, 0, 1)), ((1, 1),)))) == "too_large"
    assert code(a.ask(Evicted(((1, 1, 1),), ((1, 1), (2, 1))))) == "too_large"
    assert len(a.state.owned) == 2
