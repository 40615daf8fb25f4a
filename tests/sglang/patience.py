"""A limit for starts that a busy machine does not break: in processor time, not on the clock.

Owns the count. A start that computes is given as much as it may need; one that has used that up,
or does next to nothing for a while, is given up. A test's own timeout is the net below.
"""

import os
import time

from tests.sglang.engines import session_of

STILL_S = 120.0
STILL_CPU_S = 1.0
"""Less processor time than this in so long is no progress: importing alone takes 15 s of it."""


class Patience:
    """With the processes of one session, of which `pid` is the leader."""

    def __init__(self, pid: int, cpu_s: float) -> None:
        self._pid = pid
        self._cpu_s = cpu_s
        self._since = time.monotonic()
        self._then = 0.0

    def lost(self) -> str:
        """Why there is no point in waiting any longer, or nothing."""
        used, now = processor_time_s(self._pid), time.monotonic()
        if used > self._cpu_s:
            return f"it has used {used:.0f} s of processor time"
        if used - self._then >= STILL_CPU_S:
            self._since, self._then = now, used
        if now - self._since > STILL_S:
            return f"it does nothing since {now - self._since:.0f} s, after {used:.0f} s of work"
        return ""


def processor_time_s(pid: int) -> float:
    """What the living processes of a session have used."""
    ticks = 0
    for one in session_of(pid):
        try:
            with open(f"/proc/{one}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has just ended
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
