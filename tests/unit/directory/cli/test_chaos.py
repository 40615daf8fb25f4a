"""Chaos: what it breaks at the same time, and what it calls a failure."""

import random
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import combinations
from typing import Any
from unittest import mock

import pytest

from directory.cli import chaos_run
from directory.cli.chaos_fault import DAEMON, MOVER, RETURN, Fault
from directory.cli.chaos_faults import KINDS, SchedulerStop
from directory.cli.chaos_fleet import Held, Look, Scheduler
from directory.cli.chaos_report import report_on
from directory.cli.chaos_run import Counted, KindCount, Plan, Run
from directory.cli.driver import Job
from directory.cli.processes import DriverError
from directory.cli.tally import Tally
from directory.protocol.admin import PoolReport
from scheduler_shim.worker_messages import DAEMON_LOST, Configure, Finished, Prompt, Summary


def configure(name: str) -> Configure:
    """A scheduler that is never started."""
    return Configure(name, "mirrored", "", page_size=16, page_count=8, bytes_per_token=16)


class FakeFleet:
    """Schedulers that are up, and a daemon that answers nothing."""

    def __init__(self, count: int = 3) -> None:
        self.schedulers = [Scheduler(n, configure(f"s{n}")) for n in range(count)]

        self.away = 0
        self.said: Look | None = None

    def look(self) -> Look | None:
        """What it was made to say."""
        return self.said


