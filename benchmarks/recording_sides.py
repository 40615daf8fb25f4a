"""Daemons side by side, with and without what is told of them: log, KV events, metrics.

Owns the sides (a daemon with one scheduler each), what happens at them, and one start of three of
them under the busy load: two daemons that have nothing on, and one that has what is to be measured.
At each, requests end and new pages are published, with the evictions that it takes, in between
matches. One question follows upon the other, ten to a request (it waits in a queue), and a log's
own queue is so full that it works between matches. The sides take short turns in random order, and
whose turn it is not is stopped (SIGSTOP), so that nobody's work meets another's match. Scheduler
and daemons have a core each: which one the kernel wakes a daemon on, when the other is being spun
upon, makes a larger difference on two cores than what is measured. These two are kept awake, for
what a daemon has worked keeps a core from falling asleep, and so would seem to make matches faster.
What else a daemon has started runs on other cores where there are any; where not, both come before
all else for the milliseconds of a turn, a publisher of events included (SCHED_FIFO, where that is
allowed); then others have as long.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from benchmarks.alternating import Ratio, Start, Turn, alternate, compare, median_of
from benchmarks.awake import keep_awake
from benchmarks.node import Daemon, ThinScheduler
from benchmarks.report import percentile
from benchmarks.trees import KEY, Pages
from directory.analytics.reader import LogReader
from directory.analytics.record import Access, Dropped
from directory.cli.asking import Asking
from directory.core.events import Match
from directory.protocol.admin import AdminStats, StatsReport
from directory.protocol.ended import Ended
from scheduler_shim.request import Request
from tests.ports import free_ports

PAGE: Final = 16
TOKENS: Final = 2_048
FRESH_PAGES: Final = 4
EVICTED_AT_ONCE: Final = 32
SCRAPE_EVERY: Final = 200
QUEUED: Final = 6_000
"""Requests that end before the busy load, with about as many evictions: the log's queue is more
than half full then."""
ENDS_AT_ONCE: Final = 100
MATCHES_A_REQUEST: Final = 10
WAKING_TIMES: Final = 10
"""Matches at the beginning of a turn that do not count: the daemon has been stopped."""
TIMES: Final = 50
"""Matches of a turn that do."""
WARM_ROUNDS: Final = 20
DEADLINE_S: Final = 10.0
WRITTEN_S: Final = 30.0
"""A log that was kept from its work for long takes seconds; the daemon's end would not wait."""
CORES_USED: Final = 2
"""One for the scheduler and one for the daemons."""
SERVES: Final = "directory.cli.main"
SIDES: Final = ("off", "off again", "on")
COLUMNS: Final = ("daemon", "p50 us", "p99 us", "CPU us", "matches", "p50 to off (95 %)")
Part = Literal["log", "events", "metrics"]
PARTS: Final[tuple[Part, ...]] = ("log", "events", "metrics")


