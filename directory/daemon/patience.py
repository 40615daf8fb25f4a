"""Patience: how long a mover with work may say nothing, when it is asked, and when it is lost.

Owns three numbers and no clock. It must never take this process's own absence for the mover's
silence: who comes late to a deadline asks once more.
"""

from enum import StrEnum
from typing import Final

from directory.core import limits

PING_AFTER_US: Final = limits.MOVER_PING_AFTER_MS * 1000
OWN_ABSENCE_US: Final = 250_000
"""So late to a deadline, it was this process that was away: then the mover may have been, too."""


class Verdict(StrEnum):
    """What is to be done about a silent mover."""

    WAIT = "wait"
    ASK = "ask"
    LOST = "lost"


class Patience:
    """With one mover. `slow`, as an argument: it starts, or maps or unmaps memory."""

    def __init__(self, silence_ms_max: int, start_ms_max: int) -> None:
        self._silence_us = silence_ms_max * 1000
        self._start_us = start_ms_max * 1000
        self._heard_us = 0
        self._asked_us = 0  # 0: it has said something since it was asked
        self._excused = False

    @property
    def asked(self) -> bool:
        """Whether it owes an answer."""
        return self._asked_us > 0

    def heard(self, now: int) -> None:
        """It has said something, or owed no word until now."""
        self._heard_us, self._asked_us, self._excused = now, 0, False

    def silence_us(self, *, slow: bool) -> int:
        """How long it may say nothing."""
        return self._start_us if slow else self._silence_us

    def due_us(self, *, slow: bool) -> int:
        """When `judge` has something to say."""
        silence = self.silence_us(slow=slow)
        ask_after = min(PING_AFTER_US, silence // 2)
        if self._asked_us:
            return self._asked_us + silence - ask_after
        return self._heard_us + ask_after

    def judge(self, now: int, *, slow: bool) -> Verdict:
        """Say what is to be done; ASK counts as done."""
        due = self.due_us(slow=slow)
        if now < due:
            return Verdict.WAIT
        if self._asked_us:
            if self._excused or now - due <= OWN_ABSENCE_US:
                return Verdict.LOST
            self._excused = True
        self._asked_us = now
        return Verdict.ASK

    def __repr__(self) -> str:
        return f"<Patience heard {self._heard_us} us, asked {self._asked_us} us>"
