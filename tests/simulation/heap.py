"""The event heap: simulated time, and the one order in which everything happens.

Owns the clock (microseconds), the pending events and the running digest of everything that ran.
Events of one microsecond run in the order in which they were scheduled. It reads no real clock.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable
from typing import Any


class Heap:
    """Pending events by (time, number). `digest` covers times, names and notes of all that ran."""

    def __init__(self) -> None:
        self.now_us = 0
        self.ran = 0
        self.digest = 0
        self.lines: list[str] | None = None
        self._pending: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def after(self, delay_us: int, run: Callable[..., None], *arguments: Any) -> None:
        """Run something once, `delay_us` from now."""
        self._scheduled += 1
        heapq.heappush(
            self._pending, (self.now_us + max(0, delay_us), self._scheduled, run, arguments)
        )

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._pending:
            return False
        self.now_us, _, run, arguments = heapq.heappop(self._pending)
        self.ran += 1
        self.note(run.__qualname__)
        run(*arguments)
        return True

    def note(self, line: str) -> None:
        """Take a line into the digest, and into the log if one is kept."""
        text = f"{self.now_us} {line}"
        self.digest = zlib.crc32(text.encode(), self.digest)
        if self.lines is not None:
            self.lines.append(text)

    def clock(self) -> int:
        """The simulated clock, as a function for real code."""
        return self.now_us

    def __len__(self) -> int:
        return len(self._pending)
