"""How fast is everything back after a death? `python -m benchmarks.bench_recovery --json FILE`

Real daemons, real schedulers, SIGKILL. Owns the four questions and their targets:

- a scheduler is killed with leases and a restore under way: until the daemon has nothing of it;
- the daemon is killed: until the first answer out of the scheduler's mirror;
- a daemon starts on a full host tier: until the first page of it is restored, and how many came
  back;
- the daemon is restarted under a scheduler with a full pool: until it knows the whole pool again,
  and how long the scheduler's ticks take meanwhile, beside the same scheduler idle: after each
  return for as many ticks as it took and at least as long, so that both had the same machine and as
  many chances of a tick that is long for no reason of theirs.

`--only QUESTION` asks one of them; the figures and targets of the others are left out.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.recovery_figures import Deaths, Mirror, Returns, Round, WarmStarts, returns
from benchmarks.recovery_node import (
    PAGE_SIZE,
    VICTIM_BYTES_PER_TOKEN,
    VICTIM_PAGES,
    Node,
    Nursery,
    stolen_ms,
    tokens,
)
from benchmarks.report import heading, percentile, write_json
from directory.cli.served import ServedDaemon
from directory.daemon.memory import available_bytes
from scheduler_shim.deadlines import Deadlines

GIB: Final = 1 << 30
MIB: Final = 1 << 20
CHAIN_PAGES: Final = 128
"""Pages of a prompt that fills the host tier."""
POOL_PAGES: Final = 100_000
CHAT_TURNS: Final = 5
TURN_PAGES: Final = 20
"""The pool to be republished holds chats: each turn is one report."""

Figures = Deaths | Mirror | WarmStarts | Returns


def scheduler_deaths(folder: Path, options: argparse.Namespace) -> Deaths:
    """Kill schedulers, and see when leases, copies and residency of the dead are gone."""
    gone_ms: list[float] = []
    with ServedDaemon(folder, host_bytes=64 * MIB, segment_bytes=MIB, keep=False) as daemon:
        daemon.start()
        watcher = Node(
            daemon.runtime_dir,
            "watcher",
            page_count=VICTIM_PAGES,
            bytes_per_token=VICTIM_BYTES_PER_TOKEN,
        )
        watcher.serve(tokens(1, VICTIM_PAGES // 4))
        watcher.until(lambda: watcher.stats()["host_pages"] == VICTIM_PAGES // 4)
        nursery = Nursery(daemon.runtime_dir)
        try:
            for number in range(options.kills):
                pid = nursery.victim(f"victim-{number}")
                before = watcher.stats()
                if before["pools"] != 2 or not before["leases"]:
                    raise AssertionError(f"the victim is not as wanted: {before}")
                began = time.perf_counter()
                os.kill(pid, signal.SIGKILL)
                while True:
                    now = watcher.stats()
                    took_ms = (time.perf_counter() - began) * 1e3
                    if now["pools"] == 1 and not now["leases"] and not now["copies_in_flight"]:
                        break
                    if took_ms > 10_000:
                        raise TimeoutError(f"the dead scheduler is still there: {now}")
                gone_ms.append(took_ms)
        finally:
            nursery.close()
            watcher.close()
    return Deaths(percentile(gone_ms, 99), percentile(gone_ms, 50), len(gone_ms))


def mirror_answers(folder: Path, options: argparse.Namespace) -> Mirror:
    """Kill the daemon, and see when the mirror answers; then stop it, so that it lives and says
    nothing."""
    deadlines = Deadlines()
    answers_ms: list[float] = []
    with ServedDaemon(folder, host_bytes=64 * MIB, segment_bytes=MIB, keep=False) as daemon:
        daemon.start()
        node = Node(
            daemon.runtime_dir,
            "scheduler",
            page_count=512,
            bytes_per_token=256,
            deadlines=deadlines,
        )
        # What lies beyond the own pool is asked of the daemon, so each prompt has something new.
        known = tokens(2, 128)
        node.serve(known)
        for number in range(options.rounds):
            began = time.perf_counter()
            daemon.kill()
            (record,) = node.serve(known + tokens(100 + number, 2))
            answers_ms.append((time.perf_counter() - began) * 1e3)
            if record.own_pages < 128:
                raise AssertionError(f"the mirror did not answer: {record}")
            daemon.start()
            node.until(lambda: node.at_home)
        daemon.signal(signal.SIGSTOP)
        began = time.perf_counter()
        node.serve(known + tokens(99, 2))
        hung_ms = (time.perf_counter() - began) * 1e3
        daemon.signal(signal.SIGCONT)
        node.close()
    deadline_ms = float(deadlines.match_ms or deadlines.call_ms)
    return Mirror(max(answers_ms), hung_ms, deadline_ms, len(answers_ms))


def warm_starts(folder: Path, options: argparse.Namespace) -> WarmStarts:
    """Fill a host tier, kill its daemon, and see how soon the next one serves out of it."""
    tier_bytes, page_bytes = int(options.tier_gib * GIB), options.page_bytes
    per_token = page_bytes // PAGE_SIZE
    wanted = tier_bytes // page_bytes // CHAIN_PAGES * CHAIN_PAGES
    chains = wanted // CHAIN_PAGES
    room = min(max(64 * MIB // page_bytes, 4 * CHAIN_PAGES), wanted)
    ready_s: list[float] = []
    hit_s: list[float] = []
    back = 1.0
    segment = min(64 * MIB, tier_bytes)
    with ServedDaemon(folder, host_bytes=tier_bytes, segment_bytes=segment) as daemon:
        daemon.start()
        node = Node(daemon.runtime_dir, "filler", page_count=room, bytes_per_token=per_token)
        for chain in range(chains):
            node.serve(_chain(chain))
            # A page that its pool gives up before it was copied is not in the tier.
            said = (chain + 1) * CHAIN_PAGES
            node.until(lambda said=said: node.stats()["host_pages"] == said)  # type: ignore[misc]
        node.close()
        for number in range(options.warm_rounds):
            daemon.kill()
            began = time.perf_counter()
            daemon.start()
            ready_s.append(time.perf_counter() - began)
            reader = Node(
                daemon.runtime_dir, f"r{number}", page_count=512, bytes_per_token=per_token
            )
            (record,) = reader.serve(_chain((number * 7919) % chains) + tokens(number, 1))
            hit_s.append(time.perf_counter() - began)
            if record.host_pages != CHAIN_PAGES or record.verified != CHAIN_PAGES:
                raise AssertionError(f"no warm hit: {record}")
            back = min(back, reader.stats()["host_pages_recovered"] / wanted)
            reader.close()
    return WarmStarts(
        max(hit_s), back, tuple(hit_s), tuple(ready_s), tier_bytes, page_bytes, wanted
    )


def _chain(number: int) -> bytes:
    return tokens(1_000_000 + number, CHAIN_PAGES)


def republication(folder: Path, options: argparse.Namespace) -> Returns:
    """Restart the daemon under a scheduler whose pool is full, so many times."""
    pool_pages = options.pool_pages
    rounds: list[Round] = []
    controls: list[Round] = []
    per_token = 4
    tier = 2 * pool_pages * PAGE_SIZE * per_token
    with ServedDaemon(folder, host_bytes=tier, segment_bytes=4 * MIB) as daemon:
        daemon.start()
        node = Node(
            daemon.runtime_dir,
            "scheduler",
            page_count=pool_pages + 1_000,
            bytes_per_token=per_token,
        )
        chats = pool_pages // (CHAT_TURNS * TURN_PAGES)
        for turn in range(CHAT_TURNS):
            for chat in range(chats):
                whole = tokens(5_000_000 + chat, CHAT_TURNS * TURN_PAGES)
                node.serve(whole[: 4 * PAGE_SIZE * TURN_PAGES * (turn + 1)])
        at_rest(node)
        node.settle_memory()
        for number in range(1, options.returns + 1):
            daemon.kill()
            node.until(lambda: node.scheduler.client is None)
            daemon.begin()
            while not daemon.ready():
                node.tick()
            back = a_round(node, lambda _: node.at_home and not node.unacknowledged)
            rounds.append(back)
            if node.scheduler.counters["spans_republished"] < number * chats * CHAT_TURNS:
                raise AssertionError(f"not all was republished: {node.scheduler.counters}")
            at_rest(node)
            controls.append(a_round(node, as_much_as(node, back)))
        node.close()
    return returns(rounds, controls, pages=pool_pages, spans=chats * CHAT_TURNS)


def a_round(node: Node, over: Callable[[float], bool]) -> Round:
    """Tick until it is over; that is asked with how many seconds it has taken until then."""
    node.take_ticks()
    stolen, began = stolen_ms(), time.perf_counter()
    node.until(lambda: over(time.perf_counter() - began))
    return Round(time.perf_counter() - began, node.take_ticks(), stolen_ms() - stolen)


def as_much_as(node: Node, other: Round) -> Callable[[float], bool]:
    """Whether the node has had as many ticks as in another round, and as much time. The control is
    the same scheduler beside the same daemon, with nothing to do: what the machine does to a tick
    may well meet one of it that met the other."""
    ticks, seconds = len(other.ticks.wall_us), other.seconds
    return lambda took: len(node.ticks.wall_us) >= ticks and took >= seconds


def at_rest(node: Node) -> None:
    """Tick until the daemon has nothing to do for the scheduler any more."""
    node.until(lambda: not node.stats()["backups_waiting"])
    node.until(lambda: not node.stats()["copies_in_flight"])


QUESTIONS: Final[dict[str, Callable[[Path, argparse.Namespace], Figures]]] = {
    "deaths": scheduler_deaths,
    "mirror": mirror_answers,
    "republish": republication,
    "warm": warm_starts,
}


def wanted(options: argparse.Namespace) -> list[str]:
    """The questions to be asked, in the order in which they always are."""
    return [question for question in QUESTIONS if question in (options.only or QUESTIONS)]


def measure(options: argparse.Namespace) -> list[Figures]:
    """Ask the questions that are wanted, one after the other."""
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="tc-") as name:
        for question in wanted(options):
            folder = Path(name) / question
            folder.mkdir()
            say(question)
            found.append(QUESTIONS[question](folder, options))
    return found


def say(what: str) -> None:
    """What is being measured now, for whoever waits."""
    sys.stderr.write(f"bench_recovery: {what}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print every target, write the JSON; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_recovery")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(QUESTIONS),
        help="ask this question only; may be given several times",
    )
    parser.add_argument("--kills", type=int, default=100, help="schedulers to be killed")
    parser.add_argument("--rounds", type=int, default=10, help="daemons to be killed")
    parser.add_argument("--tier-gib", type=float, default=10.0, help="host tier, GiB")
    parser.add_argument("--page-bytes", type=int, default=64 * 1024, help="bytes of its pages")
    parser.add_argument("--warm-rounds", type=int, default=3, help="starts on the full tier")
    parser.add_argument("--pool-pages", type=int, default=POOL_PAGES, help="to be republished")
    parser.add_argument("--returns", type=int, default=5, help="restarts under a full pool")
    options = parser.parse_args(arguments)
    if "warm" in wanted(options):
        room, need = available_bytes(), int(options.tier_gib * GIB * 9 / 8)
        if room is not None and room < need:
            parser.error(f"{need:,} bytes of memory are needed, {room:,} are there: see --tier-gib")
    found = measure(options)
    only = [f"--only {question}" for question in wanted(options) if options.only]
    facts = heading(" ".join(["python -m benchmarks.bench_recovery", *only]))
    print(f"commit {facts['commit']}, {facts['date']}, {facts['machine']}")
    lines = [line for figures in found for line in figures.targets()]
    for line in lines:
        sign = ">=" if line.at_least else "<="
        verdict = "pass" if line.met else "FAIL"
        print(f"{verdict}  {line.name:24} {line.value:10.4g}  {sign} {line.limit:.4g}")
    for figures in found:
        if isinstance(figures, Returns):
            print(*figures.lines(), sep="\n")
    met = {line.name: line.met for line in lines}
    values = {name: value for of in found for name, value in msgspec.structs.asdict(of).items()}
    write_json(options.json, {**facts, **values, "targets_met": met})
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
