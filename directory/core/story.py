"""Stories: a bounded history of what happened, attached to errors.

Owns a ring of short lines. It must never influence a decision.
"""

from __future__ import annotations

from collections import deque

from directory.core import limits


class Story:
    """The last events of one directory, oldest first."""

    __slots__ = ("_lines",)

    def __init__(self, lines_max: int = limits.STORY_LINES_MAX) -> None:
        self._lines: deque[tuple[object, ...]] = deque(maxlen=lines_max)

    def add(self, *facts: object) -> None:
        """Remember one event as a few plain facts."""
        self._lines.append(facts)

    def tell(self) -> str:
        """Return the history, one line an event."""
        return "\n".join(" ".join(map(_word, facts)) for facts in self._lines)

    def __len__(self) -> int:
        return len(self._lines)


def _word(fact: object) -> str:
    return fact.__name__ if isinstance(fact, type) else str(fact)
