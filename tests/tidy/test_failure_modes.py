"""docs/failure-modes.md names tests that exist, in every line, what is really said in logs and
counters, and every fault that chaos knows."""

import re
from pathlib import Path

import pytest

from directory.cli.chaos_faults import KINDS
from tests.tidy.test_failure_rows import names_below

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\| (?!what happens|fault|-)([^`][^|]*)\|.*\|([^|]*)\|$", TEXT, re.MULTILINE)
TESTS = names_below(ROOT / "tests")
SOURCE = "".join(
    path.read_text(encoding="utf-8")
    for folder in ("directory", "scheduler_shim", "transfer")
    for path in sorted((ROOT / folder).rglob("*.py"))
)


def test_there_is_a_line_for_everything_that_can_die() -> None:
    for heading in ("## A scheduler", "## The daemon", "## The mover", "## The host tier"):
        assert heading in TEXT
    assert len(LINES) > 30


@pytest.mark.parametrize(("what", "cell"), LINES, ids=[what.strip() for what, _ in LINES])
def test_each_line_names_tests_that_exist(what: str, cell: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", cell))
    assert named, what
    assert named - TESTS == set()


def test_tests_in_the_text_exist_too() -> None:
    assert set(re.findall(r"`(test_\w+)`", TEXT)) - TESTS == set()


def test_the_table_of_chaos_is_the_programs() -> None:
    table = TEXT.partition("## Chaos")[2]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == set(KINDS)


def seen_names() -> list[str]:
    """Log lines and counters of the column that says what is seen."""
    rows = re.findall(r"^\|(?:[^|]*\|){3}([^|]*)\|[^|]*\|$", TEXT, re.MULTILINE)
    return sorted({name for cell in rows for name in re.findall(r"`([^`]+)`", cell)})


def test_there_are_names_of_what_is_seen() -> None:
    assert {"session ended", "daemon_sessions_ended", "degraded"} <= set(seen_names())


@pytest.mark.parametrize("name", seen_names())
def test_what_an_operator_is_told_to_look_for_is_said_somewhere(name: str) -> None:
    """As a text of the source, or each part of it where `...` stands for what is filled in. The
    daemon's own counters have a prefix, and some end with a word that is chosen."""
    own = name.removeprefix("daemon_")
    chosen = f'f"{own.rpartition("_")[0] or own}_{{'
    parts = [part.strip() for part in name.partition(":")[0].split("...")]
    assert own in SOURCE or chosen in SOURCE or all(part in SOURCE for part in parts), name
