"""How long a scheduler waits for its daemon, and when silence means that it is lost.

Owns the limits of one client and the count of deadlines missed in a row. It must never take a
daemon that says anything at all for lost.
"""

from __future__ import annotations

from typing import NamedTuple

from directory.core import limits
from directory.core.events import Match, Request


class Deadlines(NamedTuple):
    """Milliseconds. `misses_max`: so many deadlines missed one after the other, with no frame from
    the daemon in between, mean a lost daemon; questions that wait at the same time miss as one.
    `match_ms`: of a Match, whose answer is never needed (0: as of any call)."""

    call_ms: int = limits.CALL_DEADLINE_MS
    restore_ms: int = 4 * limits.FENCE_DEADLINE_MS
    connect_ms: int = 4 * limits.FENCE_DEADLINE_MS
    misses_max: int = 3
    match_ms: int = 0

    def of(self, body: Request) -> int:
        """How long a question waits that was given no deadline of its own."""
        return (isinstance(body, Match) and self.match_ms) or self.call_ms


class Silence:
    """Deadlines missed in a row. `said`: the number of the last message so far."""

    def __init__(self) -> None:
        self._misses = 0
        self._missed_up_to = 0

    def broken(self) -> None:
        """The daemon has said something: it is there."""
        self._misses = 0

    def missed(self, seq: int, said: int) -> int:
        """A message had no answer in time; returns how many in a row, 0 where it waited when the
        last miss was counted already: one silence, one miss."""
        if seq <= self._missed_up_to:
            return 0
        self._missed_up_to = said
        self._misses += 1
        return self._misses
