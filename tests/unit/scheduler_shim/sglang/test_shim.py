"""The shim around the held-back restores: losses and returns, flushes, weights, its own defects."""

from pathlib import Path

import msgspec
import pytest

from directory.core.actions import Matched
from directory.core.errors import TreecoredError
from directory.core.events import Insert, Mode
from scheduler_shim.client import DaemonClient
from scheduler_shim.session import DaemonAbsent
from scheduler_shim.sglang.connecting import connect
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.stats import NEVER_US, StatsFile
from scheduler_shim.thin_tree import ThinTree
from tests.unit.scheduler_shim.sglang.conftest import Add
from tests.unit.scheduler_shim.sglang.rig import KEY, MiniEngine, MiniRequest, leases, prompt
from tests.unit.scheduler_shim.sglang.test_held import ABC, start_fill
from tests.unit.scheduler_shim.support import FakeDaemon


def come_back(engine: MiniEngine) -> None:
    """Let time pass until the engine has a daemon again."""
    for _ in range(200):
        engine.step()
        engine.daemon.run()
        engine.daemon.clock_us += 10_000
        if engine.shim.client is not None:
            return
    raise AssertionError(f"{engine.shim!r} does not come back")


def test_a_lost_daemon_fails_no_request_and_hits_return_with_the_next_one(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    a, b = add("a", mode), add("b", mode)
    a.serve("a1", ABC)
    start_fill(b)
    daemon.die()
    b.settle()
    assert b.shim.mode == "degraded"
    assert b.done["r"].hit_pages == 0
    assert b.shim.outside_pages == 3, "the dead daemon's mover may still write there"
    daemon.hold_copies = False
    daemon.restart()
    come_back(b)
    assert b.shim.mode == mode
    assert b.shim.outside_pages == 0
    come_back(a)
    assert b.serve("b2", ABC).hit_pages == 3
    fresh = prompt(5, 6)
    a.serve("a2", fresh)
    assert b.serve("b3", fresh).hit_pages == 2


def test_running_requests_outlive_the_daemon_with_their_rows(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    a = add("a", mode, steps=1_000)
    a.submit("a1", ABC)
    for _ in range(4):
        a.step()
        daemon.run()
    assert a.running
    daemon.die()
    for _ in range(3):
        a.step()
    assert a.holds(ABC) == 3
    assert a.shim.evict(3) == 0, "the running request's row is protected"
    daemon.restart()
    come_back(a)
    assert a.shim.evict(3) == 0
    request, row = a.running["a1"]
    a.steps = 0
    request.steps_left = 0
    a.settle()
    assert row.receipt == 0
    assert a.shim.evict(3) == 3


def test_an_engine_that_starts_without_a_daemon_joins_it_later(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    daemon.absent = True
    a = add("a", mode)
    assert a.serve("a1", ABC).hit_pages == 0
    assert a.shim.mode == "degraded"
    daemon.absent = False
    come_back(a)
    assert a.shim.mode == mode
    assert add("b", mode).serve("b1", ABC).hit_pages == 3


def test_a_flush_waits_for_movers_and_empties_the_tree(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode)
    b.serve("own", prompt(8))
    start_fill(b)
    daemon.hold_copies = False
    b.abort("r")
    b.shim.flush()
    b.shim.after_clear()
    assert b.kept_out == b""
    assert (b.shim.tree.pages, b.shim.outside_pages) == (0, 0)
    b.settle()
    b.check()


def test_a_flush_that_waited_long_enough_leaves_the_targets_out_of_use(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, flush_wait_ms=10)
    start_fill(b)
    b.abort("r")
    b.shim.flush()
    b.shim.after_clear()
    assert len(b.kept_out) == 3 * 4
    assert b.shim.outside_pages == 3
    daemon.hold_copies = False
    b.settle()
    daemon.run()
    b.step()
    assert b.shim.outside_pages == 0
    assert b.holds(ABC) == 0, "what was on its way when the cache was emptied is not kept"


def test_an_eviction_that_falls_short_waits_for_what_movers_write(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, page_count=6, share=1.0)
    b.serve("own", prompt(8))
    start_fill(b)
    daemon.hold_copies = False
    free = b.shim.room.allocator.free_count
    freed = b.shim.evict(6)
    assert freed + b.shim.room.allocator.free_count - free >= 4
    assert b.shim.room.allocator.free_count == 6
    assert b.counters["evictions_waited"] == 1
    b.settle()


def test_an_eviction_does_not_wait_for_ever(daemon: FakeDaemon, add: Add, mode: Mode) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, page_count=6, share=1.0)
    start_fill(b)
    began_us = daemon.clock_us
    assert b.shim.evict(6) == 0
    assert daemon.clock_us - began_us < 1_000_000
    daemon.hold_copies = False
    b.settle()


def test_what_was_computed_under_other_weights_is_never_found_f7(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    a, b = add("a", mode), add("b", mode)
    a.serve("a1", ABC)
    start_fill(b)
    b.shim.change_weights(4711)
    daemon.hold_copies = False
    b.settle()
    assert b.done["r"].hit_pages == 0
    assert b.shim.outside_pages == 0
    assert a.serve("a2", ABC).hit_pages == 3, "the other engine keeps what it has"
    assert b.serve("b2", ABC).hit_pages == 3, "its own, under the new weights"
    b.shim.change_weights(4712)
    assert b.serve("b3", ABC).hit_pages == 0


def test_a_request_that_lived_through_an_update_publishes_nothing_f7(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    a = add("a", mode)
    old = a.shim.request(a._key_of_tokens(), ABC)
    a.shim.change_weights(1)
    assert not a.shim.in_force(old)
    assert a.shim.publish(old, 3, a.pool.now(), keep=False) is None


def test_memory_is_released_only_after_the_registration_has_ended(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode)
    b.serve("b1", ABC)
    b.shim.suspend("the memory goes")
    for _ in range(50):
        b.step()
        daemon.clock_us += 100_000
    assert b.shim.mode == "degraded", "nobody registers memory that is not there"
    b.shim.flush()
    b.shim.resume()
    come_back(b)
    assert b.serve("b2", ABC).hit_pages == 3


def test_a_defect_of_the_shims_own_ends_its_session_for_good_and_no_request(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    a = add("a", mode)
    a.serve("a1", ABC)
    a.shim.fail("somebody made a mistake")
    for _ in range(20):
        a.shim.tick(a.queue, busy=False)
        daemon.clock_us += 1_000_000
    assert a.shim.mode == "degraded"
    assert a.shim.stats()["failure"] == "somebody made a mistake"
    assert a.shim.problems == ["somebody made a mistake"]
    a.shim.problems.clear()
    assert a.serve("a2", ABC).hit_pages == (3 if mode == "mirrored" else 0)


def test_a_report_that_the_daemon_refuses_costs_the_daemon_and_is_a_problem(
    daemon: FakeDaemon, add: Add
) -> None:
    a = add("a")
    client = a.shim.client
    assert client is not None
    key = a._key_of_tokens()
    client.report(Insert("x", 0, key, ABC[:48], b"\0\0\0\0" * 3, 1, 0, (0, 0), fresh_pages=3))
    client.report(Insert("x", 0, key, ABC[:48], b"\1\0\0\0" * 3, 2, 0, (0, 0), fresh_pages=3))
    daemon.run()
    a.shim.tick(a.queue, busy=False)
    assert a.shim.mode == "degraded"
    assert "refused" in a.shim.problems[0]
    a.shim.problems.clear()


def test_a_path_that_the_wire_cannot_carry_is_not_published(
    daemon: FakeDaemon, add: Add, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_shim.request.PROMPT_PAGES_MAX", 2)
    a = add("a", mode)
    a.serve("a1", ABC)
    assert a.shim.tree.pages == 0
    assert a.shim.mode == mode


def test_live_requests_keep_their_leases_and_lost_releases_fall(
    daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    add("a", mode).serve("a1", ABC)
    b = add("b", mode, hold_ms_max=600_000)
    start_fill(b)
    for _ in range(5):
        daemon.clock_us += 1_100_000
        b.step()
        daemon.run()
    assert leases(daemon) == 1
    daemon.hold_copies = False
    b.settle()
    assert b.done["r"].hit_pages == 3
    assert b.counters["asked"] == 1, "nobody who waits for a landing asks again"
    assert leases(daemon) == 0


def test_counters_are_written_whole_and_at_most_once_a_second(
    daemon: FakeDaemon, add: Add, tmp_path: Path
) -> None:
    path = tmp_path / "stats.json"
    a = add("a", stats_file=path)
    a.step()
    first = msgspec.json.decode(path.read_bytes())
    assert first["mode"] == "mirrored"
    a.step()
    assert msgspec.json.decode(path.read_bytes()) == first
    daemon.clock_us += 1_000_001
    a.step()
    third = msgspec.json.decode(path.read_bytes())
    assert third["ticks"] + third["turns_left_out"] == 3
    assert [file.name for file in tmp_path.iterdir()] == ["stats.json"]


def test_counters_are_written_in_an_idle_turn_or_a_second_later(tmp_path: Path) -> None:
    file = StatsFile(tmp_path / "stats.json")
    written: list[int] = []

    def offer(now_us: int, *, idle: bool) -> bool:
        def stats() -> dict[str, object]:
            written.append(now_us)
            return {}

        file.offer(now_us, stats, idle=idle)
        return written[-1:] == [now_us]

    assert offer(5, idle=True)
    assert not offer(1_000_004, idle=True)
    assert not offer(1_000_005, idle=False)
    assert offer(1_000_006, idle=True)
    assert file.dues_us == (3_000_006, 2_000_006)
    assert not offer(3_000_005, idle=False)
    assert offer(3_000_006, idle=False), "an engine that is never idle writes it, too"
    assert StatsFile(None).dues_us == (NEVER_US, NEVER_US)


def test_while_anything_runs_or_waits_the_counters_are_written_two_seconds_after_the_last_time(
    daemon: FakeDaemon, add: Add, tmp_path: Path
) -> None:
    path = tmp_path / "stats.json"
    a = add("a", stats_file=path)
    a.step()
    first = path.read_bytes()
    daemon.clock_us += 1_500_000
    a.shim.tick([], busy=True)
    assert path.read_bytes() == first, "what runs waits for this turn"
    a.shim.tick([MiniRequest("w", ABC)], busy=False)
    assert path.read_bytes() == first, "somebody waits for it"
    daemon.clock_us += 500_000
    a.shim.tick([], busy=True)
    second = path.read_bytes()
    assert second != first
    daemon.clock_us += 1_500_000
    a.shim.tick([], busy=False)
    assert path.read_bytes() != second


def test_a_stats_file_that_cannot_be_written_stops_nothing(
    daemon: FakeDaemon, add: Add, tmp_path: Path
) -> None:
    a = add("a", stats_file=tmp_path / "no" / "such" / "folder.json")
    assert a.serve("a1", ABC).hit_pages == 0


# The first registration.


def nobody() -> DaemonClient:
    raise DaemonAbsent("nobody is there")


def test_without_a_daemon_an_engine_starts_degraded_unless_told_otherwise() -> None:
    assert connect(nobody, Settings()) is None


def test_an_engine_that_must_have_a_daemon_does_not_start_without() -> None:
    with pytest.raises(DaemonAbsent):
        connect(nobody, Settings.model_validate({"on_absent": "fail"}))


def test_an_engine_that_waits_for_its_daemon_gives_up_at_the_bound() -> None:
    settings = Settings.model_validate({"on_absent": "wait", "wait_s": 0.05})
    tries = []

    def attempt() -> DaemonClient:
        tries.append(1)
        raise TreecoredError("not yet")

    with pytest.raises(TreecoredError, match="not yet"):
        connect(attempt, settings, sleep_s=0.01)
    assert len(tries) > 1


def test_what_a_late_lease_may_protect_keeps_no_page_from_an_eviction(
    daemon: FakeDaemon, add: Add
) -> None:
    """It is counted as if it protected a whole prompt; the daemon knows what it does protect."""
    a = add("a", "thin", page_count=16)
    a.serve("a1", ABC)
    a.serve("a2", prompt(4, 5, 6))
    request = a.shim.request(KEY, prompt(1, *range(20, 30)))
    tree = a.shim.tree
    assert isinstance(tree, ThinTree)
    daemon.drop_reply = lambda body: isinstance(body, Matched)
    assert tree.match(request) == 0
    daemon.drop_reply = lambda _: False
    assert tree.totals.evictable == 0
    assert a.shim.evict(4) == 4
    assert a.shim.client is not None
    a.settle()
    assert a.shim.evict(16) == 2
