"""The simulation in the test suite: stored runs, fresh seeds of the day, and its own promises.

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

import msgspec
import pytest

from tests.simulation.__main__ import main
from tests.simulation.exhaustive import search
from tests.simulation.options import FAULTS, Options, draw
from tests.simulation.regressions import Regression, load, store, stored
from tests.simulation.scheduler import ModelScheduler
from tests.simulation.shrink import shrink
from tests.simulation.simulation import Result, Simulation

ROOT = Path(__file__).parents[2]
FRESH_SEEDS = 200
DAY_STRIDE = 10_000


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


@pytest.mark.parametrize("name", stored())
def test_a_stored_run_stays_clean(name: str) -> None:
    result = Simulation(load(name).options).run()
    assert not result.problem, f"{name}: {result.problem}"


def test_an_option_that_is_gone_makes_a_stored_run_an_error(tmp_path: Path) -> None:
    regression = Regression("why", draw(1), "checker", "commit")
    path = store("run", regression, tmp_path)
    assert stored(tmp_path) == ["run"]
    assert load("run", tmp_path) == regression
    path.write_text(path.read_text().replace('"turns"', '"no_such_option"'))
    with pytest.raises(msgspec.ValidationError, match="no_such_option"):
        load("run", tmp_path)


def test_an_option_that_a_stored_run_does_not_know_is_off() -> None:
    known = msgspec.to_builtins(draw(1))
    new = ("kept_bytes", "portion", "world_sizes")
    options = msgspec.convert({k: v for k, v in known.items() if k not in new}, type=Options)
    assert [getattr(options, name) for name in new] == [0, 0, ()]


def test_the_shrinker_stores_what_is_left_and_a_stored_run_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.simulation.__main__.ROOT", tmp_path)
    monkeypatch.setattr("tests.simulation.regressions.FOLDER", tmp_path)
    monkeypatch.setattr(
        "tests.simulation.__main__.shrink",
        lambda options, _: (options.smaller(requests=options.requests - 1), None, 1),
    )
    with monkeypatch.context() as bug:
        bug.setattr(ModelScheduler, "written", lambda _: (0, 0))
        seed = next(s for s in range(12) if Simulation(draw(s)).run().problem)
        assert main(["--shrink", str(seed), "--store", "small"]) == 1
    small = load("small", tmp_path)
    assert small.options == draw(seed).smaller(requests=draw(seed).requests - 1)
    assert small.checker
    assert "stored in small.json" in capsys.readouterr().out
    assert main(["--stored", "small"]) == 0, "without the bug it is clean"


def pinned(seed: int, **pins: object) -> Options:
    """The options of a seed, some of them set."""
    return msgspec.structs.replace(draw(seed), **pins)


@pytest.mark.timeout(600)
def test_groups_of_ranks_restore_and_every_rank_is_told_the_same() -> None:
    copied: dict[str, int] = {}
    ranks = 0
    for seed in range(4):
        count = len(draw(seed).modes)
        simulation = Simulation(pinned(seed, world_sizes=(2,) * count))
        result = simulation.run()
        assert not result.problem, result.problem
        copied["restored"] = copied.get("restored", 0) + result.facts["restored"]
        for boot in simulation.boots:
            ranks += sum(len(pool.members) for pool in boot.directory.pools.values())
            for name, amount in boot.directory.counters.items():
                copied[name] = copied.get(name, 0) + amount
    for name in ("restored", "backup_ok", "load_back_ok", "peer_copy_ok"):
        assert copied.get(name, 0) > 0, name
    assert ranks >= 8


@pytest.mark.timeout(600)
def test_answers_that_a_limit_drops_are_said_to_be_gone_and_their_leases_fall() -> None:
    gone = fallen = 0
    for seed in range(40):
        rates = {**draw(seed).rates, "loss": 0.1}
        simulation = Simulation(pinned(seed, kept_bytes=1, rates=rates))
        result = simulation.run()
        assert not result.problem, result.problem
        for boot in simulation.boots:
            gone += boot.counters["answers_gone"]
            fallen += boot.directory.counters.get("leases_unlisted", 0)
        if gone and fallen:
            break
    assert gone > 0
    assert fallen > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fresh_seeds_of_the_day_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    day = dt.datetime.now(dt.UTC).date()
    first = day.toordinal() * DAY_STRIDE
    done = command("--seeds", str(FRESH_SEEDS), "--first", str(first), "--jobs", "2")
    with capsys.disabled():
        # Where tests are shared out to processes only standard error reaches the reader.
        sys.stderr.write(f"\nsimulation, seeds of {day}:\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_log_of_a_seed_is_the_same_under_any_hash_seed(tmp_path: Path) -> None:
    logs = []
    for hash_seed in ("0", "1", "4242"):
        path = tmp_path / hash_seed
        done = command("--seed", "15", "--log", str(path), hash_seed=hash_seed)
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
    small, best, _ = shrink(
        failed.options, failed.checker, run=lambda options: Simulation(options).run(), tries_max=6
    )
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
    assert report.states > 600
