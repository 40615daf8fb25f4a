"""Requests that are held back: what they wait for, for how long, and what they get."""

from directory.core.actions import Matched, Restored
from directory.core.events import Evict, Insert, Match, Mode, Restore, Unlock
from tests.unit.scheduler_shim.sglang.conftest import Add
from tests.unit.scheduler_shim.sglang.rig import MiniEngine, leases, prompt
from tests.unit.scheduler_shim.support import FakeDaemon

ABC = prompt(1, 2, 3)


def start_fill(engine: MiniEngine, rid: str = "r", tokens: bytes = ABC) -> None:
    """Have a request of the engine wait for a copy that does not progress."""
    engine.daemon.hold_copies = True
    engine.submit(rid, tokens)
    for _ in range(4):
        engine.step()
        engine.daemon.run()
    assert engine.shim.held(rid)
    assert engine.shim.outside_pages


def test_a_prefix_that_another_engine_has_computed_lands_and_then_matches_on_the_device(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode)
    served = b.serve("b1", ABC)
    assert (served.hit_pages, served.restored) == (3, 12)
    assert b.counters["landed"] == 1
    assert leases(daemon) == 0


def test_a_prefix_that_was_evicted_here_comes_back_from_the_host(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    a = add("a", mode, page_count=5)
    a.serve("a1", ABC)
    a.serve("a2", prompt(7, 8, 9, 10))
    assert a.holds(ABC) == 0
    assert a.serve("a3", ABC).hit_pages == 3
    assert a.counters["bytes_restored_host"] == 3 * a.pool.page_bytes


def test_what_nobody_has_is_computed_after_one_answer(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    b = add("b", mode)
    request = b.submit("b1", ABC)
    b.step()
    assert b.shim.held("b1"), "the answer may say that it lies elsewhere"
    daemon.run()
    b.step()
    assert request.hit_pages == 0


def test_a_request_whose_question_has_no_answer_is_admitted_at_its_deadline(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, match_ms=20)
    daemon.drop_request = lambda body: isinstance(body, Match)
    request = b.submit("b1", ABC)
    b.step()
    daemon.clock_us += 19_000
    b.step()
    assert b.shim.held("b1")
    daemon.clock_us += 2_000
    # A thin engine's own look-ups go unanswered as well, and take their deadline each.
    b.step()
    assert request.hit_pages == 0
    assert b.counters["matches_missed"] == 1


def test_a_late_answer_leaves_no_lease(daemon: FakeDaemon, add: Add, mode: Mode) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, match_ms=20)
    daemon.drop_reply = lambda body: isinstance(body, Matched)
    b.submit("b1", ABC)
    b.step()
    daemon.run()
    assert leases(daemon) == (1 if mode == "mirrored" else 0), "a thin question takes none"
    daemon.clock_us += 30_000
    daemon.drop_reply = lambda _: False
    b.settle()
    daemon.clock_us += 2_000_000
    b.settle()
    assert leases(daemon) == 0


def test_a_held_request_lets_those_behind_it_pass(daemon: FakeDaemon, add: Add, mode: Mode) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode)
    start_fill(b)
    behind = b.submit("behind", prompt(5))
    for _ in range(4):
        b.step()
        daemon.run()
    assert behind.hit_pages == 0
    assert b.shim.held("r")


def test_one_restore_serves_two_requests_of_one_prefix(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode)
    start_fill(b)
    other = b.submit("other", prompt(1, 2, 3, 4))
    for _ in range(4):
        b.step()
        daemon.run()
    assert b.shim.held("other")
    daemon.hold_copies = False
    b.settle()
    assert b.counters["restores"] == 1
    assert (b.done["r"].hit_pages, other.hit_pages) == (3, 3)


def test_after_two_lost_landings_a_request_is_admitted_without(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode)
    daemon.fail_copies = lambda _: True
    request = b.serve("b1", ABC)
    assert request.hit_pages == 0
    assert b.counters["lost"] == 2
    assert leases(daemon) == 0


def test_a_request_is_held_no_longer_than_the_bound_and_its_fill_goes_on(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, hold_ms_max=50)
    start_fill(b)
    daemon.clock_us += 51_000
    b.step()
    assert not b.shim.held("r")
    assert b.done["r"].hit_pages == 0
    assert b.shim.outside_pages == 3, "a mover may still write there"
    daemon.hold_copies = False
    b.settle()
    daemon.run()
    b.step()
    assert b.shim.outside_pages == 0
    assert b.holds(ABC) == 3
    assert leases(daemon) == 0


def test_what_lands_for_nobody_is_kept_by_a_mirror_and_freed_by_a_thin_engine(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode)
    start_fill(b)
    b.abort("r")
    b.step()
    daemon.hold_copies = False
    b.settle()
    daemon.run()
    b.step()
    assert b.holds(ABC) == (3 if mode == "mirrored" else 0)
    assert b.shim.outside_pages == 0
    assert leases(daemon) == 0


