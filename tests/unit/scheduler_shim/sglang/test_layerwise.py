"""Loads that land layer by layer: who is admitted, what is offered and what is published."""

from directory.core.actions import Restored, SubmitCopy
from directory.core.events import Match, Mode, Restore
from tests.unit.scheduler_shim.sglang.conftest import Load
from tests.unit.scheduler_shim.sglang.layerwise_rig import ABC, LoadingEngine, at_rest
from tests.unit.scheduler_shim.sglang.rig import prompt
from tests.unit.scheduler_shim.support import FakeDaemon


def test_a_request_is_admitted_at_once_and_what_has_landed_is_published(
    engine: Load, mode: Mode
) -> None:
    a = engine(mode)
    request = a.start("r", ABC)
    assert (request.hit_pages, request.loaded_pages, request.failed) == (3, 3, "")
    assert a.counters["loads"] == a.counters["landed"] == 1
    assert "restores" not in a.counters
    assert a.holds(ABC) == 3
    at_rest(a)


def test_a_forward_pass_waits_for_the_layer_that_it_reads(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, layer_ms=60_000)
    daemon.hold_copies = True
    seen: list[int] = []

    def look(layer: int) -> None:
        seen.append(a.landed_layers())
        daemon.hold_copies = False

    a.in_forward = look
    request = a.start("r", ABC)
    assert seen == [0, 2], "nothing was there, and it was waited for"
    assert request.failed == ""
    at_rest(a)


