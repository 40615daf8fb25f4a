"""Exported records say the same in the formats of others."""

import csv
import sys
from pathlib import Path

import pytest

from directory.analytics.export import COLUMNS, ExportError, export
from directory.analytics.source import Source
from directory.analytics.study import Study
from directory.analytics.traces import BlockOptions
from tests.analytics.forty import LINES, N1, REQUESTS, frames
from tests.analytics.support import access, write_log


@pytest.fixture(name="log")
def source_of_forty(tmp_path: Path) -> Source:
    return Source(write_log(tmp_path / "log", frames()))


def test_a_mooncake_export_has_the_same_reuse_as_the_log(tmp_path: Path) -> None:
    words = ("ABC", "ABC", "ABD", "X", "ABCE", "ABD")
    log = write_log(tmp_path / "log", (access(w, at_us=10**15 + n) for n, w in enumerate(words)))
    assert export(Source(log), tmp_path / "t.jsonl") == len(words)
    before = Study.of(Source(log)).reuse.curve()
    again = Source(tmp_path / "t.jsonl", options=BlockOptions(block_tokens=4))
    assert again.kind == "mooncake"
    after = Study.of(again).reuse.curve()
    assert after.blocks == before.blocks
    assert [after.hits(n) for n in range(20)] == [before.hits(n) for n in range(20)]


def test_a_mooncake_export_leaves_out_what_is_no_query(log: Source, tmp_path: Path) -> None:
    assert export(log, tmp_path / "t.jsonl") == REQUESTS


def test_a_csv_export_has_a_row_a_record_with_every_figure(log: Source, tmp_path: Path) -> None:
    assert export(log, tmp_path / "t.csv") == len(LINES)
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) == set(COLUMNS)
    first = rows[32]
    assert (first["request"], first["namespace"], first["tokens"]) == ("r33", N1.hex(), "25")
    assert [first[f"hit_{source}"] for source in ("own", "host", "peer", "store")] == [
        "8", "8", "4", "4",
    ]  # fmt: skip
    assert [row["kind"] for row in rows].count("request") == REQUESTS


def test_parquet_without_pyarrow_is_one_clear_sentence(
    log: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ExportError, match="pip install pyarrow"):
        export(log, tmp_path / "t.parquet")


def test_a_parquet_export_has_the_same_columns(log: Source, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    assert export(log, tmp_path / "t.parquet") == len(LINES)
    table = parquet.read_table(tmp_path / "t.parquet")
    assert tuple(table.column_names) == COLUMNS
    assert table.column("tokens").to_pylist() == [line.access.tokens for line in LINES]


def test_another_ending_is_refused(log: Source, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"\.jsonl, \.csv, \.parquet"):
        export(log, tmp_path / "t.xlsx")
