"""However a run is ended, nothing that it started stays behind."""

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.heeding import heeding
from tests.integration.cli.support import COMMAND, chats, environment, write_trace
from tests.integration.daemon.support import wait_until

SCHEDULERS = 2


@contextmanager
def endless_replay(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A replay that has started its daemon and workers; with it a pidfd of each of them."""
    trace = write_trace(tmp_path / "trace.jsonl", chats(20_000, seed=1, block_tokens=512))
    with heeding(signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [*COMMAND, "replay", str(trace), "--json", "--schedulers", str(SCHEDULERS)],
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    with ExitStack() as stack:
        stack.callback(process.communicate)
        stack.callback(process.kill)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        # Nothing announces a grandchild.
        found = wait_until(lambda: started(children))
        pidfds = [os.pidfd_open(int(pid)) for pid in found]
        for pidfd in pidfds:
            stack.callback(os.close, pidfd)
        yield process, pidfds


def started(children: Path) -> list[str]:
    """The daemon and the workers, in this order, once all are there."""
    found = children.read_text().split()
    return found if len(found) == 1 + SCHEDULERS else []


def ended(pidfds: list[int]) -> bool:
    """Whether every process is gone, within half a minute for each."""
    return all(select.select([pidfd], [], [], 30)[0] for pidfd in pidfds)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_everything_it_started(
    tmp_path: Path, number: signal.Signals
) -> None:
    with endless_replay(tmp_path) as (process, pidfds):
        process.send_signal(number)
        output, said = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert output == b""
        assert said.endswith(f"treecored: ended by {number.name}\n".encode())
        assert ended(pidfds)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_run_that_is_killed_takes_its_processes_along(tmp_path: Path) -> None:
    with endless_replay(tmp_path) as (process, pidfds):
        process.kill()
        assert ended(pidfds)


def test_a_run_whose_daemon_is_killed_fails_with_the_reason(tmp_path: Path) -> None:
    with endless_replay(tmp_path) as (process, pidfds):
        signal.pidfd_send_signal(pidfds[0], signal.SIGKILL)
        output, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert output == b""
        assert b"treecored: " in said
        assert b"Traceback" not in said
        assert ended(pidfds)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
