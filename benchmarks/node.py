"""A daemon in a process of its own, and thin schedulers' sides of it, for benchmarks.

Owns the process and its folder; both go at the end. The cases are those of `trees.py`, over the
wire: what is timed is what a scheduler waits for.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from benchmarks.trees import CHAIN, KEY, Pages, random_tokens
from directory.cli.asking import Asking
from directory.core.actions import Counters
from directory.core.events import Match, Stats
from directory.protocol.admin import AdminStats, StatsReport
from scheduler_shim.client import DaemonClient
from scheduler_shim.pools import SharedPool
from scheduler_shim.request import Request
from scheduler_shim.spans import SpanTable
from scheduler_shim.thin_tree import ThinTree

START_S = 60.0
SETTLE_S = 20.0
clock = time.perf_counter_ns


class Used(NamedTuple):
    """Processor time of a daemon's thread, us; of it it looked for so long for what had not come:
    only so far as nobody else had its core meanwhile."""

    all_us: float
    looked_us: float

    def since(self, before: Used, times: int) -> dict[str, float]:
        """A time each: all of it, looking, and what is left, which is work."""
        all_us, looked_us = self.all_us - before.all_us, self.looked_us - before.looked_us
        found = {"cpu_us": all_us, "looking_us": looked_us, "work_us": all_us - looked_us}
        return {f"daemon_{name}": round(us / times, 1) for name, us in found.items()}


class Daemon:
    """`treecored serve` with a host tier in memory; ready when constructed. `segment`: the tier
    has one where none is said. `program`: the module to be run, and what comes before the command.
    """

    def __init__(
        self,
        *flags: str,
        host_tier: str = "64MiB",
        segment: str = "",
        program: Sequence[str] = ("directory.cli.main",),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="treecored-")
        self.runtime_dir = Path(self._folder.name) / "run"
        ready_in, ready_out = os.pipe()
        command = [sys.executable, "-m", *program, "serve", "--no-host-keep"]
        command += ["--runtime-dir", str(self.runtime_dir), "--ready-fd", str(ready_out)]
        command += ["--host-tier", host_tier, "--segment", segment or host_tier, *flags]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TREECORED_")}
        try:
            self.process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[1],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(ready_out,),
            )
        finally:
            os.close(ready_out)
        try:
            readable, _, _ = select.select([ready_in], [], [], START_S)
            if not readable or os.read(ready_in, 1) != b"\n":
                self.close()
                raise RuntimeError("the daemon did not start")
        finally:
            os.close(ready_in)

    def cpu_us(self) -> float:
        """Processor time that it has used, in microseconds (the kernel's clock of 10 ms ticks
        where it has no better one)."""
        schedstat = Path(f"/proc/{self.process.pid}/schedstat")
        with suppress(OSError):
            return int(schedstat.read_text(encoding="ascii").split()[0]) / 1e3
        stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * 1e6 / os.sysconf("SC_CLK_TCK")

    def used(self) -> Used:
        """Both kinds of processor time that it has used."""
        with Asking(self.runtime_dir, SETTLE_S, "benchmark") as asking:
            looked = asking.ask(AdminStats(), StatsReport).counters["daemon_looked_us"]
        return Used(self.cpu_us(), looked)

    def close(self) -> None:
        """Stop it and remove its folder. Repeatable."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ThinScheduler:
    """A thin scheduler with one cached path of `tokens` tokens, published in eight steps."""

    def __init__(
        self,
        daemon: Daemon | Path,
        page: int,
        tokens: int,
        *,
        instance: str = "bench",
        lane: bool = True,
    ) -> None:
        pages = tokens // page
        self.pool = SharedPool(
            page_size=page, page_count=2 * pages + 64, bytes_per_token=1, layers=1
        )
        self.client = DaemonClient.connect(
            daemon if isinstance(daemon, Path) else daemon.runtime_dir,
            self.pool,
            instance=instance,
            mode="thin",
            lane=lane,
        )
        self.tree = ThinTree(SpanTable(self.pool.words, self.pool.page_count), self.client)
        self.page, self.page_count = page, pages
        self.tokens = random_tokens(tokens, 0)
        self._free, self._others, row = Pages(self.pool.page_count), 0, b""
        for part in range(1, CHAIN + 1):
            end = pages * part // CHAIN
            row += self._free.take(end - len(row) // 4)
            request = self._request("publish")
            request.row = array("I")
            request.row.frombytes(row)
            published = self.tree.publish(request, end, self.pool.advance(), keep=False)
            assert published is not None
            assert not published.duplicates
        self._settle()
        self.waiting = self._request("waiting")

    def match(self, times: int) -> list[float]:
        """Match the path and lease it; releasing the lease is not waited for.

        It is one request's, which waits: its tokens were told and compared before.
        """
        taken: list[float] = []
        for _ in range(times):
            begin = clock()
            self.tree.match(self.waiting)
            taken.append((clock() - begin) / 1e3)
            assert len(self.waiting.row) == self.page_count
            self.tree.release(self.waiting)
        return taken

    def match_changed(self, times: int) -> list[float]:
        """The same, where another prompt of the namespace was published and given up before each
        match, which is not counted: the daemon looks it up once more."""
        taken: list[float] = []
        for _ in range(times):
            self._change()
            taken += self.match(1)
        return taken

    def match_new(self, times: int) -> list[float]:
        """The same, for a request that comes for the first time: its tokens are handed over."""
        taken: list[float] = []
        for _ in range(times):
            request = self._request("new")
            begin = clock()
            self.tree.match(request)
            taken.append((clock() - begin) / 1e3)
            self.tree.release(request)
        return taken

    def empty(self, times: int) -> list[float]:
        """A question without a prompt: the round trip by itself."""
        question = Match("empty", 0, KEY, b"", acquire=False)
        taken: list[float] = []
        for _ in range(times):
            begin = clock()
            self.client.call(question)
            taken.append((clock() - begin) / 1e3)
        return taken

    def close(self) -> None:
        """End the session."""
        self.client.close()
        self.pool.close()

    def _change(self) -> None:
        self._others += 1
        other = self._request("other")
        other.tokens = random_tokens(self.page, self._others) + bytes(4)
        other.row = array("I")
        other.row.frombytes(page := self._free.take(1))
        assert self.tree.publish(other, 1, self.pool.advance(), keep=False) is not None
        self.match(1)  # so that the path is not colder than what is to go
        given = self.tree.evict(1)
        assert given == page
        self._free.give(given)

    def _request(self, name: str) -> Request:
        # One token more than what can be matched: it is always left to compute.
        return Request(1, name, KEY, self.tokens + bytes(4), b"", self.page * KEY.unit_bytes)

    def _settle(self) -> None:
        """Wait until everything is in the host tier, too."""
        give_up = time.monotonic() + SETTLE_S
        while time.monotonic() < give_up:
            stats = self.client.call(Stats())
            assert isinstance(stats, Counters)
            counters = stats.counters
            if not counters["copies_in_flight"] and not counters["backups_waiting"]:
                return
            self.client.wait(10_000)


Case = Callable[[int], list[float]]
