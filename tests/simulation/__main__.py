"""`python -m tests.simulation`: run seeds, shrink a failing one, search the small scope.

Owns the command line. Exit 0 only if everything was clean; a failure prints the seed, the event,
the story and the line that reproduces it with the commit it belongs to.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from tests.simulation.exhaustive import search
from tests.simulation.options import Options, draw
from tests.simulation.regressions import Regression, load, store
from tests.simulation.shrink import shrink
from tests.simulation.simulation import Result, Simulation

ROOT = Path(__file__).parents[2]
LINES_SHOWN = 30


def commit() -> str:
    """The commit that runs, "+" behind it where files were changed; "?" outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "?"
    return found.stdout.strip()


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def describe(result: Result) -> str:
    """Everything that is needed to look into a failure."""
    seed = result.options.seed
    story = "\n".join(result.story.splitlines()[-LINES_SHOWN:])
    return (
        f"seed {seed} FAILED at event {result.events}\n{result.problem}\n"
        f"story of the directory:\n{story}\n"
        f"reproduce at commit {commit()}: python -m tests.simulation --seed {seed}"
    )


def one(options: Options, *, log: Path | None) -> int:
    """Run one seed and say all about it."""
    say(f"seed {options.seed}")
    for line in options.lines():
        say(f"  {line}")
    began = time.monotonic()
    simulation = Simulation(options, keep_log=log is not None)
    result = simulation.run()
    seconds = time.monotonic() - began
    if log is not None:
        log.write_text("\n".join(simulation.heap.lines or []) + "\n")
    for name, value in sorted(result.facts.items()):
        say(f"  {name}: {value}")
    rate = result.events / seconds if seconds else 0.0
    say(f"{result.events} events in {seconds:.2f} s, {rate:.0f} a second")
    say(f"log digest {result.digest:08x}")
    if result.problem:
        say(describe(result))
        return 1
    say("clean")
    return 0


def many(first: int, count: int, stride: int) -> int:
    """Run seeds one after another."""
    began = time.monotonic()
    events = failed = 0
    for seed in range(first, first + count * stride, stride):
        result = Simulation(draw(seed)).run()
        events += result.events
        if result.problem:
            failed += 1
            say(describe(result))
    seconds = time.monotonic() - began
    say(
        f"{count} seeds from {first}, {events} events in {seconds:.1f} s, "
        f"{events / max(seconds, 1e-9):.0f} a second, {failed} failed"
    )
    return int(failed > 0)


def parallel(first: int, count: int, jobs: int) -> int:
    """Share seeds out to processes; each prints its own failures and its sum."""
    children = []
    for job in range(jobs):
        share = len(range(job, count, jobs))
        command = [sys.executable, "-m", "tests.simulation", "--seeds", str(share)]
        command += ["--first", str(first + job), "--stride", str(jobs)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        children.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    codes = [child.wait() for child in children]
    return int(any(codes))


def smallest(options: Options, *, name: str | None) -> int:
    """Shrink a failing seed, print what is left of it, and store it if it is given a name."""
    result = Simulation(options).run()
    if not result.problem:
        say(f"seed {options.seed} is clean: there is nothing to shrink")
        return 1
    say(f"seed {options.seed} fails by {result.checker} at event {result.events}; shrinking")
    small, best, tries = shrink(options, result.checker)
    best = best or result
    for line in small.lines():
        say(f"  {line}")
    say(f"after {tries} runs: fails at event {best.events}\n{best.problem}")
    packed = msgspec.json.encode(small).decode()
    say(f"reproduce at commit {commit()}: python -m tests.simulation --options '{packed}'")
    if name is not None:
        found = best.problem.splitlines()[0]
        path = store(name, Regression(found, small, best.checker, commit()))
        say(f"stored in {path.relative_to(ROOT)}; say there what was wrong once it is known")
    return 1


def exhaust(states: int, depth: int, seconds: float, jobs: int) -> int:
    """Search the small scope and say how far it got."""
    report = search(states_max=states, depth_min=depth, seconds_max=seconds, jobs=jobs, say=say)
    how = "closed: every state was followed" if report.closed else "not closed"
    say(
        f"{report.states} states, {report.transitions} transitions, all of depth {report.depth} "
        f"reached and checked, {how}, {report.seconds:.0f} s, "
        f"{report.states / max(report.seconds, 1e-9):.0f} states a second"
    )
    if report.broken:
        say(report.broken)
        say(f"reproduce at commit {commit()}: python -m tests.simulation --exhaustive")
        return 1
    if report.closed or (report.states >= states and report.depth >= depth):
        say("clean")
        return 0
    say(f"time was over before {states} states and depth {depth}; nothing was found until then")
    return 1


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seed", type=int, help="run one seed and print its options")
    parser.add_argument("--options", help="run options given as JSON (what the shrinker prints)")
    parser.add_argument("--stored", metavar="NAME", help="run one of tests/simulation/regressions")
    parser.add_argument("--seeds", type=int, default=200, help="run so many seeds (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first seed of --seeds")
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1, help="processes for --seeds or --exhaustive")
    parser.add_argument("--steps", type=int, help="events of the safety phase at most")
    parser.add_argument("--log", type=Path, help="with --seed: write every event to a file")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="make a failing seed small")
    parser.add_argument("--store", metavar="NAME", help="with --shrink: keep it as a regression")
    parser.add_argument("--exhaustive", action="store_true", help="search the small scope")
    parser.add_argument("--states", type=int, default=1_000_000)
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.0, help="time limit of --exhaustive")
    chosen = parser.parse_args(arguments)
    if chosen.exhaustive:
        return exhaust(chosen.states, chosen.depth, chosen.seconds, chosen.jobs)
    given = (chosen.seed, chosen.shrink, chosen.options, chosen.stored)
    if all(value is None for value in given):
        if chosen.jobs > 1:
            return parallel(chosen.first, chosen.seeds, chosen.jobs)
        return many(chosen.first, chosen.seeds, chosen.stride)
    if chosen.options is not None:
        options = msgspec.json.decode(chosen.options, type=Options)
    elif chosen.stored is not None:
        options = load(chosen.stored).options
    else:
        options = draw(chosen.seed if chosen.shrink is None else chosen.shrink)
    if chosen.steps is not None:
        options = msgspec.structs.replace(options, steps_max=chosen.steps)
    if chosen.shrink is not None:
        return smallest(options, name=chosen.store)
    return one(options, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
