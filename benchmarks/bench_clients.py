"""How does one daemon serve several schedulers: peak rate, and p99 of a match at half of it?

    python -m benchmarks.bench_clients --clients 8 --json FILE

Each scheduler is a process of its own with a pool of its own; all have the same path cached. First
all match as fast as they can (with the release of each lease), then each begins a match at fixed
times, together half as often; a match that begins late counts from when it should have begun.

With `--busy` the same twice more, at the same times, beside everything else: the daemon keeps a
journal and an access log, publishes KV events and is read by Prometheus, and two more schedulers
do all they can. *busy*: they publish, evict, back up and restore (bench_soak.py's), without
computing, pages of a model's size, so that it is the mover that has more to do than it can (its
processor time and the copies in its hands are reported). *small*: the same with tiny pages.
*flood*: they do nothing but report (reporter.py), so that the daemon's own thread has more to do
than it can.

`--late` says of each match that took more than 2 ms what it waited for (late_matches.py); the
daemon marks what took it long then, which costs it some 2 us a match.

Where there are no more than two cores, `--isolate` gives the daemon one and the clients the other,
before all else there (SCHED_FIFO), reporters behind clients; the rest runs on what they leave.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from benchmarks.awake import before_all_else, keep_awake
from benchmarks.bench_soak import MODES, SHAPES, below, command_of, cpu_s, everything_on
from benchmarks.contestants import Contestant
from benchmarks.late_matches import Late, Marks, long_pieces, report
from benchmarks.node import Daemon, ThinScheduler
from benchmarks.report import heading, percentile, table, write_json
from directory.cli.asking import Asking
from directory.daemon.loop import SPIN_NS
from directory.protocol.admin import AdminStats, StatsReport

PAGE, TOKENS = 16, 8_192
LIMIT_MS, BUSY_TIMES = 2.0, 1.5
SCRAPE_S = 1.0
WARM_S = 2.0
"""So long the others are at it before anything counts: a pool's memory is touched for the first
time then, and the host tier has become full."""
SETTLE_S = 0.2
"""So much longer than the clients the others are at it."""
BURST_S, REST_S = 0.3, 0.3
LATE_NS: Final = 2_000_000
"""What takes longer is late: `--late` says what it waited for."""
EARLY_NS = 60_000
"""A client awakes so long before it is to begin, and looks at the clock until then."""
PR_SET_TIMERSLACK = 29
OTHERS: Final = 2
PROGRAM: Final = "directory.cli.main"
LOADS: Final = {"busy": "model", "small": "tiny", "flood": "tiny"}
"""What the others' pages are like."""
DEADLINE_S: Final = 10.0


def serve(runtime_dir: str, number: int) -> None:
    """One scheduler: does what the lines say until they end."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # else it awakes 50 us late
    scheduler = ThinScheduler(Path(runtime_dir), PAGE, TOKENS, instance=f"client {number}")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        _, seconds, interval_us = msgspec.json.decode(line)
        answers.write(msgspec.json.encode(_work(scheduler, seconds, interval_us)).decode() + "\n")
    scheduler.close()


def _work(scheduler: ThinScheduler, seconds: float, interval_us: float) -> Taken:
    """Match for so long, at once or every so often."""
    taken: list[float] = []
    late: list[Late] = []
    clock = time.perf_counter_ns
    begun = clock()
    end, step = begun + int(seconds * 1e9), int(interval_us * 1e3)
    due = free = begun
    while due < end:
        while (now := clock()) < due:
            if due - now > 2 * EARLY_NS:
                time.sleep((due - now - EARLY_NS) / 1e9)
        scheduler.match(1)
        ended = clock()
        took = ended - (due if step else now)
        taken.append(took / 1e3)
        if took > LATE_NS and step:
            late.append(Late(due, free, now, ended))
        free = ended
        due = due + step if step else ended
    return Taken(taken, late)


class Taken(NamedTuple):
    """Microseconds of each match from when it was to begin, and those that took long."""

    us: list[float]
    late: list[Late]


class Clients:
    """So many schedulers at one daemon, warm."""

    def __init__(self, stack: ExitStack, daemon: Daemon, count: int, *, isolate: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.bench_clients", "--serve"]
        self._all = [
            stack.enter_context(Contestant([*command, str(daemon.runtime_dir), str(number)]))
            for number in range(count)
        ]
        if isolate:
            theirs, its = sorted(os.sched_getaffinity(0))[:2]
            keep_awake(stack, (theirs, its))
            before_all_else(daemon.process.pid, its)
            for client in self._all:
                before_all_else(client.pid, theirs, 2)
        self.work(0.5, 0)

    def work(self, seconds: float, interval_us: float) -> Taken:
        """Have all of them work at the same time."""
        self.begin(seconds, interval_us)
        return self.taken()

    def begin(self, seconds: float, interval_us: float) -> None:
        """Have them begin."""
        for client in self._all:
            client.say("work", seconds, interval_us)

    def taken(self) -> Taken:
        """Wait for them."""
        all_of_them = [msgspec.convert(client.hear(), Taken) for client in self._all]
        return Taken(
            [us for one in all_of_them for us in one.us],
            [late for one in all_of_them for late in one.late],
        )


class Found(NamedTuple):
    """Of one phase: its matches, and what else is to be said of it."""

    taken: Taken
    facts: dict[str, Any]


class Marked:
    """A daemon that is to mark what took long in it, and what came of it; if `wanted`."""

    def __init__(self, *, wanted: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="marks-") if wanted else None

    @property
    def program(self) -> list[str]:
        """What is to be run."""
        return [PROGRAM] if self._folder is None else ["benchmarks.marked_daemon", self._file]

    @property
    def _file(self) -> str:
        return "" if self._folder is None else f"{self._folder.name}/marks.json"

    def begin(self, daemon: Daemon) -> None:
        """What comes from now on counts."""
        if self._folder is not None:
            daemon.process.send_signal(signal.SIGUSR1)

    def causes(self, daemon: Daemon, late: list[Late]) -> dict[str, Any]:
        """What those waited for that were late."""
        if self._folder is None:
            return {}
        daemon.process.send_signal(signal.SIGUSR2)
        file, give_up = Path(self._file), time.monotonic() + DEADLINE_S
        while not file.exists():
            if time.monotonic() > give_up:
                raise RuntimeError("the daemon has not written its marks")
            time.sleep(0.01)
        marks = msgspec.json.decode(file.read_bytes(), type=Marks)
        self._folder.cleanup()
        found = {"late": report(marks, late), "long": long_pieces(marks)}
        return {name: msgspec.to_builtins(one) for name, one in found.items()}


def stolen_s() -> float:
    """Seconds for which this machine's own host kept from it the cores that may be used here."""
    wanted = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, *spent = line.split()
        ticks += int(spent[7]) if name in wanted else 0
    return ticks / os.sysconf("SC_CLK_TCK")


