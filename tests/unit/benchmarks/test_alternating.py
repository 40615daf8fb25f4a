"""Ratios of sides that took turns: what differs is found; what does not is within its bounds."""

from random import Random

from benchmarks.alternating import Start, alternate, compare, median_of


def started(seed: int, *, slower: float) -> Start:
    """A start whose sides have a place in memory each, and noise with far outliers."""
    chance = Random(seed)
    place = {name: 1 + chance.gauss(0, 0.003) for name in ("off", "off again", "on")}

    def turn(name: str) -> list[float]:
        level = 40 * place[name] * (slower if name == "on" else 1)
        return [level * (1 + abs(chance.gauss(0, 0.1))) for _ in range(9)] + [9_000.0]

    sides = {name: (lambda name=name: turn(name)) for name in place}
    return alternate(sides, 60, chance, warm=3)


def test_a_side_that_is_slower_is_found_and_equal_ones_are_told_equal() -> None:
    starts = [started(seed, slower=1.05) for seed in range(5)]
    found = compare(starts, "on", "off", "off again")
    assert 1.03 < found.low < found.value < found.high < 1.07
    same = compare(starts, "off again", "off")
    assert same.low < 1 < same.high
    assert same.high - same.low < 0.03


def test_the_interval_is_wider_where_starts_differ() -> None:
    alike = compare([started(seed, slower=1.0) for seed in range(4)], "on", "off")
    unlike = compare(
        [started(seed, slower=slower) for seed, slower in enumerate((1.0, 1.1, 1.0, 1.1))],
        "on",
        "off",
    )
    assert unlike.high - unlike.low > 2 * (alike.high - alike.low)


def test_every_side_has_a_turn_a_round_and_warm_rounds_do_not_count() -> None:
    order: list[str] = []

    def turn(name: str) -> list[float]:
        order.append(name)
        return [float(len(order))]

    sides = {"a": lambda: turn("a"), "b": lambda: turn("b")}
    rounds = alternate(sides, 20, Random(1), warm=5)
    assert len(rounds) == 20
    assert {len(set(order[at : at + 2])) for at in range(0, 50, 2)} == {2}
    assert {tuple(order[at : at + 2]) for at in range(0, 50, 2)} == {("a", "b"), ("b", "a")}
    assert min(rounds[0]["a"] + rounds[0]["b"]) == 11


def test_the_median_is_that_of_starts_and_no_outlier_moves_it() -> None:
    starts: list[Start] = [[{"on": [level, level, 9_000.0]}] for level in (1.0, 2.0, 30.0)]
    assert median_of(starts, "on") == 2.0
