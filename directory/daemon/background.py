"""What a daemon does besides answering: its access log, KV events and metrics.

Owns when they get their turn: at the end of a turn of the loop, told whether anybody asked for
anything in it. Each of them does little at once and knows for itself when it is time. It must never
wait, and whatever of it is missing is not missed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from directory.daemon.kv_feed import KvFeed
from directory.daemon.metrics_feed import Exporter
from directory.daemon.pacing import is_late
from directory.daemon.recording import Recording

LOOK_US: Final = 500
"""While messages follow close upon one another, all else is looked at so often."""
QUIET_US: Final = 500
"""So long nothing must have been asked before the log gets its turn: messages of one turn of a
scheduler have come by then, and the sooner it begins the more is done before the next match, so
that fewer of them come right after it."""


class Background:
    """All of it. `waiting`: whether somebody asks for something by now."""

    def __init__(
        self,
        recording: Recording,
        kv: KvFeed | None,
        exporter: Exporter | None,
        waiting: Callable[[], bool],
    ) -> None:
        self._recording = recording
        self._kv = kv
        self._exporter = exporter
        self._waiting = waiting
        self._asked_us = 0
        """When somebody last asked for something."""

    def due_us(self, *others_us: int | None) -> int | None:
        """When `turn` has something to do next if nobody asks until then, or None; or what is due
        at one of `others_us`, if that is earlier."""
        due_us = self._recording.ready_us
        if due_us is not None:
            due_us = max(due_us, self._asked_us + QUIET_US)
        dues = [due_us, *others_us]
        dues += [other.due_us() for other in (self._kv, self._exporter) if other is not None]
        return min((due for due in dues if due is not None), default=None)

    def turn(self, now_us: int, *, quiet: bool) -> None:
        """A turn of the loop is over; `quiet`: nobody asked for anything in it."""
        recording, told = self._recording, False
        if self._kv is not None:
            told = self._kv.on_time(idle=quiet and not self._waiting())
        ready_us = recording.ready_us
        if not quiet:
            self._asked_us = now_us
            if recording.pressed or is_late(ready_us, now_us):
                recording.hurry(now_us)
        elif ready_us is not None and (
            now_us >= max(ready_us, self._asked_us + QUIET_US)
            # The next match will find the caches full of other work anyway.
            or told
        ):
            recording.work(now_us, self._waiting)
        if self._exporter is not None:
            self._exporter.on_time()
