"""What do a scheduler's loop and a request's life cost its thread, beside SGLang's own trees?

    python -m benchmarks.bench_turn --json FILE [--beside FOLDER]

Real caches of SGLang's on the CPU without an engine, each in a process of its own; `mirrored` and
`thin` with a daemon each in another one. Processor time, in us:

- `loop N`: both hooks of a loop beside N running requests, nothing new, nobody in
  the queue; `queue N`: the same with N requests that wait for room (stock has no hooks);
- `hit`, `new`: a request of 8,192 cached tokens, without and with 1,024 more: until it may be
  admitted (`seen`), its match, its lock and admission, what is stored of it, its end.

`--beside`: another checkout, measured in the same rounds. Rounds are interleaved; the lowest round
counts as well as the median, because others use the machine, too. Needs SGLang's environments
(`make sglang-envs`).
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.contestants import ENVIRONMENTS, ROOT, STOCK, Contestant, stock_versions
from benchmarks.node import Daemon
from benchmarks.report import Summary, heading, summarise, table, write_json

PAGE: Final = 16
TOKENS: Final = 8_192
LOOPS: Final = ("loop 1", "loop 64", "loop 256", "queue 16", "queue 128")
LIVES: Final = ("hit", "new")
STEPS: Final = ("seen", "match", "lock", "store", "end")
OURS: Final = ("mirrored", "thin")


class Side(NamedTuple):
    """One cache of one checkout: `before` is the one that stands beside."""

    version: str
    kind: str
    before: bool

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.kind}, before" if self.before else self.kind


def started(side: Side, stack: ExitStack, root: Path) -> Contestant:
    """Its process, with a cache made."""
    path = os.pathsep.join([str(root / "tests" / "sglang" / "stubs"), str(root)])
    python = str(ENVIRONMENTS / side.version / "bin" / "python")
    contestant = stack.enter_context(
        Contestant([python, "-P", "-m", "benchmarks.sglang_turn"], {"PYTHONPATH": path})
    )
    daemon = stack.enter_context(Daemon()) if side.kind in OURS else None
    folder = str(daemon.runtime_dir) if daemon is not None else ""
    contestant.tell("build", side.kind, PAGE, TOKENS, folder)
    return contestant


def measured(side: Side, contestant: Contestant, times: int) -> dict[str, float]:
    """Medians of one round, by case; of lives by step, and in all."""
    found: dict[str, float] = {}
    for case in LOOPS if side.kind in OURS else ():
        found[case] = statistics.median(contestant.tell("run", case, times))
    for case in LIVES:
        taken = contestant.tell("run", case, times)
        for at, step in enumerate(STEPS):
            found[f"{case} {step}"] = statistics.median(taken[at :: len(STEPS)])
        found[case] = sum(found[f"{case} {step}"] for step in STEPS)
    return found


def sides(versions: list[str], beside: bool, kinds: list[str] | None) -> list[Side]:
    """Everything that is measured."""
    found: list[Side] = []
    for version in versions:
        found += [Side(version, kind, False) for kind in (*STOCK[version], *OURS)]
        found += [Side(version, kind, True) for kind in OURS if beside]
    return [side for side in found if not kinds or side.kind in kinds]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_turn")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=9, help="lives, and loops by 50, a round")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--versions", nargs="*", default=None)
    parser.add_argument("--kinds", nargs="*", default=None)
    options = parser.parse_args()
    document: dict[str, Any] = heading("python -m benchmarks.bench_turn")
    document |= {"page": PAGE, "tokens": TOKENS, "unit": "us", "turns": {}}
    versions = options.versions or stock_versions()
    taken: dict[Side, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        made: dict[Side, Contestant] = {}
        for side in sides(versions, options.beside is not None, options.kinds):
            made[side] = started(side, stack, options.beside if side.before else ROOT)
        for turn in range(options.rounds + 1):
            for side, contestant in made.items():
                found = measured(side, contestant, options.times)
                if turn:
                    taken.setdefault(side, []).append(found)
    for version in dict.fromkeys(side.version for side in taken):
        here = [side for side in taken if side.version == version]
        names = list(dict.fromkeys(case for side in here for case in taken[side][0]))
        rows: list[list[object]] = []
        for case in names:
            row: list[object] = [version, case]
            for side in here:
                if case not in taken[side][0]:
                    row.append("")
                    continue
                figure: Summary = summarise([found[case] for found in taken[side]])
                entry = document["turns"].setdefault(version, {}).setdefault(side.name, {})
                entry[case] = figure.as_json()
                row.append(f"{figure.median:.1f} ({figure.low:.1f})")
            rows.append(row)
        print(table(["sglang", "case", *(side.name for side in here)], rows))
    write_json(options.json, document)


if __name__ == "__main__":
    main()