class Share:
    """What part of a core processes have taken, and the machine's host from all cores."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._stolen_s = stolen_s()
        self._began = time.monotonic()
        self._before = {name: cpu_s(pid) for name, pid in pids.items()}

    def taken(self) -> dict[str, Any]:
        """Since the beginning, by name; `ended`: those that are not there any more."""
        passed = time.monotonic() - self._began
        found: dict[str, Any] = {"ended": []}
        found["stolen_core_share"] = round((stolen_s() - self._stolen_s) / passed, 3)
        for name, pid in self._pids.items():
            try:
                used = cpu_s(pid) - self._before[name]
            except FileNotFoundError:
                found["ended"].append(name)
            else:
                found[f"{name}_core_share"] = round(used / passed, 3)
        return found


def quiet(options: argparse.Namespace) -> tuple[Found, float]:
    """Peak, and half of it, with nothing beside; also how often each client is to match then."""
    with ExitStack() as stack:
        marked = Marked(wanted=options.late)
        daemon = stack.enter_context(Daemon(*_flags(options), program=marked.program))
        clients = Clients(stack, daemon, options.clients, isolate=options.isolate)
        before = daemon.used()
        count = len(clients.work(options.seconds, 0).us)
        at_peak = daemon.used().since(before, count)
        peak = count / options.seconds
        interval_us = options.clients / (options.rate or peak / 2) * 1e6
        share, before = Share({"daemon": daemon.process.pid}), daemon.used()
        marked.begin(daemon)
        taken = clients.work(options.seconds, interval_us)
        facts = {
            "peak_per_s": round(peak),
            "half_per_s": round(len(taken.us) / options.seconds),
            **daemon.used().since(before, len(taken.us)),
            "at_peak": at_peak,
            **share.taken(),
            **marked.causes(daemon, taken.late),
        }
    return Found(taken, facts), interval_us


def _flags(options: argparse.Namespace) -> list[str]:
    return [] if options.look_us is None else ["--look-us", str(options.look_us)]


def _others(stack: ExitStack, daemon: Daemon, load: str) -> list[Contestant]:
    folder = str(daemon.runtime_dir)
    if load == "flood":
        command = [sys.executable, "-m", "benchmarks.reporter", folder]
        commands = [[*command, f"other {number}"] for number in range(OTHERS)]
    else:
        command = [sys.executable, "-m", "benchmarks.bench_soak", "--serve", folder]
        commands = [[*command, f"other {mode}", mode, LOADS[load]] for mode in MODES[:OTHERS]]
    return [stack.enter_context(Contestant(words)) for words in commands]


def beside(options: argparse.Namespace, interval_us: float, load: str) -> Found:
    """Half of the peak beside everything else."""
    shape = LOADS[load]
    with ExitStack() as stack:
        flags, port = everything_on(stack, options.clients + OTHERS)
        flags = [*flags, *_flags(options)]
        marked = Marked(wanted=options.late)
        program = marked.program
        if options.costs:
            program = ["benchmarks.costed_daemon", str(options.costs)]
        tier, segment = SHAPES[shape].host_tier, SHAPES[shape].segment
        daemon = stack.enter_context(
            Daemon(*flags, host_tier=tier, segment=segment, program=program)
        )
        others = _others(stack, daemon, load)
        if options.isolate and load == "flood":
            for other in others:
                before_all_else(other.pid, min(os.sched_getaffinity(0)))
        clients = Clients(stack, daemon, options.clients, isolate=options.isolate)
        for other in others:
            other.say("work", WARM_S, 1.0)
        for other in others:
            other.hear()
        pids = {command_of(pid): pid for pid in below(daemon.process.pid)}
        share = Share({"daemon": daemon.process.pid, **pids})
        if options.costs:
            daemon.process.send_signal(signal.SIGUSR1)
        marked.begin(daemon)
        in_flight: list[int] = []
        taken = Taken([], [])
        done: list[Any] = []
        # Who comes before all else and never pauses is stopped by the kernel; so all of them do.
        rounds = math.ceil(options.seconds / BURST_S) if options.isolate else 1
        seconds = options.seconds / rounds
        for _ in range(rounds):
            for other in others:
                other.say("work", seconds + SETTLE_S, 1.0)
            time.sleep(SETTLE_S / 2)
            clients.begin(seconds, interval_us)
            until = time.monotonic() + seconds
            while time.monotonic() < until - SCRAPE_S:
                time.sleep(SCRAPE_S)
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    answer.read()
                in_flight.append(_copies_in_flight(daemon))
            more = clients.taken()
            taken = Taken(taken.us + more.us, taken.late + more.late)
            done = [other.hear() for other in others]
            if rounds > 1:
                time.sleep(REST_S)
        if options.costs:
            daemon.process.send_signal(signal.SIGUSR2)
        facts: dict[str, Any] = share.taken() | marked.causes(daemon, taken.late)
    for name in ("requests", "restored", "wrong", "errors", "reports"):
        facts |= {name: sum(one[name] for one in done)} if name in done[0] else {}
    return Found(taken, facts | {"copies_in_flight": in_flight})


def _copies_in_flight(daemon: Daemon) -> int:
    with Asking(daemon.runtime_dir, DEADLINE_S, "bench_clients") as asking:
        return asking.ask(AdminStats(), StatsReport).gauges["copies_in_flight"]


def main() -> int:
    """Measure, print, write; exit status 1 where a p99 is above its limit, a page was wrong or
    a process was lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_clients")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each phase")
    parser.add_argument("--rate", type=float, help="matches a second, instead of half of the peak")
    parser.add_argument("--busy", action="store_true", help="also beside everything else")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--costs", type=Path, metavar="FILE", help="of the last load, by kind")
    parser.add_argument("--late", action="store_true", help="say what late matches waited for")
    parser.add_argument("--look-us", type=int, help="of the daemon, instead of its own figure")
    parser.add_argument("--isolate", action="store_true", help="for two cores")
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.late and options.costs:
        parser.error("--late and --costs each want a daemon of their own: ask for one of them")
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
        return 0
    document: dict[str, Any] = heading("python -m benchmarks.bench_clients")
    document |= {"clients": options.clients, "tokens": TOKENS, "isolated": options.isolate}
    document["look_us"] = SPIN_NS // 1000 if options.look_us is None else options.look_us
    half, interval_us = quiet(options)
    phases = {"half": (half, LIMIT_MS)}
    for load in options.loads if options.busy else ():
        phases[load] = (beside(options, interval_us, load), LIMIT_MS * BUSY_TIMES)
    rows: list[list[object]] = []
    missed = 0
    for load, (phase, limit_ms) in phases.items():
        us = {name: round(percentile(phase.taken.us, at), 1) for name, at in PERCENTILES.items()}
        document[load] = us | phase.facts | {"limit_p99_us": 1e3 * limit_ms}
        facts = document[load]
        met = us["p99_us"] <= 1e3 * limit_ms
        missed += not met or facts.get("wrong", 0) > 0 or len(facts["ended"]) > 0
        shares = [facts.get(f"{who}_core_share", "") for who in ("daemon", "mover")]
        shares.append(facts["stolen_core_share"])
        rows.append([load, *us.values(), f"{1e3 * limit_ms:.0f}", met, *shares])
    print(f"{options.clients} clients: at most {half.facts['peak_per_s']:,} matches + releases/s, ")
    print(f"then {half.facts['half_per_s']:,}; daemon CPU {_cpu(half.facts)}; at the most ", end="")
    print(_cpu(half.facts["at_peak"]) + "\n")
    print(table(["", *PERCENTILES, "limit of p99", "met", *SHARES], rows))
    for load in phases:
        for cause, found in document[load].get("late", {}).items():
            print(f"{load}: {found['matches']} late, at most {found['slowest_ms']} ms: {cause}")
    write_json(options.json, document)
    return int(missed > 0)


def _cpu(facts: dict[str, Any]) -> str:
    looking, work = facts["daemon_looking_us"], facts["daemon_work_us"]
    return f"{facts['daemon_cpu_us']} us each ({work} of work, {looking} of looking)"


SHARES = ("daemon's core", "mover's", "stolen")
PERCENTILES = {"p50_us": 50.0, "p99_us": 99.0, "p99.9_us": 99.9}

if __name__ == "__main__":
    sys.exit(main())
