"""Chaos: what it breaks at the same time, and what it calls a failure."""

import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from directory.cli.chaos_fault import DAEMON, MOVER, Fault
from directory.cli.chaos_faults import KINDS
from directory.cli.chaos_fleet import Held, Scheduler
from directory.cli.chaos_report import report_on
from directory.cli.chaos_run import Counted, KindCount, Plan, Run
from directory.cli.driver import Job
from directory.cli.tally import Tally
from scheduler_shim.worker_messages import DAEMON_LOST, Configure, Finished, Prompt, Summary


def configure(name: str) -> Configure:
    """A scheduler that is never started."""
    return Configure(name, "mirrored", "", page_size=16, page_count=8, bytes_per_token=16)


class FakeFleet:
    """Schedulers that are up, and a daemon that answers nothing."""

    def __init__(self, count: int = 3) -> None:
        self.schedulers = [Scheduler(n, configure(f"s{n}")) for n in range(count)]

    def report(self) -> None:
        """It is never asked in these tests."""


def nothing() -> Iterator[Job]:
    """No job."""
    yield from ()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose faults can all be done, do nothing, and are never over."""
    monkeypatch.setattr(Fault, "ready", lambda _: True)
    for kind in KINDS.values():
        monkeypatch.setattr(kind, "begin", lambda *_: None)
        monkeypatch.setattr(kind, "ready", lambda _: True)
    plan = Plan(1.0, 1.0, tuple(KINDS), 1, seed=7, page_size=16, block_tokens=None)
    fleet: Any = FakeFleet()
    return Run(fleet, nothing(), plan)


def test_no_two_faults_are_done_to_the_same_at_the_same_time(run: Run) -> None:
    for _ in range(200):
        while run._inject():
            pass
        active = [fault for fault, _ in run._active]
        assert active
        for one, other in combinations(active, 2):
            assert not one.claimed & other.claimed, (one, other)
        run._active.pop(random.Random(len(run._bag)).randrange(len(run._active)))


def test_schedulers_die_while_the_daemon_is_down_too(run: Run) -> None:
    met: set[tuple[str, str]] = set()
    for _ in range(300):
        while run._inject():
            pass
        met |= set(combinations(sorted(fault.kind for fault, _ in run._active), 2))
        run._active.pop(0)
    assert ("daemon-kill", "scheduler-kill") in met
    assert ("mover-kill", "scheduler-kill") in met


def test_every_kind_comes_before_one_comes_again(run: Run) -> None:
    begun = []
    for _ in range(3 * len(KINDS)):
        run._active.clear()
        assert run._inject()
        begun.append(run._active[-1][0].kind)
    for first in range(0, len(begun), len(KINDS)):
        assert set(begun[first : first + len(KINDS)]) == set(KINDS)


def test_whatever_is_done_to_the_daemon_claims_its_mover(run: Run) -> None:
    for kind, fault in KINDS.items():
        if kind.startswith(("daemon", "mover", "journal", "page")):
            assert fault.claims == {DAEMON, MOVER}
        else:
            assert fault.on_scheduler


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