def nothing() -> Iterator[Job]:
    """No job."""
    yield from ()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose faults can all be done, do nothing, and are never over."""
    monkeypatch.setattr(chaos_run, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(Fault, "ready", lambda *_: True)
    for kind in KINDS.values():
        monkeypatch.setattr(kind, "begin", lambda *_: None)
        monkeypatch.setattr(kind, "ready", lambda *_: True)
    plan = Plan(1.0, 1.0, tuple(KINDS), 1, seed=7, page_size=16, block_tokens=None)
    fleet: Any = FakeFleet()
    return Run(fleet, nothing(), plan)


def test_no_two_faults_are_done_to_the_same_at_the_same_time(run: Run) -> None:
    for _ in range(200):
        while run._inject():
            pass
        assert run._active
        for one, other in combinations(run._active, 2):
            assert not one.claimed & other.claimed, (one, other)
            assert not one.claimed & other.keeps, (one, other)
            assert not one.keeps & other.claimed, (one, other)
        run._active.pop(random.Random(len(run._bag)).randrange(len(run._active)))


def test_schedulers_die_while_the_daemon_is_down_too(run: Run) -> None:
    met: set[tuple[str, str]] = set()
    for _ in range(300):
        while run._inject():
            pass
        met |= set(combinations(sorted(fault.kind for fault in run._active), 2))
        run._active.pop(0)
    assert ("daemon-kill", "scheduler-kill") in met
    assert ("daemon-kill", "scheduler-stop") in met
    assert ("daemon-kill", "mover-slow") in met, "it dies while its mover is slow"
    assert ("mover-kill", "scheduler-kill") in met
    assert ("mover-kill", "session-cut") in met
    assert ("scheduler-stop", "session-cut") in met, "of two schedulers"


def test_while_schedulers_come_back_to_a_daemon_others_are_hit_and_it_is_not_killed_again(
    run: Run,
) -> None:
    """A daemon that serves again is whole for those who are back; the next SIGKILL of it waits
    until all are."""
    run._bag = ["daemon-kill"]
    assert run._inject()
    (killed,) = run._active
    run._bag = ["mover-kill", "session-cut", "journal-damage"]
    assert not run._inject(), "it is down"
    killed.over = True
    assert run._inject()
    assert run._inject()
    assert {fault.kind for fault in run._active} == {"daemon-kill", "mover-kill", "session-cut"}
    assert not run._inject()
    assert run._bag == ["journal-damage"]
    run._active[1:] = []
    run._bag = ["daemon-stop"]
    assert run._inject(), "a daemon may be hit while it hears what the pools hold"


def test_faults_that_had_to_wait_are_made_up_for(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """One is due every second; for the first four none can be done, then all of them are."""
    clock = [100.0]
    monkeypatch.setattr("directory.cli.chaos_run.time.monotonic", lambda: clock[0])
    begun: list[float] = []

    def inject() -> bool:
        if clock[0] >= 104.0:
            begun.append(clock[0])
        return clock[0] >= 104.0

    def turn(*, submit: bool) -> None:
        clock[0] += 0.125

    monkeypatch.setattr(run, "_inject", inject)
    monkeypatch.setattr(run, "_turn", turn)
    run._plan = run._plan._replace(seconds=10.0, every_s=1.0, kinds=())
    run._seconds = {}
    run.inject_all()
    assert len(begun) == 10


def test_every_kind_comes_before_one_comes_again(run: Run) -> None:
    begun = []
    for _ in range(3 * len(KINDS)):
        run._active.clear()
        assert run._inject()
        begun.append(run._active[-1].kind)
    for first in range(0, len(begun), len(KINDS)):
        assert set(begun[first : first + len(KINDS)]) == set(KINDS)


def test_what_is_judged_by_the_daemon_keeps_it_and_all_else_overlaps_its_death() -> None:
    free = {"scheduler-kill", "scheduler-stop", "mover-stop", "mover-slow"}
    for kind, fault in KINDS.items():
        if kind.startswith("daemon") or kind == "journal-damage":
            assert DAEMON in fault.claims
            assert (MOVER in fault.claims) == (kind == "daemon-restart"), "it is waited for"
            assert (RETURN in fault.claims) == (kind in ("daemon-kill", "journal-damage"))
        else:
            assert fault.keeps == (set() if kind in free else {DAEMON})
        assert (MOVER in fault.claims) >= kind.startswith("mover")


def test_a_stopped_scheduler_must_keep_its_registration_unless_the_daemon_was_away() -> None:
    fleet: Any = FakeFleet()
    (pid, killed) = (12345, [])
    scheduler = fleet.schedulers[0]
    scheduler.configured = True
    live = Look({}, (pool_report(scheduler.name, generation=3),))
    for away, later, reaped in ((False, 3, False), (False, 0, True), (True, 0, False)):
        fault = SchedulerStop(fleet, random.Random(1), scheduler, lambda _: None)
        with (
            mock.patch.object(Scheduler, "pid", pid),
            mock.patch("os.kill", lambda *given: killed.append(given)),
        ):
            assert fault.ready(live)
            fault.begin(0.0)
            fleet.away += away
            fleet.said = Look({}, (pool_report(scheduler.name, generation=later),))
            assert not fault.step(0.0)
            with pytest.raises(DriverError, match="reaped") if reaped else nullcontext():
                assert fault.step(9.0)
    assert [number for _, number in killed] == 3 * [signal.SIGSTOP, signal.SIGCONT]


def pool_report(instance: str, *, generation: int) -> PoolReport:
    """A live registration."""
    return PoolReport(1, instance, generation, "mirrored", "live", 1, 1, 8, 0, 0, 0, 0)


def test_what_is_held_for_a_moment_only_is_not_counted() -> None:
    """Each of two samples has a session of the daemon's that the other one has not; a leak is in
    both."""
    leak = ["pipe:[]"]
    one = Held(5, 9, {"d": 3, "m": 1}, {"d": [*leak, "socket:[]", "pidfd"], "m": ["socket:[]"]})
    other = Held(5, 8, {"d": 1, "m": 2}, {"d": leak, "m": ["socket:[]", "memfd"]})
    for found in (one.least(other), other.least(one)):
        assert found.descriptors == {"d": 1, "m": 1}
        assert found.kinds == {"d": leak, "m": ["socket:[]"]}
    assert one.least(other).nbytes == 8


def counted(**changes: Any) -> Counted:
    """A run without a flaw, but for what is given."""
    tally = Tally(16)
    tally.add(Finished(1, 64, 2, 1, 1, verified=4, wrong=0, seconds=0.1))
    held = Held(5, 4_096, {"daemon": 20, "mover": 9}, {})
    summary = Summary("s0", "mirrored", (), {"returned": 2}, {}, (f"{DAEMON_LOST}it was killed",))
    given: dict[str, Any] = {
        "tally": tally,
        "asked": 1,
        "asked_again": 3,
        "faults": [KindCount("daemon-kill", [2.0, 4.0, 3.0])],
        "reports": 9,
        "violations": [],
        "held": (held, held),
        "summaries": [summary],
        "seconds": 10.0,
        "daemon_boots": 4,
        "scheduler_boots": 1,
        "movers": 4,
        "left_alive": [],
        "quarantined": 0,
    }
    return Counted(**(given | changes))


def test_a_run_without_a_flaw_has_no_problem_and_a_loss_is_none() -> None:
    report = report_on(counted(), seed=1)
    assert report.problems == report.violations == []
    assert report.returns == 2
    (fault,) = report.faults
    assert (fault.injected, fault.median_s, fault.longest_s) == (3, 3.0, 4.0)


def flawed(**fields: Any) -> Tally:
    """A tally of one request with a flaw."""
    values: dict[str, Any] = {"verified": 4, "wrong": 0, "seconds": 0.1} | fields
    tally = Tally(16)
    tally.add(Finished(1, 64, 2, 1, 1, **values))
    return tally


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tally": flawed(verified=3, wrong=1)}, "1 pages held wrong bytes"),
        ({"tally": flawed(verified=3)}, "not read back"),
        ({"tally": flawed(error="no")}, "1 requests failed"),
        ({"asked": 2}, "1 of 2 requests finished"),
        ({"violations": ["daemon: pages are lost"]}, "pages are lost"),
        (
            {"summaries": [Summary("s0", "thin", (), {}, {}, ("a page is lost",))]},
            "s0: a page is lost",
        ),
        ({"held": (Held(5, 1, {}, {}), Held(5, 2, {}, {}))}, "shared memory changed"),
        (
            {
                "held": (
                    Held(5, 1, {"a": 1}, {"a": ["pipe:[]"]}),
                    Held(5, 1, {"a": 2}, {"a": ["pipe:[]", "socket:[]"]}),
                )
            },
            "a had 1 descriptors and has 2 (more: ['socket:[]'], less: [])",
        ),
        ({"left_alive": [17]}, "outlived"),
        ({"faults": [KindCount("mover-kill", [])]}, "no fault of these kinds"),
    ],
)
def test_every_flaw_is_a_problem(changes: dict[str, Any], said: str) -> None:
    (problem,) = report_on(counted(**changes), seed=1).problems
    assert said in problem


def test_what_a_killed_scheduler_was_asked_is_asked_again(run: Run) -> None:
    scheduler = run._fleet.schedulers[0]
    run._ask_again(scheduler)([Prompt(1), Prompt(2)])
    assert [prompt.number for _, prompt in run._again] == [1, 2]
