"""What every benchmark reports: on which machine and commit, and medians of interleaved rounds.

Owns the facts of a machine (never a name or a path of it), the summary of a row of figures, and the
JSON file. It measures nothing by itself.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

Measure = Callable[[int], Sequence[float]]
"""Carries something out so many times and returns what each time took."""


class Summary(NamedTuple):
    """Of one figure: median of the rounds' medians, the lowest and the highest of them."""

    median: float
    low: float
    high: float
    rounds: int

    def as_json(self) -> dict[str, float]:
        """Rounded to a hundredth of the unit."""
        return {
            "median": round(self.median, 2),
            "low": round(self.low, 2),
            "high": round(self.high, 2),
            "rounds": self.rounds,
        }


def summarise(figures: Sequence[float]) -> Summary:
    """Summarise the medians of several rounds."""
    return Summary(statistics.median(figures), min(figures), max(figures), len(figures))


def interleaved(
    cases: Mapping[str, Measure], *, rounds: int, times: int, warm: int = 2
) -> dict[str, Summary]:
    """Run all cases round by round, each round beginning with the next one, and summarise each.

    What the machine does meanwhile meets all cases alike. `times`: repetitions within a round, of
    which the median counts; `warm`: rounds before that, which do not.
    """
    names = list(cases)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = cases[name](times)
            if turn >= warm:
                found[name].append(statistics.median(taken))
    return {name: summarise(figures) for name, figures in found.items()}


def percentile(figures: Sequence[float], percent: float) -> float:
    """The figure that so many percent are not above."""
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def ratio(figure: Summary, base: Summary) -> float:
    """How many times the base a figure is."""
    return round(figure.median / base.median, 3)


def machine() -> dict[str, object]:
    """What ran this: cores that may be used, processor, memory, kernel, Python."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit, with a `+` where the tree differs from it; "unknown" outside of a checkout."""
    try:
        name = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}{'+' if changed else ''}"


def heading(command: str) -> dict[str, object]:
    """How a report begins."""
    return {
        "command": command,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
    }


def write_json(path: Path | None, document: Mapping[str, object]) -> None:
    """Write a report, if somebody wants it."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, as benchmarks/README.md has them; floats have one decimal."""

    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(_cell(cell) for cell in cells)} |"

    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)])


def _cell(value: object) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
