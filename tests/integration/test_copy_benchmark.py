"""The copy benchmark runs dry: every group has rows, its bytes are checked, and it can fail."""

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_copy import GROUPS
from benchmarks.copy_bus import SLAB, SLAB_BYTES, ordered_rows
from benchmarks.copy_check import WrongBytes, check_copies
from benchmarks.copy_loop import processor_rows
from benchmarks.copy_model import COSTS, Costs, ModelBase, ModelDevice, ModelDriver
from benchmarks.copy_model import NAME as MODEL
from benchmarks.copy_pages import allocated, parts_of, scattered
from benchmarks.copy_rows import Bench, Row, Sizes, at_least, at_most, below
from directory.core.ids import HOST
from transfer.ipc.memory import SharedMemoryIPC

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_dry_run_has_rows_of_every_group_and_no_error(tmp_path: Path) -> None:
    report = tmp_path / "copy.json"
    command = [sys.executable, "-m", "benchmarks.bench_copy", "--device", "cpu", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--json", str(report)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(report.read_text())
    rows = [Row(**row) for row in document["rows"]]
    assert not [row.name for row in rows if row.goal == "no error"]
    for group, words in zip(GROUPS, ("scattered", "staged", "step beside", "layers"), strict=True):
        assert any(words in row.name for row in rows), group
        assert document[f"{group}_s"] >= 0
    assert all(row.figure > 0 for row in rows)


@pytest.mark.slow
def test_a_mover_that_brings_other_bytes_is_found_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoBase:
        def measure(self) -> dict[str, float]:
            return {}

        def close(self) -> None:
            """There is nothing."""

    bench = Bench(["cpu"], Sizes.of_dry_run(), NoBase(), 1)
    try:
        check_copies(bench, 64)
        honest = bench.rig.submit

        def elsewhere(kind: str, source: int, pages: list[int], target: int, onto: list[int],
                      **more: object) -> int:  # fmt: skip
            """One page of a load lands where another one belongs."""
            turned = onto[1:] + onto[:1] if kind == "load_back" else onto
            return honest(kind, source, pages, target, turned, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(bench.rig, "submit", elsewhere)
        with pytest.raises(WrongBytes, match="load back"):
            check_copies(bench, 64)
    finally:
        bench.close()


@pytest.mark.slow
def test_the_loop_around_a_made_up_bus_cannot_be_faster_than_that_bus() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_copy", "--device", "model", "--rounds", "2"]
    command += ["--limit", "stage_bytes=8388608", "--bus-gbps"]
    for gbps in ("2", "100000"):
        done = subprocess.run(
            [*command, gbps], cwd=ROOT, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        cells = [line.split("|") for line in done.stdout.splitlines() if ", staged, " in line]
        ratios = [float(row[5]) for row in cells]
        assert len(ratios) == 8
        if gbps == "2":  # any machine's processors keep up with that
            assert all(0.8 < ratio <= 1 for ratio in ratios), done.stdout
        else:
            assert all(ratio < 0.5 for ratio in ratios), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("beside", [0, 32])
def test_what_a_thread_takes_over_is_counted_as_its_own(beside: int) -> None:
    """128 scattered rows are a list; allocated ones are few and stay the loop's."""
    calls_us = 128 * 4.0
    rows = processor_rows(Costs(range_us=4.0), 1, [f"submit_beside={beside}"])
    found = {row.name.replace(", page 1", ""): row.figure for row in rows}
    assert len(found) == 8
    for way in ("from_host", "to_host"):
        own = found[f"{way}, scattered: the loop's processor, 16 MiB"]
        thread = found[f"{way}, scattered: its thread's, 16 MiB"]
        assert (thread if beside else own) > 0.5 * calls_us
        assert beside or thread < 0.1 * calls_us
        assert found[f"{way}, allocated: its thread's, 16 MiB"] < 0.1 * calls_us


@pytest.mark.slow
def test_rows_of_the_bus_alone_are_bound_by_it_in_every_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = Costs(bus_gbps=2.0)
    monkeypatch.setenv(COSTS, "")  # put back afterwards
    costs.to_environment()
    sizes = Sizes.of_gpu()._replace(base_bytes=64 << 20)
    bench = Bench([MODEL], sizes, ModelBase(costs), 1)
    driver: Any = ModelDriver(costs)
    device = ModelDevice(driver)
    ipc = SharedMemoryIPC()
    try:
        device.attach((SLAB, 0), ipc.create("slab", SLAB_BYTES))
        for number, segment in enumerate(bench.rig.tier.segments):
            device.attach((HOST, number), segment)
        rows = list(ordered_rows(bench, device))
    finally:
        bench.close()
    rates, calls = rows[::2], rows[1::2]
    assert len({row.name for row in rates}) == len(rates) == 6
    assert all(0.8 < (row.ratio or 0) <= 1 for row in rates), rows
    assert all(row.figure > 0 for row in calls)


@pytest.mark.parametrize("choose", [scattered, allocated])
@pytest.mark.parametrize("total", [8, 64, 512, 4096])
def test_pages_are_different_and_all_of_the_pool(choose: object, total: int) -> None:
    assert callable(choose)
    for count in (1, total // 2, total):
        pages = choose(total, count, random.Random(total))
        assert len(set(pages)) == len(pages) == count
        assert 0 <= min(pages) <= max(pages) < total


def test_an_allocator_leaves_runs_and_a_random_choice_does_not() -> None:
    def neighbours(pages: list[int]) -> int:
        return sum(b == a + 1 for a, b in pairwise(pages))

    rng = random.Random(3)
    assert neighbours(allocated(512, 256, rng)) > 64
    assert neighbours(scattered(512, 256, rng)) < 16


def test_a_list_is_cut_into_parts_that_are_all_of_it() -> None:
    assert parts_of(list(range(10)), 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_rows_know_whether_their_goal_is_met() -> None:
    assert at_least("a", 9.0, 10.0, 0.9).met
    assert at_least("a", 8.9, 10.0, 0.9).met is False
    assert at_least("a", 1.0, 10.0, 0).met is None
    assert at_most("a", 11.0, 10.0, 1.1).met
    assert at_most("a", 11.2, 10.0, 1.1).met is False
    assert (below("a", 350, 350).met, below("a", 351, 350).met) == (True, False)
