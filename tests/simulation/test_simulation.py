"""The simulation in the test suite: regression seeds, fresh seeds of the day, and its own promises.

Strategy: whole runs; a finding is reproduced by the printed line. The fresh seeds follow from the
date, so that a day's failure can be found again. Two processes share the work where there are two
processors.
"""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.__main__ import main
from tests.simulation.exhaustive import search
from tests.simulation.options import FAULTS, draw
from tests.simulation.scheduler import ModelScheduler
from tests.simulation.shrink import shrink
from tests.simulation.simulation import Result, Simulation

ROOT = Path(__file__).parents[2]
FRESH_SEEDS = 200
DAY_STRIDE = 10_000


def regression_seeds() -> list[int]:
    """The committed seeds."""
    lines = Path(__file__).with_name("regression_seeds.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


def command(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run the simulation as a command."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("seed", regression_seeds())
def test_a_regression_seed_stays_clean(seed: int) -> None:
    result = Simulation(draw(seed)).run()
    assert not result.problem, f"seed {seed}: {result.problem}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fresh_seeds_of_the_day_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    day = dt.datetime.now(dt.UTC).date()
    first = day.toordinal() * DAY_STRIDE
    done = command("--seeds", str(FRESH_SEEDS), "--first", str(first), "--jobs", "2")
    with capsys.disabled():
        sys.stdout.write(f"\nsimulation, seeds of {day}:\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_log_of_a_seed_is_the_same_under_any_hash_seed(tmp_path: Path) -> None:
    logs = []
    for hash_seed in ("0", "1", "4242"):
        path = tmp_path / hash_seed
        done = command("--seed", "1", "--log", str(path), hash_seed=hash_seed)
        assert done.returncode == 0, done.stdout
        logs.append(path.read_bytes())
    assert len(logs[0].splitlines()) > 1_000
    assert logs[0] == logs[1] == logs[2]


def test_a_seed_prints_every_option_and_the_rate_of_events() -> None:
    done = command("--seed", "3")
    assert done.returncode == 0, done.stdout
    for name in draw(3).__struct_fields__:
        assert f"  {name} = " in done.stdout
    assert " a second" in done.stdout


def test_every_kind_of_fault_is_drawn_by_some_seed_and_left_out_by_some() -> None:
    drawn = [draw(seed).rates.keys() for seed in range(60)]
    for fault in FAULTS:
        assert any(fault in rates for rates in drawn), fault
        assert any(fault not in rates for rates in drawn), fault


def test_runs_reach_restores_from_both_tiers_and_compare_modes_in_lockstep() -> None:
    facts: dict[str, int] = {}
    copied: dict[str, int] = {}
    for seed in range(8):
        simulation = Simulation(draw(seed))
        result = simulation.run()
        assert not result.problem, result.problem
        for name, amount in result.facts.items():
            facts[name] = facts.get(name, 0) + amount
        for boot in simulation.boots:
            for name, amount in boot.directory.counters.items():
                copied[name] = copied.get(name, 0) + amount
    for name in ("restored", "own_hits", "audited", "lockstep", "losses"):
        assert facts[name] > 0, name
    for name in ("backup_ok", "backup_void", "load_back_ok", "peer_copy_ok"):
        assert copied.get(name, 0) > 0, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_missing_destination_fence_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelScheduler, "quiet", lambda _: (0, 0))
    failed: Result | None = None
    for seed in range(40):
        result = Simulation(draw(seed)).run()
        if result.problem:
            failed = result
            break
    assert failed is not None, "no seed noticed that restores run into launched work"
    small, best, _ = shrink(failed.options, failed.checker, tries_max=6)
    assert best is None or best.checker == failed.checker
    assert len(small.rates) <= len(failed.options.rates)


def test_a_failing_seed_prints_where_it_failed_and_how_to_reproduce_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelScheduler, "written", lambda _: (0, 0))
    codes = [main(["--seed", str(seed)]) for seed in range(12)]
    said = capsys.readouterr().out
    assert 1 in codes
    assert "FAILED at event" in said
    assert "story of the directory:" in said
    assert "python -m tests.simulation --seed" in said


@pytest.mark.timeout(600)
def test_the_small_scope_is_clean_as_far_as_there_is_time() -> None:
    report = search(states_max=1, depth_min=5)
    assert not report.broken
    assert report.depth == 5
    assert report.states > 700
