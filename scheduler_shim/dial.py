"""Dialling: how a scheduler that lost its daemon gets a client of the next one without waiting.

`Dial` is the seam: a real daemon behind it, something in one process for tests and for the
simulation. `DaemonAttempt` is one try of the real one, a few steps that each return at once. It
must never block the scheduler, and a try that failed leaves nothing open.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from directory.core.errors import ProtocolError
from directory.core.events import Mode
from directory.protocol.codec import decode_session_reply, encode
from directory.protocol.messages import (
    Register,
    Registered,
    SessionRefused,
    SessionReply,
    Welcome,
)
from directory.protocol.runtime_dir import deserted
from scheduler_shim.arena import TokenArena
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.lane_link import make_arena, make_link
from scheduler_shim.link import ZmqLink, monotonic_us
from scheduler_shim.pools import Pool
from scheduler_shim.session import (
    SESSION_NAME,
    SOFTWARE,
    DaemonAbsent,
    NobodyListens,
    Registration,
    answer_welcome,
    hello,
    raise_refusal,
    register_message,
)
from transfer.ipc.channel import FdChannel, close_fds

CONNECT_S: Final = 0.01
"""A unix socket connects at once or its backlog is full; then the next try comes soon enough."""


class Attempt(Protocol):
    """One try to register with a daemon."""

    def step(self) -> DaemonClient | None:
        """One step, which is short; the attached client once there is one.

        Raises a typed error when the try has failed.
        """
        ...

    def close(self) -> None:
        """Give the try up. Repeatable; a client that was returned is not touched."""
        ...


class Dial(Protocol):
    """Makes tries, and tells the time to wait between them."""

    def begin(self, mode: Mode) -> Attempt:
        """Begin a try. Raises a typed error when it fails at once, `DaemonAbsent` where nobody
        listens; its steps raise `NobodyListens` then."""
        ...

    def deserted(self) -> bool:
        """Whether it is known that neither the daemon nor any mover of it lives."""
        ...

    def now_us(self) -> int:
        """The clock of the links that it makes."""
        ...


class DaemonDial:
    """Tries the daemon of a runtime folder. `world_size`, `rank`: as in `DaemonClient.connect`."""

    def __init__(
        self,
        runtime_dir: Path,
        pool: Pool,
        *,
        instance: str,
        deadlines: Deadlines | None = None,
        world_size: int = 1,
        rank: int = 0,
        software: str = SOFTWARE,
    ) -> None:
        self._software = software
        self._runtime_dir = runtime_dir
        self._path = str(runtime_dir / SESSION_NAME)
        self._pool = pool
        self._instance = instance
        self._deadlines = deadlines or Deadlines()
        self._world_size = world_size
        self._rank = rank

    def begin(self, mode: Mode) -> DaemonAttempt:
        """Begin a try. Nothing has been said, and nobody been looked for, when it returns."""
        message = partial(
            register_message,
            self._pool,
            instance=self._instance,
            mode=mode,
            world_size=self._world_size,
            rank=self._rank,
        )
        return DaemonAttempt(
            self._path,
            message,
            self._pool,
            self._deadlines,
            software=self._software,
            world_size=self._world_size,
        )

    def deserted(self) -> bool:
        """Whether nobody holds the lock of the runtime folder."""
        return deserted(self._runtime_dir)

    def now_us(self) -> int:
        """The monotonic clock."""
        return monotonic_us()


class DaemonAttempt:
    """Hello, Register and Attach, each said once its forerunner was answered.

    `path`: of the session socket. `message`: makes the registration, once a daemon has welcomed.
    """

    def __init__(
        self,
        path: str,
        message: Callable[[], Register],
        pool: Pool,
        deadlines: Deadlines,
        *,
        software: str = SOFTWARE,
        world_size: int = 1,
    ) -> None:
        self._make_message = message
        self._pool = pool
        self._deadlines = deadlines
        self._software = software
        self._world_size = world_size
        self._path = path
        self._socket: socket.socket | None = None
        """Made, and not connected yet."""
        self._channel: FdChannel | None = None
        self._said_hello = False
        self._welcome: Welcome | None = None
        self._message: Register | None = None
        self._answer: tuple[bytes, list[int]] | None = None
        self._give_up_us = 0  # at the latest then must the daemon have said something
        self._epoch = 0
        self._client: DaemonClient | None = None
        self._registered: Registration | None = None
        self._arena: TokenArena | None = None
        self._link: ZmqLink | None = None
        self._arena_due = self._lane_due = self._link_due = False
        self._said_attach = False
        self._wait_anew()

    def step(self) -> DaemonClient | None:
        """One step, which is short: requests go on between it and the next one."""
        try:
            if self._client is None:
                moved = self._prepare()
            elif self._client.try_attach():
                return self._client
            else:
                moved, self._said_attach = not self._said_attach, True
            if moved:
                self._wait_anew()
            elif monotonic_us() >= self._give_up_us:
                raise DaemonAbsent("the daemon did not answer in time")
        except BaseException:
            self.close()
            raise
        return None

    def close(self) -> None:
        """Close the session."""
        if self._client is not None:
            self._client.close()
        elif self._link is not None:
            self._link.close()
        elif self._channel is not None:
            self._channel.close()
        elif self._socket is not None:
            self._socket.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _wait_anew(self) -> None:
        """Only the daemon's silence counts, not how long the scheduler is between two steps."""
        self._give_up_us = monotonic_us() + self._deadlines.connect_ms * 1_000

    def _prepare(self) -> bool:
        """Make a socket, connect, say Hello, hear, make the registration, say it, make the arena,
        make the link, its lane, open it, make the client: one of them. The arena's pages are made
        by what lies there first, bit by bit; and ZeroMQ's part, which takes a while for its
        threads, only should the lane end. Says whether something was done; nothing is while the
        daemon says nothing."""
        registered = self._registered
        if self._channel is None:
            self._connect()
        elif not self._said_hello:
            self._said_hello = True
            self._send(self._channel, hello(self._software), ())
        elif self._welcome is not None:
            self._make_answer(self._welcome)
        elif self._answer is not None:
            (payload, fds), self._answer = self._answer, None
            self._send(self._channel, payload, fds)
        elif registered is None:
            return self._hear(self._channel)
        elif self._arena_due:
            self._arena_due = False
            self._arena = make_arena(warm=False)
        elif self._link is None:
            arena, self._arena = self._arena, None
            self._link = make_link(self._channel, registered.endpoint, arena, later=True)
            self._lane_due = self._link_due = True
        elif self._lane_due:
            self._lane_due = False
            self._link.prepare()
        elif self._link_due:
            self._link_due = False
            self._link.open()
        else:
            ranks = self._world_size
            self._client = DaemonClient(self._link, registered, self._deadlines, world_size=ranks)
            self._client.before_loss = self._pool.settle
        return True

    def _connect(self) -> None:
        """The socket, then its connection."""
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                return
            self._socket.settimeout(CONNECT_S)
            self._socket.connect(self._path)
        except OSError as error:
            raise NobodyListens(f"no daemon listens at {self._path}: {error}") from error
        self._channel = FdChannel(self._socket)

    def _hear(self, channel: FdChannel) -> bool:
        try:
            if channel.want_write:
                channel.flush()
            frames = channel.receive()
        except (ProtocolError, OSError) as error:
            raise DaemonAbsent(f"the daemon closed the session: {error}") from error
        for payload, fds in frames:
            close_fds(fds)
            self._take(decode_session_reply(payload))
        return bool(frames)

    def _make_answer(self, welcome: Welcome) -> None:
        """The registration, then what depends on the daemon in it."""
        if self._message is None:
            self._message = self._make_message()
            return
        self._welcome = None
        message, fds = answer_welcome(self._message, self._pool, welcome)
        self._answer = encode(message), fds

    def _take(self, reply: SessionReply) -> None:
        if isinstance(reply, SessionRefused):
            raise_refusal(reply.code, reply.message)
        if isinstance(reply, Welcome):
            self._welcome, self._epoch = reply, reply.epoch
        elif isinstance(reply, Registered):
            self._registered = Registration(
                reply.pool,
                reply.generation,
                self._epoch,
                reply.secret,
                reply.endpoint,
                reply.ended,
                reply.lane,
            )
            self._arena_due = reply.lane

    def _send(self, channel: FdChannel, payload: bytes, fds: list[int] | tuple[()]) -> None:
        try:
            channel.send(payload, fds)
        except (ProtocolError, OSError) as error:
            channel.close()
            raise DaemonAbsent(f"the daemon closed the session: {error}") from error

    def __repr__(self) -> str:
        return f"<DaemonAttempt {self._client!r}>"
