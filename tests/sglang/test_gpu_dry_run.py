"""The runs for a GPU machine (benchmarks/sglang_gpu), dry: with engines on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sglang.environments import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(500)]


@pytest.mark.every_cell
@pytest.mark.parametrize("group", ["exact-layerwise-1-overlap", "kills-layerwise", "ids"])
def test_a_group_of_rows_runs_dry_and_every_restored_page_is_right(
    group: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "benchmarks.sglang_gpu", "run", "--device", "cpu"]
    command += ["--scale", "tiny", "--out", str(tmp_path), "--limit", "450", group]
    said = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout
    result = json.loads((tmp_path / f"{group}.json").read_text(encoding="utf-8"))
    assert result["ok"], said
    assert result["digests"]["compared"] > 0
    assert result["digests"]["wrong"] == 0
