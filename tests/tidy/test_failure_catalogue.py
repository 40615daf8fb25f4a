"""docs/failure-rows.md has every row, with tests that run on any machine for all that can."""

from pathlib import Path

import pytest

from docs import failure_rows
from docs.failure_rows import CASES, LIFE_CYCLE, failure_table, rows_of_tests

ON_A_DEVICE_ONLY = {36, 37}
"""Rows that shared memory and the fake device cannot show."""


def test_every_row_of_the_life_cycle_is_there_and_has_tests_with_real_processes() -> None:
    tests = rows_of_tests()
    assert set(LIFE_CYCLE) <= CASES.keys()
    for row in LIFE_CYCLE:
        assert "integration" in {folder for folder, _ in tests[row]}, f"F{row}"


@pytest.mark.parametrize("row", [row for row in CASES if row not in ON_A_DEVICE_ONLY])
def test_a_row_is_tested_where_there_is_neither_gpu_nor_sglang(row: int) -> None:
    assert {folder for folder, _ in rows_of_tests()[row]} - {"gpu", "sglang"}


def test_a_test_of_an_unknown_row_and_a_row_without_a_test_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "unit"
    folder.mkdir()
    (folder / "test_it.py").write_text(
        "def test_one_f1_f2() -> None: ...\ndef test_f3_is_not_meant() -> None: ...\n",
        encoding="ascii",
    )
    monkeypatch.setattr(failure_rows, "TESTS", tmp_path)
    monkeypatch.setattr(failure_rows, "CASES", {1: "one", 2: "two"})
    assert failure_table().count("`test_one_f1_f2`") == 2
    for cases in ({1: "one"}, {1: "one", 2: "two", 3: "three"}):
        monkeypatch.setattr(failure_rows, "CASES", cases)
        with pytest.raises(ValueError, match="rows without case or test"):
            failure_table()
