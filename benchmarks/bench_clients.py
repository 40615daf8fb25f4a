"""How does one daemon serve several schedulers: peak rate, and p99 of a match at half of it?

    python -m benchmarks.bench_clients --clients 8 --json FILE

Each scheduler is a process of its own with a pool of its own; all have the same path cached. First
all match as fast as they can (with the release of each lease), then each begins a match at fixed
times, together half as often; a match that begins late counts from when it should have begun.

With `--busy` the same again, at the same times, beside everything else: the daemon keeps a journal
and an access log, publishes KV events and is read by Prometheus, and two more schedulers
(bench_soak.py's) publish, evict, back up and restore as fast as they can, so that the mover always
has something to copy.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.bench_soak import everything_on
from benchmarks.contestants import Contestant
from benchmarks.node import Daemon, ThinScheduler
from benchmarks.report import heading, percentile, table, write_json

PAGE, TOKENS = 16, 8_192
LIMIT_MS, BUSY_TIMES = 2.0, 1.5
SCRAPE_S = 1.0
EARLY_NS = 60_000
"""A client awakes so long before it is to begin, and looks at the clock until then."""
PR_SET_TIMERSLACK = 29


def serve(runtime_dir: str, number: int) -> None:
    """One scheduler: does what the lines say until they end."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # else it awakes 50 us late
    scheduler = ThinScheduler(Path(runtime_dir), PAGE, TOKENS, instance=f"client {number}")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        _, seconds, interval_us = msgspec.json.decode(line)
        answers.write(msgspec.json.encode(_work(scheduler, seconds, interval_us)).decode() + "\n")
    scheduler.close()


def _work(scheduler: ThinScheduler, seconds: float, interval_us: float) -> list[float]:
    """Match for so long, at once or every so often; microseconds from when each was to begin."""
    taken: list[float] = []
    clock = time.perf_counter_ns
    begun = clock()
    end, step = begun + int(seconds * 1e9), int(interval_us * 1e3)
    due = begun
    while due < end:
        while (now := clock()) < due:
            if due - now > 2 * EARLY_NS:
                time.sleep((due - now - EARLY_NS) / 1e9)
        scheduler.match(1)
        taken.append((clock() - (due if step else now)) / 1e3)
        due = due + step if step else clock()
    return taken


def together(clients: list[Contestant], seconds: float, interval_us: float) -> list[float]:
    """Have all of them work at the same time."""
    for client in clients:
        client.say("work", seconds, interval_us)
    return [figure for client in clients for figure in client.hear()]


def main() -> int:
    """Measure, print, write; exit status 1 where p99 is above the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_clients")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each of the two phases")
    parser.add_argument("--busy", action="store_true", help="once more beside everything else")
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
        return 0
    document: dict[str, Any] = heading("python -m benchmarks.bench_clients")
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon())
        clients = started(stack, daemon, options.clients)
        peak = len(together(clients, options.seconds, 0)) / options.seconds
        interval_us = options.clients / (peak / 2) * 1e6
        before = daemon.cpu_us()
        figures = together(clients, options.seconds, interval_us)
        cpu_us = (daemon.cpu_us() - before) / len(figures)
    limits = {"half": LIMIT_MS}
    found = {"half": figures}
    if options.busy:
        found["busy"] = beside(options.clients, options.seconds, interval_us, document)
        limits["busy"] = LIMIT_MS * BUSY_TIMES
    document |= {
        "clients": options.clients,
        "tokens": TOKENS,
        "peak_per_s": round(peak),
        "half_per_s": round(len(figures) / options.seconds),
        "half_daemon_cpu_us": round(cpu_us, 1),
    }
    rows: list[list[object]] = []
    for name, taken in found.items():
        us = {title: round(percentile(taken, at), 1) for title, at in PERCENTILES.items()}
        document[f"{name}_us"] = us
        row = [name, options.clients, document["peak_per_s"], document["half_per_s"]]
        rows.append([*row, *us.values(), round(cpu_us, 1) if name == "half" else ""])
    columns = ["", "clients", "peak match + release/s", "half of it", *PERCENTILES, "daemon CPU us"]
    print(table(columns, rows))
    write_json(options.json, document)
    return int(any(document[f"{name}_us"]["p99"] > 1e3 * most for name, most in limits.items()))


def started(stack: ExitStack, daemon: Daemon, count: int) -> list[Contestant]:
    """So many schedulers, warm."""
    command = [sys.executable, "-m", "benchmarks.bench_clients", "--serve"]
    clients = [
        stack.enter_context(Contestant([*command, str(daemon.runtime_dir), str(number)]))
        for number in range(count)
    ]
    together(clients, 0.5, 0)
    return clients


def beside(count: int, seconds: float, interval_us: float, document: dict[str, Any]) -> list[float]:
    """The same beside everything else; what that was is said in the document."""
    with ExitStack() as stack:
        flags, port = everything_on(stack)
        daemon = stack.enter_context(Daemon(*flags))
        command = [sys.executable, "-m", "benchmarks.bench_soak", "--serve"]
        others = [
            stack.enter_context(Contestant([*command, str(daemon.runtime_dir), f"busy {at}", mode]))
            for at, mode in enumerate(("mirrored", "thin"))
        ]
        clients = started(stack, daemon, count)
        for other in others:
            other.say("work", seconds + 1, 1.0)
        time.sleep(0.5)  # they are at it
        before, began = daemon.cpu_us(), time.monotonic()
        for client in clients:
            client.say("work", seconds, interval_us)
        until = time.monotonic() + seconds
        while time.monotonic() < until - SCRAPE_S:
            time.sleep(SCRAPE_S)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                answer.read()
        taken = [figure for client in clients for figure in client.hear()]
        share = (daemon.cpu_us() - before) / 1e6 / (time.monotonic() - began)
        done: list[Any] = [other.hear() for other in others]
        document["busy"] = {"requests": sum(one["requests"] for one in done)}
        document["busy"]["daemon_core_share"] = round(share, 3)
        document["busy"]["restored_pages"] = sum(one["restored"] for one in done)
    return taken


PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}

if __name__ == "__main__":
    sys.exit(main())
