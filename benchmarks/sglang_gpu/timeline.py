"""What one request's time went into: the marks of all processes, laid side by side.

Owns the reading of mark files (transfer/ipc/marks.py) and one table: for each kind of request the
medians of how long after it was sent each step came. The client marks `ask COLUMN TOKENS` and
`told ID`; what the others marked between the two belongs to that request, backups left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from transfer.ipc.marks import SUFFIX

STEPS: Final = (
    "seen", "asked", "matched", "restore", "load", "copy", "taken", "looks", "looked", "fenced",
    "started", "first slice", "last slice", "first layer", "last layer", "done", "copied",
    "answered", "admitted", "first wait", "last wait", "launched", "computed",
)  # fmt: skip
"""Of a request, in about their order. Layers are those that the mover has told."""
OFTEN: Final = {"slice": "slice", "landed": "layer", "waits": "wait"}
"""Marks that come many times a request, of which the first and the last count."""


class Mark(NamedTuple):
    """One line of one process."""

    at_ns: int
    what: str
    about: tuple[str, ...]
    pid: int


def read(folder: Path) -> list[Mark]:
    """The marks of all processes, in the order of time."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        for line in path.read_text(encoding="utf-8").splitlines():
            at, what, *about = line.split()
            found.append(Mark(int(at), what, tuple(about), int(path.stem)))
    return sorted(found)


def asks(marks: Iterable[Mark]) -> Iterator[tuple[str, dict[str, float]]]:
    """Each request: its column with its tokens, and milliseconds from its sending to each step."""
    name, began, steps = "", 0, dict[str, float]()
    backups: set[str] = set()
    for mark in marks:
        after = (mark.at_ns - began) / 1e6
        if mark.what in ("taken", "copy") and mark.about[1] == "backup":
            backups.add(mark.about[0])
        if mark.what == "ask":
            name, began, steps = " ".join(mark.about), mark.at_ns, {}
        elif mark.what == "told":
            if name:
                yield name, {**steps, "told": after}
            name = ""
        elif name and not (mark.about and mark.about[0] in backups):
            if mark.what in OFTEN:
                steps.setdefault(f"first {OFTEN[mark.what]}", after)
                steps[f"last {OFTEN[mark.what]}"] = after
            else:
                steps[mark.what] = after


def told(folder: Path) -> dict[str, dict[str, float]]:
    """The medians of every kind of request, in milliseconds after its sending."""
    kinds: dict[str, list[dict[str, float]]] = {}
    for name, steps in asks(read(folder)):
        kinds.setdefault(name, []).append(steps)
    return {
        name: {
            step: round(statistics.median(s[step] for s in each if step in s), 2)
            for step in (*STEPS, "told")
            if any(step in s for s in each)
        }
        for name, each in kinds.items()
    }


def as_text(timeline: dict[str, dict[str, float]]) -> str:
    """One line a kind of request."""
    return "\n".join(
        f"{name}: " + ", ".join(f"{step} {ms:.2f}" for step, ms in steps.items())
        for name, steps in timeline.items()
    )
