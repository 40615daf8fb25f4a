"""Counters of a scheduler, and the first problems that it met.

Owns both. A problem is something that must never happen and did; it must never be lost among the
counters, and never let the list of them grow for ever.
"""

from __future__ import annotations

from typing import Final

PROBLEMS_KEPT_MAX: Final = 64


class Tally:
    """Base of what counts. Mutated by its scheduler's thread alone."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.problems: list[str] = []
        """What must never happen and did; a check reports it."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter; nothing is entered for nothing."""
        if amount:
            self.counters[name] = self.counters.get(name, 0) + amount

    def problem(self, problem: str) -> None:
        """Remember the first of what must never happen, and count all of it."""
        self.count("problems")
        if len(self.problems) < PROBLEMS_KEPT_MAX:
            self.problems.append(problem)