def test_an_abort_at_any_moment_leaves_no_lease_and_no_page_f72(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    for after in range(6):
        b = add(f"b{after}", mode)
        b.submit("r", ABC)
        for _ in range(after):
            b.step()
            daemon.run()
        b.abort("r")
        b.settle()
        daemon.run()
        b.step()
        daemon.clock_us += 2_000_000
        b.settle()
        assert b.shim.outside_pages == 0
        assert leases(daemon) == 0


def test_a_landing_whose_prefix_was_evicted_meanwhile_is_freed(
    daemon: FakeDaemon, add: Add
) -> None:
    add("a").serve("a1", ABC)
    b = add("b")
    b.serve("own", prompt(1))
    start_fill(b)
    assert b.shim.outside_pages == 2
    assert b.shim.evict(1) == 1
    daemon.hold_copies = False
    b.settle()
    assert b.counters["landings_freed"] == 2
    # Looked up once more: this time all of it came.
    assert b.done["r"].hit_pages == 3


def test_a_thin_engines_prefix_stays_as_long_as_its_restore_is_under_way(
    daemon: FakeDaemon, add: Add
) -> None:
    add("a").serve("a1", ABC)
    b = add("b", "thin")
    b.serve("own", prompt(1))
    start_fill(b)
    assert b.shim.room.evict(1) == 0
    daemon.hold_copies = False
    b.settle()
    assert b.done["r"].hit_pages == 3


def test_a_request_that_waits_long_is_asked_for_again(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    b = add("b", mode, reask_ms=500)
    b.closed = True
    b.submit("r", ABC)
    for _ in range(3):
        b.step()
        daemon.run()
    assert not b.shim.held("r"), "nobody has it"
    add("a", mode).serve("a1", ABC)
    b.step()
    assert b.counters["asked"] == 1, "it was asked for just now"
    daemon.clock_us += 600_000
    b.step()
    assert not b.shim.held("r"), "whoever has waited long does not wait for the answer"
    daemon.run()
    b.step()
    assert b.shim.held("r")
    b.closed = False
    b.settle()
    assert b.done["r"].hit_pages == 3


def test_only_so_many_questions_are_asked_in_a_tick_and_the_others_wait_for_theirs(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    b = add("b", mode, asks_max=2, page_count=64)
    for at in range(6):
        b.submit(f"r{at}", prompt(10 + at))
    b.step()
    assert b.counters["asked"] == 2
    assert all(b.shim.held(f"r{at}") for at in range(6))
    daemon.run()
    b.step()
    assert b.counters["asked"] == 4


def test_only_the_head_of_a_long_queue_is_looked_at(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    b = add("b", mode, window=2)
    for at in range(4):
        b.submit(f"r{at}", prompt(10 + at))
    b.shim.tick(b.queue, busy=False)
    assert [b.shim.held(f"r{at}") for at in range(4)] == [True, True, False, False]
    b.settle()


def test_a_request_that_falls_behind_in_the_queue_lets_go_of_its_lease(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, window=1)
    start_fill(b)
    assert leases(daemon) == 1
    others = [b.submit(f"o{at}", prompt(30 + at)) for at in range(3)]
    b.queue = [*others, *(r for r in b.queue if r.rid == "r")]
    b.shim.tick(b.queue, busy=True)
    daemon.run()
    assert not b.shim.held("r")
    daemon.hold_copies = False
    b.settle()
    assert leases(daemon) == 0


def test_nothing_is_asked_for_what_the_own_pool_has(daemon: FakeDaemon, add: Add) -> None:
    a = add("a")
    a.serve("a1", ABC)
    asked = a.counters["asked"]
    request = a.submit("a2", ABC)
    a.step()
    assert request.hit_pages == 3
    assert a.counters["asked"] == asked


def test_with_loads_switched_off_nothing_is_held_or_asked(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, loads="none")
    request = b.submit("b1", ABC)
    b.step()
    assert request.hit_pages == 0
    assert not any(isinstance(body, Restore) for body in daemon.heard)


def test_a_tick_waits_for_answers_only_while_nothing_else_can_be_done(
    daemon: FakeDaemon, add: Add
) -> None:
    b = add("b", idle_wait_us=700)
    b.submit("r", ABC)
    b.link.waits.clear()
    b.shim.tick(b.queue, busy=True)
    assert b.link.waits == []
    daemon.drop_request = lambda body: isinstance(body, Match)
    b.submit("r2", prompt(4))
    b.shim.tick(b.queue, busy=False)
    assert b.link.waits == [700]
    daemon.drop_request = lambda _: False
    b.settle()


def test_a_restore_that_is_answered_late_still_lands_and_its_targets_stay_out_of_use(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, hold_ms_max=600_000)
    start_fill(b)
    client = b.shim.client
    assert client is not None
    daemon.clock_us += 1_000 * client.deadlines.restore_ms + 1
    b.step()
    assert b.counters["restores_expired"] == 1
    assert b.shim.outside_pages == 3
    daemon.hold_copies = False
    b.settle()
    daemon.run()
    b.step()
    assert b.shim.outside_pages == 0


def test_every_message_of_a_held_request_is_of_few_kinds(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    daemon.heard.clear()
    b = add("b", mode)
    b.serve("b1", ABC)
    kinds = {type(body) for body in daemon.heard}
    assert {Match, Restore, Insert} <= kinds
    assert Evict not in kinds
    assert any(isinstance(body, Unlock) for body in daemon.heard)
    assert sum(isinstance(body, Restored) for body in daemon.said) == 1
