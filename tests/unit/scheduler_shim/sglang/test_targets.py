"""Targets of held-back restores: how many there may be, and what they leave to others."""

from directory.core.actions import Totals
from directory.core.events import Mode
from tests.unit.scheduler_shim.sglang.conftest import Add
from tests.unit.scheduler_shim.sglang.rig import leases, prompt
from tests.unit.scheduler_shim.sglang.test_held import ABC, start_fill
from tests.unit.scheduler_shim.support import FakeDaemon


def test_a_thin_engine_knows_at_once_what_its_restores_protect(
    daemon: FakeDaemon, add: Add
) -> None:
    add("a").serve("a1", ABC)
    b = add("b", "thin")
    b.serve("own", prompt(1))
    daemon.hold_copies = True
    b.submit("r", ABC)
    b.shim.tick(b.queue, busy=True)
    daemon.run()
    assert b.shim.tree.totals == Totals(1, 0), "the question alone protects nothing"
    b.shim.tick(b.queue, busy=True)
    assert b.shim.outside_pages == 2
    heard = len(daemon.heard)
    assert b.shim.tree.totals == Totals(0, 1)
    assert len(daemon.heard) == heard, "nobody had to be asked for that"
    daemon.hold_copies = False
    b.settle()


def test_restores_take_no_more_than_their_share(daemon: FakeDaemon, add: Add, mode: Mode) -> None:
    add("a", mode).serve("a1", prompt(1, 2, 3, 4, 5, 6))
    b = add("b", mode, page_count=8, share=0.5)
    start_fill(b, tokens=prompt(1, 2, 3, 4, 5, 6))
    assert b.shim.outside_pages == 4
    other = b.submit("other", prompt(1, 2, 3, 4, 5, 6, 7))
    b.step()
    daemon.hold_copies = False
    b.settle()
    assert b.done["r"].hit_pages >= 4
    assert other.hit_pages >= 4


def test_without_room_within_the_share_a_request_is_admitted_without(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, share=0.0)
    assert b.serve("b1", ABC).hit_pages == 0
    assert b.counters["restores_without_room"] == 1
    assert leases(daemon) == 0


def test_fewer_pages_than_are_worth_it_are_not_restored(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, restore_min_pages=4)
    assert b.serve("b1", ABC).hit_pages == 0
    assert "restores" not in b.counters


def test_targets_are_not_taken_from_the_prefix_that_they_continue(
    daemon: FakeDaemon, add: Add
) -> None:
    a = add("a")
    a.serve("a1", prompt(1, 2, 3, 4))
    b = add("b", page_count=4, share=1.0)
    b.serve("own", prompt(1, 2))
    b.serve("other", prompt(8, tail=1))
    request = b.submit("r", prompt(1, 2, 3, tail=1))
    b.settle()
    assert request.hit_pages == 3
