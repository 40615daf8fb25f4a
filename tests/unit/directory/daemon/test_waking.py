"""How the loop's thread sleeps: after reports it takes the core from nobody, after questions it
does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Final

import pytest

from directory.daemon.loop import Loop
from directory.daemon.waking import AFTER_QUESTION_NS, AFTER_REPORT_NS, Waking

NOW: Final = 1_000_000_000_000
PAST: Final = NOW + max(AFTER_QUESTION_NS, AFTER_REPORT_NS)


class Sleep:
    """Stands for epoll: with which policy and how long the thread slept, each time."""

    def __init__(self) -> None:
        self.slept: list[tuple[int, float | None]] = []

    def __call__(self, timeout_s: float | None, most: int) -> str:
        assert most == 7
        self.slept.append((os.sched_getscheduler(0), timeout_s))
        return "ready"

    @property
    def policies(self) -> list[int]:
        return [policy for policy, _ in self.slept]


@pytest.fixture(autouse=True)
def _ordinary() -> Iterator[None]:
    """What these tests do to their thread's policy ends with them."""
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    yield
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_after_reports_it_sleeps_as_a_batch_process_and_runs_as_before() -> None:
    waking, sleep = Waking(), Sleep()
    waking.reported()
    assert waking.sleep(sleep, None, 7, NOW) == "ready"
    assert sleep.slept == [(os.SCHED_BATCH, AFTER_REPORT_NS / 1e9)], "for a moment only"
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    # It may be woken by others meanwhile: the next report is none the less to find it so.
    waking.sleep(sleep, 0.001, 7, NOW + AFTER_REPORT_NS // 2)
    assert sleep.slept[1:] == [(os.SCHED_BATCH, 0.001)]


def test_some_time_after_the_last_report_it_sleeps_as_ever() -> None:
    waking, sleep = Waking(), Sleep()
    waking.sleep(sleep, None, 7, NOW)
    waking.reported()
    waking.sleep(sleep, None, 7, NOW)
    waking.sleep(sleep, None, 7, NOW + AFTER_REPORT_NS)
    assert sleep.policies == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]
    assert sleep.slept[-1][1] is None


def test_while_somebody_asks_reports_change_nothing() -> None:
    waking, sleep = Waking(), Sleep()
    waking.asked()
    waking.reported()
    waking.sleep(sleep, None, 7, NOW)
    waking.reported()
    waking.sleep(sleep, None, 7, NOW + AFTER_QUESTION_NS - 1)
    assert sleep.policies == [os.SCHED_OTHER] * 2
    waking.reported()
    waking.sleep(sleep, None, 7, NOW + AFTER_QUESTION_NS)
    assert sleep.policies[2:] == [os.SCHED_BATCH]
    waking.asked()
    waking.sleep(sleep, None, 7, PAST)
    assert sleep.policies[3:] == [os.SCHED_OTHER]


@pytest.mark.parametrize("asleep", [False, True])
def test_a_policy_that_somebody_gives_it_later_stays(
    monkeypatch: pytest.MonkeyPatch, *, asleep: bool
) -> None:
    given = os.SCHED_OTHER
    tries: list[int] = []

    def change(_who: int, policy: int, _param: os.sched_param) -> None:
        nonlocal given
        tries.append(policy)
        given = policy

    def poll(_timeout_s: float | None, _most: int) -> str:
        nonlocal given
        given = os.SCHED_FIFO if asleep else given
        return "ready"

    monkeypatch.setattr(os, "sched_getscheduler", lambda _who: given)
    monkeypatch.setattr(os, "sched_setscheduler", change)
    waking = Waking()
    given = os.SCHED_OTHER if asleep else os.SCHED_FIFO
    waking.reported()
    assert waking.sleep(poll, None, 7, NOW) == "ready"
    waking.reported()
    waking.sleep(poll, None, 7, NOW)
    assert tries == ([os.SCHED_BATCH] if asleep else [])
    assert given == os.SCHED_FIFO
    monkeypatch.undo()


def test_where_it_is_forbidden_it_sleeps_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def refuse(_who: int, policy: int, _param: os.sched_param) -> None:
        tries.append(policy)
        raise PermissionError(1, "not permitted")

    waking, sleep = Waking(), Sleep()
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    for _ in range(3):
        waking.reported()
        assert waking.sleep(sleep, 1.0, 7, NOW) == "ready"
    assert sleep.slept == [(os.SCHED_OTHER, 1.0)] * 3
    assert tries == [os.SCHED_BATCH], "it is tried once"


def test_an_operators_policy_is_kept() -> None:
    seen: list[int] = []

    def work() -> None:  # a thread of its own: the policy is a thread's
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        waking, sleep = Waking(), Sleep()
        waking.reported()
        waking.sleep(sleep, None, 7, NOW)
        seen.extend((*sleep.policies, os.sched_getscheduler(0)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [os.SCHED_BATCH] * 2


def test_an_error_of_the_sleep_leaves_the_policy_as_it_was() -> None:
    waking = Waking()
    waking.reported()

    def interrupted(_timeout_s: float | None, _most: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waking.sleep(interrupted, None, 7, NOW)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_loop_sleeps_so_after_reports_and_what_it_starts_does_not_run_so() -> None:
    """The real loop and the real epoll: somebody looks at the policy while the thread sleeps."""
    loop, found = Loop(), list[int]()
    near, far = socket.socketpair()
    thread = threading.get_native_id()

    def served(_: int) -> None:
        near.recv(1)
        loop.reported = True

    def look() -> None:
        found.append(os.sched_getscheduler(thread))
        far.send(b"x")

    with near, far:
        loop.watch(near.fileno(), served)
        far.send(b"x")
        loop.turn(None)
        timer = threading.Timer(0.02, look)
        timer.start()
        loop.turn(None)
        timer.join()
        child = "import os; print(os.sched_getscheduler(0))"
        loop.after_turn(
            lambda: found.append(int(subprocess.check_output([sys.executable, "-c", child])))
        )
        far.send(b"x")
        loop.turn(None)
        loop.unwatch(near.fileno())
    loop.close()
    assert found == [os.SCHED_BATCH, os.SCHED_OTHER]
