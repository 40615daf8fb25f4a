"""Adaptive loads: by layers where nothing decodes, held back where something does."""

from __future__ import annotations

from directory.core.actions import Restored
from directory.core.events import Mode
from tests.unit.scheduler_shim.sglang.conftest import Load
from tests.unit.scheduler_shim.sglang.layerwise_rig import ABC, OTHERS, LoadingEngine, at_rest
from tests.unit.scheduler_shim.sglang.rig import prompt
from tests.unit.scheduler_shim.support import FakeDaemon

WHOLE = 12
"""Tokens of ABC's pages."""


def decoding(engine: LoadingEngine, *, now: bool) -> None:
    """Whether something decodes, whatever runs."""
    offers = engine.shim.loads.offers
    assert offers is not None
    offers.decoding = lambda: now


def offered(engine: LoadingEngine, daemon: FakeDaemon) -> None:
    """Have ABC offered to a request that nobody admits yet."""
    engine.closed = True
    engine.submit("r", ABC)
    for _ in range(3):
        engine.step()
        daemon.run()
    offers = engine.shim.loads.offers
    assert offers is not None
    assert offers.offered("r")


def test_where_nothing_decodes_a_request_is_admitted_at_once(engine: Load, mode: Mode) -> None:
    a = engine(mode, loads="adaptive")
    request = a.start("r", ABC)
    assert (request.hit_pages, request.loaded_pages, request.restored) == (3, 3, 0)
    assert a.counters["loads"] == 1
    assert not a.counters.keys() & {"restores", "offers_held_back"}
    at_rest(a)


def test_the_same_request_is_held_back_while_another_one_decodes(engine: Load, mode: Mode) -> None:
    a = engine(mode, loads="adaptive")
    a.keeps = True
    a.start("running", prompt(50))
    a.keeps = False
    request = a.start("r", ABC)
    assert (request.hit_pages, request.loaded_pages, request.restored) == (3, 0, WHOLE)
    assert a.counters["restores"] == a.counters["offers_held_back"] == 1
    assert not a.counters.keys() & {"loads", "offers"}
    a.finish("running")
    again = a.start("again", OTHERS[0])
    assert (again.hit_pages, again.loaded_pages) == (3, 3), "nothing decodes any more"
    at_rest(a)


def test_layerwise_loads_do_not_look_at_what_decodes(engine: Load, mode: Mode) -> None:
    a = engine(mode)
    decoding(a, now=True)
    assert a.start("r", ABC).loaded_pages == 3
    assert "offers_held_back" not in a.counters
    at_rest(a)


def test_an_offer_is_taken_back_when_something_decodes_before_its_admission(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, loads="adaptive", hold_ms_max=50)
    offered(a, daemon)
    decoding(a, now=True)
    daemon.clock_us += 10_000_000  # it has waited in the queue for long
    daemon.hold_copies = True
    a.step()
    a.step()
    assert a.shim.held("r"), "it is held back from now on, and not since it was asked for"
    daemon.hold_copies = False
    daemon.run()
    a.closed = False
    request = next(r for r in a.queue if r.rid == "r")
    a.settle()
    assert (request.hit_pages, request.restored) == (3, WHOLE)
    assert a.counters["offers_held_back"] == a.counters["restores"] == 1
    assert "loads" not in a.counters
    assert "held_too_long" not in a.counters
    at_rest(a)


def test_an_offer_whose_own_prefix_went_is_looked_up_again_when_it_is_taken_back(
    engine: Load, daemon: FakeDaemon
) -> None:
    a = engine("mirrored", loads="adaptive")
    a.serve("short", prompt(1))
    offered(a, daemon)
    asked = a.counters["asked"]
    a.shim.evict(a.pool.page_count)
    assert a.holds(ABC) == 0
    decoding(a, now=True)
    for _ in range(6):
        a.step()
        daemon.run()
    assert a.counters["asked"] == asked + 1
    assert a.holds(ABC) == 3
    a.closed = False
    at_rest(a)


def test_without_room_to_hold_it_back_for_a_request_keeps_its_offer(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, loads="adaptive", share=0.0)
    a.crowd = True
    decoding(a, now=True)
    request = a.start("r", ABC)
    assert (request.hit_pages, request.loaded_pages, request.failed) == (3, 3, "")
    assert a.counters["offers_crowded"] == a.counters["loads"] == 1
    at_rest(a)


def test_an_offer_stays_one_where_there_is_no_room_to_take_it_back(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, loads="adaptive", share=0.0)
    offered(a, daemon)
    a.crowd = True
    decoding(a, now=True)
    a.step()
    a.step()
    assert a.counters["offers_crowded"] == 1, "it is found out once"
    a.closed = False
    request = next(r for r in a.queue if r.rid == "r")
    a.settle()
    assert request.hit_pages == 3
    assert a.counters["loads"] == 1
    assert not a.counters.keys() & {"restores", "restores_without_room", "offers_held_back"}
    at_rest(a)


def test_two_of_one_prefix_that_are_held_back_share_the_restore(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, loads="adaptive")
    offered(a, daemon)
    a.submit("r2", ABC)
    for _ in range(3):
        a.step()
        daemon.run()
    decoding(a, now=True)
    daemon.hold_copies = True
    a.step()
    assert a.shim.held("r")
    assert a.shim.held("r2")
    assert (a.counters["restores"], a.counters["restores_joined"]) == (1, 1)
    daemon.hold_copies = False
    a.closed = False
    at_rest(a)


def test_nothing_is_left_of_an_offer_once_the_daemon_is_lost(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, loads="adaptive")
    offered(a, daemon)
    daemon.die()
    a.step()
    decoding(a, now=True)
    daemon.restart()
    for _ in range(400):
        a.step()
        daemon.run()
        daemon.clock_us += 10_000
    assert a.shim.mode == mode
    assert not a.counters.keys() & {"offers_held_back", "offers_crowded"}
    a.closed = False
    at_rest(a)


def test_a_request_that_waited_long_and_is_refused_waits_for_its_load(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, hold_ms_max=50)
    offered(a, daemon)
    daemon.clock_us += 10_000_000
    daemon.drop_reply = lambda body: isinstance(body, Restored)
    a.closed, a.refuses = False, {"r"}
    a.step()
    assert a.counters["loads_put_back"] == 1
    a.step()
    assert a.shim.held("r"), "its load has just begun"
    daemon.drop_reply = lambda _: False
    daemon.clock_us += 1_000_000
    at_rest(a)


def test_a_load_by_layers_that_is_lost_ends_its_request_and_what_is_held_back_fails_nobody(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, loads="adaptive")
    daemon.fail_copies = lambda copy: copy.kind == "load_back"
    alone = a.start("alone", ABC)
    assert "made to fail" in alone.failed
    assert a.counters["loads_lost_in_flight"] == 1
    decoding(a, now=True)
    beside = a.start("beside", ABC)
    assert (beside.failed, beside.hit_pages) == ("", 0), "it is computed after two losses"
    assert a.counters["restores"] == a.counters["lost"] - 1 == 2
    assert a.counters["loads_lost_in_flight"] == 1
    daemon.fail_copies = lambda _: False
    at_rest(a)
