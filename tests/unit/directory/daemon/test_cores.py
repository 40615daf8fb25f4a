"""Cores are what affinity and every control group's quota leave."""

import os
from pathlib import Path

import pytest

from directory.daemon.cores import cores
from directory.daemon.loop import Loop
from tests.unit.directory.daemon.test_memory import write


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("said", "found"),
    [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("6400000 100000", 8),
     ("", 8), ("x y", 8), ("100000 0", 8)],
)  # fmt: skip
def test_a_unified_groups_quota_counts_in_whole_cores(
    tmp_path: Path, said: str, found: int
) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/pod/box\n", "cg/pod/box/cpu.max": f"{said}\n"})
    assert cores(tmp_path / "proc", tmp_path / "cg") == found


def test_a_group_above_limits_those_in_it(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "cg/pod/box/cpu.max": "500000 100000",
        "cg/pod/cpu.max": "200000 100000",
    }
    write(tmp_path, files)
    assert cores(tmp_path / "proc", tmp_path / "cg") == 2


@pytest.mark.parametrize(("quota", "found"), [("-1", 8), ("200000", 2), ("250000", 2)])
def test_a_group_of_the_first_version_limits_too(tmp_path: Path, quota: str, found: int) -> None:
    files = {
        "proc/self/cgroup": "8:pids:/\n4:cpuacct,cpu:/host/name\n",
        "cg/cpu/cpu.cfs_quota_us": f"{quota}\n",
        "cg/cpu/cpu.cfs_period_us": "100000\n",
    }
    write(tmp_path, files)
    assert cores(tmp_path / "proc", tmp_path / "cg") == found


def test_where_nothing_is_said_all_of_them_count(tmp_path: Path) -> None:
    assert cores(tmp_path, tmp_path) == 8


def test_a_loop_that_has_one_core_by_its_quota_never_looks_instead_of_sleeping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("directory.daemon.loop.cores", lambda: 1)
    loop = Loop()
    assert (loop.cores, loop._can_spin) == (1, False)
    loop.close()
