"""The table of failure rows: what went wrong in other systems, and the tests that watch it here.

Owns the wording of each row. A test that stands for a row ends in its number (`..._f76`), or in
several; the table lists all of them, and a row without a test is an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parent.parent / "tests"
DEFINITION: Final = re.compile(r"^ *def (test_\w+)\(", re.MULTILINE)
SUFFIX: Final = re.compile(r"(?:_f\d+)+$")

CASES: Final = {
    1: "keys that are glued together let one adapter or salt reach another's pages",
    7: "after an update of the weights pages of the old ones come back from a lower tier",
    9: "a look-up of pairs of tokens reads beyond the end of a short key",
    13: "an insert frees pages that a request's page table still names",
    15: "pages that were published in the middle of a prefill are freed with the aborted request",
    18: "a release gives back somebody else's lock",
    19: "a node is split during a copy and its slots are used anew",
    26: "pages are counted twice, or the check that should notice does nothing",
    32: "a hit of the whole prompt leaves nothing to compute",
    36: "memory of expandable segments cannot be shared",
    37: "an event is dropped before its importer opens or uses it",
    38: "the wrong GPU, by an ordinal of another process",
    39: "two pools in one allocation, one handle",
    44: "a permuted or strided tensor is read as if it were dense",
    47: "pages are copied before they are written",
    51: "less arrives than was promised, and counts",
    59: "a pool is made anew under a live registration",
    62: "a dead engine's memory stays taken, and its restart fails",
    63: "cleaning up after a dead client, or waiting for one, stops everybody",
    65: "a healthy idle engine is thrown out, and its next request hangs",
    67: "after a restart of the server the engines must be restarted, too",
    68: "two processes of one name or process id overwrite each other's registration",
    70: "a key stays half-written after its writer died",
    72: "locks leak when a request ends between two steps",
    76: "a reply never comes, and the engine waits for ever",
    79: "one bad message ends the service for everybody",
    83: "a second daemon takes the socket over, or a stale file bars a restart",
    88: "each crash of the server leaks its shared memory",
    93: "the host tier is full of copies of what the GPUs hold",
    94: "a backup that got no memory counts as done",
    100: "the tree's process grows for ever",
    107: "ranks decide by themselves and wait for one another",
    114: "a request that is tried again counts as several",
    117: "rates jump, or are negative after a restart",
    129: "an upgrade of one side crashes the other",
    132: "host memory cannot be pinned",
    138: "what comes over the wire is run",
    143: "a forged handle or size is believed",
}
LIFE_CYCLE: Final = (62, 63, 65, 67, 68, 70, 72, 76, 79, 83, 88)
"""The rows of the class "failure and life cycle"."""


def rows_of_tests() -> dict[int, list[tuple[str, str]]]:
    """(folder below tests/, name) of every test that names a row, by row."""
    found: dict[int, set[tuple[str, str]]] = {}
    for path in TESTS.rglob("test_*.py"):
        folder = path.relative_to(TESTS).parts[0]
        for name in DEFINITION.findall(path.read_text(encoding="utf-8")):
            suffix = SUFFIX.search(name)
            for row in re.findall(r"\d+", suffix.group()) if suffix else ():
                found.setdefault(int(row), set()).add((folder, name))
    return {row: sorted(names) for row, names in found.items()}


def failure_table() -> str:
    """A row of each case with its tests. Raises `ValueError` for a row without case or test."""
    tests = rows_of_tests()
    if tests.keys() != CASES.keys():
        raise ValueError(f"rows without case or test: {sorted(tests.keys() ^ CASES.keys())}")
    lines = ["| row | what went wrong | tests |", "| --- | --- | --- |"]
    for row, case in CASES.items():
        by_folder: dict[str, list[str]] = {}
        for folder, name in tests[row]:
            by_folder.setdefault(folder, []).append(f"`{name}`")
        cell = "; ".join(f"{folder}: {', '.join(names)}" for folder, names in by_folder.items())
        lines.append(f"| F{row} | {case} | {cell} |")
    return "\n".join(lines) + "\n"
