"""Short storms as part of every test run; the long one is `make storm`."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.storm.storm import SAMPLES, Sample, Scenario, Storm
from tests.storm.world import Violation, World

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_storm_of_thirty_thousand_operations_accounts_for_every_page() -> None:
    storm = Storm(20_240, operations=30_000, check_every=1_000)
    storm.run()
    kinds = "match insert finish abort evict split flush flush_host mover_lost reconnect death"
    assert all(storm.did.get(kind) for kind in [*kinds.split(), "restore"]), storm.did
    counters = storm.world.directory.counters
    assert counters["host_pages_restored"] > 500
    assert counters["peer_pages_restored"] > 500
    assert storm.world.copies_ended["void"] > 500
    assert sum(actor.verified for actor in storm.actors) > 1_000


@pytest.mark.parametrize("seed", range(6))
def test_storms_of_few_schedulers_are_walked_after_every_hundredth_operation(seed: int) -> None:
    Storm(seed, operations=1_500, schedulers=1 + seed % 4, check_every=100).run()


def test_unique_suffixes_under_one_hot_prefix_leave_the_tree_as_it_was_f100() -> None:
    storm = Storm(
        3,
        operations=8_000,
        schedulers=4,
        scenario="hot-prefix",
        host_pages=96,
        check_every=2_000,
    )
    storm.run()
    assert storm.did["match"] > 4_000
    assert not [problem for problem in storm.levels() if "memory" not in problem]
    # Nodes are bounded by pages, and these by pools and host tier, whatever went by.
    assert max(sample.nodes for sample in storm.samples) < 4 * 128 + 96


def test_a_storm_finds_pages_that_do_not_hold_what_their_path_demands() -> None:
    storm = Storm(1, operations=1)
    for _ in range(1_500):
        storm._step()
    for actor in storm.actors:
        actor.contents[:] = [7] * actor.page_count
    storm.operations = 1_500
    with pytest.raises(Violation, match="of its path is wrong"):
        storm.run()


def test_a_storm_finds_copies_whose_words_nobody_looked_at() -> None:
    storm = Storm(1, operations=6_000)
    with (
        mock.patch.object(World, "_words_hold", return_value=True),
        pytest.raises(Violation, match="of its path is wrong"),
    ):
        storm.run()


@pytest.mark.parametrize(
    ("last", "problems"),
    [
        (Sample(0, 1_000, 5, 100 << 20), 0),
        (Sample(0, 1_200, 5, 100 << 20), 1),
        (Sample(0, 1_000, 9, 100 << 20), 1),
        (Sample(0, 1_000, 5, 120 << 20), 1),
    ],
)
def test_what_goes_on_rising_is_not_level_f100(last: Sample, problems: int) -> None:
    storm = Storm(1, operations=1)
    second = Sample(0, 1_000, 5, 100 << 20)
    storm.samples = [second] * (SAMPLES * 3 // 4) + [last] * (SAMPLES // 4)
    assert len(storm.levels()) == problems


def outcome(*flags: str, scenario: Scenario = "mixed", hash_seed: str = "0") -> str:
    """The outcome line of a storm in a process of its own."""
    command = [sys.executable, "-m", "tests.storm", "--operations", "2000", "--seed", "11"]
    command += ["--no-levels", "--check-every", "1000", "--scenario", scenario, *flags]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("outcome ")]
    return line


def test_with_every_digest_constant_the_outcome_is_the_same() -> None:
    assert outcome("--constant-digests") == outcome()


def test_under_another_hash_seed_the_outcome_is_the_same() -> None:
    assert outcome(hash_seed="1") == outcome(hash_seed="2")
