"""The daemon: the directory, and the shell that feeds it events and does what it says.

Owns the directory, the boot epoch and the order of things in one thread: events in, actions out,
nothing decided here. It must never carry on with a directory that has raised: then it begins a
new epoch with an empty one, and the schedulers register again.
"""

import os
import secrets
import select
import signal
import socket
from collections import Counter
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from directory.core.actions import (
    Action,
    Answer,
    Counters,
    Journal,
    JournalBegin,
    JournalEnd,
    MoreToClose,
    Refused,
    Registered,
    RegistrationRefused,
    ReleasePool,
    SubmitCopy,
)
from directory.core.directory import Directory
from directory.core.errors import InternalError
from directory.core.events import Asked, Body, CloseMore, CopyDone, Event
from directory.core.ids import OpId, PoolId
from directory.daemon import garbage
from directory.daemon.access_log import open_recording
from directory.daemon.admin import Facts, answer, stats_report
from directory.daemon.background import LOOK_US, Background
from directory.daemon.checksums import open_table
from directory.daemon.clock import now_us
from directory.daemon.config import Settings
from directory.daemon.kept_tier import KeptTier
from directory.daemon.kv_feed import join_taps, open_feed
from directory.daemon.loop import Loop
from directory.daemon.metrics_feed import Exporter
from directory.daemon.movers import Movers
from directory.daemon.registration import Registration
from directory.daemon.runtime import RuntimeDir, StartError
from directory.daemon.server import Server, new_epoch
from directory.daemon.sessions import Sessions
from directory.daemon.tier_folder import TierFolder
from directory.daemon.turns import Rank
from directory.daemon.warm import open_kept, recover
from directory.protocol.admin import AdminReply, AdminRequest, StatsReport
from directory.protocol.ended import Ended, Wanted
from transfer.host_tier import HostTierMemory

SHUTDOWN_MS_MAX: Final = 1_000
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

log = structlog.get_logger("daemon")


