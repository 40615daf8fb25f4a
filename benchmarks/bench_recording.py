"""What do the access log and metrics cost a match? `python -m benchmarks.bench_recording`

Three real daemons with equal trees: one whose scheduler says nothing of its requests, one that
keeps sums (as every daemon does), and one that writes an access log and is read by Prometheus. Each
match follows the report of a request that has ended. Owns the target: with all of it on, the median
of a match is within 2 % of that without any; and nothing of the log may be lost.
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from benchmarks.node import Daemon, ThinScheduler
from benchmarks.report import Measure, heading, interleaved, ratio, write_json
from directory.analytics.reader import LogReader
from directory.analytics.record import Access, Dropped
from directory.core.events import Match
from directory.core.namespace import NamespaceKey
from directory.protocol.ended import Ended

LIMIT: Final = 1.02
PAGE: Final = 16
TOKENS: Final = 2_048
SCRAPE_EVERY: Final = 50
DEADLINE_S: Final = 10.0


class Case:
    """A daemon with one scheduler. `told`: whether it is told of ended requests at all."""

    def __init__(self, stack: ExitStack, *flags: str, told: bool = True, scrape: str = "") -> None:
        self.daemon = stack.enter_context(Daemon(*flags))
        self.scheduler = ThinScheduler(self.daemon, PAGE, TOKENS)
        stack.callback(self.scheduler.client.close)
        self.client = self.scheduler.client
        self.told = told
        self.scrape = scrape
        self.requests = 0
        tokens = self.scheduler.tokens
        self.question = Match("r", 0, NamespaceKey(), tokens, acquire=False)
        self.paths = self.client.registration.ended == "paths"

    def match(self, times: int) -> list[float]:
        """Microseconds of each of so many matches."""
        taken: list[float] = []
        for _ in range(times):
            if self.told:
                self._tell()
            else:
                self.client.call(self.question)  # what comes before is as near as in the others
            if self.scrape and self.requests % SCRAPE_EVERY == 0:
                with urllib.request.urlopen(self.scrape, timeout=DEADLINE_S) as answer:
                    answer.read()
            began = time.perf_counter_ns()
            self.client.call(self.question)
            taken.append((time.perf_counter_ns() - began) / 1000)
        return taken

    def _tell(self) -> None:
        """Report a request with a path that nobody had before, and see that it arrives."""
        self.requests += 1
        tokens = self.scheduler.tokens
        path = tokens[: len(tokens) // 2] + self.requests.to_bytes(4, "little")
        path += tokens[len(path) :]
        self.client.report(
            Ended(
                request=f"r{self.requests}",
                attempt=0,
                namespace=NamespaceKey(),
                kind="request",
                prompt_tokens=TOKENS,
                hit=(TOKENS // 2, 0, 0, 0),
                tokens=path if self.paths else b"",
            )
        )
        while self.client.open_count:
            self.client.poll()
            self.client.call(self.question)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and fail where the target is missed."""
    parser = argparse.ArgumentParser(prog="bench_recording")
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="t"))) / "log"
        port = free_port()
        flags = ("--access-log", str(folder), "--metrics", f"127.0.0.1:{port}")
        url = f"http://127.0.0.1:{port}/metrics"
        silent, sums = Case(stack, told=False), Case(stack)
        on = Case(stack, *flags, scrape=url)
        cases: dict[str, Measure] = {"nothing": silent.match, "sums": sums.match, "all": on.match}
        found = interleaved(cases, rounds=options.rounds, times=options.times)
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            text = answer.read().decode()
        counted = re.search(r'requests_total\{instance="bench",kind="request"\} (\S+)', text)
        on.daemon.process.terminate()
        on.daemon.process.wait(DEADLINE_S)
        frames = list(LogReader(folder))
        written = sum(isinstance(frame, Access) for frame in frames)
        dropped = sum(frame.records for frame in frames if isinstance(frame, Dropped))
    ratios = {name: ratio(found[name], found["nothing"]) for name in ("sums", "all")}
    for name, figure in found.items():
        print(
            f"{name:8} match p50 {figure.median:8.1f} us  ({figure.low:.1f} to {figure.high:.1f})"
        )
    print(f"ratios   {ratios} (at most {LIMIT})")
    print(f"requests {on.requests}, in the log {written}, dropped {dropped}")
    whole = counted is not None and int(float(counted[1])) == on.requests == written
    write_json(
        options.json,
        {
            **heading("python -m benchmarks.bench_recording"),
            "match_us": {name: figure.as_json() for name, figure in found.items()},
            "ratios": ratios,
            "requests": on.requests,
            "logged": written,
        },
    )
    return int(ratios["all"] > LIMIT or not whole)


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
