"""Offers that are taken back: for how long, how many at once, and only where there is room.

Beside them what a tick may cost: round trips that are waited for, and counts of running requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from directory.core.actions import Matched
from directory.core.events import Match, Mode
from directory.core.tokens import unpack_pages
from scheduler_shim.sglang.offers import RECALLS_MAX
from scheduler_shim.sglang.waiting import Stage
from scheduler_shim.thin_tree import ThinTree
from tests.unit.scheduler_shim.fake_daemon import FakeDaemon
from tests.unit.scheduler_shim.sglang.conftest import Load
from tests.unit.scheduler_shim.sglang.layerwise_rig import ABC, OTHERS, LoadingEngine, at_rest
from tests.unit.scheduler_shim.sglang.rig import KEY, MiniEngine, prompt
from tests.unit.scheduler_shim.sglang.test_adaptive import decoding, offered

MANY = 20
PATHS = [prompt(100 + number, 1_000 + number) for number in range(MANY)]


def crowd(daemon: FakeDaemon, mode: Mode, **more: Any) -> LoadingEngine:
    """An engine, nothing of whose pool is in use, with many requests that the host tier has."""
    other = LoadingEngine(daemon, "other", page_count=16)
    for number, tokens in enumerate(PATHS):
        other.serve(f"cold{number}", tokens)
    other.shim.room.evict(16 - other.free)
    other.settle()
    other.close()
    a = LoadingEngine(daemon, "a", mode, page_count=256, loads="adaptive", **more)
    a.closed = True
    a.step()
    for number, tokens in enumerate(PATHS):
        a.submit(f"r{number}", tokens)
    return a


def steps(a: LoadingEngine, daemon: FakeDaemon, number: int) -> None:
    """So many steps, each with whatever the daemon has to say."""
    for _ in range(number):
        a.step()
        daemon.run()


def leases_asked_in(daemon: FakeDaemon, work: Callable[[], object]) -> int:
    """Leases that are asked for in a piece of work."""
    before = len(daemon.heard)
    work()
    return sum(isinstance(body, Match) and body.acquire for body in daemon.heard[before:])


def at_stage(a: LoadingEngine, stage: Stage) -> int:
    """Requests whose look-up stands there."""
    return sum(entry.stage is stage for entry in a.shim._held._entries.values())


def end(a: LoadingEngine, daemon: FakeDaemon) -> None:
    """All of them are served; nothing is left."""
    daemon.drop_request = lambda _: False
    a.closed = False
    decoding(a, now=False)
    at_rest(a)
    a.close()


# For how long.


def test_an_offer_whose_prefix_went_is_held_for_its_new_look_up(
    engine: Load, daemon: FakeDaemon
) -> None:
    a = engine("mirrored", hold_ms_max=50)
    a.serve("short", prompt(1))
    offered(a, daemon)
    daemon.clock_us += 10_000_000  # it has waited in the queue for long
    a.shim.room.evict(a.pool.page_count - a.free)
    a.closed = False
    request = next(r for r in a.queue if r.rid == "r")
    a.settle()
    assert request.hit_pages == 3
    assert "held_too_long" not in a.counters
    at_rest(a)


def test_an_offer_that_joins_anothers_load_is_held_for_that(
    engine: Load, daemon: FakeDaemon
) -> None:
    a = engine("mirrored", hold_ms_max=50)
    offered(a, daemon)
    daemon.clock_us += 10_000_000
    a.submit("r2", ABC)
    a.queue.reverse()
    steps(a, daemon, 3)
    daemon.hold_copies, a.closed, a.refuses = True, False, {"r2"}
    a.step()
    assert a.counters["restores_joined"] == 1
    a.step()
    assert a.shim.held("r"), "it is held back from now on"
    assert "held_too_long" not in a.counters
    daemon.hold_copies = False
    at_rest(a)


# How many at once.


def test_a_tick_takes_a_few_offers_back_and_the_others_wait_their_turn(
    daemon: FakeDaemon, mode: Mode
) -> None:
    a = crowd(daemon, mode)
    steps(a, daemon, 4)
    assert at_stage(a, Stage.OFFERED) == MANY
    decoding(a, now=True)
    each = 1 if mode == "thin" else RECALLS_MAX
    for tick in range(1, 3):
        asked = leases_asked_in(daemon, a.step)
        assert asked == (1 if mode == "thin" else 0)
        assert a.counters["restores"] == tick * each
        assert at_stage(a, Stage.RECALLED) == MANY - tick * each
        assert at_stage(a, Stage.OFFERED) == 0, "they are held back, too"
        daemon.run()
    steps(a, daemon, 2 * MANY)
    assert a.counters["offers_held_back"] == a.counters["restores"] == MANY
    assert "loads" not in a.counters
    end(a, daemon)


def test_whose_turn_has_not_come_has_its_offer_again_once_nothing_decodes(
    daemon: FakeDaemon, mode: Mode
) -> None:
    a = crowd(daemon, mode)
    steps(a, daemon, 4)
    decoding(a, now=True)
    a.step()
    back = a.counters["restores"]
    decoding(a, now=False)
    a.step()
    assert at_stage(a, Stage.OFFERED) == MANY - back
    assert at_stage(a, Stage.RECALLED) == 0
    end(a, daemon)
    assert a.counters["landed"] == MANY


def test_answers_of_many_that_are_held_back_at_once_cost_a_thin_tick_one_lease(
    daemon: FakeDaemon,
) -> None:
    a = crowd(daemon, "thin")
    decoding(a, now=True)
    a.step()
    daemon.run()
    for _ in range(3):
        assert leases_asked_in(daemon, a.step) <= 2
        daemon.run()
    steps(a, daemon, 2 * MANY)
    assert a.counters["offers_held_back"] == MANY
    end(a, daemon)


def test_a_silent_daemon_costs_a_thin_tick_one_deadline(daemon: FakeDaemon) -> None:
    a = crowd(daemon, "thin", match_ms=20)
    steps(a, daemon, 4)
    decoding(a, now=True)
    daemon.drop_request = lambda _: True
    began_us = daemon.clock_us
    a.step()
    assert daemon.clock_us - began_us <= 21_000
    end(a, daemon)


# Room.


def test_a_thin_request_whose_lease_takes_the_room_keeps_its_offer(daemon: FakeDaemon) -> None:
    a = LoadingEngine(daemon, "a", "thin", page_count=12, loads="adaptive", share=1.0)
    long = prompt(*range(1, 9))
    for number, tokens in enumerate((long, prompt(*range(31, 42)))):
        a.serve(f"cold{number}", tokens)
        a.settle()
    a.serve("own", prompt(*range(1, 7)))
    room = a.free + a.shim.tree.totals.evictable
    decoding(a, now=True)
    request = a.start("r", long)
    assert request.hit_pages == 8
    assert request.restored or request.loaded_pages, f"room for {room} pages"
    counted = a.counters.get("offers_held_back", 0), a.counters.get("offers_crowded", 0)
    assert counted == ((1, 0) if request.restored else (0, 1))
    at_rest(a)
    a.close()


def test_room_for_a_thin_restore_is_the_same_before_and_after_its_lease(
    daemon: FakeDaemon,
) -> None:
    a = LoadingEngine(daemon, "a", "thin", page_count=12, loads="adaptive")
    a.serve("own", prompt(1, 2, 3))
    tree, targets = a.shim.tree, a.shim._held.targets
    request = a.shim.request(KEY, prompt(1, 2, 3))
    request.row = unpack_pages(tree.find(request.key, request.match_tokens).pages)
    assert len(request.row) == 3
    before = targets.room_for(request)
    assert isinstance(tree, ThinTree)
    assert tree.match(request) >= 3
    assert request.receipt
    assert targets.room_for(request) == before
    tree.release(request)
    a.close()


def test_without_room_nothing_is_counted_as_held_back(
    engine: Load, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    a = engine(mode, loads="adaptive")
    offered(a, daemon)
    decoding(a, now=True)
    monkeypatch.setattr(a.shim._held.targets, "wanted", lambda _: 0)
    steps(a, daemon, 3)
    assert a.counters["offers_crowded"] == 1
    assert not a.counters.keys() & {"offers_held_back", "restores"}
    assert at_stage(a, Stage.OFFERED) == 1
    a.closed = False
    request = next(r for r in a.queue if r.rid == "r")
    a.settle()
    assert request.hit_pages == 3
    assert a.counters["loads"] == 1
    at_rest(a)


# What a tick costs.


def test_running_requests_are_counted_once_a_tick_and_anew_behind_it(
    daemon: FakeDaemon, mode: Mode
) -> None:
    a = crowd(daemon, mode)
    steps(a, daemon, 4)
    decoding(a, now=True)
    asked = 0

    def reserved() -> int:
        nonlocal asked
        asked += 1
        return 0

    a.shim.tick(a.queue, busy=True, reserved=reserved)
    assert asked == 1
    a.shim.reserved_pages()
    a.shim.reserved_pages()
    assert asked == 3, "somebody may have been admitted since"
    daemon.run()
    end(a, daemon)


def test_a_late_answer_in_an_eviction_does_not_leave_the_engine_short(daemon: FakeDaemon) -> None:
    a = LoadingEngine(daemon, "a", "thin", page_count=12)
    for number, tokens in enumerate((ABC, *OTHERS)):
        a.serve(f"cold{number}", tokens)
    a.closed = True
    request = a.submit("r", prompt(1, 2, 3, *range(60, 66)))
    steps(a, daemon, 3)
    row = a.shim.request(KEY, request.tokens)
    found = a.shim.tree.find(row.key, row.match_tokens)
    offer = a.shim.loads.pages("r", row.key, row.match_tokens, found.pages)
    assert offer
    promised = a.free + a.shim.tree.totals.evictable
    daemon.drop_request = lambda body: isinstance(body, Match) and body.acquire
    assert a.shim.loads.begin(request, found.pages, offer) == b"", "its lease was not answered"
    daemon.drop_request = lambda _: False
    short = row.all_pages - a.free
    assert 0 < short <= promised - a.free
    assert a.shim.evict(short) == short
    a.closed = False
    at_rest(a)
    a.close()


def test_a_busy_tick_waits_for_no_answer_to_what_an_earlier_one_has_asked(
    daemon: FakeDaemon, mode: Mode
) -> None:
    a = MiniEngine(daemon, "a", mode, page_count=32, busy_wait_us=500, match_ms=20)
    daemon.drop_reply = lambda body: isinstance(body, Matched)
    a.submit("early", prompt(1, 2))
    a.shim.tick(a.queue, busy=True)
    daemon.drop_reply = lambda _: False
    daemon.clock_us += 1_000
    a.submit("late", prompt(3, 4))
    began_us = daemon.clock_us
    a.shim.tick(a.queue, busy=True)
    assert (a.shim.held("early"), a.shim.held("late")) == (True, False)
    assert daemon.clock_us - began_us < 500
    daemon.clock_us += 20_000
    a.settle()
    a.close()
