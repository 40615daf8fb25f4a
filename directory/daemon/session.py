"""One session: its state, and what it holds while it lives.

Owns the state table of sessions. A session is changed by `Sessions` alone; it never reads or
writes a socket itself.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Protocol

from directory.core.events import Event
from directory.core.ids import PoolId
from directory.core.states import Table, step
from directory.daemon.registration import Registration
from directory.protocol.admin import AdminReply, AdminRequest
from directory.protocol.ended import Wanted
from transfer.ipc.channel import FdChannel, PeerCredentials


class SessionState(StrEnum):
    """State of one session."""

    CONNECTED = "connected"
    GREETED = "greeted"
    REGISTERING = "registering"
    IMPORTING = "importing"
    LIVE = "live"
    ENDED = "ended"


class SessionEvent(StrEnum):
    """What happens to a session."""

    HELLO = "hello"
    REGISTER = "register"
    TAKEN_IN = "taken_in"
    IMPORTED = "imported"
    END = "end"


_S, _E = SessionState, SessionEvent
SESSION: Final[Table] = {
    (_S.CONNECTED, _E.HELLO): _S.GREETED,
    (_S.GREETED, _E.REGISTER): _S.REGISTERING,
    (_S.REGISTERING, _E.TAKEN_IN): _S.IMPORTING,
    (_S.IMPORTING, _E.IMPORTED): _S.LIVE,
    (_S.CONNECTED, _E.END): _S.ENDED,
    (_S.GREETED, _E.END): _S.ENDED,
    (_S.REGISTERING, _E.END): _S.ENDED,
    (_S.IMPORTING, _E.END): _S.ENDED,
    (_S.LIVE, _E.END): _S.ENDED,
}


class Host(Protocol):
    """What sessions need of the daemon around them."""

    @property
    def epoch(self) -> int:
        """The boot epoch."""
        ...

    def tell(self, event: Event) -> None:
        """Hand an event to the directory and do what it answers."""
        ...

    @property
    def wanted(self) -> Wanted:
        """What schedulers are to say of requests that have ended."""
        ...

    def admin(self, request: AdminRequest) -> AdminReply:
        """Answer a person's question; raises a typed error for one that has no answer."""
        ...

    def import_pool(self, pool: PoolId, registration: Registration) -> None:
        """Have the mover import the pool; `Sessions.on_imported` is called with the outcome."""
        ...

    def open_pool(self, pool: PoolId, secret: bytes) -> None:
        """Let the pool be spoken for over ZeroMQ."""
        ...

    def open_lane(self, pool: PoolId, fds: Sequence[int], arena_bytes: int, *, thin: bool) -> None:
        """Let the pool be spoken for by a lane, too; takes the descriptors over. `thin`: its mode.

        Raises a typed error, and then they stay the caller's.
        """
        ...

    def close_pool(self, pool: PoolId) -> None:
        """No longer listen to the pool over ZeroMQ."""
        ...


class Session:
    """One connection. Only `Sessions` changes it. `reader`: it may only ask."""

    def __init__(
        self,
        token: int,
        channel: FdChannel,
        peer: PeerCredentials,
        pidfd: int,
        *,
        reader: bool = False,
    ) -> None:
        self.token = token
        self.reader = reader
        self.channel = channel
        self.peer = peer
        self.pidfd = pidfd
        self.state = SessionState.CONNECTED
        self.registration: Registration | None = None
        self.pool: PoolId = 0
        self.generation = 0
        self.imported = False

    def step(self, event: SessionEvent) -> None:
        """Go to the next state."""
        self.state = step(SESSION, self.state, event, self)

    def __repr__(self) -> str:
        return f"<Session {self.token} of pid {self.peer.pid}, {self.state}, pool {self.pool}>"
