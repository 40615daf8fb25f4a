"""The runs for a GPU machine (benchmarks/sglang_gpu), dry: with engines on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.environments import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(500)]


def dry_run(group: str, out: Path) -> tuple[dict[str, Any], str]:
    """The group's result, and what was printed."""
    command = [sys.executable, "-m", "benchmarks.sglang_gpu", "run", "--device", "cpu"]
    command += ["--scale", "tiny", "--out", str(out), "--limit", "450", group]
    said = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout
    return json.loads((out / f"{group}.json").read_text(encoding="utf-8")), said


@pytest.mark.every_cell
@pytest.mark.parametrize("group", ["exact-layerwise-1-overlap", "kills-layerwise", "ids"])
def test_a_group_of_rows_runs_dry_and_every_restored_page_is_right(
    group: str, tmp_path: Path
) -> None:
    result, said = dry_run(group, tmp_path)
    assert result["ok"], said
    assert result["digests"]["compared"] > 0
    assert result["digests"]["wrong"] == 0


@pytest.mark.every_cell
def test_own_hits_beside_stock_run_dry_and_every_pair_counts(tmp_path: Path) -> None:
    result, said = dry_run("own", tmp_path)
    assert result["ok"], said
    assert result["misses"] == []
    pairs = {
        length: found["own / stock own"]["pairs"] for length, found in result["ratios"].items()
    }
    assert pairs == {"64": 6, "256": 2}