class Side:
    """A daemon with one scheduler, of which requests end and which publishes."""

    def __init__(
        self,
        stack: ExitStack,
        *flags: str,
        scrape: str = "",
        program: Sequence[str] = (SERVES,),
    ) -> None:
        self.daemon = stack.enter_context(Daemon("--host-tier", "0", *flags, program=program))
        self.scheduler = ThinScheduler(self.daemon, PAGE, TOKENS)
        stack.callback(self.scheduler.close)
        self.client, self.tree = self.scheduler.client, self.scheduler.tree
        self.scrape = scrape
        self.requests = self.matches = 0
        self.told = 0
        """Requests whose ends are to be found in what was kept."""
        self.each = MATCHES_A_REQUEST
        """So many matches to a request that ends."""
        self.scheduler.match(1)
        self.row = self.scheduler.waiting.row[: TOKENS // PAGE // 2]
        count, used = self.scheduler.pool.page_count, self.scheduler.page_count
        self.free = Pages(0)
        self.free.give(array("I", range(used, count)).tobytes())
        self.free_count = count - used
        self.question = Match("r", 0, KEY, self.scheduler.tokens, acquire=False)
        self.paths = self.client.registration.ended == "paths"
        self.chance = random.Random(1)

    def turn(self) -> list[float]:
        """Microseconds of each of a few matches, one upon the other."""
        with self.running():
            for _ in range(WAKING_TIMES):
                self.match()
            return [self.match() for _ in range(TIMES)]

    def fill(self, requests: int) -> None:
        """Have so many requests end."""
        for _ in range(requests // ENDS_AT_ONCE):
            with self.running():
                for _ in range(ENDS_AT_ONCE):
                    self.end()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the daemon go on for as long as this lasts, before all else; then others."""
        began = time.monotonic()
        self.signal(signal.SIGCONT)
        try:
            with self.before_all_else():
                yield
        finally:
            self.signal(signal.SIGSTOP)
            if os.cpu_count() == CORES_USED:
                time.sleep(time.monotonic() - began)

    @contextmanager
    def before_all_else(self) -> Iterator[None]:
        """Have scheduler and daemon run before all else, where that is allowed."""
        both = (0, self.daemon.process.pid)
        with suppress(PermissionError):
            for pid in both:
                os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(1))
        try:
            yield
        finally:
            for pid in both:
                os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))

    def signal(self, number: signal.Signals) -> None:
        """Stop the daemon with all that it has started, or let them go on."""
        for each in (self.daemon.process.pid, *self.children()):
            os.kill(each, number)

    def children(self) -> list[int]:
        """What the daemon has started: its mover, and who publishes events and metrics."""
        pid = self.daemon.process.pid
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
        return [int(child) for child in listed.split()]

    def read(self) -> str:
        """What Prometheus reads."""
        with urllib.request.urlopen(self.scrape, timeout=DEADLINE_S) as answer:
            text: str = answer.read().decode()
            return text

    def match(self, gap_s: float = 0.0) -> float:
        """Microseconds of a match that comes so long after what is before it."""
        if self.matches % self.each == 0:
            self.end()
            if self.scrape and self.requests % SCRAPE_EVERY == 0:
                self.read()
        self.matches += 1
        if gap_s:
            time.sleep(gap_s)
        began = time.perf_counter_ns()
        self.client.call(self.question)
        return (time.perf_counter_ns() - began) / 1000

    def end(self) -> None:
        """A request with a path that nobody had before is published and ends; see that the daemon
        has heard of it."""
        self.requests += 1
        self.told += 1
        tokens = self.scheduler.tokens
        key_bytes = PAGE * KEY.unit_bytes
        path = tokens[: len(self.row) * key_bytes] + self.requests.to_bytes(4, "little")
        path += tokens[len(path) : (len(self.row) + FRESH_PAGES) * key_bytes]
        if self.free_count < FRESH_PAGES:
            given = self.tree.evict(EVICTED_AT_ONCE)
            self.free.give(given)
            self.free_count += len(given) // 4
        request = Request(self.requests, f"r{self.requests}", KEY, path + bytes(4), b"", key_bytes)
        request.row = self.row[:]
        request.row.frombytes(self.free.take(FRESH_PAGES))
        self.free_count -= FRESH_PAGES
        written = self.scheduler.pool.advance()
        done = self.tree.publish(request, len(request.row), written, keep=False)
        assert done is not None
        assert not done.duplicates
        self.client.report(
            Ended(
                request=request.name,
                attempt=0,
                namespace=KEY,
                kind="request",
                prompt_tokens=len(request.row) * PAGE + 1,
                hit=(len(self.row) * PAGE, 0, 0, 0),
                inserted=FRESH_PAGES * PAGE,
                tokens=path if self.paths else b"",
            )
        )
        while self.client.open_count:
            self.client.poll()
            self.client.call(self.question)


class Kept(NamedTuple):
    """What was told to the daemon that has something on, and what became of it; None: is off."""

    requests: int
    counted: int | None
    logged: int | None
    dropped: int
    batches: int | None

    @property
    def whole(self) -> bool:
        """Whether every request is in the metrics, and in the log or among the dropped (a dropped
        record may as well be one of an eviction), and somebody heard of events."""
        logged = self.requests if self.logged is None else self.logged
        return (
            self.counted in (None, self.requests)
            and logged <= self.requests <= logged + self.dropped
            and self.batches != 0
        )


class Paced(NamedTuple):
    """Matches a second; with everything on, the share of them that came right after other work, and
    by what share the median is above that of the others."""

    per_second: float
    after_work: float
    shift: float


class Found(NamedTuple):
    """Of one start: its rounds, what was kept, and processor time a match (us) by side."""

    rounds: Start
    kept: Kept
    cpu_us: dict[str, float]
    paced: Paced | None = None
    """Where matches do not follow one upon the other."""


def pin(
    stack: ExitStack, sides: Sequence[Side], subscriber: subprocess.Popen[bytes] | None
) -> None:
    """Give this process one core and the daemons another one, where there are two, both awake, and
    all others what the daemons have started, their threads of ZeroMQ's and who reads their events.
    Only once they have seen how many there are: who has but one does not look before it sleeps."""
    cores = sorted(os.sched_getaffinity(0))
    used, others = cores[:CORES_USED], cores[CORES_USED:]
    keep_awake(stack, used)
    if len(used) < CORES_USED:
        return
    stack.callback(os.sched_setaffinity, 0, cores)
    os.sched_setaffinity(0, used[:1])
    beside = [] if subscriber is None else [subscriber.pid]
    for side in sides:
        beside += [side.daemon.process.pid, *side.children()]
    for pid in beside if others else ():
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # a thread that has ended since
                os.sched_setaffinity(int(task), others)
    for side in sides:
        os.sched_setaffinity(side.daemon.process.pid, used[1:])


class Told(NamedTuple):
    """Of what a daemon is told to tell: its flags, where the log is, and who asks for the rest."""

    flags: list[str]
    folder: Path | None
    events: str
    scrape: str


def places_for(stack: ExitStack, parts: Collection[Part]) -> Told:
    """Places for the parts that a daemon is to have on."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t"))) / "log"
    port = free_ports(4)
    events, metrics = f"tcp://127.0.0.1:{port}", f"127.0.0.1:{port + 3}"
    named = {"log": ["--access-log", str(folder)], "events": ["--kv-events", events],
             "metrics": ["--metrics", metrics]}  # fmt: skip
    return Told(
        [flag for part in parts for flag in named[part]],
        folder if "log" in parts else None,
        events if "events" in parts else "",
        f"http://{metrics}/metrics" if "metrics" in parts else "",
    )


