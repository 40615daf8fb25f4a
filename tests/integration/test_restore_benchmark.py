"""The restore benchmark runs, and a real daemon tells its mover what it expects."""

from pathlib import Path

import pytest

from benchmarks.restore_whole import whole_way
from directory.daemon.expecting import UNMET_MAX
from transfer.ipc.marks import SUFFIX, VARIABLE

TIMES = UNMET_MAX + 2
"""More than are expected where no restore is ever seen to follow."""


def marks(folder: Path) -> list[str]:
    """What was marked, by process and in order."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return [line.split()[1] for line in lines]


@pytest.mark.parametrize("spins", [True, False])
def test_a_mover_is_told_of_a_restore_that_a_match_lets_expect_where_it_may_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spins: bool
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    found = whole_way(TIMES, spins=spins)
    assert all(took_us > 0 for took_us in found.values())
    said = marks(tmp_path)
    assert said.count("expected") == (TIMES + 1) * spins
    assert said.count("copied") >= TIMES + 1, "and every restore has landed"
