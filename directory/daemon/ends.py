"""Ends of copies: what a mover has said is done, until the directory has been told.

Owns the ends that wait for their turn (turns.py): a restore's, for which somebody waits, before a
backup's. A backup is begun for each that has ended, so it is here that backups are slowed down
while there is no time for them. Each kind is told in the order in which it was said; two copies of
different kinds never depend on one another's end. It must never keep one whose mover is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Final

import structlog

from directory.core.events import CopyDone
from directory.daemon.loop import Loop
from directory.daemon.turns import Rank

PIECE_NS: Final = 200_000
"""So long the directory is told of ended copies before others have their turn, and one more."""

log = structlog.get_logger("ends")


class Ends:
    """Those of one mover at a time. `tell` tells the directory of one."""

    def __init__(self, loop: Loop, tell: Callable[[CopyDone], None]) -> None:
        self._loop = loop
        self._tell = tell
        self._waiting: dict[Rank, deque[CopyDone]] = {
            Rank.RESTORES: deque(),
            Rank.BACKUPS: deque(),
        }

    def put(self, done: CopyDone, *, backup: bool) -> None:
        """Tell of one when its turn has come."""
        rank = Rank.BACKUPS if backup else Rank.RESTORES
        self._waiting[rank].append(done)
        self._loop.later(self, rank, partial(self._some, rank))

    def tell_all(self) -> None:
        """Tell of all that wait, now."""
        for waiting in self._waiting.values():
            while waiting:
                self._tell(waiting.popleft())

    def tell_last(self) -> None:
        """Tell of all that wait, for the daemon ends; where that raises, of none after it."""
        try:
            self.tell_all()
        except Exception as error:
            # What the daemon ends over may be raised here again. What was not told has not landed,
            # and everything else is to be closed all the same.
            log.error("ends of copies were not told", left=len(self), exc_info=error)
        self.forget()

    def forget(self) -> None:
        """Tell of none of them any more."""
        self._loop.forget(self)
        for waiting in self._waiting.values():
            waiting.clear()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _some(self, rank: Rank) -> None:
        waiting, begun = self._waiting[rank], monotonic_ns()
        if rank is Rank.RESTORES:
            self._loop.waited_for = True
        while waiting:
            self._tell(waiting.popleft())
            if monotonic_ns() - begun >= PIECE_NS:
                break
        if waiting:
            self._loop.later(self, rank, partial(self._some, rank))

    def __repr__(self) -> str:
        restores, backups = map(len, self._waiting.values())
        return f"<Ends of {restores} restores and {backups} backups>"
