"""The driver: a private daemon and its reference schedulers, from start to a clean end.

Owns the child processes, their channels and a temporary runtime folder, and gives all of them
back whatever happens (errors, Ctrl-C). It hands requests out in order and collects what the
workers say; it must never judge a page or count a hit itself.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from directory.cli.processes import DriverError, Worker, ending, last_words, reap, spawn
from directory.cli.signals import EndingSignals
from scheduler_shim.worker_messages import (
    AskSummary,
    Configure,
    Configured,
    Finished,
    FromWorker,
    Prompt,
    Quit,
    Summary,
)
from transfer.ipc.channel import FdChannel

START_DEADLINE_S = 30.0
STALL_DEADLINE_S = 60.0
SUMMARY_DEADLINE_S = 120.0
UNSENT_POLL_MS = 5


class Plan(NamedTuple):
    """What to start. `schedulers`: one `Configure` each (its runtime_dir is filled in here).

    The commands are the product's own unless a test puts others in their place.
    """

    schedulers: tuple[Configure, ...]
    host_bytes: int
    segment_bytes: int
    daemon_command: tuple[str, ...] | None = None
    worker_command: tuple[str, ...] | None = None


class Job(NamedTuple):
    """A request and the index of the scheduler that it goes to."""

    scheduler: int
    prompt: Prompt


class Done(NamedTuple):
    """A finished request and the index of the scheduler that served it."""

    scheduler: int
    finished: Finished


class Driver:
    """A running daemon with its workers; use it as a context manager."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._folder: Path | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._daemon_pidfd = -1
        self._poller = select.poll()
        self._by_fd: dict[int, int] = {}
        self._signals = EndingSignals()
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        """Start everything; raises `DriverError`, and then nothing is left running."""
        self._signals.catch()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="treecored-"))
            self._start_daemon(self._folder)
            for number, configure in enumerate(self._plan.schedulers):
                self._start_worker(number, configure, self._folder)
            self._await_configured()
        except BaseException:
            self._close(orderly=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End workers, then the daemon, then remove the folder; at once when there is an error."""
        self._close(orderly=kind is None)

    def run(
        self,
        jobs: Iterable[Job],
        *,
        concurrency: int,
        on_done: Callable[[Done], None] | None = None,
    ) -> list[Done]:
        """Hand the jobs out in order, at most `concurrency` in progress in all; wait for all.

        With a concurrency of 1 a job starts when the one before it has finished. Raises
        `DriverError` when a process dies or nothing at all finishes for a minute.
        """
        waiting = iter(jobs)
        job = next(waiting, None)
        results: list[Done] = []
        in_progress = 0
        while job is not None or in_progress:
            while job is not None and in_progress < concurrency:
                worker = self.workers[job.scheduler]
                worker.in_progress.add(job.prompt.number)
                worker.send(job.prompt)
                in_progress += 1
                job = next(waiting, None)
            for number, message in self._receive(STALL_DEADLINE_S):
                worker = self.workers[number]
                if not isinstance(message, Finished) or message.number not in worker.in_progress:
                    raise DriverError(f"{worker.name} sent an unexpected {message!r:.200}")
                worker.in_progress.remove(message.number)
                in_progress -= 1
                results.append(Done(number, message))
                if on_done is not None:
                    on_done(results[-1])
        return results

    def summaries(self, *, check: bool) -> list[Summary]:
        """Ask every worker in turn for its Summary; with `check` invariants are walked, too."""
        found: list[Summary] = []
        for number, worker in enumerate(self.workers):
            worker.send(AskSummary(check))
            for sender, message in self._receive(SUMMARY_DEADLINE_S):
                if sender != number or not isinstance(message, Summary):
                    raise DriverError(
                        f"{self.workers[sender].name} sent an unexpected {message!r:.200}"
                    )
                found.append(message)
        return found

    # Starting.

    def _start_daemon(self, folder: Path) -> None:
        ready_read, ready_write = os.pipe()
        try:
            command = list(self._plan.daemon_command or self._serve_command())
            command += [
                "--runtime-dir", str(folder / "run"),
                "--host-tier", str(self._plan.host_bytes),
                "--segment", str(self._plan.segment_bytes),
                "--ready-fd", str(ready_write),
            ]  # fmt: skip
            self._daemon = spawn(command, log=folder / "daemon.log", fd=ready_write)
            self._daemon_pidfd = os.pidfd_open(self._daemon.pid)
            os.close(ready_write)
            ready_write = -1
            self._await_ready(ready_read)
        finally:
            os.close(ready_read)
            if ready_write >= 0:
                os.close(ready_write)
        self._poller.register(self._daemon_pidfd, select.POLLIN)

    def _serve_command(self) -> list[str]:
        # `-P` keeps the current folder off the import path, whoever owns it.
        module = [sys.executable, "-P", "-m", "directory.cli.tied", str(os.getpid())]
        return [*module, "serve", "--log-level", "warning", "--no-host-keep"]

    def _await_ready(self, ready_fd: int) -> None:
        ready, _, _ = select.select([ready_fd], [], [], START_DEADLINE_S)
        if not ready:
            raise DriverError(
                f"the daemon was not ready within {START_DEADLINE_S:.0f} s{self._last_words()}"
            )
        if not os.read(ready_fd, 1):
            raise DriverError(f"the daemon did not start{self._last_words()}")

    def _start_worker(self, number: int, configure: Configure, folder: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        channel = FdChannel(ours)
        log = folder / f"{configure.instance}.log"
        with theirs:
            module = (sys.executable, "-P", "-m", "scheduler_shim.worker")
            command = [*(self._plan.worker_command or module), "--fd", str(theirs.fileno())]
            try:
                process = spawn(command, log=log, fd=theirs.fileno())
            except BaseException:
                channel.close()
                raise
        worker = Worker(configure.instance, process, channel, log)
        self.workers.append(worker)
        self._by_fd[channel.fileno()] = number
        self._poller.register(channel, select.POLLIN)
        runtime_dir = str(folder / "run")
        worker.send(msgspec.structs.replace(configure, runtime_dir=runtime_dir))

    def _await_configured(self) -> None:
        waiting = set(range(len(self.workers)))
        while waiting:
            for number, message in self._receive(START_DEADLINE_S):
                name = self.workers[number].name
                if not isinstance(message, Configured):
                    raise DriverError(f"{name} sent an unexpected {message!r:.200}")
                if not message.ok:
                    detail = message.detail or "no reason given"
                    raise DriverError(f"{name} could not register with the daemon: {detail}")
                waiting.discard(number)

    # Talking.

    def _receive(self, deadline_s: float) -> list[tuple[int, FromWorker]]:
        """Wait for messages of any worker; raises `DriverError` on a death or at the deadline."""
        messages: list[tuple[int, FromWorker]] = []
        give_up = time.monotonic() + deadline_s
        while not messages:
            for worker in self.workers:
                if worker.channel.want_write:
                    worker.flush()
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                raise DriverError(self._stall(deadline_s))
            unsent = any(worker.channel.want_write for worker in self.workers)
            for fd, _ in self._poller.poll(UNSENT_POLL_MS if unsent else left_s * 1000 + 1):
                if fd == self._daemon_pidfd:
                    assert self._daemon is not None
                    how = ending(self._daemon.wait())
                    raise DriverError(f"the daemon ended unexpectedly ({how}){self._last_words()}")
                number = self._by_fd[fd]
                messages += [(number, m) for m in self.workers[number].receive()]
        return messages

    def _stall(self, deadline_s: float) -> str:
        """Who owes an answer, and what they and the daemon last said."""
        owing = [worker for worker in self.workers if worker.in_progress] or self.workers
        said = "".join(
            f"\n{worker.name} has {len(worker.in_progress)} in progress{last_words(worker.log)}"
            for worker in owing
        )
        return f"nothing was heard for {deadline_s:.0f} s{said}\nthe daemon{self._last_words()}"

    def _last_words(self) -> str:
        assert self._folder is not None
        return last_words(self._folder / "daemon.log")

    # Ending.

    def _close(self, *, orderly: bool) -> None:
        # A second Ctrl-C must not leave half of this undone.
        self._signals.ignore()
        try:
            self._end_workers(orderly)
            self._end_daemon()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
        finally:
            self._signals.restore()

    def _end_workers(self, orderly: bool) -> None:
        for worker in self.workers:
            if orderly:
                with suppress(DriverError):
                    worker.send(Quit())
            else:
                worker.process.terminate()
        for worker in self.workers:
            reap(worker.process)
            worker.channel.close()
        self.workers.clear()
        self._by_fd.clear()
        self._poller = select.poll()

    def _end_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.terminate()
            reap(self._daemon)
            self._daemon = None
        if self._daemon_pidfd >= 0:
            os.close(self._daemon_pidfd)
            self._daemon_pidfd = -1


def instance_names(count: int) -> Sequence[str]:
    """Names of the schedulers, as they stand in tables and logs."""
    return [f"scheduler-{number}" for number in range(count)]
