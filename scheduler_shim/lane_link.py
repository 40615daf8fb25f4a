"""The lane link: the frames of the numbered stream by the fast lane, by ZeroMQ when that is over.

Owns the lane's own end and the token arena. Waking a sleeping process is most of a round trip, so
whoever has just sent something looks for the answer for a moment before it sleeps. It must never
look for longer than `SPIN_US`, and not at all where one core has to serve both sides.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from directory.core.errors import TransferError, TreecoredError
from directory.protocol.codec import encode
from directory.protocol.messages import OpenLane
from scheduler_shim.arena import TokenArena
from scheduler_shim.link import NoLink, ZmqLink
from transfer.ipc.channel import FdChannel
from transfer.ipc.lane import FrameLane, LaneOver

SPIN_US: Final = 150
"""An answer is there sooner, unless the daemon is busy; then sleeping costs little beside it."""


class LaneLink(ZmqLink):
    """A link with a lane of its own."""

    def __init__(
        self, session: FdChannel, endpoint: str, arena: TokenArena, *, later: bool = False
    ) -> None:
        """Take over session and arena and open the lane, now or when `open` is called; without one
        it goes on by ZeroMQ alone.

        ZeroMQ's part, which costs two threads, seven descriptors and a third of a millisecond, is
        made only should the lane end. Raises `NoLink`, and the session is still yours.
        """
        super().__init__(session, endpoint, later=True)
        self._arena = arena
        self._lane: FrameLane | None = None
        self._pair: tuple[FrameLane, socket.socket] | None = None
        """Both ends of a lane that is not open yet."""
        self._spin_ns = SPIN_US * 1_000 if len(os.sched_getaffinity(0)) > 1 else 0
        self._looks = False
        self._arrived: list[bytes] = []
        self._held_lost = 0  # by lanes that are over
        self._poll = select.poll()
        self._polled: dict[int, int] = {}
        if not later:
            try:
                self.open()
            except NoLink:
                arena.close()
                raise

    def prepare(self) -> None:
        """Make the lane, if there can be one; `open` hands its other end over."""
        if self._pair is None:
            with suppress(OSError):
                self._pair = FrameLane.pair()

    def open(self) -> None:
        """Open the lane; where there can be none, connect. Raises `NoLink`."""
        self.prepare()
        pair, self._pair = self._pair, None
        if pair is None:
            self.connect()
            return
        lane, other = pair
        try:
            message = encode(OpenLane(self._arena.nbytes))
            self._session.send(message, (other.fileno(), self._arena.fd))
            self._lane = lane
        except (TreecoredError, OSError):
            lane.close()  # the session is over, as the first call will notice
            self.connect()
        finally:
            other.close()

    @property
    def arena(self) -> TokenArena | None:
        """Where long tokens and page lists go; the daemon looks there while there is a lane."""
        return self._arena if self._lane is not None else None

    def send(self, frame: bytes) -> bool:
        """Send a frame if the lane, or the pipe, takes it."""
        if self._lane is None:
            return self._connected and super().send(frame)
        self._looks = True
        return self._lane.send(frame)

    def hold(self, frame: bytes) -> bool:
        """Send a frame together with what comes next, at the latest when answers are looked for."""
        if self._lane is None:
            return self.send(frame)
        return self._lane.hold(frame)

    @property
    def holds(self) -> bool:
        """Whether anything is held, or could not be sent; where the lane is over, perhaps."""
        return self._lane is None or self._lane.holds or self._held_lost > 0

    def send_held(self) -> None:
        """Send what is held."""
        if self._lane is not None:
            self._lane.send_held()

    def silent(self) -> bool:
        """Whether there is a lane, and by one look at it nothing to be sent, read or noticed."""
        return self._lane is not None and not self._arrived and self._lane.silent()

    def looks_no_more(self) -> None:
        """Whatever was sent, the next wait sleeps at once."""
        self._looks = False

    def take_held_lost(self) -> int:
        """Frames that were held and could not be sent since this was asked."""
        lost = self._held_lost
        if self._lane is not None:
            lost, self._lane.held_lost = lost + self._lane.held_lost, 0
        self._held_lost = 0
        return lost

    def receive(self) -> list[bytes]:
        """Read what is there, up to a limit; more is there at the next call."""
        frames, self._arrived = self._arrived, []
        if self._lane is None and not self._connected:
            return frames
        if self._lane is None:
            return frames + super().receive() if frames else super().receive()
        return frames or self._read()

    def wait(self, timeout_us: int | None, fds: Sequence[int] = ()) -> None:
        """Look for an answer for a moment, then block in one poll on everything."""
        if self._lane is not None:
            self._lane.send_held()
            if self._looks and not self._arrived:
                self._looks = False
                self._look(self._lane, timeout_us)
        if self._arrived:
            return
        lane = self._lane
        if lane is None:  # it may have ended just now
            if self._connected:
                super().wait(timeout_us, fds)
            return
        wanted = {
            lane.fileno(): select.POLLIN | (select.POLLOUT if lane.want_write else 0),
            self._session_fd: select.POLLIN,
            **dict.fromkeys(fds, select.POLLIN),
        }
        if wanted != self._polled:
            self._watch(wanted)
        timeout_ms = None if timeout_us is None else -(-timeout_us // 1_000)
        for fd, _ in self._poll.poll(timeout_ms):
            if fd == self._session_fd:
                self._read_session()
            elif fd == lane.fileno():
                lane.flush()

    def close(self) -> None:
        """Close everything."""
        super().close()
        self._end_lane()
        if self._pair is not None:
            for end in self._pair:
                end.close()
            self._pair = None
        self._arena.close()

    # Private.

    def _look(self, lane: FrameLane, timeout_us: int | None) -> None:
        """See whether an answer comes soon; not while the daemon has still to be told all."""
        spin = self._spin_ns if timeout_us is None else min(self._spin_ns, timeout_us * 1_000)
        until = time.monotonic_ns() + spin
        try:
            while not lane.want_write:
                if frames := lane.receive():
                    self._arrived, self._looks = frames, True  # more may follow at once
                    return
                if time.monotonic_ns() >= until:
                    return
                os.sched_yield()  # the daemon may have been put on this very core
        except LaneOver:
            self._end_lane()

    def _read(self) -> list[bytes]:
        lane = self._lane
        if lane is None:
            return []
        lane.send_held()
        if lane.want_write:
            lane.flush()
        try:
            frames = lane.receive()
            self._looks |= bool(frames)  # more may follow at once
            return frames
        except LaneOver:
            self._end_lane()
            return []

    def _end_lane(self) -> None:
        """Go on by ZeroMQ: what was on its way is sent again there."""
        if self._lane is not None:
            if self._alive and not self._session.closed:
                self._read_session()  # the daemon may be dead, and who only polls never waits
            self._held_lost += self._lane.held_lost
            self._lane.close()
            self._lane = None
            try:
                if self._alive:
                    self.connect()
            except NoLink:
                self._alive = False  # there is no way left: the daemon is as good as gone

    def _watch(self, wanted: dict[int, int]) -> None:
        for fd in self._polled.keys() - wanted.keys():
            with suppress(KeyError):
                self._poll.unregister(fd)
        for fd, events in wanted.items():
            self._poll.register(fd, events)
        self._polled = wanted

    def __repr__(self) -> str:
        how = "by its lane" if self._lane is not None else "by ZeroMQ"
        return f"<LaneLink {'alive' if self._alive else 'lost'}, {how}>"


def make_arena(*, warm: bool = True) -> TokenArena | None:
    """An arena; None where there is no memory for it: everything travels in its message then."""
    with suppress(TransferError):
        return TokenArena(warm=warm)
    return None


def make_link(
    session: FdChannel, endpoint: str, arena: TokenArena | None, *, later: bool = False
) -> ZmqLink:
    """The link of a session; with an arena, which it takes over, a lane is opened. With `later`
    nothing is, before its `open`.

    Raises `NoLink`; the session is still yours, the arena is closed."""
    if arena is not None:
        return LaneLink(session, endpoint, arena, later=later)
    return ZmqLink(session, endpoint, later=later)


def open_link(session: FdChannel, endpoint: str, *, lane: bool) -> ZmqLink:
    """Arena and link at once. Raises `NoLink`; the session is closed."""
    try:
        return make_link(session, endpoint, make_arena() if lane else None)
    except BaseException:
        session.close()
        raise
