"""Ratios of one daemon's turns, round by round: drift and a few bad rounds move nothing."""

from random import Random

from benchmarks.alternating import Start
from benchmarks.recording_switch import compare_by_round


def started(seed: int, *, slower: float, drift: float = 0.5, bad: int = 0) -> Start:
    """Rounds of a machine whose speed drifts; in the last `bad` ones it did something else."""
    chance = Random(seed)
    rounds = []
    for number in range(12):
        level = 100 * (1 + drift * number / 12)
        levels = {"off": level, "off again": level, "on": level * slower}
        if number >= 12 - bad:
            levels["on"] *= 1.5
        rounds.append(
            {
                name: [level * (1 + chance.gauss(0, 0.05)) for _ in range(50)]
                for name, level in levels.items()
            }
        )
    return rounds


def test_what_is_slower_is_found_though_the_machine_drifts() -> None:
    found = compare_by_round(
        [started(seed, slower=1.04) for seed in range(4)], "on", "off", "off again"
    )
    assert 1.03 < found.low < 1.04 < found.high < 1.05


def test_equal_sides_are_told_equal_within_two_percent() -> None:
    starts = [started(seed, slower=1.0) for seed in range(4)]
    same = compare_by_round(starts, "off again", "off")
    assert 0.99 < same.low < 1 < same.high < 1.01
    on = compare_by_round(starts, "on", "off", "off again")
    assert on.high < 1.02


def test_rounds_in_which_the_machine_did_something_else_do_not_decide() -> None:
    found = compare_by_round([started(seed, slower=1.0, bad=2) for seed in range(4)], "on", "off")
    assert found.value < 1.01
    worse = compare_by_round([started(seed, slower=1.0, bad=8) for seed in range(4)], "on", "off")
    assert worse.value > 1.2
