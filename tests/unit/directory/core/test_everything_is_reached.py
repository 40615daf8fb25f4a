"""One set of scenarios reaches every event, action, message, answer and step of a state table.

A new type or step that nothing here reaches makes the test fail: extend a scenario.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, get_args

import pytest

from directory.core import copies, events, lease, registry, states, transfers, tree
from directory.core.actions import Action, Answer, AnyReply, Refused, RegistrationRefused
from directory.core.directory import Directory
from directory.core.errors import TreecoredError, error_classes
from directory.core.events import (
    Asked,
    CopyDone,
    Event,
    Evict,
    Evicted,
    Flush,
    Insert,
    Live,
    Lock,
    Match,
    MoverLost,
    PagesDamaged,
    Request,
    Stats,
)
from tests.unit.directory.core.world import KEY, Scheduler, World

# Codes that belong to the parts around the core; their own tests reach them.
ELSEWHERE = {
    "answer_gone",
    "not_authorised",
    "out_of_order",
    "stale_epoch",
    "version_mismatch",
    "import_failed",
    "bad_layout",
    "internal",
    "invalid_transition",
}


class Seen:
    """What went through every Directory of the scenarios."""

    def __init__(self) -> None:
        self.types: set[type] = set()
        self.codes: set[str] = set()
        self.steps: set[tuple[str, str]] = set()


def life_of_a_page(world: World) -> None:
    """Thin and mirrored: insert, match, lock, evict, restore, flush, stats."""
    a, b = Scheduler(world, "a"), Scheduler(world, "b", "mirrored")
    a.publish([1, 2, 3])
    world.finish_all()
    b.publish([1, 2])
    got = b.match([1, 2, 3], own=2)
    seq = b.restore([1, 2, 3], got)
    world.finish_all()
    assert b.landed(seq)
    b.unlock(got.receipt)
    node = a.match([1, 2, 3], acquire=False).node
    a.ask(Lock("r", 1, node))
    receipt = a.match([1, 2, 3]).receipt
    a.publish([1, 2, 3, 4], receipt=receipt)
    a.unlock(receipt)
    a.ask(Evict(1))
    b.evict(1)
    a.publish([8])
    a.ask(Flush("host"))
    world.finish_all()
    a.ask(Flush("pool"))
    a.ask(Live(()))
    a.ask(Stats(check=True))


def deaths(world: World) -> None:
    """Owners and movers that go at bad moments, and copies that fail."""
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1])
    world.finish(next(iter(world.copies)), "failed")
    a.publish([1, 2])
    got = b.match([1, 2])
    b.restore([1, 2], got)
    world.close(a.pool)
    world.close(b.pool)
    while world.ending:
        world.close_more()
    world.copies.clear()
    world.send(MoverLost(0))
    world.send(PagesDamaged(bytes(4), "scrub"))
    world.send(CopyDone(99, "ok"))


def leased_through_a_flush(world: World) -> None:
    """A leased host page drains, and is freed with its lease."""
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1])
    world.finish_all()
    a.flush()
    receipt = b.match([1]).receipt
    b.ask(Flush("host"))
    b.unlock(receipt)
    a.publish([2])
    world.finish_all()
    a.flush()
    world.directory.transfers.evict_host(64, 1)


def mistakes(world: World) -> None:
    """Every refusal."""
    a, b = Scheduler(world, "a"), Scheduler(world, "b", "mirrored")
    world.register("a")
    a.ask(Match("r" * 1000, 1, KEY, b""))
    a.ask(Evict(0))
    a.ask(Evicted((), ()))
    b.ask(Evicted(((1, 0, 1),), ()))
    a.ask(Lock("r", 1, 5))
    a.unlock(5)
    a.ask(Insert("r", 1, KEY, bytes(4), bytes(8), 1, 0, (0, 0)))
    world.send(Asked(77, 1, 0, Stats()))


def ranks(world: World) -> None:
    """A group that is not there yet, then is, then is contradicted by one of its own."""
    first = Scheduler(world, "g", world_size=2)
    first.ask(Stats())
    world.register("g", world_size=3)
    second = Scheduler(world, "g", world_size=2, rank=1)
    second.ask(Stats())
    first.ask(Evict(1))
    second.ask(Evict(2))


def a_kept_tier() -> None:
    """A host tier with a journal that is compacted at once."""
    world = World()
    world.directory = Directory(host_bytes=1 << 12, segment_bytes=1 << 12, journal=1)
    a = Scheduler(world, "a")
    a.publish([1, 2])
    world.finish_all()
    a.publish([1, 3])
    world.finish_all()


def crowd(world: World) -> None:
    """More pools than the limit."""
    for number in range(3):
        world.register(f"p{number}")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    real_handle, real_step = Directory.handle, states.step

    def handle(self: Directory, event: Event) -> list[Action]:
        actions = real_handle(self, event)
        found.types.add(type(event))
        if isinstance(event, Asked):
            found.types.add(type(event.body))
        for action in actions:
            found.types.add(type(action))
            if isinstance(action, Answer):
                found.types.add(type(action.body))
                if isinstance(action.body, Refused):
                    found.codes.add(action.body.code)
            elif isinstance(action, RegistrationRefused):
                found.codes.add(action.code)
        return actions

    def step(table: states.Table, state: Any, event: StrEnum, what: object) -> Any:
        found.steps.add((state, event))
        return real_step(table, state, event, what)

    monkeypatch.setattr(Directory, "handle", handle)
    for module in (copies, tree, lease, registry, transfers):
        monkeypatch.setattr(module, "step", step)
    monkeypatch.setattr("directory.core.limits.POOLS_MAX", 2)
    for scenario in (life_of_a_page, deaths, leased_through_a_flush, mistakes, ranks, crowd):
        scenario(World(closed_a_step=1))
    monkeypatch.setattr("directory.core.limits.JOURNAL_COMPACT_BYTES_MIN", 1)
    a_kept_tier()
    return found


def test_every_event_message_action_and_answer_is_reached(seen: Seen) -> None:
    unions = (Event, Request, Action, AnyReply)
    wanted = {kind for union in unions for kind in get_args(union)}
    assert sorted(kind.__name__ for kind in wanted - seen.types) == []


def test_every_message_body_is_in_the_union_of_requests() -> None:
    # Others that have loaded more than the core know a body that never reaches it.
    bodies = {kind for kind in events.Body.__subclasses__() if kind.__module__ == events.__name__}
    assert bodies == set(get_args(Request))


def test_every_step_of_every_life_cycle_is_reached(seen: Seen) -> None:
    wanted = {key for table in states.TABLES.values() for key in table}
    assert sorted(wanted - seen.steps) == []


def test_every_refusal_of_the_core_is_reached(seen: Seen) -> None:
    leaves = {
        code
        for code, cls in error_classes().items()
        if not cls.__subclasses__() and issubclass(cls, TreecoredError)
    }
    assert sorted(leaves - ELSEWHERE - seen.codes) == []
