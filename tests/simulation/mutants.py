"""`python -m tests.simulation.mutants`: plant deliberate bugs and see that they are found.

Owns the hunt, the record of how each mutant was found (`mutant_seeds.txt`) and the table made of
it in docs/simulation.md. A mutant that survives its seeds is a missing checker: exit 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from tests.simulation.mutants_edges import EDGES
from tests.simulation.mutants_ends import ENDS
from tests.simulation.mutants_journal import JOURNAL
from tests.simulation.mutants_pools import POOLS
from tests.simulation.mutants_seams import Mutant
from tests.simulation.mutants_tree import TREE
from tests.simulation.mutants_wire import WIRE

MUTANTS: Final = (*TREE, *POOLS, *ENDS, *EDGES, *WIRE, *JOURNAL)
BY_NAME: Final = {mutant.name: mutant for mutant in MUTANTS}

ROOT: Final = Path(__file__).parents[2]
RECORD: Final = Path(__file__).with_name("mutant_seeds.txt")
DOCUMENT: Final = ROOT / "docs" / "simulation.md"
BEGIN: Final = "<!-- mutants:begin -->"
END: Final = "<!-- mutants:end -->"

SAID: Final = {
    "Diverging": "lockstep",
    "InternalError": "mirror (`InternalError`)",
    "BadMessage": "mirror (`BadMessage`)",
    "KeyError": "crash",
}
"""What the names of exceptions mean to a reader."""

NOTES: Final = """\
Pinned: what every seed of a mutant is given beside what it draws. Seeds are counted from 0.

Not in the table, because nothing that happens tells them from the right thing: a client that does
not look at a reply's epoch (a boot says nothing but `stale_epoch` to it, which ends the client as
well), words that are not compared before a copy (they are afterwards), and a merge that ignores
lock counts alone (they differ only where a lease ends, and that bars the merge already).

Nor is one that the simulation was not seen to reach within 60 seeds of slow ranks: copies that a
group overtook and that count (docs/adr/0001). tests/unit/directory/core/test_group_copies.py plays
its schedule step by step.
"""

SEEDS_MAX: Final = 400
FURTHER_SEEDS: Final = 6
"""Seeds run beyond the first that finds a mutant, to see which checkers else do."""


class Kill(NamedTuple):
    """How a mutant was found: by the first seed that found it, and by which checkers."""

    name: str
    seed: int
    checkers: tuple[str, ...]

    @property
    def seeds(self) -> int:
        """How many seeds from 0 on it took."""
        return self.seed + 1

    def __str__(self) -> str:
        return f"{self.name} -> {', '.join(self.checkers)} -> {self.seeds}"


class UncleanSeed(Exception):
    """A seed fails without the bug as well: it found something real, not the mutant."""


def hunt(mutant: Mutant, seeds: Iterable[int], further: int = 0) -> Kill | None:
    """Run seeds until one finds the mutant, then some more; None: it survived them all.

    Raises `UncleanSeed` where the same seed without the bug is not clean.
    """
    checkers: dict[str, None] = {}
    first: int | None = None
    for seed in seeds:
        if first is not None:
            if not further:
                break
            further -= 1
        result = mutant.run(seed)
        if result.problem:
            clean = mutant.run_clean(seed)
            if clean.problem:
                raise UncleanSeed(f"{mutant.name}, seed {seed}, without the bug: {clean.problem}")
            first = seed if first is None else first
            checkers[result.checker] = None
    return None if first is None else Kill(mutant.name, first, tuple(checkers))


# The record and the document.


def recorded() -> dict[str, Kill]:
    """The record, by mutant."""
    kills = {}
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, seed, checkers = line.split(maxsplit=2)
            kills[name] = Kill(name, int(seed), tuple(checkers.split(", ")))
    return kills


def record(kills: Iterable[Kill]) -> None:
    """Write the record."""
    lines = ["# Mutant, first seed that finds it, checkers. `--write` makes this file anew."]
    lines += [f"{kill.name} {kill.seed} {', '.join(kill.checkers)}" for kill in kills]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


def table(kills: Iterable[Kill]) -> str:
    """The table of the document."""
    lines = ["| mutant | what is wrong | checker | seeds needed | pinned |", "|" + " --- |" * 5]
    for kill in kills:
        mutant = BY_NAME[kill.name]
        checkers = ", ".join(SAID.get(name, name) for name in kill.checkers)
        cells = (f"`{kill.name}`", mutant.what, checkers, str(kill.seeds), mutant.pinned())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{NOTES}"


def documented(text: str, kills: Iterable[Kill]) -> str:
    """A document's text with the table between its markers, which are added where missing."""
    if BEGIN not in text:
        text = (text or "# Simulation\n") + f"\n## Mutants\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{DOCUMENT.name} has {BEGIN} but not {END}")
    return f"{before}{BEGIN}\n\n{table(kills)}\n{END}{after}"


# The command.


def say(text: str) -> None:
    """Write a line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Hunt every mutant, or one."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants")
    parser.add_argument("--only", action="append", choices=list(BY_NAME), metavar="NAME")
    parser.add_argument("--seeds-max", type=int, default=SEEDS_MAX)
    parser.add_argument("--seed", type=int, help="run this seed only and print what was found")
    parser.add_argument("--write", action="store_true", help="write the record and the table")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    chosen = parser.parse_args(arguments)
    mutants = [BY_NAME[name] for name in chosen.only or BY_NAME]
    if chosen.seed is not None:
        return _show(mutants, chosen.seed)
    seeds = range(chosen.seeds_max)
    if chosen.jobs > 1:
        kills = _shared(mutants, chosen.jobs, chosen.seeds_max)
    else:
        kills = {}
        for mutant in mutants:
            kill = hunt(mutant, seeds, FURTHER_SEEDS)
            if kill is None:
                say(f"{mutant.name} SURVIVED {len(seeds)} seeds: {mutant.what}")
            else:
                kills[mutant.name] = kill
                say(str(kill))
    if chosen.write:
        known = {**(recorded() if RECORD.exists() else {}), **kills}
        ordered = [known[name] for name in BY_NAME if name in known]
        record(ordered)
        text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
        DOCUMENT.write_text(documented(text, ordered), encoding="utf-8")
    survivors = [mutant.name for mutant in mutants if mutant.name not in kills]
    say(f"{len(kills)} of {len(mutants)} mutants found, survivors: {survivors or 'none'}")
    return int(bool(survivors))


def _show(mutants: list[Mutant], seed: int) -> int:
    missed = 0
    for mutant in mutants:
        result = mutant.run(seed)
        missed += not result.problem
        say(f"{mutant.name}, seed {seed}, {result.events} events: {result.problem or 'not found'}")
    return int(missed > 0)


def _shared(mutants: list[Mutant], jobs: int, seeds_max: int) -> dict[str, Kill]:
    """Share the mutants out to processes; what they print is the result."""
    children = []
    for job in range(min(jobs, len(mutants))):
        command = [sys.executable, "-m", "tests.simulation.mutants"]
        command += ["--seeds-max", str(seeds_max)]
        for mutant in mutants[job::jobs]:
            command += ["--only", mutant.name]
        children.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    kills = {}
    for child in children:
        said, _ = child.communicate()
        sys.stdout.write(said)
        if child.returncode not in (0, 1):
            raise SystemExit(child.returncode)
        for line in said.splitlines():
            parts = line.split(" -> ")
            if len(parts) == 3:
                kills[parts[0]] = Kill(parts[0], int(parts[2]) - 1, tuple(parts[1].split(", ")))
    return kills


if __name__ == "__main__":
    raise SystemExit(main())