class Daemon:
    """One daemon. `ready_fd`: a byte is written to it and it is closed once the daemon serves."""

    def __init__(self, settings: Settings, runtime: RuntimeDir, ready_fd: int = -1) -> None:
        self._settings = settings
        self._runtime = runtime
        self._ready_fd = ready_fd
        self.counters: Counter[str] = Counter()
        self._kept: KeptTier | None
        self._tier_folder: TierFolder | None
        epoch = new_epoch()
        self.recording = open_recording(settings, runtime.path, epoch=epoch, now_us=now_us())
        self._kept, self._tier_folder = open_kept(settings, runtime.path)
        self._kv = open_feed(settings, runtime.path, self.counters)
        self._directory = self._new_directory()
        self._no_room: list[OpId] = []
        self._defect: str | None = None
        self._serving = False
        self._stop_signal = 0
        self._exporter: Exporter | None = None
        self._loop = Loop(settings.look_us * 1000)
        self._wake_in, self._wake_out = socket.socketpair()
        self._tier = self._make_tier()
        self._sums = open_table(settings, self._kept)
        held_fds: tuple[int, ...] = (runtime.lock_fd,)
        if self._tier_folder is not None:
            held_fds += (self._tier_folder.lock_fd,)
        self.movers = Movers(
            self._loop,
            self,
            settings.device,
            self._tier,
            settings.mover_silence_ms_max,
            self.counters,
            start_ms_max=settings.mover_start_ms_max,
            options=settings.mover_options,
            held_fds=held_fds,
            sums=self._sums,
        )
        self.server = Server(runtime.router_socket, epoch, self._ask, self.counters, self._loop)
        self.open_lane = self.server.open_lane
        self.sessions = Sessions(
            self._loop, self, runtime.endpoint, settings.sessions_max, self.counters
        )

    @property
    def epoch(self) -> int:
        """The boot epoch that every reply carries."""
        return self.server.epoch

    # Life.

    def run(self) -> None:
        """Serve until a stop signal. Raises `StartError` when no mover can be started."""
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        self._loop.watch(self._wake_in.fileno(), self._wake)
        if self._settings.metrics:
            self._exporter = Exporter(self._settings, self._loop, self.stats, self.counters)
        self._loop.watch_hidden(self.server)
        self.movers.start()
        if self._kv is not None:
            self._kv.start(self._loop)
        beside = Background(self.recording, self._kv, self._exporter, self._loop.waiting)
        looked_us, frames, due_us = 0, 0, beside.due_us(now_us())
        while not self._stop_signal:
            self._loop.turn(None if due_us is None else max(0, due_us - now_us()) / 1e6)
            now, asked = now_us(), self.counters["frames"]
            if asked != frames and now < looked_us + LOOK_US and self._defect is None:
                due_us = looked_us + LOOK_US
                continue
            quiet, frames, looked_us = asked == frames, asked, now
            self.server.on_time(now)
            self.movers.on_time(now)
            beside.turn(now, quiet=quiet)
            if self._no_room:
                self._fail_copies()
            if self._defect is not None:
                self._reset()
            room_us = now if self._no_room else None
            due_us = beside.due_us(self.movers.due_us(), self.server.due_us(), room_us)

    def close(self) -> None:
        """End everything in order, within a bounded time. Repeatable."""
        log.info("stopping", signal=self._stop_signal, sessions=len(self.sessions))
        self._directory.transfers.begin_no_backups()
        self.movers.ends.tell_last()
        self.sessions.close()
        pidfd = self.movers.begin_close()
        if pidfd >= 0:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            poller.poll(SHUTDOWN_MS_MAX)
        self.movers.close()
        if self._exporter is not None:
            self._exporter.close()
        self.recording.close(now_us())
        if self._kv is not None:
            self._kv.close()
        if self._sums is not None:
            os.close(self._sums.fd)
            self._sums = None
        if self._kept is not None:
            self._kept.close()
        if self._tier_folder is not None:
            self._tier_folder.release()
        self.server.close()
        self._loop.close()
        signal.set_wakeup_fd(-1)
        self._wake_in.close()
        self._wake_out.close()
        self._close_ready_fd()

    # Events and actions.

    def tell(self, event: Event) -> None:
        """Hand an event to the directory and do what it answers."""
        if self._defect is not None:
            return  # the directory is thrown away at the end of this turn
        self.recording.event = event
        if isinstance(event, CopyDone):
            self.recording.sums.copy.add(event.duration_us)
        try:
            actions = self._directory.handle(event)
        except Exception as error:  # noqa: BLE001
            # The directory is pure: whatever it raises is a defect of its own, and its state can
            # no longer be trusted. Nothing of it may take the loop along.
            self._break(event, error)
            return
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Answer():
                body = action.body
                if isinstance(body, Counters):
                    body = msgspec.structs.replace(body, counters=self._all_counters(body.counters))
                self.server.answer(action.pool, action.seq, body)
                self.movers.expecting.answered(action.pool, body)
            case SubmitCopy():
                self._submit(action)
            case Journal() | JournalBegin() | JournalEnd():
                assert self._kept is not None, "only a directory with a journal writes one"
                self._kept.apply(action)
            case ReleasePool():
                self.recording.pool_went(action.pool, now_us())
                self.sessions.on_released(action.pool)
                self.movers.release_pool(action.pool)
                self._pools_changed()
            case MoreToClose():
                self._loop.later(MoreToClose, Rank.BACKUPS, lambda: self.tell(CloseMore()))
            case Registered():
                self.recording.pool_came(self._directory.registry.members[action.pool], now_us())
                self.sessions.on_registered(action)
                self._pools_changed()
            case RegistrationRefused():
                self.sessions.on_registration_refused(action)

    def _pools_changed(self) -> None:
        if self._kv is not None:
            self._kv.pools_changed()

    def _submit(self, copy: SubmitCopy) -> None:
        if self._kept is None or self._kept.has_room(copy):
            self.movers.submit(copy)
            return
        # Not from inside the directory's turn: what it begins instead may fail as well.
        self._no_room.append(copy.op)

    def _fail_copies(self) -> None:
        ops, self._no_room = self._no_room, []
        self.counters["copies_without_room"] += len(ops)
        for op in ops:
            self.tell(CopyDone(op, "failed", "the host tier's file system has no room left"))

    def _ask(self, pool: PoolId, seq: int, body: Body) -> None:
        """One new message of a client."""
        if isinstance(body, Ended):
            # For the sums and the log alone. Of a group speaks who was the first to register.
            if (state := self._directory.pools.get(pool)) is not None:
                self.recording.ended(state, body, now_us())
            return
        if self._defect is not None:
            self.server.answer(pool, seq, Refused(InternalError.code, self._defect))
            return
        self.tell(Asked(pool, seq, now_us(), body))

    def _all_counters(self, directorys: dict[str, int]) -> dict[str, int]:
        """The directory's counters and the daemon's own, under names that cannot meet."""
        own = {f"daemon_{name}": value for name, value in sorted(self.counters.items())}
        own.update(daemon_mover_pid=self.movers.pid, daemon_breakers_open=self.movers.breakers_open)
        own.update(daemon_sessions=len(self.sessions), daemon_unmapping=self.sessions.unmapping)
        own.update(daemon_looked_us=self._loop.looked_ns // 1000)
        return {**directorys, **own}

    @property
    def wanted(self) -> Wanted:
        """What schedulers are to say of requests that have ended."""
        return self.recording.wanted

    def stats(self) -> StatsReport:
        """Every figure of this moment."""
        return stats_report(self._facts(), self._all_counters({}))

    def admin(self, request: AdminRequest) -> AdminReply:
        """Answer a person's question. Raises a typed error for one that has no answer."""
        return answer(request, self._facts(), self._all_counters({}))

    def _facts(self) -> Facts:
        return Facts(self._directory, self.recording, self.epoch, now_us())

    # What sessions and movers want of one another.

    def import_pool(self, pool: PoolId, registration: Registration) -> None:
        """Have the mover import the pool."""
        self.movers.import_pool(pool, registration)

    def on_imported(self, pool: PoolId, ok: bool, code: str, detail: str) -> None:
        """A pool was imported, or not."""
        self.sessions.on_imported(pool, ok, code, detail)

    def on_unmapped(self, pool: PoolId) -> None:
        """No mover touches a closed pool any more."""
        self.sessions.on_unmapped(pool)

    def open_pool(self, pool: PoolId, secret: bytes) -> None:
        """Let the pool be spoken for over ZeroMQ."""
        self.server.open_pool(pool, secret)

    def close_pool(self, pool: PoolId) -> None:
        """No longer listen to the pool over ZeroMQ."""
        self.server.close_pool(pool)

    def on_serving(self) -> None:
        """A mover is up: the first time, open the door and say so."""
        if self._serving:
            return
        self._serving = True
        try:
            self.sessions.listen(self._runtime.session_socket, self._settings.readers_dir)
        except OSError as error:
            raise StartError(f"the session socket cannot be opened: {error}") from None
        garbage.settle()
        log.info(
            "ready",
            runtime_dir=str(self._runtime.path),
            pid=os.getpid(),
            host_tier=int(self._settings.host_tier),
        )
        if self._ready_fd >= 0:
            try:
                os.write(self._ready_fd, b"\n")
            except OSError as error:
                log.warning("nobody waits at the ready descriptor", reason=str(error))
        self._close_ready_fd()

    # Defects.

    def _break(self, event: Event, error: Exception) -> None:
        """Note that the directory cannot be trusted any more; `_reset` follows in this turn."""
        self._defect = (
            "the daemon met a defect of its own and begins a new epoch; register again "
            f"({type(error).__name__})"
        )
        self.counters["internal_errors"] += 1
        log.error(
            "the directory raised",
            during=type(event).__name__,
            story=self._directory.story.tell(),
            exc_info=error,
        )
        if isinstance(event, Asked):
            self.server.answer(event.pool, event.seq, Refused(InternalError.code, self._defect))

    def _reset(self) -> None:
        """Begin again with nothing: new directory, new epoch, new mover; sessions are closed."""
        self.counters["resets"] += 1
        # The mover goes first: a pool or slot must not be written by a copy nobody knows of.
        self.sessions.close_all("the daemon begins a new epoch")
        self.movers.replace()
        self.server.begin_epoch(new_epoch())
        if self._kept is not None:
            # Written by a directory that has raised: nothing of it is believed.
            self._kept.clear()
        self._no_room.clear()
        self.recording.past.update(self._directory.counters)
        self._directory = self._new_directory()
        garbage.sweep()
        self._defect = None
        log.warning("a new epoch has begun", resets=self.counters["resets"])

    def _new_directory(self) -> Directory:
        settings = self._settings
        directory = Directory(
            host_bytes=int(settings.host_tier),
            segment_bytes=int(settings.segment),
            journal=0 if self._kept is None else secrets.randbits(64) | 1,
        )
        kv_tap = None if self._kv is None else self._kv.watch(directory)
        directory.tree.tap = join_taps((self.recording.watch(), kv_tap))
        return directory

    def _make_tier(self) -> HostTierMemory | None:
        settings = self._settings
        if not settings.host_tier:
            return None
        if self._kept is None:
            return HostTierMemory.create(int(settings.host_tier), int(settings.segment))
        recover(self._kept, self._directory)
        # A driver that pins memory touches all of it at once.
        pinned = settings.device != "cpu" and not settings.host_unpinned
        return self._kept.memory(reserve=pinned)

    def _stop(self, number: int, _: object) -> None:
        # Nothing else: it may have come in the middle of a log line, whose lock is this thread's.
        self._stop_signal = number

    def _wake(self, _: int) -> None:
        """The signal's own handler has run already; only the bytes are to be taken away."""
        with suppress(BlockingIOError):
            self._wake_in.recv(4096)

    def _close_ready_fd(self) -> None:
        if self._ready_fd >= 0:
            with suppress(OSError):  # it may never have been a descriptor of ours
                os.close(self._ready_fd)
            self._ready_fd = -1
