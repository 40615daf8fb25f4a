"""Stored runs: the options of runs that failed once, or that reach rare places.

Owns the files in `regressions/`, one a run. They hold all options with the seed that the schedule
of faults follows from, not the seed alone: what a seed draws changes with every new option, and a
stored run would no longer be the one that failed. An option that is gone is an error here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from tests.simulation.options import Options

FOLDER: Final = Path(__file__).with_name("regressions")
_SHORT_LIST: Final = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")


class Regression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stored run. `found`: what it found, in words; `checker`, `commit`: who saw it, where."""

    found: str
    options: Options
    checker: str = ""
    commit: str = ""


def stored(folder: Path | None = None) -> list[str]:
    """Names of the stored runs."""
    return sorted(path.stem for path in (folder or FOLDER).glob("*.json"))


def load(name: str, folder: Path | None = None) -> Regression:
    """One stored run. Raises `msgspec.ValidationError` when it has options that are gone."""
    return msgspec.json.decode(((folder or FOLDER) / f"{name}.json").read_bytes(), type=Regression)


def store(name: str, regression: Regression, folder: Path | None = None) -> Path:
    """Write a run, lists on one line, and return where."""
    text = msgspec.json.format(msgspec.json.encode(regression), indent=1).decode()
    text = _SHORT_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    path = (folder or FOLDER) / f"{name}.json"
    path.write_text(text + "\n", encoding="utf-8")
    return path
