"""What bench_recovery measures with: a scheduler of this process, and schedulers to be killed.

Owns how a scheduler is driven (one tick after the other, each timed) and the nursery that victims
are forked from. It measures; what a figure means is bench_recovery's.

`python -m benchmarks.recovery_node RUNTIME_DIR` is the nursery: for each line `NAME` it forks a
scheduler that publishes pages, takes leases and has a restore under way, then says `PID`.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from directory.core.actions import Counters, Matched
from directory.core.events import Match, Restore, Stats
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.dial import DaemonDial
from scheduler_shim.link import monotonic_us
from scheduler_shim.pools import SharedPool
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.worker_messages import Finished

PAGE_SIZE: Final = 16
IDLE_US: Final = 1_000
"""Between two ticks that changed nothing, at most."""
GIVE_UP_S: Final = 120.0
VICTIM_PAGES: Final = 256
VICTIM_BYTES_PER_TOKEN: Final = 256
VICTIM_LEASES: Final = 8


def tokens(seed: int, pages: int, page_size: int = PAGE_SIZE) -> bytes:
    """Packed tokens of a prompt; another seed has no page in common with it."""
    return random.Random(seed).randbytes(4 * pages * page_size)


class Tick(NamedTuple):
    """One of `Ticks`."""

    wall_us: float
    cpu_us: float
    waited_us: float | None


class Ticks(NamedTuple):
    """How long each tick took, microseconds, how much of it this thread had a core, and how much
    another one had it instead (None: the kernel does not say). Where it was made to wait, a tick is
    long for no reason of its own."""

    wall_us: list[float]
    cpu_us: list[float]
    waited_us: list[float | None]

    @property
    def longest(self) -> Tick:
        """The one that took most time."""
        at = self.wall_us.index(max(self.wall_us))
        return Tick(self.wall_us[at], self.cpu_us[at], self.waited_us[at])


class RunDelay:
    """How long this thread has waited for a core until now, by the kernel's account. None where it
    keeps none."""

    def __init__(self) -> None:
        try:
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def now_us(self) -> float | None:
        """Microseconds since the thread began."""
        if self._fd < 0:
            return None
        return int(os.pread(self._fd, 128, 0).split()[1]) / 1_000

    def close(self) -> None:
        """Let go of the account. Repeatable."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def stolen_ms() -> float:
    """What the machine beneath has taken from the cores that may be used, since it was started."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path("/proc/stat").read_text("ascii").splitlines())
    stolen = sum(int(line[8]) for line in lines if line[0] in mine)
    return stolen * 1_000 / os.sysconf("SC_CLK_TCK")


class Node:
    """One mirrored scheduler with its pool, driven from here."""

    def __init__(
        self,
        runtime_dir: Path,
        instance: str,
        *,
        page_count: int,
        bytes_per_token: int,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.pool = SharedPool(
            page_size=PAGE_SIZE, page_count=page_count, bytes_per_token=bytes_per_token
        )
        client = DaemonClient.connect(
            runtime_dir, self.pool, instance=instance, mode="mirrored", deadlines=deadlines
        )
        self.scheduler = ReferenceScheduler(
            self.pool,
            client,
            instance=instance,
            concurrency=4,
            dial=DaemonDial(runtime_dir, self.pool, instance=instance, deadlines=deadlines),
        )
        self.ticks = Ticks([], [], [])
        self._run_delay = RunDelay()
        self._number = 0
        self._finished: list[Finished] = []

    def tick(self) -> None:
        """One tick, timed; then wait a little if it changed nothing, as a worker does: for the
        daemon or, without one, until the way back has something to do."""
        scheduler = self.scheduler
        waited = self._run_delay.now_us()
        began, began_cpu = time.perf_counter_ns(), time.thread_time_ns()
        self._finished += scheduler.tick()
        took_cpu, took = time.thread_time_ns() - began_cpu, time.perf_counter_ns() - began
        self.ticks.wall_us.append(took / 1_000)
        self.ticks.cpu_us.append(took_cpu / 1_000)
        until = self._run_delay.now_us()
        delay = None if waited is None or until is None else until - waited
        self.ticks.waited_us.append(delay)
        if not scheduler.moved:
            client = scheduler.client
            if client is not None and not client.lost:
                client.wait(IDLE_US)
            else:
                wake_us = scheduler.wake_us
                due_us = IDLE_US if wake_us is None else max(0, wake_us - monotonic_us())
                time.sleep(min(due_us, IDLE_US) / 1e6)

    def until(self, done: Callable[[], bool]) -> None:
        """Tick until it is so."""
        give_up = time.monotonic() + GIVE_UP_S
        while not done():
            if time.monotonic() > give_up:
                raise TimeoutError(f"it did not come to pass: {self.scheduler!r}")
            self.tick()

    def serve(self, *prompts: bytes) -> list[Finished]:
        """Have requests served, several at a time; returns their records."""
        for prompt in prompts:
            self._number += 1
            self.scheduler.submit(self._number, prompt)
        self.until(lambda: len(self._finished) == len(prompts))
        records, self._finished = self._finished, []
        if any(record.error or record.wrong for record in records):
            raise AssertionError(f"a request failed or held wrong pages: {records}")
        return records

    def take_ticks(self) -> Ticks:
        """The ticks since this was asked; they are counted anew."""
        taken, self.ticks = self.ticks, Ticks([], [], [])
        return taken

    def settle_memory(self) -> None:
        """Let Python's collector look no more at what is here now, as a scheduler's process does
        once it is set up: a tick is to be timed, not a walk over all that this benchmark made."""
        gc.collect()
        gc.freeze()

    def stats(self) -> dict[str, int]:
        """The daemon's counters."""
        client = self.scheduler.client
        assert client is not None
        reply = client.call(Stats(False), 20_000)
        assert isinstance(reply, Counters), reply
        return reply.counters

    @property
    def at_home(self) -> bool:
        """Whether there is a daemon that was told all that the pool holds."""
        return self.scheduler.mode == "mirrored"

    @property
    def unacknowledged(self) -> int:
        """Messages that the daemon has not acknowledged."""
        return 0 if self.scheduler.client is None else self.scheduler.client.open_count

    def close(self) -> None:
        """End the session and give the pool back."""
        self.scheduler.close()
        self.pool.close()
        self._run_delay.close()


