"""The driver hands jobs out as told, and leaves nothing behind however a run ends."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from directory.cli.driver import Driver, Job, Plan, instance_names
from directory.cli.processes import DriverError
from directory.cli.signals import EndingSignals, Interrupted
from scheduler_shim.worker_messages import Configure, Prompt
from tests.heeding import heeding

FAKE = (sys.executable, str(Path(__file__).parent / "fake_processes.py"))


@pytest.fixture(autouse=True)
def started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Every child that a test starts; afterwards all are gone, and the runtime folder too."""
    children: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recording(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        child: subprocess.Popen[bytes] = popen(*args, **kwargs)  # type: ignore[call-overload]
        children.append(child)
        return child

    monkeypatch.setattr("directory.cli.processes.subprocess.Popen", recording)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield children
    assert children
    assert [child.returncode for child in children if child.returncode is None] == []
    assert list(tmp_path.iterdir()) == []
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def plan(*behaviours: str, daemon: str = "ready") -> Plan:
    names = instance_names(len(behaviours))
    assert len(set(behaviours)) == 1, "one command serves all workers"
    return Plan(
        tuple(Configure(name, "mirrored", "", 16, 64, 64) for name in names),
        host_bytes=1 << 20,
        segment_bytes=1 << 20,
        daemon_command=(*FAKE, "daemon", daemon),
        worker_command=(*FAKE, "worker", behaviours[0]),
    )


def jobs(count: int, schedulers: int = 1) -> list[Job]:
    return [Job(n % schedulers, Prompt(n, tokens=bytes(4 * 32))) for n in range(count)]


def test_jobs_of_a_strict_run_finish_in_order_one_at_a_time() -> None:
    with Driver(plan("good", "good")) as driver:
        done = driver.run(jobs(6, 2), concurrency=1)
        summaries = driver.summaries(check=True)
    assert [d.finished.number for d in done] == list(range(6))
    assert [d.scheduler for d in done] == [0, 1, 0, 1, 0, 1]
    assert [s.instance for s in summaries] == ["scheduler-0", "scheduler-1"]
    assert [s.counters for s in summaries] == [{"most_in_hand": 1, "checked": 1}] * 2


def test_as_many_jobs_are_in_progress_as_the_concurrency_allows() -> None:
    seen: list[int] = []
    with Driver(plan("good")) as driver:
        done = driver.run(
            jobs(9), concurrency=3, on_done=lambda one: seen.append(one.finished.number)
        )
        (summary,) = driver.summaries(check=False)
    assert sorted(seen) == list(range(9))
    assert [d.finished.number for d in done] == seen
    assert summary.counters == {"most_in_hand": 3, "checked": 0}


def test_children_have_sessions_of_their_own_and_no_settings_of_the_user(
    monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setenv("TREECORED_HOST_TIER", "1")
    with Driver(plan("good")):
        for child in started:
            assert os.getsid(child.pid) == child.pid
            assert b"TREECORED_" not in Path(f"/proc/{child.pid}/environ").read_bytes()


def test_a_daemon_that_does_not_start_is_reported_with_its_last_words() -> None:
    with pytest.raises(DriverError, match=r"daemon did not start\n  the lock is held by process 1"):
        Driver(plan("good", daemon="broken")).__enter__()


def test_a_daemon_that_ends_during_the_run_ends_the_run() -> None:
    with (
        pytest.raises(DriverError, match=r"the daemon ended unexpectedly \(.+\)\n  out of luck"),
        Driver(plan("mute", daemon="dying")) as driver,
    ):
        driver.run(jobs(1), concurrency=1)


def test_a_worker_that_cannot_register_is_reported_with_its_reason() -> None:
    with pytest.raises(DriverError, match=r"scheduler-0 could not register .* no daemon at the"):
        Driver(plan("refused")).__enter__()


def test_a_worker_that_dies_is_reported_with_exit_status_and_last_words() -> None:
    with (
        pytest.raises(DriverError, match=r"scheduler-0 ended .*exit status 7\)\n  cannot go on"),
        Driver(plan("dies")) as driver,
    ):
        driver.run(jobs(1), concurrency=1)


def test_a_worker_that_talks_nonsense_ends_the_run() -> None:
    with pytest.raises(DriverError, match="scheduler-0: "), Driver(plan("raves")) as driver:
        driver.run(jobs(1), concurrency=1)


def test_a_run_in_which_nothing_happens_ends_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Driver(plan("mute")) as driver:
        monkeypatch.setattr("directory.cli.driver.STALL_DEADLINE_S", 0.05)
        with pytest.raises(
            DriverError, match=r"nothing was heard .*\nscheduler-0 has 1 in progress\n"
        ):
            driver.run(jobs(1), concurrency=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ending_signal_unwinds_the_run_and_leaves_nothing_behind(number: signal.Signals) -> None:
    def send(_: object) -> None:
        os.kill(os.getpid(), number)

    with (
        heeding(number),
        pytest.raises(Interrupted, match=number.name) as caught,
        Driver(plan("good")) as driver,
    ):
        driver.run(jobs(3), concurrency=1, on_done=send)
    assert caught.value.exit_status == 128 + number


def test_a_signal_that_was_ignored_stays_ignored(
    started: list[subprocess.Popen[bytes]],
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Driver(plan("good")):
            os.kill(os.getpid(), signal.SIGHUP)
        signals = EndingSignals()
        signals.restore()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
