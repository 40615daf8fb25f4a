"""The fleet that chaos is let loose on: one daemon, its mover, and schedulers with names that stay.

Owns the processes and what may be done to them: killed, stopped, started again under the same
name. What was asked of a scheduler that was killed is handed back, to be asked again. It must
never judge what a process says, and a death that nobody ordered ends the run.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from directory.cli.asking import Asking, NoAnswer
from directory.cli.check import ask
from directory.cli.processes import DriverError, Worker, reap, spawn
from directory.cli.served import ServedDaemon
from directory.cli.signals import EndingSignals
from directory.protocol.admin import AdminReport, AdminStats, PoolReport, StatsReport
from scheduler_shim.worker_messages import Configure, Configured, FromWorker, Prompt, Quit
from transfer.checksum import available
from transfer.ipc.channel import FdChannel

REPORT_DEADLINE_S: Final = 2.0
WALK_DEADLINE_S: Final = 10.0
UNSENT_POLL_MS: Final = 5
SHM_MARKS: Final = ("/memfd:treecored", "/dev/shm/treecored")
SIZES_VARY: Final = ("log.", "tier.lock", "owner")


class Held(NamedTuple):
    """What the processes hold: shared-memory objects and their bytes, descriptors by role.

    `kinds`: what each role's descriptors are, without numbers ("socket:[]"), one name a descriptor.
    """

    objects: int
    nbytes: int
    descriptors: dict[str, int]
    kinds: dict[str, list[str]]

    def least(self, other: Held) -> Held:
        """The memory of the later sample, and of each process the sample with fewer descriptors."""
        fewer = {
            role: self if count <= other.descriptors[role] else other
            for role, count in self.descriptors.items()
        }
        return Held(
            other.objects,
            other.nbytes,
            {role: held.descriptors[role] for role, held in fewer.items()},
            {role: held.kinds[role] for role, held in fewer.items()},
        )


class Look(NamedTuple):
    """What the daemon says of itself without walking its state: counters and gauges by name, and
    its registrations."""

    counters: dict[str, int]
    pools: tuple[PoolReport, ...]


class Scheduler:
    """One name, and the process that bears it now (None: between two)."""

    def __init__(self, number: int, configure: Configure) -> None:
        self.number = number
        self.name = configure.instance
        self.configure = configure
        self.worker: Worker | None = None
        self.prompts: dict[int, Prompt] = {}
        """Asked of this process and not finished."""
        self.configured = False
        """Whether this process is through with its first registration, taken or not."""
        self.boots = 0

    @property
    def pid(self) -> int:
        """Its process; 0 between two."""
        return 0 if self.worker is None else self.worker.process.pid

    def __repr__(self) -> str:
        return f"<Scheduler {self.name} pid {self.pid}, {len(self.prompts)} asked>"


class Fleet:
    """A running daemon with its schedulers; use it as a context manager."""

    def __init__(
        self, configures: Sequence[Configure], *, host_bytes: int, segment_bytes: int
    ) -> None:
        """All schedulers have pages of one size. Host pages are compared with checksums where
        the library for that is installed."""
        self.folder = Path(tempfile.mkdtemp(prefix="treecored-"))
        self.daemon = ServedDaemon(
            self.folder,
            *(("--host-checksums", "verified") if available() else ()),
            host_bytes=host_bytes,
            segment_bytes=segment_bytes,
        )
        self.away = 0
        """How often the daemon was ended or stopped."""
        self.stopped = False
        """Whether the daemon stands still now: nobody waits for its word."""
        self.page_bytes = configures[0].page_size * configures[0].bytes_per_token
        self.schedulers = [Scheduler(n, configure) for n, configure in enumerate(configures)]
        self._poller = select.poll()
        self._by_fd: dict[int, Scheduler] = {}
        self._signals = EndingSignals()

    def __enter__(self) -> Self:
        """Start everything; raises `DriverError`, and then nothing is left running."""
        self._signals.catch()
        try:
            self.daemon.start()
            for scheduler in self.schedulers:
                self.begin(scheduler)
        except BaseException:
            self._close(orderly=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(orderly=kind is None)

    # What is done to schedulers.

    def begin(self, scheduler: Scheduler) -> None:
        """Start a process under a name that has none. Raises `DriverError`."""
        assert scheduler.worker is None
        scheduler.boots += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        channel = FdChannel(ours)
        log = self.folder / f"{scheduler.name}-{scheduler.boots}.log"
        with theirs:
            module = [sys.executable, "-P", "-m", "scheduler_shim.worker"]
            try:
                process = spawn(
                    [*module, "--fd", str(theirs.fileno())], log=log, fd=theirs.fileno()
                )
            except BaseException:
                channel.close()
                raise
        scheduler.worker = Worker(scheduler.name, process, channel, log)
        scheduler.configured = False
        self._by_fd[channel.fileno()] = scheduler
        self._poller.register(channel, select.POLLIN)
        runtime_dir = str(self.daemon.runtime_dir)
        scheduler.worker.send(msgspec.structs.replace(scheduler.configure, runtime_dir=runtime_dir))

    def kill(self, scheduler: Scheduler) -> list[Prompt]:
        """SIGKILL a scheduler and see it dead; returns what is to be asked again."""
        worker = self._forget(scheduler)
        worker.process.kill()
        worker.process.wait()
        worker.channel.close()
        lost, scheduler.prompts = list(scheduler.prompts.values()), {}
        return lost

    def submit(self, scheduler: Scheduler, prompt: Prompt) -> None:
        """Ask a request of a scheduler."""
        assert scheduler.worker is not None
        scheduler.prompts[prompt.number] = prompt
        scheduler.worker.send(prompt)

    def receive(self, timeout_s: float) -> list[tuple[Scheduler, FromWorker]]:
        """Messages that come within a time. Raises `DriverError` at a death nobody ordered."""
        self.daemon.fail_if_ended()
        unsent = False
        for scheduler in self.schedulers:
            if scheduler.worker is not None and scheduler.worker.channel.want_write:
                scheduler.worker.flush()
                unsent |= scheduler.worker.channel.want_write
        found: list[tuple[Scheduler, FromWorker]] = []
        for fd, _ in self._poller.poll(UNSENT_POLL_MS if unsent else timeout_s * 1_000):
            scheduler = self._by_fd[fd]
            assert scheduler.worker is not None
            for message in scheduler.worker.receive():
                if isinstance(message, Configured):
                    self._configured(scheduler, message)
                else:
                    found.append((scheduler, message))
        return found

    # Facts.

    def look(self) -> Look | None:
        """What the daemon says of itself; None when it does not answer."""
        if self.stopped or not self.daemon.pid or not self.daemon.ready():
            return None
        try:
            with Asking(self.daemon.runtime_dir, REPORT_DEADLINE_S, "treecored chaos") as asking:
                report = asking.ask(AdminStats(), StatsReport)
        except NoAnswer:
            return None
        return Look({**report.counters, **report.gauges}, report.pools)

    def report(self) -> AdminReport | None:
        """The same, every invariant walked: the daemon answers nobody else meanwhile."""
        if self.stopped or not self.daemon.pid or not self.daemon.ready():
            return None
        try:
            return ask(self.daemon.runtime_dir, WALK_DEADLINE_S)
        except NoAnswer:
            return None

    def held(self, mover_pid: int) -> Held:
        """What daemon, mover and schedulers hold in shared memory, and their descriptors."""
        pids = {"daemon": self.daemon.pid, "mover": mover_pid}
        pids |= {scheduler.name: scheduler.pid for scheduler in self.schedulers}
        sizes: dict[tuple[int, int], int] = {}
        kinds: dict[str, list[str]] = {}
        for role, pid in pids.items():
            paths = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
            kinds[role] = [_kind(path) for path in paths]
            for path in paths:
                _measure(path, sizes)
        if self.daemon.host_dir is not None:
            for file in self.daemon.host_dir.iterdir():
                _measure(os.fspath(file), sizes)
        counts = {role: len(names) for role, names in kinds.items()}
        return Held(len(sizes), sum(sizes.values()), counts, kinds)

    # Private.

    def _configured(self, scheduler: Scheduler, message: Configured) -> None:
        # A daemon that is away or not yet rid of the last bearer of the name is found later.
        if not message.ok and not message.detail.startswith("degraded"):
            raise DriverError(f"{scheduler.name} cannot be a scheduler: {message.detail}")
        scheduler.configured = True

    def _forget(self, scheduler: Scheduler) -> Worker:
        worker, scheduler.worker = scheduler.worker, None
        assert worker is not None
        self._poller.unregister(worker.channel)
        del self._by_fd[worker.channel.fileno()]
        return worker

    def _close(self, *, orderly: bool) -> None:
        self._signals.ignore()  # a second Ctrl-C must not leave half of this undone
        try:
            for scheduler in self.schedulers:
                if scheduler.worker is not None:
                    _end(self._forget(scheduler), orderly=orderly)
            self.daemon.close()
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            self._signals.restore()


def await_end(pid: int, deadline_s: float) -> bool:
    """Wait for a process that is no child of ours to end; False when it does not."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([pidfd], [], [], deadline_s)[0])
    finally:
        os.close(pidfd)


def _kind(path: str) -> str:
    try:
        return re.sub(r"\d+", "", os.readlink(path))
    except OSError:
        return "closed meanwhile"


def _measure(path: str, sizes: dict[tuple[int, int], int]) -> None:
    """Note the size of a file if it is our shared memory: logs grow, and locks name processes."""
    try:
        name = os.readlink(path) if path.startswith("/proc/") else path
        if not name.startswith(SHM_MARKS) or Path(name).name.startswith(SIZES_VARY):
            return
        status = os.stat(path)
    except OSError:
        return  # closed meanwhile
    sizes[status.st_dev, status.st_ino] = status.st_size


def _end(worker: Worker, *, orderly: bool) -> None:
    process: subprocess.Popen[bytes] = worker.process
    process.send_signal(signal.SIGCONT)
    try:
        if orderly:
            worker.send(Quit())
        else:
            process.terminate()
    except DriverError:
        process.kill()
    give_up = time.monotonic() + 1.0
    while worker.channel.want_write and time.monotonic() < give_up:
        try:
            worker.flush()
        except DriverError:
            break
        select.select([], [worker.channel], [], 0.1)
    reap(process)
    worker.channel.close()
