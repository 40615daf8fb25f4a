"""How fast is everything back after a death? `python -m benchmarks.bench_recovery --json FILE`

Real daemons, real schedulers, SIGKILL. Owns the four questions and their targets:

- a scheduler is killed with leases and a restore under way: until the daemon has nothing of it;
- the daemon is killed: until the first answer out of the scheduler's mirror;
- a daemon starts on a full host tier: until the first page of it is restored, and how many came
  back;
- the daemon is restarted under a scheduler with a full pool: until it knows the whole pool again,
  and how long the scheduler's ticks take meanwhile, beside the same scheduler idle: after each
  return for as many ticks as it took, so that both had the same machine and as many chances of a
  tick that is long for no reason of theirs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from benchmarks.recovery_node import (
    PAGE_SIZE,
    VICTIM_BYTES_PER_TOKEN,
    VICTIM_PAGES,
    Node,
    Nursery,
    Ticks,
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
KIND_LIMITS: Final = {
    "scheduler_gone_ms_p99": 100.0,
    "warm_hit_s": 5.0,
    "republish_s": 2.0,
    "tick_ms_p999": 5.0,
}
PAGES_BACK_MIN: Final = 0.999
TICK_TIMES_CONTROL_MAX: Final = 3.0


class Results(msgspec.Struct, frozen=True):
    """What `--json` writes. `warm_hit_s`, `mirror_answer_ms`, `republish_s`: the longest
    of all rounds; ticks are those of all rounds together; `cpu`: what the scheduler's thread had of
    a core in them."""

    scheduler_gone_ms_p99: float
    mirror_answer_ms: float
    deadline_ms: float
    warm_hit_s: float
    pages_back: float
    republish_s: float
    tick_ms_p999: float
    tick_ms_max: float
    control_tick_ms_p999: float
    control_tick_ms_max: float
    tick_cpu_ms_p999: float
    tick_cpu_ms_max: float
    control_tick_cpu_ms_p999: float
    control_tick_cpu_ms_max: float
    tick_ms_p50: float
    control_tick_ms_p50: float
    tick_longest_ms: tuple[float, ...]
    control_tick_longest_ms: tuple[float, ...]
    mirror_answer_hung_ms: float
    scheduler_gone_ms_p50: float
    scheduler_kills: int
    mirror_rounds: int
    warm_starts_s: tuple[float, ...]
    warm_ready_s: tuple[float, ...]
    host_tier_bytes: int
    host_page_bytes: int
    host_pages: int
    pool_pages: int
    pool_spans: int
    republications_s: tuple[float, ...]
    ticks: int
    control_ticks: int


class Target(NamedTuple):
    """One line of the verdict."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def scheduler_deaths(folder: Path, kills: int) -> list[float]:
    """Milliseconds from SIGKILL until leases, copies and residency of the dead are gone."""
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
            for number in range(kills):
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
    return gone_ms


def mirror_answers(folder: Path, rounds: int, deadlines: Deadlines) -> tuple[list[float], float]:
    """Milliseconds from the daemon's SIGKILL to an answer from the mirror, of each round, and from
    its SIGSTOP (it lives and says nothing)."""
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
        for number in range(rounds):
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
    return answers_ms, hung_ms


class WarmStarts(NamedTuple):
    """Seconds from the start of a daemon's process until it was ready, and until the first warm
    page was in a pool; the least share of pages that was back; pages."""

    ready_s: list[float]
    hit_s: list[float]
    pages_back: float
    pages: int


def warm_starts(folder: Path, tier_bytes: int, page_bytes: int, rounds: int) -> WarmStarts:
    """Fill a host tier, kill its daemon, and see how soon the next one serves out of it."""
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
        for number in range(rounds):
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
    return WarmStarts(ready_s, hit_s, back, wanted)


def _chain(number: int) -> bytes:
    return tokens(1_000_000 + number, CHAIN_PAGES)


class Republication(NamedTuple):
    """Seconds from a new daemon's readiness until it knows the pool, and the ticks, of each
    round."""

    seconds: list[float]
    ticks: list[Ticks]
    control: list[Ticks]
    spans: int


def republication(folder: Path, pool_pages: int, rounds: int) -> Republication:
    """Restart the daemon under a scheduler whose pool is full, so many times."""
    seconds: list[float] = []
    ticks: list[Ticks] = []
    control: list[Ticks] = []
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
        for number in range(1, rounds + 1):
            daemon.kill()
            node.until(lambda: node.scheduler.client is None)
            daemon.begin()
            while not daemon.ready():
                node.tick()
            node.take_ticks()
            began = time.perf_counter()
            node.until(lambda: node.at_home and not node.unacknowledged)
            seconds.append(time.perf_counter() - began)
            ticks.append(node.take_ticks())
            if node.scheduler.counters["spans_republished"] < number * chats * CHAT_TURNS:
                raise AssertionError(f"not all was republished: {node.scheduler.counters}")
            # The control: the same scheduler beside the same daemon, with nothing to do.
            at_rest(node)
            node.take_ticks()
            node.until(lambda: len(node.ticks.wall_us) == len(ticks[-1].wall_us))
            control.append(node.take_ticks())
        node.close()
    return Republication(seconds, ticks, control, chats * CHAT_TURNS)


def at_rest(node: Node) -> None:
    """Tick until the daemon has nothing to do for the scheduler any more."""
    node.until(lambda: not node.stats()["backups_waiting"])
    node.until(lambda: not node.stats()["copies_in_flight"])