def measure(rounds: int, seed: int, parts: Collection[Part]) -> Found:
    """One start of all sides under the busy load."""
    with ExitStack() as stack:
        on = places_for(stack, parts)
        sides = {
            "off": Side(stack),
            "off again": Side(stack),
            "on": Side(stack, *on.flags, scrape=on.scrape),
        }
        subscriber = subscribe(stack, on.events)
        pin(stack, list(sides.values()), subscriber)
        for side in sides.values():
            side.fill(QUEUED)
        turns: dict[str, Turn] = {name: side.turn for name, side in sides.items()}
        before = {name: (side.daemon.cpu_us(), side.matches) for name, side in sides.items()}
        found = alternate(turns, rounds, random.Random(seed), warm=WARM_ROUNDS)
        cpu = {
            name: (side.daemon.cpu_us() - before[name][0]) / (side.matches - before[name][1])
            for name, side in sides.items()
        }
        for side in sides.values():
            side.signal(signal.SIGCONT)
        kept = kept_by(sides["on"], on.folder, subscriber)
    return Found(found, kept, cpu)


Compare: TypeAlias = Callable[..., Ratio]


def judged(
    found: Sequence[Found], compare: Compare = compare
) -> tuple[dict[str, Any], list[list[object]], Ratio]:
    """Of several starts: the document, rows of the table of COLUMNS, and how `on` compares."""
    starts = [start.rounds for start in found]
    compared = {
        "off again": compare(starts, "off again", "off"),
        "on": compare(starts, "on", "off", "off again"),
    }
    document: dict[str, Any] = {}
    rows: list[list[object]] = []
    for side in SIDES:
        taken = [figure for start in starts for one in start for figure in one[side]]
        figures = {
            "p50_us": round(median_of(starts, side), 2),
            "p99_us": round(percentile(taken, 99), 2),
            "daemon_cpu_us": round(sum(start.cpu_us[side] for start in found) / len(found), 2),
            "matches": len(taken),
        }
        against = compared.get(side)
        document[side] = figures | ({"ratio": against.as_json()} if against else {})
        rows.append([side, *figures.values(), str(against or "")])
    paced = [start.paced for start in found if start.paced is not None]
    if paced:
        for name in Paced._fields:
            mean = sum(getattr(one, name) for one in paced) / len(paced)
            document[name] = round(mean, 4)
    document["kept"] = [start.kept._asdict() for start in found]
    return document, rows, compared["on"]


def subscribe(stack: ExitStack, address: str) -> subprocess.Popen[bytes] | None:
    """Somebody who reads the events; nobody where there are none."""
    if not address:
        return None
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.subscriber", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    stack.callback(process.kill)
    return process


def _waiting(side: Side) -> int:
    """Records of a log that wait to be written."""
    with Asking(side.daemon.runtime_dir, DEADLINE_S, "bench_recording") as daemon:
        log = daemon.ask(AdminStats(), StatsReport).log
    return 0 if log is None else log.waiting


def kept_by(on: Side, folder: Path | None, subscriber: subprocess.Popen[bytes] | None) -> Kept:
    """End a daemon, and see what is left of what it was told."""
    counted = None
    if on.scrape:
        told = re.search(r'requests_total\{instance="bench",kind="request"\} (\S+)', on.read())
        counted = int(float(told[1])) if told is not None else 0
    give_up = time.monotonic() + WRITTEN_S
    while folder is not None and _waiting(on) and time.monotonic() < give_up:
        time.sleep(0.1)
    on.daemon.process.terminate()
    on.daemon.process.wait(DEADLINE_S)
    heard = int(subscriber.communicate()[0]) if subscriber is not None else None
    frames = list(LogReader(folder)) if folder is not None else []
    logged = sum(isinstance(frame, Access) for frame in frames)
    dropped = sum(frame.records for frame in frames if isinstance(frame, Dropped))
    return Kept(on.told, counted, logged if folder is not None else None, dropped, heard)
