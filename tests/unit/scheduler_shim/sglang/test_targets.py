"""Targets of held-back restores: how many there may be, and what they leave to others."""

from directory.core.actions import Totals
from directory.core.events import Evicted, Match, Mode
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
    b.crowd = True
    start_fill(b, tokens=prompt(1, 2, 3, 4, 5, 6))
    assert b.shim.outside_pages == 4
    other = b.submit("other", prompt(1, 2, 3, 4, 5, 6, 7))
    b.step()
    daemon.hold_copies = False
    b.settle()
    assert b.done["r"].hit_pages >= 4
    assert other.hit_pages >= 4


SIX = prompt(1, 2, 3, 4, 5, 6)


def test_a_request_that_is_alone_may_have_nearly_all_there_is(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", SIX)
    b = add("b", mode, page_count=8, share=0.25)
    b.serve("old", prompt(21, 22, 23, 24, 25, 26, 27))
    served = b.serve("r", SIX)
    assert (served.hit_pages, b.counters["restores"], b.counters["pages_asked_for"]) == (6, 1, 6)
    assert "restores_without_room" not in b.counters


def test_its_own_prefix_is_not_counted_among_what_it_may_have(daemon: FakeDaemon, add: Add) -> None:
    add("a").serve("a1", SIX)
    b = add("b", page_count=7, share=0.25)
    b.serve("old", prompt(21, 22, 23, 24))
    b.serve("own", prompt(1, 2))
    before = b.counters["pages_asked_for"]
    assert b.serve("r", SIX).hit_pages == 6
    assert b.counters["pages_asked_for"] == before + 4


def test_with_somebody_else_in_the_queue_or_running_it_has_its_share(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", SIX)
    for name in ("waiting", "running"):
        b = add(name, mode, page_count=8, share=0.25)
        b.crowd = name == "running"
        if name == "waiting":
            b.submit("other", prompt(9))
        start_fill(b, tokens=SIX)
        assert b.shim.outside_pages == 2
        daemon.hold_copies = False
        b.settle()


def test_room_for_one_that_is_alone_is_made_while_its_answer_is_awaited(
    daemon: FakeDaemon, add: Add
) -> None:
    add("a").serve("a1", SIX)
    b = add("b", page_count=11)
    b.serve("own", prompt(1, 2))
    b.serve("other", prompt(31, 32, 33, 34, 35, 36, 37))
    daemon.hold_copies = True
    b.submit("r", SIX)
    heard = len(daemon.heard)
    b.step()
    daemon.run()
    kinds = [type(body) for body in daemon.heard[heard:] if isinstance(body, Match | Evicted)]
    assert kinds == [Match, Evicted], "the question comes first, and what went is not told later"
    room = b.shim.room
    assert room.free_count == 6, "four to restore into, one to compute and one for what it says"
    assert room.allocator.free_count == 2
    assert b.holds(SIX) == 2, "what it goes on from is still there"
    heard = len(daemon.heard)
    b.step()
    daemon.run()
    assert not any(isinstance(body, Evicted) for body in daemon.heard[heard:])
    assert (b.shim.outside_pages, room.free_count) == (4, 2)
    daemon.hold_copies = False
    b.settle()
    assert b.done["r"].hit_pages == 6


def test_room_is_made_for_all_of_it_though_its_own_prefix_is_half_of_the_tree(
    daemon: FakeDaemon, add: Add
) -> None:
    ten = prompt(*range(1, 11))
    add("a").serve("a1", ten)
    b = add("b", page_count=14)
    b.serve("other", prompt(31, 32, 33, 34, 35, 36))
    b.serve("own", prompt(1, 2, 3, 4, 5, 6))
    daemon.hold_copies = True
    b.submit("r", ten)
    b.step()
    evicted = b.counters["pages_evicted"]
    daemon.run()
    b.step()
    assert b.shim.outside_pages == 4
    assert b.counters["pages_evicted"] == evicted, "nothing is given up behind the answer"
    daemon.hold_copies = False
    b.settle()


def test_while_a_daemon_stands_still_with_its_targets_others_are_served(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    twelve = prompt(*range(1, 13))
    add("a", mode, page_count=40).serve("a1", twelve)
    b = add("b", mode, page_count=13)
    daemon.hold_copies = True
    b.submit("r", twelve)
    for _ in range(4):
        b.step()
        daemon.run()
    assert b.shim.outside_pages == 11, "one page of ten, rounded up, is no target"
    b.submit("small", prompt(50)[: b.pool.page_size // 2])
    for _ in range(200):
        b.step()  # the daemon and its mover are not run any more
        daemon.clock_us += 20_000
    assert "small" in b.done


def test_room_that_was_made_in_vain_is_evictable_and_found_by_who_computes(
    daemon: FakeDaemon, add: Add
) -> None:
    b = add("b", page_count=6)
    b.serve("old", prompt(21, 22, 23, 24, 25))
    request = b.submit("r", ABC)
    b.step()
    room = b.shim.room
    assert room.free_count > room.allocator.free_count
    assert room.totals.evictable == b.shim.tree.totals.evictable + 4
    daemon.run()
    b.step()
    assert request.hit_pages == 0
    assert room.free_count == room.allocator.free_count
    b.settle()


def test_no_room_is_made_ahead_where_others_run_or_the_daemon_chooses(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    b = add("b", mode, page_count=6)
    b.serve("old", prompt(21, 22, 23, 24, 25))
    b.crowd = mode == "mirrored"
    b.submit("r", ABC)
    pages = b.shim.tree.pages
    b.step()
    assert b.shim.tree.pages == pages
    daemon.run()
    b.settle()


def test_without_room_within_the_share_a_request_is_admitted_without(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, share=0.0)
    b.crowd = True
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
