"""Registrations: generations, refusals, endings."""

from __future__ import annotations

import pytest

from directory.core import limits
from directory.core.actions import Registered, RegistrationRefused, ReleasePool
from directory.core.events import PoolClosed
from tests.unit.directory.core.mirror import PAGE_BYTES
from tests.unit.directory.core.world import Scheduler, World


def test_pool_ids_are_never_used_again_and_generations_count_up() -> None:
    world = World()
    first = Scheduler(world, "a")
    assert world.close(first.pool) == [ReleasePool(first.pool)]
    second, other = Scheduler(world, "a"), Scheduler(world, "b")
    assert (first.generation, second.generation, other.generation) == (1, 2, 1)
    assert len({first.pool, second.pool, other.pool}) == 3


def test_a_live_instance_is_not_taken_over() -> None:
    world = World()
    Scheduler(world, "a")
    refused = world.register("a")
    assert isinstance(refused, RegistrationRefused)
    assert refused.code == "instance_live"
    assert "another instance id" in refused.message


@pytest.mark.parametrize(
    ("name", "pages", "page_size", "page_bytes"),
    [
        ("", 1, 1, 1),
        ("n" * (limits.INSTANCE_CHARS_MAX + 1), 1, 1, 1),
        ("a", 0, 1, 1),
        ("a", limits.POOL_PAGES_MAX + 1, 1, 1),
        ("a", 1, 0, 1),
        ("a", 1, limits.PAGE_SIZE_MAX + 1, 1),
        ("a", 1, 1, 0),
    ],
)
def test_a_shape_out_of_range_is_refused(
    name: str, pages: int, page_size: int, page_bytes: int
) -> None:
    world = World()
    refused = world.register(name, pages=pages, page_size=page_size, page_bytes=page_bytes)
    assert isinstance(refused, RegistrationRefused)
    assert refused.code == "bad_message"


def test_one_fingerprint_has_one_page_shape() -> None:
    world = World()
    Scheduler(world, "a")
    refused = world.register("b", page_size=2)
    assert isinstance(refused, RegistrationRefused)
    assert "put the layout into the fingerprint" in refused.message
    assert isinstance(
        world.register("b", page_size=2, fingerprint=b"g", page_bytes=2 * PAGE_BYTES), Registered
    )


def test_pools_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POOLS_MAX", 1)
    world = World()
    a = Scheduler(world, "a")
    refused = world.register("b")
    assert isinstance(refused, RegistrationRefused)
    assert refused.code == "too_many"
    world.close(a.pool)
    assert isinstance(world.register("b"), Registered)


def test_a_pool_closes_only_when_its_last_copy_has_ended() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    world.close(a.pool)
    assert list(world.directory.pools) == [a.pool]
    assert not world.directory.pools[a.pool].live
    world.finish_all()
    assert not world.directory.pools
    assert not world.directory.tree.nodes, "a dead owner's backup never counts"


def test_closing_twice_or_an_unknown_pool_is_harmless() -> None:
    world = World()
    a = Scheduler(world, "a")
    world.close(a.pool)
    assert world.send(PoolClosed(a.pool, 0)) == []
    assert world.send(PoolClosed(77, 0)) == []


def test_what_a_fingerprint_means_is_forgotten_with_its_last_pool_and_pages() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    world.finish_all()
    world.close(a.pool)
    assert not world.directory.pools
    held = world.register("b", page_size=2)
    assert isinstance(held, RegistrationRefused), "the host still holds pages of that shape"
    world.directory.transfers.evict_host(PAGE_BYTES, 2)
    assert isinstance(world.register("b", page_size=2), Registered)


def test_generations_of_instances_that_ended_long_ago_are_forgotten_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "GENERATIONS_KEPT_MAX", 3)
    world = World()

    def live_and_die(name: str) -> int:
        scheduler = Scheduler(world, name)
        world.close(scheduler.pool)
        return scheduler.generation

    lasting = Scheduler(world, "lasting")
    assert [live_and_die(name) for name in ("a", "b", "a", "c", "a")] == [1, 1, 2, 1, 3]
    assert live_and_die("b") == 1, "b was the one that had ended longest ago"
    assert live_and_die("a") == 4
    world.close(lasting.pool)
    assert live_and_die("lasting") == 2, "what lives is not forgotten"
