"""Are two sides equally fast? Small turns of each by the hundred, and how sure the answer is.

Owns the order of turns, the ratio of medians and its interval. Sides of one start take their turns
in random order, so that whatever else the machine does meets all alike. Two processes that run the
same program are still not equally fast, for where their memory lies: hence several starts, and a
second side without anything, which shows what a difference of nothing looks like.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

RESAMPLES = 1_000
SURE_PERCENT = 95

Turn = Callable[[], list[float]]
"""A side's turn: what each of a few times took."""
Start = Sequence[Mapping[str, list[float]]]
"""The rounds of one start: what every side took in its turn."""
Medians = Sequence[tuple[float, float]]
"""Of the rounds of one start: the medians of two sides' turns."""


class Ratio(NamedTuple):
    """How many times as long one side takes at its median, and between what that surely lies."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """Rounded to a thousandth."""
        return {name: round(figure, 4) for name, figure in self._asdict().items()}

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


def alternate(
    sides: Mapping[str, Turn], rounds: int, order: random.Random, *, warm: int = 20
) -> Start:
    """Give every side a turn a round; the first `warm` rounds do not count."""
    taken: list[dict[str, list[float]]] = []
    names = list(sides)
    for number in range(warm + rounds):
        order.shuffle(names)
        found = {name: sides[name]() for name in names}
        if number >= warm:
            taken.append(found)
    return taken


def median_of(starts: Sequence[Start], side: str) -> float:
    """The median of the starts' medians of all that they took."""
    return statistics.median(
        statistics.median(figure for found in start for figure in found[side]) for start in starts
    )


def compare(starts: Sequence[Start], side: str, *bases: str, seed: int = 1) -> Ratio:
    """One side to others, taken together: by start the ratio of the medians of their turns'
    medians, and of these the geometric mean. The interval is that of a bootstrap of starts, and of
    rounds within them, so it has in it what differs from start to start and between moments."""
    medians = [
        [
            (statistics.median(found[side]), statistics.fmean(map(statistics.median, based)))
            for found in start
            for based in [[found[base] for base in bases]]
        ]
        for start in starts
    ]
    chance = random.Random(seed)
    seen = sorted(
        _mean(
            [
                chance.choices(rounds, k=len(rounds))
                for rounds in chance.choices(medians, k=len(medians))
            ]
        )
        for _ in range(RESAMPLES)
    )
    tail = RESAMPLES * (100 - SURE_PERCENT) // 200
    return Ratio(_mean(medians), seen[tail], seen[-1 - tail])


def _mean(starts: Sequence[Medians]) -> float:
    return statistics.geometric_mean(
        statistics.median(one for one, _ in rounds)
        / statistics.median(other for _, other in rounds)
        for rounds in starts
    )
