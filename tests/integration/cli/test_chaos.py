"""Chaos: processes are killed, stopped and damaged under load, and nobody notices more than a miss.

The first test is the whole command as an operator runs it, with every kind of fault, for as long as
a test may take; it comes early in a run, because it mostly waits.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from directory.cli.chaos_faults import possible
from directory.daemon.tier_folder import SHARED_MEMORY, file_system
from tests.integration.cli.support import treecored

pytestmark = pytest.mark.skipif(
    file_system(SHARED_MEMORY) != "tmpfs", reason="there is no shared memory to keep a tier in"
)
SECONDS = 120


@pytest.mark.timeout(400)
def test_chaos_of_every_kind_costs_no_request_no_page_and_no_memory(tmp_path: Path) -> None:
    kept = _kept_folders()
    result = treecored(
        tmp_path / "tmp", "chaos", "--seconds", SECONDS, "--every", 2, "--json", timeout_s=390
    )
    assert result.status == 0, result.stderr
    report = result.report
    assert report["problems"] == report["violations"] == []
    times = {fault["kind"]: fault["injected"] for fault in report["faults"]}
    assert set(times) == set(possible())
    assert min(times.values()) >= 1
    assert report["requests_failed"] == report["pages_wrong"] == 0
    assert report["pages_verified"] > 1_000
    assert min(report["hit_tokens"].values()) > 0
    assert report["daemon_boots"] >= 4
    assert report["movers"] > report["daemon_boots"], "some died alone"
    assert report["scheduler_boots"] > report["schedulers"]
    assert report["host_pages_recovered"] > 0, "the last daemon found a warm host tier"
    assert report["shared_memory_bytes"][0] == report["shared_memory_bytes"][1] > 0
    assert report["descriptors_before"] == report["descriptors_after"]
    assert _kept_folders() <= kept, "a host tier was left behind"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["scheduler-kill", "session-cut", "mover-kill"])
def test_one_kind_alone_is_survived_as_often_as_it_comes(tmp_path: Path, kind: str) -> None:
    report = run_of(kind, 6, tmp_path)
    if report["faults"][0]["injected"] < 2:  # a busy machine needs longer for two of them
        report = run_of(kind, 30, tmp_path)
    (fault,) = report["faults"]
    assert fault["injected"] >= 2
    assert 0 < fault["median_s"] <= fault["longest_s"]
    assert report["daemon_boots"] == 1


def run_of(kind: str, seconds: float, tmp_path: Path) -> dict[str, Any]:
    """What came of faults of one kind."""
    chosen = ("--seconds", seconds, "--every", 0.5, "--schedulers", 2, "--fault", kind)
    result = treecored(tmp_path / "tmp", "chaos", *chosen, "--json", timeout_s=190)
    assert result.status == 0, result.stderr
    return result.report


def test_the_table_names_every_fault_and_the_verdict(tmp_path: Path) -> None:
    chosen = ("--seconds", 3, "--every", 1, "--schedulers", 2, "--fault", "scheduler-twin")
    result = treecored(tmp_path / "tmp", "chaos", *chosen)
    assert result.status == 0, result.stderr
    assert "scheduler-twin" in result.stdout
    assert "nobody noticed" in result.stdout


def test_a_trace_that_is_none_is_bad_input(tmp_path: Path) -> None:
    result = treecored(tmp_path / "tmp", "chaos", tmp_path / "none.jsonl")
    assert result.status == 2
    assert "none.jsonl" in result.stderr


def _kept_folders() -> set[str]:
    folder = SHARED_MEMORY / f"treecored-{os.getuid()}"
    names = os.listdir(folder) if folder.is_dir() else []
    # Other runs beside this one have theirs; those whose process is gone are nobody's.
    return {
        name
        for name in names
        if name.startswith("run-") and not Path(f"/proc/{name.split('-')[1]}").exists()
    }
