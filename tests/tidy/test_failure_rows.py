"""The table of failure rows in docs/gpu.md names tests that exist, in the folder it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (F\d+) \|[^|]*\|([^|]*)\|$", TABLE, re.MULTILINE)
DEFINITION = re.compile(r"^def (test_\w+)\(", re.MULTILINE)


def names_below(folder: Path, without: str = "") -> set[str]:
    """Names of the test functions of a folder."""
    return {
        name
        for path in folder.rglob("test_*.py")
        if not without or without not in path.parts
        for name in DEFINITION.findall(path.read_text(encoding="utf-8"))
    }


def test_every_row_of_the_class_is_there() -> None:
    assert {"F36", "F37", "F38", "F39", "F44", "F47", "F51", "F59"} <= {row for row, _ in ROWS}


@pytest.mark.parametrize(("row", "cell"), ROWS, ids=[row for row, _ in ROWS])
def test_the_tests_of_a_row_exist(row: str, cell: str) -> None:
    cpu, _, gpu = cell.partition("gpu:")
    on_cpu, on_gpu = (set(re.findall(r"`(test_\w+)`", part)) for part in (cpu, gpu))
    assert on_cpu | on_gpu, "no test is named"
    assert on_cpu - names_below(ROOT / "tests", without="gpu") == set()
    assert on_gpu - names_below(ROOT / "tests" / "gpu") == set()
    unlike = {name for name in on_cpu | on_gpu if re.search(r"_f\d+", name)}
    assert {name for name in unlike if not name.lower().endswith(f"_{row.lower()}")} == set()
