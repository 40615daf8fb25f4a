"""Being woken: whether this thread takes the core from whoever wakes it.

Owns the scheduling policy that the loop's thread sleeps with. Who asks waits for the answer, so a
question has the core that it finds, and so has all else that is waited for (lanes.py and ends.py
say what that is). Reports are not, and their scheduler computes on: a daemon that is told of a
whole pool is woken again and again, and where cores are few the kernel would stop the scheduler for
it each time, as long as the reports take. So shortly after reports, with nothing that anybody
waited for in a while, the thread sleeps as a batch process (SCHED_BATCH, sched(7)): woken,
such a one takes an idle core, or that of its waker once this one sleeps. It never runs like that,
so that what it starts has another's policy. A thread that was given another one by its operator
keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeVar

AFTER_QUESTION_NS: Final = 50_000_000
"""So long nobody must have asked for anything."""
AFTER_REPORT_NS: Final = 50_000_000
"""The last report must not be longer ago."""
PRIORITY: Final = os.sched_param(0)
"""The only one that these two policies have; how nice a process is it stays."""

Ready = TypeVar("Ready")
Poll = Callable[[float | None, int], Ready]


class Waking:
    """How one thread, which must be the one that made this, sleeps. Mutated by it alone."""

    def __init__(self) -> None:
        self._able = os.sched_getscheduler(0) == os.SCHED_OTHER
        self._asked = self._reported = False
        self._asked_ns = self._reported_ns = -max(AFTER_QUESTION_NS, AFTER_REPORT_NS)

    def asked(self) -> None:
        """Somebody waited for something that was done since the last sleep."""
        self._asked = True

    def reported(self) -> None:
        """Reports that nobody waits for were carried out since the last sleep."""
        self._reported = True

    def sleep(self, poll: Poll[Ready], timeout_s: float | None, most: int, now_ns: int) -> Ready:
        """Sleep in `poll` as what was done before suggests. It may return sooner, with nothing."""
        if self._asked:
            self._asked, self._asked_ns = False, now_ns
        if self._reported:
            self._reported, self._reported_ns = False, now_ns
        left_ns = self._reported_ns + AFTER_REPORT_NS - now_ns
        if left_ns <= 0 or now_ns < self._asked_ns + AFTER_QUESTION_NS or not self._able:
            return poll(timeout_s, most)
        if os.sched_getscheduler(0) != os.SCHED_OTHER:  # somebody has given it one meanwhile
            self._able = False
            return poll(timeout_s, most)
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, PRIORITY)
        except OSError:  # a sandbox forbids it
            self._able = False
            return poll(timeout_s, most)
        try:
            left_s = left_ns / 1e9
            return poll(left_s if timeout_s is None else min(timeout_s, left_s), most)
        finally:
            if os.sched_getscheduler(0) == os.SCHED_BATCH:
                os.sched_setscheduler(0, os.SCHED_OTHER, PRIORITY)

    def __repr__(self) -> str:
        return f"<Waking {'able' if self._able else 'unable'} to be modest>"
