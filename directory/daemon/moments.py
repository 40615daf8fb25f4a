"""Moments: when pages were given up of late, and how many between any two of them.

Owns a bounded memory of one tier's; the oldest half goes when it is full.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

MOMENTS_MAX: Final = 65_536


class Moments:
    """When pages were given up of late, and how many up to then."""

    def __init__(self) -> None:
        self._at_us: list[int] = []
        self._pages: list[int] = [0]

    def add(self, at_us: int, pages: int) -> None:
        if len(self._at_us) >= MOMENTS_MAX:
            half = MOMENTS_MAX // 2
            del self._at_us[:half]
            del self._pages[:half]
        self._at_us.append(at_us)
        self._pages.append(self._pages[-1] + pages)

    def between(self, since_us: int, until_us: int) -> int:
        """Pages given up from one moment on until another one, as far as is remembered."""
        first, last = bisect_left(self._at_us, since_us), bisect_left(self._at_us, until_us + 1)
        return self._pages[last] - self._pages[first]
