"""A scheduler in a process of its own, for tests that kill or stop it.

`python -m tests.integration.daemon.scheduler_process RUNTIME_DIR INSTANCE STEP` goes as far as the
step says and reports it in one line; then it answers each line that it is sent, and ends with its
standard input. It holds what a real one holds: a session, a pool, published pages, a lease, a load.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from directory.core.actions import Matched
from directory.core.events import Restore
from tests.integration.daemon.support import DEADLINE_S, ROOT, RawClient, packed, wait_until

STEPS = ("registered", "published", "leased", "loading", "forked")
PAGES = 4
NEVER = 1 << 40
"""A fence that nobody lets pass."""


def tokens(instance: str) -> range:
    """The path that an instance publishes: nobody else's."""
    first = 1_000 * sum(instance.encode())
    return range(first, first + 4 * PAGES)


class SchedulerProcess:
    """Its process, as the test sees it; `pid` is as seen from here."""

    def __init__(self, process: subprocess.Popen[str], instance: str) -> None:
        self.process = process
        self.instance = instance
        self.pid = process.pid

    def ask(self) -> str:
        """Have it ask the daemon something; returns what it says."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("ask\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def signal(self, how: signal.Signals) -> None:
        """Signal it."""
        os.kill(self.pid, how)


@contextmanager
def scheduler(
    runtime_dir: Path, instance: str, step: str, *, prefix: Sequence[str] = ()
) -> Iterator[SchedulerProcess]:
    """Start one and wait until it is at the step. `prefix`: a command that runs it."""
    command = [*prefix, sys.executable, "-m", __name__, str(runtime_dir), instance, step]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == step
            yield SchedulerProcess(process, instance)
        finally:
            process.kill()
            process.wait(DEADLINE_S)


def say(what: object) -> None:
    """One line for the test."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main(runtime_dir: Path, instance: str, step: str) -> None:
    """Be the scheduler."""
    reached = STEPS.index(step)
    with RawClient(runtime_dir, instance) as client:
        path = tokens(instance)
        if reached >= STEPS.index("published"):
            for page in range(PAGES):
                client.pool_memory.write(page, b"%s %d;" % (instance.encode(), page))
            client.insert(path, range(PAGES))
        if step == "loading":  # what it is to load must be in the host tier
            wait_until(lambda: client.stats().get("pages_backed_up", 0) >= PAGES)
        if reached >= STEPS.index("leased"):
            found = client.match(path)
            assert isinstance(found, Matched)
            if step == "loading":
                body = Restore("r", 0, found.receipt, 0, packed(range(20, 24)), (NEVER, NEVER))
                client.send(body)
                client.stats()
        if step == "forked" and not os.fork():
            signal.pause()  # the child has the session's connection, too
        say(step)
        for _ in sys.stdin:
            say(client.stats()["pools"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
