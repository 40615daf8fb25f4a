"""Sessions: one connection of a scheduler's process to the session socket, from Hello to its end.

Owns the listener, the connections, the pidfds of the peers and the registrations. A session ends
when a kernel object says so (end of file, pidfd) or when its peer breaks the protocol; silence
never ends one. It must never let one session's mistake reach another.
"""

import errno
import os
import secrets
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from directory.core import actions
from directory.core.errors import (
    BadMessage,
    CapacityError,
    NotAuthorised,
    ProtocolError,
    TooMany,
    TreecoredError,
    UnknownPool,
)
from directory.core.events import PoolClosed
from directory.core.ids import PoolId
from directory.daemon.clock import now_us
from directory.daemon.loop import Loop
from directory.daemon.readers import READERS_MAX, Readers
from directory.daemon.registration import Registration
from directory.daemon.session import Host, Session, SessionEvent, SessionState
from directory.protocol.admin import (
    AdminExplain,
    AdminReport,
    AdminRequest,
    AdminStats,
    AdminTree,
)
from directory.protocol.codec import decode_session_request, encode
from directory.protocol.messages import (
    Hello,
    OpenLane,
    Register,
    Registered,
    SessionRefused,
    SessionReply,
    SessionRequest,
    Welcome,
)
from directory.protocol.version import agree
from transfer.ipc.channel import ChannelClosed, FdChannel, close_fds
from transfer.ipc.stage_ring import STAGE_BELOW_BYTES

SECRET_BYTES: Final = 32
BACKLOG: Final = 64
ACCEPTS_PER_WAKE_MAX: Final = 32
TEXT_CHARS_MAX: Final = 1_000
NO_DESCRIPTORS: Final = (
    "the daemon has no file descriptor left for another session; end some or raise its limit of "
    "open files"
)

READS: Final = AdminStats | AdminTree | AdminExplain
"""What a reader may ask; a check holds the daemon up and is for its own user."""

log = structlog.get_logger("session")


