"""Does memory stay flat while schedulers come, share, evict and restore for half an hour?

    python -m benchmarks.bench_soak --seconds 1800 --share 0.25 --json FILE

A daemon with journal, access log, metrics and KV events on, and three reference schedulers in
processes of their own (two mirrored, one thin). Each sends prompts that begin like others' and end
like nobody's, through a pool and a host tier that are far too small for them, so that all the time
pages are evicted, backed up and restored; every page that is reused is read back and compared. Each
process rests so that all of them together take no more than `--share` of a core. Before that come
`--warm` requests without rest: what the daemon remembers up to a limit (answers, evictions, batches
of events for who missed some) is full then. Resident memory of every process is read each few
seconds. It is flat where, after the first quarter, the median of the last tenth is at most 2 % and
1 MiB above that of the tenth that follows the quarter.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from benchmarks.contestants import Contestant
from benchmarks.node import Daemon
from benchmarks.report import heading, table, write_json
from directory.core.namespace import NamespaceKey
from scheduler_shim.client import DaemonClient
from scheduler_shim.compute import Compute
from scheduler_shim.pools import SharedPool
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.request import Request
from tests.ports import free_ports

PAGE: Final = 16
TOKEN_ID_BYTES: Final = 4
FAMILIES: Final = 40
PREFIX_PAGES: Final = 96
SUFFIX_PAGES: Final = 32


class Shape(NamedTuple):
    """What a scheduler's pages are, and how many; `host_tier`: as many as two pools have;
    `segment`: one page size's, of which pools of several are given some each."""

    token_bytes: int
    layers: int
    pool_pages: int
    host_tier: str
    segment: str
    computed: bool = True


SHAPES: Final = {
    "tiny": Shape(16, 2, 2_048, "2MiB", "256KiB"),
    "model": Shape(128 * 1024, 32, 512, "2GiB", "64MiB", computed=False),
}
"""*tiny*: a page of 512 bytes, so that there is nothing to copy and everything to decide. *model*:
that of a model of 8 B parameters (32 layers, 8 heads of 128, 16 bits: 2 MiB). Where nothing is
`computed`, a scheduler says that it has and reads nothing back: whoever copies is all that it waits
for then."""
MODES: Final = ("mirrored", "thin", "mirrored")
FLAT_SHARE, FLAT_BYTES = 0.02, 1 << 20
REQUEST_S: Final = 20.0
PORTS_EACH: Final = 3
"""Of a scheduler's KV events: what is new, what was missed, and what there is."""
MIB: Final = 1 << 20
MEMORY: Final = "/dev/shm"
"""A kept host tier lies in memory."""


class Uncomputed(Compute):
    """Says of every page that it holds what it must."""

    def write(self, request: Request, first: int, last: int) -> tuple[int, int]:
        """Let the fences pass."""
        del request, first, last
        return self._pool.advance()

    def wrong(self, digests: Sequence[bytes], pages: Sequence[int]) -> int:
        """None."""
        del digests, pages
        return 0


