"""Looks: how a thread waits for a layer that lands: mostly asleep, awake often enough.

Owns the rhythm and nothing of what is waited for.
"""

from __future__ import annotations

import time
from typing import Final

SPIN_S: Final = 50e-6
SPINS: Final = 10
PEEK_US: Final = 500
"""How long it waits for an answer to come when it takes in answers."""


class Looks:
    """One wait."""

    def __init__(self) -> None:
        self._count = 0

    def slept(self) -> bool:
        """Sleep a moment; False, without sleep, every so often: take in what has come."""
        self._count += 1
        if self._count % SPINS:
            time.sleep(SPIN_S)
            return True
        return False

    def __repr__(self) -> str:
        return f"<Looks {self._count}>"