class Sessions:
    """All sessions and the listener they come from."""

    def __init__(
        self, loop: Loop, host: Host, endpoint: str, sessions_max: int, counters: Counter[str]
    ) -> None:
        self._loop = loop
        self._host = host
        self._endpoint = endpoint
        self._sessions_max = sessions_max
        self._counters = counters
        self._listener: socket.socket | None = None
        self._readers: Readers | None = None
        self._spare_fd = -1  # given up for a moment to turn a connection away when none is left
        self._sessions: dict[int, Session] = {}
        self._by_pool: dict[PoolId, Session] = {}
        self._instances: dict[PoolId, str] = {}
        self._mapped_still: dict[PoolId, str] = {}
        """Instances of pools that are closed, and that a mover may still write into."""
        self._last_token = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def unmapping(self) -> int:
        """Pools without a session that a mover has not let go of: clean-ups under way."""
        return len(self._instances.keys() - self._by_pool.keys()) + len(self._mapped_still)

    def listen(self, path: Path, readers_dir: Path | None = None) -> None:
        """Open the listener; the path must be free. `readers_dir`: for others of its group."""
        if readers_dir is not None:
            self._readers = Readers(self._loop, readers_dir, partial(self.greet, reader=True))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(path))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener
        self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._loop.watch(listener.fileno(), self._accept)

    # What the directory and the mover say.

    def on_registered(self, action: actions.Registered) -> None:
        """The directory took the pool in: import its memory."""
        session = self._sessions.get(action.token)
        if session is None or session.registration is None:
            self._host.tell(PoolClosed(action.pool, now_us()))
            return
        session.pool, session.generation = action.pool, action.generation
        session.step(SessionEvent.TAKEN_IN)
        self._by_pool[action.pool] = session
        self._instances[action.pool] = session.registration.message.instance
        self._host.import_pool(action.pool, session.registration)

    def on_registration_refused(self, action: actions.RegistrationRefused) -> None:
        """The directory did not take the pool in: say why and end the session."""
        session = self._sessions.get(action.token)
        if session is not None:
            self._refuse(session, action.code, action.message)

    def on_released(self, pool: PoolId) -> None:
        """The directory has let a pool go; `on_unmapped` follows.

        Where it went with its group, the session ends by itself when it is told that the pool is
        unknown; but one that still waits to be imported would wait for ever.
        """
        instance = self._instances.pop(pool, None)
        if instance is not None:
            self._mapped_still[pool] = instance
        session = self._by_pool.get(pool)
        if session is not None and session.state is SessionState.IMPORTING:
            self._refuse(session, UnknownPool.code, "its group has ended; register all ranks again")

    def on_unmapped(self, pool: PoolId) -> None:
        """No mover touches a closed pool any more."""
        instance = self._mapped_still.pop(pool, None)
        if instance is None:
            return
        for session in list(self._by_pool.values()):
            if self._instances.get(session.pool) == instance:
                self._announce(session)

    def on_imported(self, pool: PoolId, ok: bool, code: str, detail: str) -> None:
        """A mover has imported the pool, for the first time or again, or could not."""
        session = self._by_pool.get(pool)
        if session is None:
            return
        if not ok:
            self._refuse(session, code or "import_failed", detail)
            return
        session.imported = True
        self._announce(session)

    def _announce(self, session: Session) -> None:
        """Tell a scheduler that its pool is registered, once that is true.

        Not before the mover has let go of what the same instance registered before: it may be the
        same memory, and a copy of the earlier generation would still write into pages that the
        scheduler takes for free.
        """
        pool = session.pool
        if session.state is not SessionState.IMPORTING or not session.imported:
            return
        if self._instances.get(pool) in self._mapped_still.values():
            log.info("registration waits for an earlier generation's copies", pool=pool)
            return
        session.step(SessionEvent.IMPORTED)
        secret = secrets.token_bytes(SECRET_BYTES)
        self._host.open_pool(pool, secret)
        self._counters["pools_registered"] += 1
        log.info("pool registered", pool=pool, generation=session.generation, pid=session.peer.pid)
        wanted = self._host.wanted
        registered = Registered(pool, session.generation, secret, self._endpoint, wanted, lane=True)
        self._send(session, registered)

    # Ends.

    def close_all(self, reason: str) -> None:
        """End every session; before another one is served, no mover knows their pools."""
        for session in list(self._sessions.values()):
            self._end(session, reason)
        self._instances.clear()
        self._mapped_still.clear()

    def close(self) -> None:
        """End every session and the listeners. Repeatable."""
        if self._readers is not None:
            self._readers.close()
            self._readers = None
        if self._listener is not None:
            self._loop.unwatch(self._listener.fileno())
            self._listener.close()
            self._listener = None
            os.close(self._spare_fd)
        self.close_all("the daemon ends")

    # Connections.

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTS_PER_WAKE_MAX):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._counters["sessions_not_accepted"] += 1
                log.warning("a connection was not accepted", reason=str(error))
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                return
            self.greet(FdChannel(sock))

    def _turn_away(self) -> None:
        """Refuse one waiting connection unheard; left waiting it would wake the loop for ever."""
        assert self._listener is not None
        os.close(self._spare_fd)
        try:
            channel = FdChannel(self._listener.accept()[0])
            self._counters["sessions_refused"] += 1
            with suppress(TreecoredError):
                channel.send(encode(SessionRefused(TooMany.code, NO_DESCRIPTORS)))
            channel.close()
        except OSError:
            pass  # it is gone by itself
        finally:
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def greet(self, channel: FdChannel, *, reader: bool = False) -> None:
        """Take a connection in, or refuse it for whom it comes from. `reader`: it may only ask."""
        try:
            peer = channel.peer_credentials()
            if reader and sum(known.reader for known in self._sessions.values()) >= READERS_MAX:
                raise TooMany(f"{READERS_MAX} readers are here; come back later")
            if peer.uid != os.getuid() and not reader:
                raise NotAuthorised(
                    f"this daemon serves user {os.getuid()}, not {peer.uid}; run one of your own"
                )
            if len(self._sessions) >= self._sessions_max:
                raise TooMany(
                    f"{self._sessions_max} sessions are open; end some or raise sessions_max"
                )
            pidfd = channel.peer_pidfd()
        except (TreecoredError, OSError) as error:
            code = error.code if isinstance(error, TreecoredError) else TreecoredError.code
            self._counters["sessions_refused"] += 1
            log.warning("session refused", code=code, reason=str(error))
            with suppress(TreecoredError):
                channel.send(encode(SessionRefused(code, str(error))))
            channel.close()
            return
        self._last_token += 1
        session = Session(self._last_token, channel, peer, pidfd, reader=reader)
        self._sessions[session.token] = session
        self._counters["sessions_opened"] += 1
        self._loop.watch(channel.fileno(), lambda _: self._serve(session))
        self._loop.watch(pidfd, lambda _: self._end(session, "its process ended"))

    def _serve(self, session: Session) -> None:
        """Read what a session said; a broken one is told why and ended."""
        try:
            if session.channel.want_write:
                session.channel.flush()
                self._loop.want_write(session.channel.fileno(), session.channel.want_write)
            frames = session.channel.receive()
        except ChannelClosed:
            self._end(session, "its connection ended")
            return
        except (ProtocolError, OSError) as error:
            code = error.code if isinstance(error, TreecoredError) else BadMessage.code
            self._refuse(session, code, str(error))
            return
        for payload, fds in frames:
            if session.state is SessionState.ENDED:
                close_fds(fds)
                continue
            try:
                self._handle(session, decode_session_request(payload), fds)
            except TreecoredError as error:
                self._refuse(session, error.code, str(error))

    def _handle(self, session: Session, request: SessionRequest, fds: Sequence[int]) -> None:
        """Carry one request out; the descriptors are closed here unless a registration has them."""
        kept = False
        try:
            if session.reader and not isinstance(request, Hello | READS):
                raise NotAuthorised("here one may only ask for figures, the tree, explanations")
            if isinstance(request, Hello):
                self._hello(session, request, fds)
            elif isinstance(request, AdminRequest):
                self._admin(session, request, fds)
            elif isinstance(request, OpenLane):
                if session.state is not SessionState.LIVE or session.registration is None:
                    raise BadMessage("a lane is opened after Registered")
                thin = session.registration.message.mode == "thin"
                self._host.open_lane(session.pool, fds, request.arena_bytes, thin=thin)
                kept = True
            else:
                registration = self._registration(session, request, fds)
                kept = True
                session.registration = registration
                session.step(SessionEvent.REGISTER)
                self._host.tell(registration.event(session.token, now_us()))
        finally:
            if not kept:
                close_fds(fds)

    def _hello(self, session: Session, hello: Hello, fds: Sequence[int]) -> None:
        if session.state is not SessionState.CONNECTED:
            raise BadMessage("Hello is the first message of a session and comes once")
        if fds:
            raise BadMessage("Hello comes without descriptors")
        version = agree(hello.version_min, hello.version_max)
        session.step(SessionEvent.HELLO)
        software = hello.software[:TEXT_CHARS_MAX]
        log.info("session opened", pid=session.peer.pid, version=version, software=software)
        self._send(session, Welcome(version, self._host.epoch, STAGE_BELOW_BYTES))

    def _admin(self, session: Session, request: AdminRequest, fds: Sequence[int]) -> None:
        """Answer a question; whoever is let in to this socket is the daemon's own user."""
        name = type(request).__name__
        if session.state is SessionState.CONNECTED:
            raise BadMessage(f"say Hello before {name}")
        if fds:
            raise BadMessage(f"{name} comes without descriptors")
        self._counters["admin_questions"] += 1
        reply = self._host.admin(request)
        if isinstance(reply, AdminReport):
            for violation in reply.violations:
                log.error("an invariant does not hold", violation=violation)
        self._send(session, reply)

    def _registration(
        self, session: Session, request: Register, fds: Sequence[int]
    ) -> Registration:
        if session.state is SessionState.CONNECTED:
            raise BadMessage("say Hello before Register")
        if session.state is not SessionState.GREETED:
            raise BadMessage("a session registers one pool, once; open another session")
        return Registration.read(request, fds)

    def _send(self, session: Session, reply: SessionReply) -> None:
        try:
            session.channel.send(encode(reply))
            if session.channel.want_write:
                self._loop.want_write(session.channel.fileno(), True)
        except (ChannelClosed, CapacityError, OSError) as error:
            self._end(session, f"it cannot be written to: {error}")

    def _refuse(self, session: Session, code: str, message: str) -> None:
        """Tell a session why it ends, and end it."""
        if session.state is SessionState.ENDED:
            return
        self._counters["sessions_refused"] += 1
        log.warning("session refused", pid=session.peer.pid, code=code, reason=message)
        self._send(session, SessionRefused(code, message[:TEXT_CHARS_MAX]))
        self._end(session, f"refused: {code}")

    def _end(self, session: Session, reason: str) -> None:
        """Let go of everything of a session. Repeatable."""
        if session.state is SessionState.ENDED:
            return
        session.step(SessionEvent.END)
        del self._sessions[session.token]
        self._loop.unwatch(session.channel.fileno())
        self._loop.unwatch(session.pidfd)
        session.channel.close()
        os.close(session.pidfd)
        log.info("session ended", pid=session.peer.pid, pool=session.pool, reason=reason)
        self._counters["sessions_ended"] += 1
        if session.pool:
            del self._by_pool[session.pool]
            self._host.close_pool(session.pool)
            self._host.tell(PoolClosed(session.pool, now_us()))
        if session.registration is not None:
            session.registration.close()
