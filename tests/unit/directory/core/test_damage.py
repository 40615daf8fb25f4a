"""Damaged host pages: matched by nobody, their slots never used again, all else untouched."""

import random
from collections.abc import Iterable

import pytest

from directory.core.events import Flush, PagesDamaged
from directory.core.ids import HOST
from directory.core.node import Node
from directory.core.tokens import pack_pages, unpack_pages
from tests.unit.directory.core.mirror import PAGE_BYTES
from tests.unit.directory.core.world import Scheduler, World

PATH = [1, 2, 3, 4]


def world_with_a_path(tokens: Iterable[int] = PATH) -> tuple[World, Scheduler]:
    """A path that only the host holds, and a scheduler that holds nothing."""
    world = World()
    a = Scheduler(world, "a")
    a.publish(list(tokens))
    world.finish_all()
    world.close(a.pool)
    return world, Scheduler(world, "b")


def slots(world: World) -> list[int]:
    """Every slot that is matched, in the order of paths."""
    found: list[int] = []
    todo: list[Node] = [space.root for space in world.directory.tree.spaces.values()]
    while todo:
        node = todo.pop()
        residency = node.resident(HOST)
        found += unpack_pages(residency.pages) if residency else []
        todo += node.children.values()
    return found


def damage(world: World, *which: int) -> None:
    world.send(PagesDamaged(pack_pages(which), "scrub"))


def figure(world: World, name: str) -> int:
    return world.directory.figures().get(name, 0)


@pytest.mark.parametrize("at", range(4))
def test_a_damaged_page_is_matched_no_more_and_what_precedes_it_still_is(at: int) -> None:
    world, b = world_with_a_path()
    damage(world, slots(world)[at])
    assert b.match(PATH).restorable_pages == at
    assert figure(world, "host_pages_quarantined") == 1
    assert figure(world, "host_pages_damaged") == 1
    assert figure(world, "host_pages") == at


def test_a_damaged_slot_is_never_handed_out_again_and_the_others_are() -> None:
    world, b = world_with_a_path()
    bad = slots(world)[1]
    damage(world, bad)
    assert bad not in world.directory.slots.free_slots(PAGE_BYTES)
    before = set(slots(world))
    for first in range(100, 500, 20):
        b.publish(range(first, first + 20))
        world.finish_all()
        assert bad not in slots(world)
    assert len(before | set(slots(world))) == 63, "all others are in use"
    b.ask(Flush("host"))
    assert len(world.directory.slots.free_slots(PAGE_BYTES)) == 63


def test_a_page_that_a_pool_still_has_is_backed_up_again_elsewhere() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish(PATH)
    world.finish_all()
    bad = slots(world)[2]
    damage(world, bad)
    world.finish_all()
    world.close(a.pool)
    assert bad not in slots(world)
    b = Scheduler(world, "b")
    found = b.match(PATH)
    assert found.restorable_pages == 4
    seq = b.restore(PATH, found)
    world.finish_all()
    answer = b.landed(seq)
    assert answer is not None
    assert answer.landed


def test_a_load_that_is_reading_a_damaged_page_does_not_count() -> None:
    world, b = world_with_a_path()
    seq = b.restore(PATH, b.match(PATH))
    damage(world, slots(world)[3])
    world.finish_all()
    answer = b.landed(seq)
    assert answer is not None
    assert not answer.landed
    assert b.match(PATH).restorable_pages == 3


def test_a_load_of_other_pages_goes_on() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish(PATH)
    a.publish([7, 8])
    world.finish_all()
    world.close(a.pool)
    b = Scheduler(world, "b")
    seq = b.restore([7, 8], b.match([7, 8]))
    before = set(slots(world))
    damage(world, next(slot for slot in before if slot not in _path_slots(world, 7)))
    world.finish_all()
    answer = b.landed(seq)
    assert answer is not None
    assert answer.landed


def _path_slots(world: World, first: int) -> set[int]:
    for space in world.directory.tree.spaces.values():
        for key, node in space.root.children.items():
            if key == pack_pages([first]):
                return set(unpack_pages(node.places[HOST].pages))
    raise AssertionError(first)


def test_leased_pages_leave_with_their_lease_and_the_slot_stays_out() -> None:
    world, b = world_with_a_path()
    held = b.match(PATH)
    bad = slots(world)[0]
    damage(world, bad)
    assert slots(world) == []
    b.unlock(held.receipt)
    free = world.directory.slots.free_slots(PAGE_BYTES)
    assert bad not in free
    assert len(free) == world.directory.slots.capacity(PAGE_BYTES) - 1


def test_damage_that_is_reported_again_or_is_no_slot_of_the_tier_changes_nothing() -> None:
    world, _ = world_with_a_path()
    bad = slots(world)[3]
    damage(world, bad)
    was = world.directory.figures()
    damage(world, bad, 1 << 20, 65_535, (9 << 16) | 3)
    assert world.directory.figures() == was


def test_a_slot_that_is_being_filled_is_left_alone() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish(PATH)
    (copy,) = world.copies.values()
    damage(world, *unpack_pages(copy.parts[0].target_pages))
    world.finish_all()
    assert len(slots(world)) == 4
    assert figure(world, "host_pages_quarantined") == 0


def test_a_backup_below_a_damaged_page_comes_to_nothing() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish(PATH)
    world.finish_all()
    a.publish([*PATH, 5, 6])
    damage(world, slots(world)[1])
    world.close(a.pool)
    world.finish_all()
    assert len(slots(world)) == 1
    assert not world.directory.tree.fills


@pytest.mark.parametrize("seed", range(20))
def test_any_damage_at_any_moment_leaves_every_invariant_and_every_byte_right(seed: int) -> None:
    random_ = random.Random(seed)
    world = World(host_pages=24)
    schedulers = [Scheduler(world, name, pages=12) for name in "ab"]
    waiting: list[tuple[Scheduler, int]] = []
    for _ in range(150):
        who = random_.choice(schedulers)
        path = [random_.choice((1, 2)) for _ in range(random_.randint(1, 6))]
        match random_.randrange(5):
            case 0:
                who.publish(path)
            case 1:
                found = who.match(path)
                if found.restorable_pages:
                    waiting.append((who, who.restore(path, found)))
                who.unlock(found.receipt)
            case 2 if world.copies:
                world.finish(random_.choice(list(world.copies)))
            case 3 if random_.random() < 0.3:
                damage(world, random_.randrange(8) | random_.randrange(3) << 16)
            case _:
                who.evict(1)
        waiting = [(s, seq) for s, seq in waiting if s.landed(seq) is None]
    world.finish_all()
    for who, seq in waiting:
        who.landed(seq)
    for who in schedulers:
        who.check()