def test_what_another_pool_has_is_restored_while_the_request_waits(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.serve("again", ABC)
    b = LoadingEngine(daemon, "b", mode)
    request = b.start("r", ABC)
    assert (request.hit_pages, request.loaded_pages, request.restored) == (3, 0, 12)
    assert b.counters["restores"] == 1
    assert "loads" not in b.counters
    b.settle()
    b.close()


def test_without_room_for_another_pools_pages_the_host_tiers_are_loaded_on_admission(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.serve("again", ABC)
    b = LoadingEngine(daemon, "b", mode, share=0.0)
    b.crowd = True
    request = b.start("r", ABC)
    if mode == "thin":
        assert b.counters["restores_without_room"] == 1
        assert (request.hit_pages, request.loaded_pages) == (0, 0), "it has no lease meanwhile"
    else:
        assert (request.hit_pages, request.loaded_pages, request.failed) == (3, 3, "")
        assert b.counters["offers_crowded"] == b.counters["loads"] == 1
        assert "restores_without_room" not in b.counters
    b.settle()
    assert not b.counters.get("bytes_restored_peer")
    b.close()


def test_one_that_is_alone_is_restored_out_of_a_pool_though_that_takes_all_the_room(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, loads="adaptive")
    a.serve("again", ABC)
    b = LoadingEngine(daemon, "b", mode, page_count=4, share=0.25, loads="adaptive")
    b.serve("old", prompt(41, 42, 43))
    request = b.start("r", ABC)
    assert (request.hit_pages, request.loaded_pages, request.restored) == (3, 0, 12)
    assert b.counters["bytes_restored_peer"] == 3 * b.pool.page_bytes
    assert not b.counters.keys() & {"offers_crowded", "restores_without_room", "loads"}
    b.settle()
    b.close()


def test_with_less_room_than_the_host_tier_has_pages_all_of_those_are_loaded_on_admission(
    engine: Load, daemon: FakeDaemon
) -> None:
    a = engine("mirrored")
    a.serve("again", ABC)
    b = LoadingEngine(daemon, "b", "mirrored", page_count=8, share=0.25)
    b.crowd = True
    request = b.start("r", ABC)
    assert (request.hit_pages, request.loaded_pages, request.failed) == (3, 3, "")
    assert b.counters["offers_crowded"] == b.counters["loads"] == 1
    assert "restores" not in b.counters, "not two pages ahead of the third"
    b.settle()
    b.close()


def test_only_what_the_host_tier_has_is_offered_where_there_is_no_room(
    engine: Load, daemon: FakeDaemon
) -> None:
    longer = prompt(1, 2, 3, 4, 5)
    a = engine("mirrored")
    a.serve("again", ABC)
    daemon.hold_copies = True
    a.serve("longer", longer)  # of the last two pages there is no backup yet
    b = LoadingEngine(daemon, "b", "mirrored", share=0.0, layer_ms=60_000)
    b.crowd = True

    def go_on(_: int) -> None:
        daemon.hold_copies = False

    b.in_forward = go_on
    request = b.start("r", longer)
    assert (request.hit_pages, request.loaded_pages, request.failed) == (3, 3, "")
    b.settle()
    b.close()


def test_another_request_of_the_same_prefix_waits_until_it_has_landed(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.closed = True
    first, second = a.submit("r1", ABC), a.submit("r2", ABC)
    for _ in range(3):
        a.step()
        daemon.run()
    a.closed = False
    daemon.drop_reply = lambda body: isinstance(body, Restored)
    a.keeps = True
    a.step()
    assert first.loaded_pages == 3
    assert second in a.queue
    assert a.shim.held("r2")
    daemon.drop_reply = lambda _: False
    a.keeps = False
    daemon.clock_us += 1_000_000  # the answer is sent again
    a.settle()
    assert (second.hit_pages, second.loaded_pages) == (3, 0)
    a.finish("r1")
    assert a.counters["loads"] == 1
    assert "held_too_long" not in a.counters
    at_rest(a)


def test_a_row_that_ends_before_the_answer_leaves_its_targets_out_of_use_until_then(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.keeps = True
    daemon.drop_reply = lambda body: isinstance(body, Restored)
    a.start("r", ABC)
    assert a.shim.loads.alive, "its lease must not fall meanwhile"
    a.abort("r")
    assert a.shim.outside_pages == 3
    a.check()
    daemon.drop_reply = lambda _: False
    daemon.clock_us += 1_000_000
    at_rest(a)
    # A mirror inserts what lands for nobody; a thin one cannot know whether its path still stands.
    assert a.holds(ABC) == (3 if mode == "mirrored" else 0)


def test_a_request_that_ends_with_its_first_step_waits_for_the_answer_a_moment(
    engine: Load, mode: Mode
) -> None:
    a = engine(mode)
    a.start("r", ABC)
    assert a.rows == {}
    assert a.holds(ABC) == 3
    at_rest(a)


def test_what_lands_after_the_first_step_is_published_by_the_next_tick(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.keeps = True
    daemon.drop_reply = lambda body: isinstance(body, Restored)
    a.start("r", ABC)
    assert a.holds(ABC) == 0
    daemon.drop_reply = lambda _: False
    daemon.clock_us += 1_000_000
    for _ in range(4):
        a.step()
        daemon.run()
    assert a.holds(ABC) == 3
    a.finish("r")
    at_rest(a)


def test_a_request_that_is_not_admitted_after_all_waits_for_its_load(
    engine: Load, mode: Mode
) -> None:
    a = engine(mode)
    a.refuses = {"r"}
    request = a.start("r", ABC)
    assert (request.hit_pages, request.loaded_pages, request.restored) == (3, 0, 12)
    assert a.counters["loads_put_back"] == 1
    at_rest(a)


def test_a_weight_change_during_a_load_publishes_nothing(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.keeps = True
    a.in_forward = lambda layer: a.shim.change_weights(7) if layer == 1 else None
    request = a.start("r", ABC)
    assert request.failed == ""
    a.in_forward = lambda _: None
    a.settle()
    a.finish("r")
    assert a.holds(ABC) == 0
    at_rest(a)


def test_an_offer_whose_own_prefix_was_evicted_is_looked_up_again(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.serve("short", prompt(1))  # the first page is here again
    assert a.holds(ABC) == 1
    a.closed = True
    a.submit("r", ABC)
    for _ in range(3):
        a.step()
        daemon.run()
    a.shim.evict(a.pool.page_count)
    assert a.holds(ABC) == 0
    a.closed = False
    for _ in range(6):
        a.step()
        daemon.run()
    assert a.queue == []
    at_rest(a)


def test_a_waiting_offer_protects_no_page_of_the_own_pool(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.serve("short", prompt(1))
    a.closed = True
    a.submit("r", ABC)
    for _ in range(3):
        a.step()
        daemon.run()
    assert not a.shim.held("r")
    assert a.shim.tree.totals.protected == 0
    a.abort("r")
    at_rest(a)


def test_without_a_counter_to_spare_the_prefix_is_computed(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.keeps = True
    daemon.drop_reply = lambda body: isinstance(body, Restored)
    layers = a.shim.loads._layers
    assert layers is not None
    taken = [layers.landings.begin(1) for _ in range(4)]
    request = a.start("r", ABC)
    assert (request.hit_pages, request.loaded_pages) == (0, 0)
    assert a.counters["loads_declined"] == 1
    assert len([body for body in daemon.heard if isinstance(body, Restore)]) == 0
    for landing in taken:
        assert landing is not None
        landing.take_answer(landed=True)
    a.finish("r")
    at_rest(a)


def test_a_flush_after_a_load_leaves_an_empty_pool(engine: Load, mode: Mode) -> None:
    a = engine(mode)
    a.start("r", ABC)
    a.settle()
    a.shim.flush()
    a.shim.after_clear()
    assert a.kept_out == b""
    assert a.free == a.pool.page_count
    assert a.start("again", ABC).loaded_pages == 3
    at_rest(a)


def test_a_question_without_an_answer_is_no_offer(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode, match_ms=5)
    daemon.drop_request = lambda body: (
        isinstance(body, Match)
        and body.acquire == (mode == "mirrored")
        and not body.request.startswith(("find", "totals", "touch"))
    )
    a.submit("r", ABC)
    a.step()
    daemon.clock_us += 10_000
    a.step()
    assert a.counters["matches_missed"] == 1
    daemon.drop_request = lambda _: False
    at_rest(a)


def test_copies_of_loads_name_their_counter_and_no_others_do(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    before = len(daemon.copies)
    a.start("r", ABC)
    loads: list[SubmitCopy] = [c for c in daemon.copies[before:] if c.kind == "load_back"]
    assert [copy.landing is not None for copy in loads] == [True]
    assert all(copy.landing is None for copy in daemon.copies[:before])
