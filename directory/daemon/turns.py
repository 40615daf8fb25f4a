"""Turns: whose work is done next of what can wait, and how much of it beside questions.

Owns the queues of such work, their order and the share of the time that it has while somebody
asks; no clock. A question (a match, a release) is never here: it is carried out when it comes, and
waits for one piece of this work at most. While nobody asks, all of the time is for it; while
somebody does, a share, so that neither a flood of reports keeps a question waiting nor questions
without a pause keep a report waiting for ever. Of what waits, a restore somebody waits for comes
before reports, and these before the ends of backups: then it is who reports without end that is
slowed down, and backups are made only as fast as there is time for them. What was passed over so
often comes first whatever it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import IntEnum
from typing import Final

Piece = Callable[[], None]
"""Does a little of somebody's work. Who has more puts it off anew."""

SHARE: Final = 1 / 8
"""Of the time, for what can wait, while questions come without a pause."""
SAVED_NS_MAX: Final = 100_000
"""So much of it can be saved up: a pause of questions makes no burst."""
OWED_NS_MAX: Final = 1_000_000
"""A piece that took longer counts as so long: what waits behind it is not made to wait for that."""
PASSED_MAX: Final = 8
"""So often others may go first."""


class Rank(IntEnum):
    """What comes first."""

    RESTORES = 0
    """Somebody waits for it: restores, asked for or ended, and what a thin pool asks for."""
    REPORTS = 1
    BACKUPS = 2


class Turns:
    """The work that waits. Mutated by the loop's thread alone."""

    __slots__ = ("_earned_ns", "_passed", "_waiting", "count")

    def __init__(self) -> None:
        self._waiting = tuple(OrderedDict[Hashable, Piece]() for _ in Rank)
        self._passed = [0] * len(Rank)
        self._earned_ns = 0.0
        self.count = 0
        """Pieces that wait; the loop looks at it several times a message."""

    def __len__(self) -> int:
        return self.count

    def put(self, who: Hashable, rank: Rank, piece: Piece) -> None:
        """Have a piece done when its turn has come; one a rank for each `who`, behind others."""
        queue = self._waiting[rank]
        if who not in queue:
            queue[who] = piece
            self.count += 1

    def waits(self, who: Hashable) -> bool:
        """Whether somebody has something here."""
        first, second, third = self._waiting
        return who in first or who in second or who in third

    def drop(self, who: Hashable) -> None:
        """Forget all that somebody has here."""
        for queue in self._waiting:
            if queue.pop(who, None) is not None:
                self.count -= 1

    def asked(self, took_ns: int) -> None:
        """Questions were answered for so long."""
        earned_ns = self._earned_ns + took_ns * SHARE / (1 - SHARE)
        self._earned_ns = min(SAVED_NS_MAX, earned_ns)

    @property
    def earned(self) -> bool:
        """Whether a piece is to be done though somebody asks."""
        return self._earned_ns > 0

    def spent(self, took_ns: int) -> None:
        """A piece took so long while somebody asked."""
        self._earned_ns = max(-OWED_NS_MAX, self._earned_ns - took_ns)

    def take(self) -> Piece:
        """The next piece; there must be one."""
        rank = self._next()
        for other in Rank:
            if other != rank and self._waiting[other]:
                self._passed[other] += 1
        self._passed[rank] = 0
        _, piece = self._waiting[rank].popitem(last=False)
        self.count -= 1
        return piece

    def _next(self) -> Rank:
        waiting = [rank for rank in Rank if self._waiting[rank]]
        late = [rank for rank in waiting if self._passed[rank] >= PASSED_MAX]
        return max(late, key=lambda rank: self._passed[rank]) if late else waiting[0]

    def __repr__(self) -> str:
        waiting = ", ".join(f"{len(self._waiting[rank])} {rank.name.lower()}" for rank in Rank)
        return f"<Turns {waiting}, {self._earned_ns / 1e3:.0f} us earned>"
