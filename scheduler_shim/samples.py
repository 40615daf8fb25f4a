"""A bounded sample of an unbounded row of numbers.

Owns the choice of what is kept, which is the same in every run. It must never grow.
"""

from __future__ import annotations

import random
from typing import Final

SAMPLES_MAX: Final = 4_096


class Samples:
    """A bounded, even sample of an unbounded row of numbers (reservoir sampling)."""

    def __init__(self, most: int = SAMPLES_MAX) -> None:
        self._most = most
        self._random = random.Random(0)  # the choice need not be secret, only even
        self.seen = 0
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Take a number in."""
        self.seen += 1
        if len(self.values) < self._most:
            self.values.append(value)
        else:
            at = int(self._random.random() * self.seen)
            if at < self._most:
                self.values[at] = value

    def percentile(self, percent: int) -> float:
        """The value below which so many percent of the sample lie; 0 for an empty one."""
        if not self.values:
            return 0.0
        values = sorted(self.values)
        return values[min(len(values) * percent // 100, len(values) - 1)]
