"""The link: how a client's frames reach the daemon, and how it learns that the daemon is gone.

`Link` is the whole I/O seam of the shim: `ZmqLink` for a real daemon, something in one process for
tests and for the simulation. A link may lose frames in both directions; the numbered stream above
it makes up for that. It must never block, except in `wait`, and never interpret a frame.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

import zmq

from directory.core.errors import ProtocolError, TreecoredError
from directory.core.limits import MESSAGE_BYTES_MAX, UNACKED_MESSAGES_MAX
from transfer.ipc.channel import FdChannel, close_fds

FRAMES_PER_RECEIVE_MAX: Final = 1_024


class NoLink(ProtocolError):
    """This process cannot make what a link consists of: it has no more descriptors, say.

    It never travels on the wire, so it has no code of its own.
    """


class Link(Protocol):
    """Carries frames between one client and its daemon, and tells the time."""

    def send(self, frame: bytes) -> bool:
        """Send now or not at all; False when the frame was dropped. Never blocks."""
        ...

    def receive(self) -> list[bytes]:
        """Frames that have arrived, in order; never blocks."""
        ...

    def wait(self, timeout_us: int | None, fds: Sequence[int] = ()) -> None:
        """Block until a frame may be there, the daemon is gone, one of `fds` is readable, or the
        time is over (None: for ever)."""
        ...

    def now_us(self) -> int:
        """A clock that never goes back, in microseconds."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the daemon still holds the session open (as seen by the last call)."""
        ...

    def close(self) -> None:
        """End the session. Repeatable."""
        ...


def monotonic_us() -> int:
    """The clock of real links."""
    return time.monotonic_ns() // 1_000


class ZmqLink:
    """A DEALER for frames, and the session socket for liveness."""

    _context: zmq.Context[zmq.Socket[bytes]]
    _dealer: zmq.Socket[bytes]
    _poller: zmq.Poller

    def __init__(self, session: FdChannel, endpoint: str, *, later: bool = False) -> None:
        """Take over the session; connects without waiting, now or when `open` is called."""
        self._session = session
        self._session_fd = session.fileno()
        self._endpoint = endpoint
        self._alive = True
        self._extra: Sequence[int] = ()
        self._connected = False
        if not later:
            self.open()

    def prepare(self) -> None:
        """Make what `open` needs, where that is to be no part of it."""

    def open(self) -> None:
        """Make the way for frames. Raises `NoLink`; nothing of it stays then."""
        self.connect()

    def connect(self) -> None:
        """Make the DEALER, whose context has two threads. Repeatable.

        Raises `NoLink`; nothing of it stays then.
        """
        if self._connected:
            return
        try:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        except zmq.ZMQError as error:  # no descriptor is left
            raise NoLink(f"no link to {self._endpoint}: {error}") from error
        try:
            dealer = context.socket(zmq.DEALER)
            # Nothing is queued for a daemon that is not there, nothing lingers at the end, and a
            # full pipe is an answer at once: what is dropped is sent again by the stream above.
            dealer.setsockopt(zmq.IMMEDIATE, 1)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.SNDHWM, UNACKED_MESSAGES_MAX)
            dealer.setsockopt(zmq.RCVHWM, UNACKED_MESSAGES_MAX)
            dealer.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
            dealer.connect(self._endpoint)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise NoLink(f"no link to {self._endpoint}: {error}") from error
        self._context, self._dealer, self._connected = context, dealer, True
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        if self._alive:
            self._poller.register(self._session_fd, zmq.POLLIN)

    def send(self, frame: bytes) -> bool:
        """Send a frame if the pipe takes it."""
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> list[bytes]:
        """Read what is there, up to a limit; more is there at the next call."""
        frames: list[bytes] = []
        for _ in range(FRAMES_PER_RECEIVE_MAX):
            try:
                frames.append(self._dealer.recv(zmq.NOBLOCK))
            except zmq.ZMQError:
                break
        if not frames and self._alive:
            self._read_session()  # who only polls never waits, and would not learn of its end
        return frames

    def wait(self, timeout_us: int | None, fds: Sequence[int] = ()) -> None:
        """Block in one poll on everything."""
        if fds != self._extra:
            for fd in self._extra:
                self._poller.unregister(fd)
            for fd in fds:
                self._poller.register(fd, zmq.POLLIN)
            self._extra = tuple(fds)
        timeout_ms = None if timeout_us is None else -(-timeout_us // 1_000)
        for what, _ in self._poller.poll(timeout_ms):
            if what == self._session_fd:
                self._read_session()

    def now_us(self) -> int:
        """The monotonic clock."""
        return monotonic_us()

    @property
    def alive(self) -> bool:
        """Whether no end of file has been seen on the session."""
        return self._alive

    def close(self) -> None:
        """Close both sockets."""
        self._alive = False
        if not self._session.closed:
            self._session.close()
            if self._connected:
                self._dealer.close(linger=0)
                self._context.term()

    def _read_session(self) -> None:
        try:
            for _, fds in self._session.receive():
                close_fds(fds)  # nothing is said on a session after its registration
        except (TreecoredError, OSError):
            self._alive = False
            if self._connected:
                self._poller.unregister(self._session_fd)  # it would be readable for ever

    def __repr__(self) -> str:
        return f"<ZmqLink {'alive' if self._alive else 'lost'}>"