def measure(options: argparse.Namespace) -> Results:
    """Ask all four questions, one after the other."""
    deadlines = Deadlines()
    with tempfile.TemporaryDirectory(prefix="tc-") as name:
        folders = [Path(name) / letter for letter in "abcd"]
        for folder in folders:
            folder.mkdir()
        say("scheduler deaths")
        gone_ms = scheduler_deaths(folders[0], options.kills)
        say("answers of the mirror")
        answers_ms, hung_ms = mirror_answers(folders[1], options.rounds, deadlines)
        say("republication")
        again = republication(folders[2], options.pool_pages, options.returns)
        say("warm starts")
        warm = warm_starts(
            folders[3], int(options.tier_gib * GIB), options.page_bytes, options.warm_rounds
        )
    ticks_us = [took for of_round in again.ticks for took in of_round.wall_us]
    control_us = [took for of_round in again.control for took in of_round.wall_us]
    cpu_us = [took for of_round in again.ticks for took in of_round.cpu_us]
    control_cpu_us = [took for of_round in again.control for took in of_round.cpu_us]
    return Results(
        scheduler_gone_ms_p99=percentile(gone_ms, 99),
        mirror_answer_ms=max(answers_ms),
        deadline_ms=float(deadlines.match_ms or deadlines.call_ms),
        warm_hit_s=max(warm.hit_s),
        pages_back=warm.pages_back,
        republish_s=max(again.seconds),
        republications_s=tuple(again.seconds),
        tick_ms_p999=percentile(ticks_us, 99.9) / 1e3,
        tick_ms_max=max(ticks_us) / 1e3,
        control_tick_ms_p999=percentile(control_us, 99.9) / 1e3,
        control_tick_ms_max=max(control_us) / 1e3,
        tick_cpu_ms_p999=percentile(cpu_us, 99.9) / 1e3,
        tick_cpu_ms_max=max(cpu_us) / 1e3,
        control_tick_cpu_ms_p999=percentile(control_cpu_us, 99.9) / 1e3,
        control_tick_cpu_ms_max=max(control_cpu_us) / 1e3,
        tick_ms_p50=percentile(ticks_us, 50) / 1e3,
        control_tick_ms_p50=percentile(control_us, 50) / 1e3,
        tick_longest_ms=tuple(max(of_round.wall_us) / 1e3 for of_round in again.ticks),
        control_tick_longest_ms=tuple(max(of_round.wall_us) / 1e3 for of_round in again.control),
        mirror_answer_hung_ms=hung_ms,
        scheduler_gone_ms_p50=percentile(gone_ms, 50),
        scheduler_kills=len(gone_ms),
        mirror_rounds=len(answers_ms),
        warm_starts_s=tuple(warm.hit_s),
        warm_ready_s=tuple(warm.ready_s),
        host_tier_bytes=int(options.tier_gib * GIB),
        host_page_bytes=options.page_bytes,
        host_pages=warm.pages,
        pool_pages=options.pool_pages,
        pool_spans=again.spans,
        ticks=len(ticks_us),
        control_ticks=len(control_us),
    )


def targets(found: Results) -> list[Target]:
    """Every target beside what was measured."""
    lines = [Target(name, getattr(found, name), limit) for name, limit in KIND_LIMITS.items()]
    lines.append(Target("mirror_answer_ms", found.mirror_answer_ms, found.deadline_ms))
    lines.append(Target("pages_back", found.pages_back, PAGES_BACK_MIN, at_least=True))
    limit = TICK_TIMES_CONTROL_MAX * found.control_tick_ms_max
    lines.append(Target("tick_ms_max", found.tick_ms_max, limit))
    return lines


def say(what: str) -> None:
    """What is being measured now, for whoever waits."""
    sys.stderr.write(f"bench_recovery: {what}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print every target, write the JSON; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_recovery")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--kills", type=int, default=100, help="schedulers to be killed")
    parser.add_argument("--rounds", type=int, default=10, help="daemons to be killed")
    parser.add_argument("--tier-gib", type=float, default=10.0, help="host tier, GiB")
    parser.add_argument("--page-bytes", type=int, default=64 * 1024, help="bytes of its pages")
    parser.add_argument("--warm-rounds", type=int, default=3, help="starts on the full tier")
    parser.add_argument("--pool-pages", type=int, default=POOL_PAGES, help="to be republished")
    parser.add_argument("--returns", type=int, default=5, help="restarts under a full pool")
    options = parser.parse_args(arguments)
    room, wanted = available_bytes(), int(options.tier_gib * GIB * 9 / 8)
    if room is not None and room < wanted:
        parser.error(f"{wanted:,} bytes of memory are needed, {room:,} are there: see --tier-gib")
    found = measure(options)
    facts = heading("python -m benchmarks.bench_recovery")
    print(f"commit {facts['commit']}, {facts['date']}, {facts['machine']}")
    lines = targets(found)
    for line in lines:
        sign = ">=" if line.at_least else "<="
        verdict = "pass" if line.met else "FAIL"
        print(f"{verdict}  {line.name:24} {line.value:10.4g}  {sign} {line.limit:.4g}")
    most = f"{found.tick_cpu_ms_max:.4g} ms, of the control's {found.control_tick_cpu_ms_max:.4g}"
    print(f"      the most that a tick had of a core: {most}")
    met = {line.name: line.met for line in lines}
    write_json(options.json, {**facts, **msgspec.structs.asdict(found), "targets_met": met})
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
