"""Restores that are expected: who is to look for them instead of sleeping, and for how long.

Being woken takes a sleeping process 100 to 250 us, as long as all that it then does for a restore.
A scheduler that is told in answer to a match that something lies beyond its pool asks for it within
a millisecond, so the mover of its GPU and this process look for that; and for the end of a copy
between pools, which takes a few. Owns how long, and when to give it up: where restores do not
follow, nothing is expected until one has come. It decides nothing of any copy; whatever it says is
only about who sleeps.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Final

from directory.core.actions import AnyReply, Matched, SubmitCopy
from directory.core.ids import PoolId
from directory.daemon.loop import Loop

RESTORE_NS: Final = 1_500_000
"""So long after the answer a restore is looked for."""
END_NS: Final = 4_000_000
"""So long after it has gone to the mover the end of a copy between pools is looked for."""
AGAIN_NS: Final = 500_000
"""What was expected so lately is not said again."""
UNMET_MAX: Final = 8
"""So many in a row may be followed by no restore."""


class Expecting:
    """`tell`: lets the mover know, of a pool. `heeds`: whether movers may look instead of sleeping;
    without, nothing is ever expected, and this process sleeps as always."""

    def __init__(self, loop: Loop, tell: Callable[[PoolId], None], *, heeds: bool) -> None:
        self._loop = loop
        self._tell = tell
        self._heeds = heeds
        self._unmet = 0
        self._said_ns = -AGAIN_NS

    def answered(self, pool: PoolId, body: AnyReply) -> None:
        """A pool was answered."""
        if not self._heeds or type(body) is not Matched or not body.restorable_pages:
            return
        now = monotonic_ns()
        if self._unmet >= UNMET_MAX or now - self._said_ns < AGAIN_NS:
            return
        self._unmet += 1
        self._said_ns = now
        self._loop.look_out(now + RESTORE_NS)
        # The scheduler's answer has not gone yet, and goes first.
        self._loop.after_turn(lambda: self._tell(pool))

    def submitted(self, copy: SubmitCopy) -> None:
        """A copy goes to the mover."""
        if copy.kind == "backup":
            return
        self._unmet = 0
        if self._heeds and copy.kind == "peer_copy":
            self._loop.look_out(monotonic_ns() + END_NS)

    def __repr__(self) -> str:
        return f"<Expecting {'' if self._heeds else 'nothing, '}{self._unmet} unmet>"
