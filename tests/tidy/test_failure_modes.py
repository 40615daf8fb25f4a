"""docs/failure-modes.md names tests that exist, in every line, and every fault that chaos knows."""

import re
from pathlib import Path

import pytest

from directory.cli.chaos_faults import KINDS
from tests.tidy.test_failure_rows import names_below

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\| (?!what happens|fault|-)([^`][^|]*)\|.*\|([^|]*)\|$", TEXT, re.MULTILINE)
TESTS = names_below(ROOT / "tests")


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
