"""Mover supervision: one mover process, started, fed, watched and replaced.

Owns the mover's handle, the host tier's memory and what a new mover must be told: the tier and the
pools that are live. Whether a copy counts is the directory's to say; here a copy is only handed on
or, with its mover, lost. It must never tell the directory that a mover is lost before that process
is dead: until then it may still write.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import structlog

from directory.core import limits
from directory.core.actions import SubmitCopy
from directory.core.errors import CapacityError, ProtocolError
from directory.core.events import CopyDone, MoverLost, PagesDamaged
from directory.core.ids import PoolId
from directory.core.states import step
from directory.daemon.checksums import ChecksumTable
from directory.daemon.clock import now_us
from directory.daemon.ends import Ends
from directory.daemon.expecting import Expecting
from directory.daemon.gate import Gate
from directory.daemon.loop import Loop
from directory.daemon.mover_states import MOVER, MoverEvent, MoverHost, MoverState
from directory.daemon.mover_words import (
    AnyMover,
    log_damaged,
    may_look,
    options_of,
    rejected,
    say_copy,
    say_import,
)
from directory.daemon.patience import Patience, Verdict
from directory.daemon.registration import Registration
from directory.daemon.runtime import StartError
from transfer.host_tier import HostTierMemory
from transfer.ipc.marks import mark
from transfer.messages import Imported, Pong, Ready, Rejected, Released, Reply, TierOpened
from transfer.mover_handle import MoverHandle
from transfer.mover_set import MoverSet

RESTART_AFTER_MS_MIN: Final = 50
RESTART_AFTER_MS_MAX: Final = 5_000
STEADY_AFTER_MS: Final = 10_000
"""A mover that has lived so long after its start is replaced at once when it dies."""
STARTS_WITHOUT_SUCCESS_MAX: Final = 3

Say = Callable[[AnyMover], None]

log = structlog.get_logger("mover")


class Movers:
    """The mover and its successors. `tier` is None where there is no host tier."""

    def __init__(
        self,
        loop: Loop,
        host: MoverHost,
        device: str,
        tier: HostTierMemory | None,
        silence_ms_max: int,
        counters: Counter[str],
        *,
        start_ms_max: int = limits.MOVER_START_MS_MAX,
        options: Sequence[str] = (),
        held_fds: Sequence[int] = (),
        sums: ChecksumTable | None = None,
    ) -> None:
        self._loop = loop
        self._host = host
        self._device = device
        self._tier = tier
        self._patience = Patience(silence_ms_max, start_ms_max)
        self._options = options_of(device, options, loop.cores)
        self._held_fds = tuple(held_fds)
        self._sums = sums
        self._counters = counters
        self.state = MoverState.NONE
        self._mover: AnyMover | None = None
        self._dying = False  # it was killed, and is told nothing more
        self._watched_fd = -1
        self._writing = False
        self._pools: dict[PoolId, Registration] = {}
        self._importing: set[PoolId] = set()
        self._releasing: set[PoolId] = set()
        self._gate = Gate(counters)
        self.ends = Ends(loop, self._take)
        heeds = may_look(device, self._options, loop.cores)
        self.expecting = Expecting(loop, self._expect, self._device_of, heeds=heeds)
        self._tier_answers = 0
        self._failures = 0
        self._served_once = False
        self._since_us = 0
        self._restart_us = 0

    @property
    def pid(self) -> int:
        """Process id of the mover, 0 while there is none."""
        return self._mover.pid if self._mover is not None else 0

    @property
    def breakers_open(self) -> int:
        """Kinds of copies that are not tried now because they kept failing."""
        return len(self._gate.open_kinds())

    # Life.

    def start(self) -> None:
        """Start a mover now and tell it all that a mover has to know."""
        try:
            kind = MoverSet if "," in self._device else MoverHandle
            mover = kind.spawn(self._device, options=self._options, held_fds=self._held_fds)
        except OSError as error:
            self._plan_restart(f"no process can be started: {error}", lived_ms=0)
            return
        self._mover = mover
        self.state = step(MOVER, self.state, MoverEvent.SPAWN, self)
        self._since_us = now_us()
        self._patience.heard(self._since_us)
        self._writing = False
        self._counters["movers_started"] += 1
        self._watched_fd = mover.fileno()
        self._loop.watch(self._watched_fd, self._serve)
        self._loop.watch(mover.pidfd, lambda _: self._lose("its process ended"))
        log.info("mover started", mover=mover.pid, pools=len(self._pools))
        self._tier_answers = 0
        try:
            if self._tier is not None:
                if self._sums is not None:
                    fd, verify, scrub = self._sums
                    self._tier_answers += mover.open_checksums(
                        self._tier, fd, verify=verify, scrub_bytes_s=scrub
                    )
                self._tier_answers += mover.open_tier(self._tier)
            for pool, registration in self._pools.items():
                self._importing.add(pool)
                say_import(mover, pool, registration)
        except (ProtocolError, CapacityError, OSError) as error:
            # Its death fires the pidfd, and that path replaces it.
            log.warning("mover cannot be told", mover=mover.pid, reason=str(error))
            mover.kill()
            return
        self._watch_writing()

    def due_us(self) -> int | None:
        """When `on_time` has something to do next, or None."""
        due = [due for due in (self._gate.due_us(), self._mover_due_us()) if due is not None]
        return min(due) if due else None

    def _mover_due_us(self) -> int | None:
        if self.state is MoverState.NONE:
            return self._restart_us
        return self._patience.due_us(slow=self._slow) if self._busy else None

    def on_time(self, now: int) -> None:
        """End copies whose time is over, start another, or see whether a busy mover is there."""
        for done in self._gate.failed(now):
            self._host.tell(done)
        due = self._mover_due_us()
        if due is None or now < due:
            return
        if self.state is MoverState.NONE:
            self.start()
            return
        if self._patience.asked:
            # It may have answered while this process was busy or away.
            self._serve(self._watched_fd)
            self.ends.tell_all()
        if self._mover is None or not self._busy:
            return
        verdict = self._patience.judge(now, slow=self._slow)
        if verdict is Verdict.ASK:
            self._tell_mover(lambda mover: mover.ping(0))
        elif verdict is Verdict.LOST:
            silence_ms = self._patience.silence_us(slow=self._slow) // 1000
            self._lose(f"it has work and said nothing for {silence_ms} ms")

    def replace(self) -> None:
        """Kill the mover and start another that knows no pool; the directory has begun anew."""
        self._bury(MoverEvent.DEATH)
        self._pools.clear()
        self._gate.clear(now_us())
        self.start()

    def begin_close(self) -> int:
        """Ask the mover to end; returns its pidfd to wait for, or -1."""
        if self._mover is None:
            return -1
        self._tell_mover(lambda mover: mover.shutdown())
        return self._mover.pidfd

    def close(self) -> None:
        """End the mover, however, and let go of the host tier. Repeatable."""
        if self.state is not MoverState.ENDED:
            self._bury(MoverEvent.CLOSE)
        if self._tier is not None:
            self._tier.close()
            self._tier = None

    # What the directory and the sessions want.

    def import_pool(self, pool: PoolId, registration: Registration) -> None:
        """Import a pool, and again into every successor; the host hears each outcome."""
        self._pools[pool] = registration
        self._begin_work()
        self._importing.add(pool)
        self._tell_mover(lambda mover: say_import(mover, pool, registration))

    def release_pool(self, pool: PoolId) -> None:
        """Close a pool at the mover; the host hears when nothing touches it any more."""
        self._importing.discard(pool)
        if self._pools.pop(pool, None) is None or self._mover is None:
            self._host.on_unmapped(pool)
            return
        self._begin_work()
        self._releasing.add(pool)
        self._tell_mover(lambda mover: mover.release_pool(pool))

    def submit(self, copy: SubmitCopy) -> None:
        """Hand a copy on, now or once a mover serves; or it fails, by `on_time`."""
        mark("copy", copy.op, copy.kind)
        self.expecting.submitted(copy)
        was_busy = self._busy
        if self._gate.admit(copy, now_us(), serving=self.state is MoverState.SERVING):
            if not was_busy:
                self._patience.heard(now_us())
            self._tell_mover(lambda mover: mover.submit(copy))

    def _expect(self, pool: PoolId) -> None:
        """Let a mover that has nothing to do look for what is about to come (of several, the set
        knows which have)."""
        if self.state is MoverState.SERVING and ("," in self._device or not self._gate.busy):
            self._tell_mover(lambda mover: mover.expect(pool))

    def _device_of(self, pool: PoolId) -> str:
        told = self._pools.get(pool)
        return told.handles[0].device if told is not None and told.handles else ""

    # The mover's side.

    @property
    def _busy(self) -> bool:
        work = self._gate.busy or self._importing or self._releasing
        return bool(work) or self.state is MoverState.STARTING

    def _begin_work(self) -> None:
        """A mover without work owed no word: its silence counts from now on."""
        if not self._busy:
            self._patience.heard(now_us())

    @property
    def _slow(self) -> bool:
        """Whether what the mover does may take long in a single step."""
        return self.state is MoverState.STARTING or bool(self._importing or self._releasing)

    def _serve(self, _: int) -> None:
        mover = self._mover
        if mover is None:
            return
        try:
            if mover.want_write:
                mover.flush()
                self._watch_writing()
            replies = mover.receive()
        except (ProtocolError, OSError) as error:
            self._lose(str(error))
            return
        if replies:
            self._patience.heard(now_us())
        for reply in replies:
            if self._mover is not mover:
                return  # it was given up on meanwhile, and the directory knows that
            if isinstance(reply, CopyDone):
                self.ends.put(reply, backup=self._gate.kind_of(reply.op) == "backup")
            elif not isinstance(reply, Pong):
                self.ends.tell_all()  # it may be said of what ended copies had to do with
                self._take(reply)

    def _take(self, reply: Reply) -> None:
        match reply:
            case CopyDone():
                mark("copied", reply.op, reply.outcome)
                self._gate.ended(reply, now_us())
                self._counters[f"copies_{reply.outcome}"] += 1
                self._host.tell(reply)
            case PagesDamaged():
                log_damaged(reply)
                self._host.tell(reply)
            case Imported():
                self._importing.discard(reply.pool)
                self._host.on_imported(reply.pool, reply.ok, reply.code, reply.detail)
            case Ready():
                self._on_ready(0)
            case TierOpened():
                if reply.ok:
                    log.info("host tier opens", mover=self.pid, segments=reply.segments)
                    self._on_ready(1)
                else:
                    self._lose(f"it cannot open the host tier: {reply.detail}")
            case Released():
                if reply.detail:
                    log.warning("pool not wholly unmapped", pool=reply.pool, reason=reply.detail)
                self._releasing.discard(reply.pool)
                self._host.on_unmapped(reply.pool)
            case Rejected():
                # It does not say which request that was: whoever waits for it would wait for ever.
                self._lose(rejected(reply))

    def _on_ready(self, tier_answers: int) -> None:
        """Serve once the mover and every part of the tier are there."""
        self._tier_answers -= tier_answers
        if self.state is MoverState.STARTING and self._tier_answers <= 0:
            self.state = step(MOVER, self.state, MoverEvent.READY, self)
            self._served_once = True
            log.info("mover ready", mover=self.pid)
            for copy in self._gate.to_submit():
                self._tell_mover(partial(say_copy, copy))
            self._host.on_serving()

    def _lose(self, reason: str) -> None:
        """The mover is of no more use: see it dead, tell the directory, plan a successor."""
        mover = self._mover
        if mover is None:
            return
        pid, lived_ms = mover.pid, (now_us() - self._since_us) // 1000
        mover.kill()
        self._dying = True
        self.ends.tell_all()  # what it had finished and said before still counts
        try:
            for reply in mover.receive():
                if isinstance(reply, CopyDone | PagesDamaged):
                    self._take(reply)
                elif isinstance(reply, Rejected):
                    reason = rejected(reply)
        except (ProtocolError, OSError):
            pass
        self._bury(MoverEvent.DEATH)
        self._counters["movers_lost"] += 1
        log.error("mover lost", mover=pid, reason=reason, lived_ms=lived_ms)
        self._plan_restart(reason, lived_ms)
        # The directory ends every copy that it knows of, those that wait for a mover included: a
        # successor must not be handed them, for their pages are free from here on.
        self._gate.mover_lost(now_us())
        self._host.tell(MoverLost(now_us(), reason))

    def _plan_restart(self, reason: str, lived_ms: int) -> None:
        """Set when the next mover is started: at once, then ever later while they keep dying."""
        self._failures = 0 if lived_ms >= STEADY_AFTER_MS else self._failures + 1
        if not self._served_once and self._failures >= STARTS_WITHOUT_SUCCESS_MAX:
            raise StartError(f"no mover could be started: {reason}")
        doublings = min(self._failures, 16) - 2
        pause_ms = (
            min(RESTART_AFTER_MS_MIN << doublings, RESTART_AFTER_MS_MAX) if (doublings >= 0) else 0
        )
        self._restart_us = now_us() + pause_ms * 1000

    def _bury(self, event: MoverEvent) -> None:
        """Kill and reap the mover and forget what only it knew."""
        mover, self._mover, self._dying = self._mover, None, False
        self.ends.forget()
        if mover is not None:
            self._loop.unwatch(self._watched_fd)
            self._loop.unwatch(mover.pidfd)
            mover.close()
        self._importing.clear()
        released, self._releasing = sorted(self._releasing), set()
        if mover is not None or event is MoverEvent.CLOSE:
            self.state = step(MOVER, self.state, event, self)
        for pool in released:
            self._host.on_unmapped(pool)

    def _tell_mover(self, say: Say) -> None:
        mover = self._mover
        if mover is None or self._dying:
            return
        try:
            say(mover)
        except (ProtocolError, CapacityError, OSError) as error:
            # Not from inside the directory's turn: the kill is noticed as any other death.
            log.warning("mover cannot be told", mover=mover.pid, reason=str(error))
            mover.kill()
            self._dying = True
            return
        self._watch_writing()

    def _watch_writing(self) -> None:
        if self._mover is not None and self._mover.want_write != self._writing:
            self._writing = self._mover.want_write
            self._loop.want_write(self._watched_fd, self._writing)

    def __repr__(self) -> str:
        return f"<Movers {self.state}, {len(self._pools)} pools, {self._gate!r}>"
