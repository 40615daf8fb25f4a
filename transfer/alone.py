"""Whether copies by a kernel have their GPU to themselves, by how long their slices take.

Pure. Owns the slices of such copies that are in flight, and one answer, which means "hardly
shared": of two that are in flight at once each is allowed the bytes of both. Two processes on one
GPU take turns, and a turn is many times as long as a slice: one that took hardly longer than memory
takes to move its bytes has waited for nobody. That is known 100 us after the first slice has gone,
where the driver's library averages over some tenths of a second (device/cuda_busy.py). The answer
is no unless it was seen, and it is asked for before every slice. It must never outlive what it was
seen of: a slice that is late takes it back before it is done, and the more often it was believed
and was wrong, the longer nothing is concluded. A slice may also be sent to find out (a try): one
that was late counts like one that was believed.
"""

from __future__ import annotations

from transfer.device.protocol import Ticket

TRUSTED_US = 2_000
"""So long after the last slice its time says something."""
LAUNCH_US = 30
"""What a slice takes besides its bytes, from the return of its launch to the turn of the mover's
loop that sees it done."""
DOUBT_US_MIN = 5_000
DOUBT_US_MAX = 500_000
UNSEEN_MAX = 3
"""Tries in a row of which nobody saw whether they were in time, before a pause as behind one that
was not: each of them goes alone, and what computes there waits for it."""
"""So long nothing is concluded once it was wrong, and twice as long each further time: between two
steps of a decode a slice does have the GPU to itself, and the next step waits for those behind."""


class _Slice:
    """One that is in flight. `shared`: bytes of all that were in flight beside it, and its own.
    `tried`: it was sent to find out."""

    __slots__ = ("nbytes", "shared", "since_us", "tried")

    def __init__(self, nbytes: int, shared: int, since_us: int, *, tried: bool) -> None:
        self.nbytes = nbytes
        self.shared = shared
        self.since_us = since_us
        self.tried = tried


class Alone:
    """Mutated as slices go and end. `bytes_per_us`: a slice that was slower has waited for somebody
    (0: nobody knows how fast memory or link is here, and the answer is always no)."""

    def __init__(self, bytes_per_us: int) -> None:
        self._bytes_per_us = bytes_per_us
        self._in_flight: dict[Ticket, _Slice] = {}  # the oldest first
        self._seen = False
        self._seen_us = 0
        self._looked_us = 0
        self._doubt_us = 0
        self._doubted_until_us = 0
        self._unseen = 0

    def submitted(self, ticket: Ticket, nbytes: int, now_us: int, *, tried: bool = False) -> None:
        """A slice has gone; `tried`: to find out."""
        others = self._in_flight.values()
        beside = sum(other.nbytes for other in others)
        for other in others:
            other.shared += nbytes
        self._in_flight[ticket] = _Slice(nbytes, beside + nbytes, now_us, tried=tried)

    def ended(self, ticket: Ticket, now_us: int) -> None:
        """A slice is no more in flight; of any other copy nothing is noted."""
        piece = self._in_flight.pop(ticket, None)
        if piece is None:
            return
        in_time = self._in_time(piece, now_us)
        if not in_time and self._in_time(piece, self._looked_us):
            # Nobody looked in between: it may have ended long ago, and says nothing.
            self._unseen += piece.tried
            if self._unseen >= UNSEEN_MAX:
                self._unseen, self._doubted_until_us = 0, now_us + DOUBT_US_MIN
            return
        self._unseen = 0
        # Whether it went while that was believed; what was forgotten by then was not wrong.
        believed = piece.tried or (self._seen and piece.since_us - self._seen_us <= TRUSTED_US)
        if in_time and believed:
            self._doubt_us = 0
        elif believed:
            self._doubt_us = min(max(DOUBT_US_MIN, 2 * self._doubt_us), DOUBT_US_MAX)
            self._doubted_until_us = now_us + self._doubt_us
        self._seen = in_time and now_us >= self._doubted_until_us
        self._seen_us = now_us

    def looked(self, now_us: int) -> None:
        """All that has ended by now was told of."""
        self._looked_us = now_us

    def holds(self, now_us: int) -> bool:
        """Whether the last slice had the GPU to itself, and nothing speaks against it since."""
        if not self._seen or now_us - self._seen_us > TRUSTED_US:
            return False
        return all(self._in_time(piece, now_us) for piece in self._in_flight.values())

    def may_try(self, now_us: int) -> bool:
        """Whether a slice may go to find out: nothing that goes tells, and nothing is doubted."""
        return bool(self._bytes_per_us) and not self._in_flight and now_us >= self._doubted_until_us

    def trying(self, now_us: int) -> bool:
        """Whether it will be known soon: something is in flight, and not late."""
        pieces = self._in_flight.values()
        return bool(pieces) and all(self._in_time(piece, now_us) for piece in pieces)

    def _in_time(self, piece: _Slice, now_us: int) -> bool:
        """Whether it takes no longer than all that was in flight with it; nothing is in time where
        nobody knows how long that is."""
        if not self._bytes_per_us:
            return False
        return now_us - piece.since_us <= LAUNCH_US + piece.shared // self._bytes_per_us

    def __repr__(self) -> str:
        return f"<Alone {self._seen}, {len(self._in_flight)} in flight>"
