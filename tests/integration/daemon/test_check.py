"""`treecored check` on a running daemon: it reports, and the daemon serves on."""

import json
import signal
import subprocess
import sys

from tests.integration.daemon.support import ROOT, DaemonProcess, RawClient, wait_until


def check(daemon: DaemonProcess, *flags: str) -> "subprocess.CompletedProcess[str]":
    """Run the command."""
    command = [sys.executable, "-m", "directory.cli.main", "check", *flags]
    return subprocess.run(
        [*command, "--runtime-dir", str(daemon.runtime_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_running_daemon_walks_its_state_and_serves_on(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as a:
        a.pool_memory.write(3, b"x")
        a.insert(range(4), [3])
        wait_until(lambda: a.stats().get("pages_backed_up") == 1)
        done = check(daemon, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        report = json.loads(done.stdout)
        assert report["clean"] is True
        (pool,) = report["pools"]
        assert (pool["instance"], pool["pages"], pool["phase"]) == ("a", 1, "live")
        assert report["counters"]["host_pages"] == 1
        assert report["counters"]["daemon_admin_questions"] == 1
        table = check(daemon)
        assert table.returncode == 0
        assert "every invariant holds" in table.stdout
        for figure in ("daemon unmapping", "daemon breakers open", "daemon copies not tried"):
            assert figure in table.stdout
        assert a.stats()["pools"] == 1


def test_a_daemon_that_stands_still_is_no_answer_and_is_left_alone(daemon: DaemonProcess) -> None:
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        done = check(daemon, "--deadline", "0.3")
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert done.returncode == 2
    assert "did not answer" in done.stderr
    assert check(daemon).returncode == 0
    assert daemon.process.poll() is None


def test_after_its_end_no_daemon_answers(daemon: DaemonProcess) -> None:
    assert daemon.stop() == 0
    assert check(daemon).returncode == 2
