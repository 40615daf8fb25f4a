"""Wishes for backups: they go with their nodes, and what comes to nothing holds nothing up."""

from __future__ import annotations

import pytest

from directory.core import limits
from directory.core.actions import Action
from directory.core.node import Node
from tests.unit.directory.core.world import Scheduler, World


def test_a_wish_goes_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BACKUPS_IN_FLIGHT_MAX", 1)
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    for first in range(1, 9):
        a.publish([first])
    b.publish([9])
    wished = world.directory.transfers.wished
    assert len(wished) == 8
    world.close(a.pool)
    assert len(wished) == 1, "b's: of a's nodes all but the one that fills are gone"
    world.finish_all()
    assert (len(wished), world.directory.host.pages) == (0, 1)


def test_wishes_that_come_to_nothing_are_looked_at_a_few_at_a_time_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "BACKUPS_IN_FLIGHT_MAX", 2)
    monkeypatch.setattr(limits, "BACKUPS_LOOKED_AT_MAX", 3)
    world = World()
    a = Scheduler(world, "a")
    for first in range(1, 5):
        a.publish([first])
    transfers = world.directory.transfers
    for first in range(5, 25):
        a.publish([first])
    looks: list[int] = []
    begin = transfers._begin_backup

    def refused(node: Node, not_pool: int) -> list[Action]:
        looks.append(node.id)
        return [] if len(looks) <= 12 else begin(node, not_pool)

    monkeypatch.setattr(transfers, "_begin_backup", refused)
    waiting = len(transfers.wished)
    world.finish(next(iter(world.copies)))
    assert len(looks) == 3
    assert len(transfers.wished) == waiting - 3
    world.finish(next(iter(world.copies)))
    assert len(looks) == 12 + 1, "no other end was to come: it went on until one was begun"
    world.finish_all()
    assert not transfers.wished
    assert len(looks) == waiting, "each was looked at once"


def test_wishes_of_a_pool_that_is_taken_out_are_looked_at_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last backup has ended and nothing of it can be read any more: its end looks at them."""
    monkeypatch.setattr(limits, "BACKUPS_IN_FLIGHT_MAX", 2)
    monkeypatch.setattr(limits, "BACKUPS_LOOKED_AT_MAX", 3)
    monkeypatch.setattr(limits, "ENDED_WISHES_LOOKED_AT_MAX", 4)
    world = World(host_pages=80, closed_a_step=1)
    dead, other = Scheduler(world, "a", pages=64), Scheduler(world, "b")
    for first in range(60):
        dead.publish([first])
    other.publish([99])
    transfers = world.directory.transfers
    looks: list[int] = []
    begin = transfers._begin_backup

    def begin_backup(node: Node, not_pool: int) -> list[Action]:
        looks[-1] += 1
        return begin(node, not_pool)

    monkeypatch.setattr(transfers, "_begin_backup", begin_backup)
    looks.append(0)
    world.close(dead.pool)
    while world.copies:
        looks.append(0)
        world.finish(next(iter(world.copies)))
    assert len(transfers.wished) > 20
    while world.ending:
        looks.append(0)
        world.close_more()
    assert not transfers.wished
    assert max(looks) == 4
    world.finish_all()
    assert world.directory.host.pages == 1, "what is the other one's was not forgotten"


def test_no_backup_is_begun_once_the_daemon_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BACKUPS_IN_FLIGHT_MAX", 1)
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    a.publish([1, 2, 3])
    a.publish([4])
    world.directory.transfers.begin_no_backups()
    world.finish(next(iter(world.copies)))
    assert not world.copies, "neither what waited nor what is below the one that has landed"
    assert world.directory.host.pages == 2
