"""Ratios of two columns of interleaved measurements, with the upper 95 % bound of each.

Pure. Owns the arithmetic: the ratio of two medians, or the mean of the pairs' own ratios, and a
bootstrap over the pairs (both of a pair were measured in the same turn, so what a turn has in
common stays together; in the pairs' own ratios it cancels). Same samples, same bound.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from operator import truediv
from typing import Final, NamedTuple

DRAWS: Final = 2_000
LEVEL: Final = 0.95
SEED: Final = 1


class Ratio(NamedTuple):
    """Of two columns: of their medians (or means), and its upper bound. `pairs`: how many."""

    value: float
    upper: float
    pairs: int

    def within(self, goal: float) -> bool:
        """Whether even the upper bound keeps to a goal."""
        return self.upper <= goal


def ratio_of(
    ours: Sequence[float],
    theirs: Sequence[float],
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> Ratio:
    """The ratio of two columns. Raises `ValueError` where they are not pairs."""
    return _bootstrapped(ours, theirs, lambda a, b: of(a) / of(b))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The geometric mean of the pairs' ratios. Raises `ValueError` where they are not pairs."""
    return _bootstrapped(ours, theirs, lambda a, b: statistics.geometric_mean(map(truediv, a, b)))


def _bootstrapped(
    ours: Sequence[float],
    theirs: Sequence[float],
    value: Callable[[Sequence[float], Sequence[float]], float],
) -> Ratio:
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} measurements are no pairs")
    draw = random.Random(SEED)
    numbers = range(len(ours))
    found = []
    for _ in range(DRAWS):
        taken = draw.choices(numbers, k=len(ours))
        found.append(value([ours[n] for n in taken], [theirs[n] for n in taken]))
    found.sort()
    upper = found[min(len(found) - 1, int(LEVEL * len(found)))]
    return Ratio(value(ours, theirs), upper, len(ours))
