"""Speaking for one registration: the connection, its numbered stream, and Attach.

Owns the link and the stream of one client, and the proof that the connection speaks for its
registration. What is asked and what is answered is `client.py`'s. It never waits beyond the
connect deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from msgspec.structs import replace

from directory.core import limits
from directory.core.errors import TooMany
from directory.core.events import Insert, Match, Request, Unlock
from directory.protocol.codec import encode
from directory.protocol.ended import Ended
from directory.protocol.messages import NOWHERE, Attach, ClientBody, Envelope
from directory.protocol.stream import SendStream
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.lane_link import LaneLink
from scheduler_shim.leases import LeasesOut
from scheduler_shim.link import Link
from scheduler_shim.session import DaemonAbsent, Registration

PLACED: Final = (Match, Insert)
"""Messages whose tokens, and page lists, lie in the arena."""
ATTACHES_MAX: Final = 16
"""So often the connection may be made anew beneath, with no answer in between."""


class Speaker(ABC):
    """One registration's voice. `lost`: why the daemon is lost; empty while it is not."""

    def __init__(
        self,
        link: Link,
        registration: Registration,
        deadlines: Deadlines,
        *,
        alone: bool,
    ) -> None:
        """`alone`: no other rank numbers the same messages."""
        self.registration = registration
        self.deadlines = deadlines
        self.lost = ""
        self.counters: dict[str, int] = {}
        self._link = link
        self._lane = link if isinstance(link, LaneLink) else None
        self._stream = SendStream()
        self._last_seq = 0
        self._leases = LeasesOut()
        self._defers = alone and self._lane is not None
        self._releases: list[Unlock] = []  # neither numbered nor said yet
        # What comes by a lane needs no Attach. Should the lane end, the daemon refuses what comes
        # by the connection instead, and Attach is said then.
        self._attached = self._lane is not None
        self._attach_us = 0
        self._resend_check_us = 0
        self._reattaches = 0

    def attach(self) -> None:
        """Prove to the daemon which registration this connection speaks for.

        Raises `DaemonAbsent` when it does not answer within the connect deadline.
        """
        give_up = self._link.now_us() + self.deadlines.connect_ms * 1_000
        while not self.try_attach():
            self._link.wait(limits.RESEND_AFTER_MS * 1_000)
            self._take_in()
            if self._link.now_us() >= give_up and not self._attached:
                self.lose("the daemon did not answer Attach")

    def try_attach(self) -> bool:
        """Say Attach when it is time; whether it was answered. Never waits.

        Raises `DaemonAbsent` once the daemon is lost.
        """
        now = self._link.now_us()
        if not self._attached and not self.lost and now >= self._attach_us:
            # A link that has just been made may drop the first frame, so it is said again.
            self._attach_us = now + limits.RESEND_AFTER_MS * 1_000
            self._say_attach()
        self._take_in()
        if self.lost:
            raise DaemonAbsent(f"{self.lost}; is the daemon still running?")
        return self._attached

    def send_held(self) -> None:
        """Send what was held, if anything was."""
        if self._releases:
            self._say_releases()
        if self._lane is not None and self._lane.holds and not self.lost:
            self._lane.send_held()
            self._count("frames_not_sent", self._lane.take_held_lost())

    @property
    def silent(self) -> bool:
        """Whether nothing is open, to be said or to be heard, by one look at the lane. By ZeroMQ
        that is never known."""
        lane = self._lane
        if self._releases or self._stream.open_count:
            return False
        return lane is not None and lane.silent()

    @property
    def leases_out(self) -> int:
        """Leases that were granted and not released, or that may have been."""
        return len(self._leases)

    @abstractmethod
    def lose(self, reason: str) -> None:
        """Give the daemon up."""

    def now_us(self) -> int:
        """The link's clock."""
        return self._link.now_us()

    @abstractmethod
    def _take_in(self) -> None:
        """Take in what has arrived."""

    def _attach_again(self) -> bool:
        """The connection was made anew beneath; whether Attach was said once more. Many frames may
        be refused before it arrives: for them it is said once."""
        if not self._attached:
            return False
        now = self._link.now_us()
        if now < self._attach_us:
            return True
        if self._reattaches >= ATTACHES_MAX:
            return False
        self._attach_us = now + limits.RESEND_AFTER_MS * 1_000 // 4
        self._reattaches += 1
        self._say_attach()
        return True

    def _leave_lane(self) -> None:
        """Where the lane has ended: attach the connection, and say there what is open."""
        if self._lane is not None:
            self._count("frames_not_sent", self._lane.take_held_lost())
        if self._lane is not None and self._lane.arena is None:
            self._lane = None
            self._count("lanes_ended")
            # A connection that has just been made may drop all this; what is sent again later is
            # refused then, and Attach said once more.
            self._say_attach()
            self._say_open()

    def _say_open(self) -> None:
        """Everything that is open is due: the way that it went is over."""
        self._stream.hurry(self._link.now_us())
        self._resend_check_us = 0

    def _say_attach(self) -> None:
        self._send(0, Attach(self.registration.pool, self.registration.secret))

    def _push(self, body: Request | Ended, *, asks: bool, hold: bool = False) -> int:
        """Number a message and say it; returns the number, 0 where the daemon is lost.

        A release can wait for what is said next; what was published or given up is told at once.
        By a lane a release even comes behind a match that asks for a lease, so that it is neither
        made ready nor carried out while that is waited for. All else may depend on what is
        released.
        """
        if self.lost:
            return 0
        if self._defers and not asks and isinstance(body, Unlock):
            self._releases.append(body)
            return 0
        follow = False
        if self._releases:
            follow = asks and isinstance(body, Match) and body.acquire
            if not follow:
                self._say_releases()
        seq = self._number(body, asks=asks, hold=hold)
        if follow:
            self._say_releases()
        return seq

    def _say_releases(self) -> None:
        """Say what was released, together with what comes next."""
        if self._releases:
            releases, self._releases = self._releases, []
            for body in releases:
                self._number(body, asks=False, hold=True)

    def _number(self, body: Request | Ended, *, asks: bool, hold: bool) -> int:
        if self.lost:
            return 0
        try:
            seq = self._stream.push(body, asks=asks, now_us=self._link.now_us())
        except TooMany as error:
            self.lose(str(error))
            return 0
        self._last_seq = seq
        if isinstance(body, Unlock):
            self._leases.released(body.receipt)
            hold = hold or not asks
        self._send(seq, body, hold=hold)
        return seq

    def _send(self, seq: int, body: ClientBody, *, hold: bool = False) -> None:
        """Send a message; with `hold` it may wait for the next one, which is then sent with it."""
        tokens = pages = NOWHERE
        lane = self._lane
        arena = lane.arena if lane is not None else None
        if arena is not None and isinstance(body, PLACED):
            acked = self._stream.acked
            tokens = arena.place(body.tokens, seq, acked)
            if isinstance(body, Insert):
                pages = arena.place(body.pages, seq, acked)
                if pages is not NOWHERE:
                    body = replace(body, pages=b"")
            if tokens is not NOWHERE:
                body = replace(body, tokens=b"")
        envelope = Envelope(
            self.registration.epoch, seq, self._stream.answered, body, tokens, pages
        )
        frame = encode(envelope)
        sent = lane.hold(frame) if hold and lane is not None else self._link.send(frame)
        if not sent:
            self._count("frames_not_sent")

    def _count(self, name: str, number: int = 1) -> None:
        if number:
            self.counters[name] = self.counters.get(name, 0) + number