class Client:
    """One scheduler with its requests, one at a time."""

    def __init__(self, runtime_dir: str, name: str, mode: str, shape: Shape) -> None:
        pool = SharedPool(
            page_size=PAGE,
            page_count=shape.pool_pages,
            bytes_per_token=shape.token_bytes,
            layers=shape.layers,
        )
        client = DaemonClient.connect(
            Path(runtime_dir),
            pool,
            instance=name,
            mode="thin" if mode == "thin" else "mirrored",
        )
        self.scheduler = ReferenceScheduler(pool, client, instance=name, thin=mode == "thin")
        if not shape.computed:
            self.scheduler.compute = Uncomputed(pool, NamespaceKey(), self.scheduler.count)
        self._chance = random.Random(name)
        page_key = PAGE * TOKEN_ID_BYTES
        self._prefixes = [
            random.Random(at).randbytes(PREFIX_PAGES * page_key) for at in range(FAMILIES)
        ]
        self._number = 0
        self._counts = {"requests": 0, "wrong": 0, "errors": 0, "own": 0, "restored": 0}

    def work(self, seconds: float, share: float) -> dict[str, int]:
        """Requests, one after the other, with so much rest that no more of a core is used."""
        begun, used = time.monotonic(), time.process_time()
        while (passed := time.monotonic() - begun) < seconds:
            busy = time.process_time() - used
            if busy > share * passed:
                self.wait(min(busy / share - passed, 0.5))
            else:
                self.request()
        return self._counts

    def wait(self, seconds: float) -> None:
        """Rest. What the daemon says meanwhile is heard."""
        time.sleep(seconds)
        self.scheduler.tick()

    def request(self) -> None:
        """A prompt that begins like others' and ends like nobody's."""
        self._number += 1
        # Few are asked for often and many seldom: some of it stays, some falls, some comes back.
        family = min(int(self._chance.expovariate(0.12)), FAMILIES - 1)
        pages, page_key = self._chance.randrange(16, PREFIX_PAGES + 1), PAGE * TOKEN_ID_BYTES
        prompt = self._prefixes[family][: pages * page_key]
        prompt += self._chance.randbytes(SUFFIX_PAGES * page_key)
        self.scheduler.submit(self._number, prompt)
        give_up = time.monotonic() + REQUEST_S
        while True:
            done = self.scheduler.tick()
            for one in done:
                self._counts["requests"] += 1
                self._counts["wrong"] += one.wrong
                self._counts["errors"] += bool(one.error)
                self._counts["own"] += one.own_pages
                self._counts["restored"] += one.host_pages + one.peer_pages
            if done:
                return
            if time.monotonic() > give_up:
                raise TimeoutError(f"request {self._number} of {self.scheduler!r} has not ended")
            client = self.scheduler.client
            if not self.scheduler.moved and client is not None:
                client.wait(10_000)

    def problems(self) -> list[str]:
        """What does not hold, and whether the daemon was lost."""
        lost = [f"lost the daemon: {self.scheduler.last_loss}"] if self.scheduler.degraded else []
        return [*self.scheduler.check(), *lost]


def serve(runtime_dir: str, name: str, mode: str, shape: str = "tiny") -> None:
    """One scheduler: does what the lines say until they end."""
    client = Client(runtime_dir, name, mode, SHAPES[shape])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        verb, *arguments = msgspec.json.decode(line)
        answer: object = os.getpid()
        if verb == "work":
            answer = client.work(*arguments)
        elif verb == "check":
            answer = client.problems()
        answers.write(msgspec.json.encode(answer).decode() + "\n")
    client.scheduler.close()


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def below(pid: int) -> list[int]:
    """A process's children."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in listed.split()]


def command_of(pid: int) -> str:
    """What a child of the daemon does: the last part of its module's name."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    named = [words[at + 1].decode() for at, word in enumerate(words[:-1]) if word == b"-m"]
    return named[0].split(".")[-1] if named else "child"