class Nursery:
    """A process that schedulers are forked from, so that each costs no start of Python."""

    def __init__(self, runtime_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.recovery_node", str(runtime_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def victim(self, name: str) -> int:
        """A scheduler that has published pages, holds leases and restores; its process id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n".encode())
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the nursery; its victims are dead already."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _victim(runtime_dir: Path, name: str) -> None:
    """Publish, lease, restore, say so, and wait to be killed."""
    pool = SharedPool(
        page_size=PAGE_SIZE, page_count=VICTIM_PAGES, bytes_per_token=VICTIM_BYTES_PER_TOKEN
    )
    client = DaemonClient.connect(runtime_dir, pool, instance=name, mode="mirrored")
    scheduler = ReferenceScheduler(pool, client, instance=name)
    scheduler.submit(1, tokens(os.getpid(), VICTIM_PAGES // 2))
    while not scheduler.tick():
        client.wait(IDLE_US)
    key, shared = NamespaceKey(), tokens(1, VICTIM_PAGES // 4)
    receipt = 0
    for number in range(VICTIM_LEASES):
        found = client.call(Match(f"{name}-lease-{number}", 0, key, shared))
        assert isinstance(found, Matched), found
        receipt = found.receipt
    targets = scheduler.room.allocate(VICTIM_PAGES // 4)
    assert targets is not None
    client.ask(Restore(f"{name}-lease", 0, receipt, 0, pack_pages(targets), pool.now()))
    os.write(sys.stdout.fileno(), f"{os.getpid()}\n".encode())
    while True:
        signal.pause()


def main() -> None:
    """The nursery's loop."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are nobody's to wait for
    runtime_dir = Path(sys.argv[1])
    for line in iter(sys.stdin.readline, ""):
        if os.fork() == 0:
            _victim(runtime_dir, line.strip())


if __name__ == "__main__":
    main()