def judged(samples: list[int]) -> dict[str, float | bool]:
    """Whether memory stayed flat after the first quarter."""
    tenth = max(1, len(samples) // 10)
    quarter = len(samples) // 4
    first = statistics.median(samples[quarter : quarter + tenth])
    last = statistics.median(samples[-tenth:])
    return {
        "first_mib": round(first / MIB, 2),
        "last_mib": round(last / MIB, 2),
        "most_mib": round(max(samples) / MIB, 2),
        "flat": last <= first * (1 + FLAT_SHARE) + FLAT_BYTES,
    }


def everything_on(stack: ExitStack, schedulers: int) -> tuple[list[str], int]:
    """A daemon's flags with all of it on, and the port of its metrics. Each scheduler's events have
    ports of their own."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treecored-soak-")))
    tier = stack.enter_context(tempfile.TemporaryDirectory(prefix="treecored-", dir=MEMORY))
    events = free_ports(PORTS_EACH * schedulers + 1)
    metrics = events + PORTS_EACH * schedulers
    flags = ["--host-keep", "--host-dir", tier]
    flags += ["--access-log", str(folder / "log"), "--access-log-size", "16MiB"]
    flags += ["--kv-events", f"tcp://127.0.0.1:{events}", "--metrics", f"127.0.0.1:{metrics}"]
    return flags, metrics


def soak(stack: ExitStack, seconds: float, every: float, share: float, warm: int) -> dict[str, Any]:
    """Run it; what was done, what memory was, and what did not hold."""
    flags, _ = everything_on(stack, len(MODES))
    daemon = stack.enter_context(Daemon(*flags, host_tier=SHAPES["tiny"].host_tier))
    command = [sys.executable, "-m", "benchmarks.bench_soak", "--serve", str(daemon.runtime_dir)]
    clients = [
        stack.enter_context(Contestant([*command, f"{mode}-{number}", mode]))
        for number, mode in enumerate(MODES)
    ]
    watched = {"daemon": daemon.process.pid}
    for number, (client, mode) in enumerate(zip(clients, MODES, strict=True)):
        process: Any = client.tell("pid")
        watched[f"{mode} scheduler {number}"] = process
    for child in below(daemon.process.pid):
        watched[command_of(child)] = child
    samples: dict[str, list[int]] = {name: [] for name in watched}
    warmed = 0
    while warmed < warm:
        for client in clients:
            client.say("work", every, 1.0)
        warmed = sum(client.hear()["requests"] for client in clients)  # type: ignore[call-overload]
    before = {name: cpu_s(pid) for name, pid in watched.items()}
    begun, done = time.monotonic(), []
    # The daemon and its children take about as much as the schedulers do.
    each = share / (2 * len(clients))
    while time.monotonic() - begun < seconds:
        for client in clients:
            client.say("work", every, each)
        done = [client.hear() for client in clients]
        for name, pid in watched.items():
            samples[name].append(resident(pid))
    passed = time.monotonic() - begun
    return {
        "seconds": round(passed),
        "warm_requests": warmed,
        "core_share": {
            name: round((cpu_s(pid) - before[name]) / passed, 3) for name, pid in watched.items()
        },
        "memory": {name: judged(taken) for name, taken in samples.items()},
        "samples": samples,
        "schedulers": done,
        "problems": [problem for client in clients for problem in client.tell("check")],
    }


def main() -> int:
    """Run, print, write; exit status 1 where memory grew, a page was wrong or nothing was done."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_soak")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=1_800.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--share", type=float, default=0.25, help="of a core, all together")
    parser.add_argument("--warm", type=int, default=60_000, help="requests before it begins")
    parser.add_argument("--serve", nargs="+", metavar="WORD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return 0
    document: dict[str, Any] = heading("python -m benchmarks.bench_soak")
    with ExitStack() as stack:
        document |= soak(stack, options.seconds, options.every, options.share, options.warm)
    write_json(options.json, document)
    rows = [
        [name, f["first_mib"], f["last_mib"], f["most_mib"], document["core_share"][name]]
        for name, f in document["memory"].items()
    ]
    print(table(["process", "MiB after a quarter", "at the end", "at most", "of a core"], rows))
    total = {name: sum(one[name] for one in document["schedulers"]) for name in ("requests", "own")}
    total |= {key: sum(one[key] for one in document["schedulers"]) for key in FURTHER}
    print(f"\n{document['seconds']} s: {total}; problems: {document['problems'] or 'none'}")
    grown = [name for name, judgement in document["memory"].items() if not judgement["flat"]]
    if grown:
        print(f"not flat: {', '.join(grown)}")
    bad = total["wrong"] + total["errors"] + len(document["problems"]) + len(grown)
    return int(bad > 0 or not total["restored"])


FURTHER: Final = ("restored", "wrong", "errors")

if __name__ == "__main__":
    sys.exit(main())
