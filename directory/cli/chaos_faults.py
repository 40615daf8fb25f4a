"""The kinds of fault that chaos injects: one class a kind, what it does to whom, when it is over.

Owns the table of kinds. It must never touch a process outside the fleet.
"""

from __future__ import annotations

import os
import resource
import signal
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Final

from directory.cli.chaos_fault import DAEMON, MOVER, NOTHING, RETURN, Fault, mover_of
from directory.cli.chaos_fleet import Look
from directory.cli.processes import DriverError
from directory.core.errors import InstanceLive, TreecoredError
from scheduler_shim.client import DaemonClient
from scheduler_shim.pools import SharedPool
from scheduler_shim.worker_messages import Cut
from transfer.checksum import available
from transfer.host_tier import INDEX_MASK, SEGMENT_SHIFT

STOP_S: Final = (0.3, 3.0)
SLOW_STEP_S: Final = 0.15
SLOW_STEPS: Final = 8
BITS_FLIPPED: Final = 20
TAIL_BYTES: Final = 4_096
PAGES_DAMAGED: Final = 5


class SchedulerKill(Fault):
    """It is started again under its name at once, while the daemon may not know yet."""

    kind, does = "scheduler-kill", "SIGKILL of a scheduler; it comes back under the same name"
    on_scheduler = True

    def begin(self, now_s: float) -> None:
        """Kill and start."""
        self.due_s = now_s
        lost = self.fleet.kill(self.target)
        self.fleet.begin(self.target)
        self.ask(lost)

    def ready(self, look: Look | None) -> bool:
        """It may be killed while the daemon is away, too."""
        self.before = look
        return self.target.configured

    def recovered(self, look: Look) -> bool:
        """A new generation is registered (after another daemon's start they begin at 1)."""
        return self.target.configured and self.generation(look) > 0


class SchedulerStop(Fault):
    """A stopped scheduler lives: it must not be reaped."""

    kind, does = "scheduler-stop", "SIGSTOP of a scheduler, then SIGCONT"
    on_scheduler = True
    away = 0

    def ready(self, look: Look | None) -> bool:
        """It may be stopped while the daemon is away, too."""
        self.before = look
        return self.target.configured

    def begin(self, now_s: float) -> None:
        """Stop it."""
        self.away = self.fleet.away
        os.kill(self.target.pid, signal.SIGSTOP)
        self.due_s = now_s + self.chance.uniform(*STOP_S)

    def step(self, now_s: float) -> bool:
        """Let it go on; it must have kept the registration that it had, unless the daemon itself
        was away meanwhile."""
        if now_s < self.due_s:
            return False
        had = 0 if self.away != self.fleet.away else self.generation(self.before)
        look = self.fleet.look() if had else None
        if had and look is None:
            return False  # it is busy: look again
        os.kill(self.target.pid, signal.SIGCONT)
        if had and self.generation(look) != had:
            raise DriverError(f"{self.target.name} was reaped while it was stopped")
        return True

    def recovered(self, look: Look) -> bool:
        """It is registered."""
        return self.generation(look) > 0


class SchedulerTwin(Fault):
    """Somebody else comes with the name of a living scheduler."""

    kind, does = "scheduler-twin", "a second process registers under a living scheduler's name"
    on_scheduler = True
    keeps = frozenset({DAEMON})

    def begin(self, now_s: float) -> None:
        """Come with its name; to be refused is the only right answer."""
        self.due_s = now_s
        pool = SharedPool(page_size=16, page_count=4, bytes_per_token=16)
        try:
            DaemonClient.connect(
                self.fleet.daemon.runtime_dir, pool, instance=self.target.name, mode="mirrored"
            ).close()
        except InstanceLive:
            return
        except TreecoredError as error:
            raise DriverError(f"a twin of {self.target.name} was refused oddly: {error}") from None
        finally:
            pool.close()
        raise DriverError(f"a twin of {self.target.name} was let in")

    def recovered(self, look: Look) -> bool:
        """The first one has kept its registration."""
        return self.generation(look) == self.generation(self.before)


class SessionCut(Fault):
    """The scheduler lives and its session ends."""

    kind, does = "session-cut", "a scheduler's session socket is closed under it"
    on_scheduler = True
    keeps = frozenset({DAEMON})

    def begin(self, now_s: float) -> None:
        """Cut it."""
        self.due_s = now_s
        self._cut()

    def recovered(self, look: Look) -> bool:
        """It has registered again, as the next generation."""
        if self.generation(look) == self.generation(self.before):
            self._cut()  # it was on its way back from an earlier loss, and had none to cut
            return False
        return self.generation(look) > self.generation(self.before)

    def _cut(self) -> None:
        assert self.target.worker is not None
        self.target.worker.send(Cut())


class _DaemonFault(Fault):
    """The daemon ends and is started again: all schedulers must come back. Once it serves, faults
    of schedulers and of its mover may hit those who are back already, and others of the daemon hit
    it while it hears what the pools hold; after a SIGKILL all must be back before the next one. Its
    mover may stand still or be slow when it happens."""

    claims = frozenset({DAEMON})
    until_whole = False

    def recovered(self, look: Look) -> bool:
        """Every scheduler that is up is registered."""
        live = {pool.instance for pool in look.pools if pool.phase == "live"}
        wanted = {each.name for each in self.fleet.schedulers if each.configured}
        return mover_of(look) > 0 and wanted <= live


class DaemonKill(_DaemonFault):
    """Its mover must die with it; the host tier stays."""

    kind, does = "daemon-kill", "SIGKILL of the daemon; it is started on its old host tier"
    claims = frozenset({DAEMON, RETURN})

    def begin(self, now_s: float) -> None:
        """Kill; start after a while."""
        self.fleet.away += 1
        self.fleet.daemon.kill()
        self.due_s = now_s + self.chance.uniform(0.0, 1.0)

    def step(self, now_s: float) -> bool:
        """Start it."""
        if now_s < self.due_s:
            return False
        if not self.fleet.daemon.pid:
            self.fleet.daemon.begin()
        return self.fleet.daemon.ready()


class DaemonRestart(DaemonKill):
    """An upgrade."""

    kind, does = "daemon-restart", "SIGTERM of the daemon, and the next one on the same host tier"
    claims = frozenset({DAEMON, MOVER})  # it would wait for a mover that stands still

    def begin(self, now_s: float) -> None:
        """End it in order."""
        self.fleet.away += 1
        self.fleet.daemon.stop()
        self.due_s = now_s


class DaemonStop(_DaemonFault):
    """It lives and says nothing: schedulers go on without."""

    kind, does = "daemon-stop", "SIGSTOP of the daemon, then SIGCONT"

    def begin(self, now_s: float) -> None:
        """Stop it."""
        self.fleet.away += 1
        self.fleet.stopped = True
        self.fleet.daemon.signal(signal.SIGSTOP)
        self.due_s = now_s + self.chance.uniform(*STOP_S)

    def step(self, now_s: float) -> bool:
        """Let it go on."""
        if now_s < self.due_s:
            return False
        self.fleet.daemon.signal(signal.SIGCONT)
        self.fleet.stopped = False
        return True


class JournalDamage(DaemonKill):
    """What the damage covers is lost; nothing of it is served."""

    kind, does = "journal-damage", "SIGKILL of the daemon, bits of its journal flipped, its end cut"

    def begin(self, now_s: float) -> None:
        """Kill it and spoil its logs."""
        super().begin(now_s)
        host_dir = self.fleet.daemon.host_dir
        assert host_dir is not None
        for log in sorted(host_dir.glob("log.*")):
            self._damage(log)

    def _damage(self, log: Path) -> None:
        content = bytearray(log.read_bytes())
        for _ in range(min(BITS_FLIPPED, len(content))):
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        log.write_bytes(content[: max(0, len(content) - self.chance.randrange(TAIL_BYTES))])


class JournalFull(Fault):
    """The daemon cannot write its files: no room, as it looks to it (limit of file sizes)."""

    kind, does = "journal-full", "every write of the daemon to a file fails for a while"
    claims = frozenset({MOVER})  # one that is started meanwhile would inherit the limit
    keeps = frozenset({DAEMON})

    def begin(self, now_s: float) -> None:
        """Let nothing grow."""
        self._limit(0)
        self.due_s = now_s + self.chance.uniform(*STOP_S)

    def step(self, now_s: float) -> bool:
        """Let everything grow again."""
        if now_s < self.due_s:
            return False
        self._limit(resource.RLIM_INFINITY)
        return True

    def _limit(self, soft: int) -> None:
        _, hard = resource.prlimit(self.fleet.daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(
            self.fleet.daemon.pid,
            resource.RLIMIT_FSIZE,
            (hard if soft == resource.RLIM_INFINITY else soft, hard),
        )


class PageDamage(Fault):
    """Host pages are compared with their checksums before they count, so none of these does."""

    kind, does = "page-damage", "bits of valid pages of the host tier are flipped as it runs"
    keeps = frozenset({DAEMON})

    def begin(self, now_s: float) -> None:
        """Flip a bit in some pages that nobody is writing: their slots are valid."""
        self.due_s = now_s
        host_dir = self.fleet.daemon.host_dir
        assert host_dir is not None
        words = array("Q")
        words.frombytes((host_dir / "words").read_bytes())
        valid = [slot for slot, word in enumerate(words) if word]
        for slot in self.chance.sample(valid, min(PAGES_DAMAGED, len(valid))):
            segment, index = slot >> SEGMENT_SHIFT, slot & INDEX_MASK
            page_bytes = self.fleet.page_bytes
            with (host_dir / f"segment.{segment}").open("r+b", buffering=0) as file:
                at = index * page_bytes + self.chance.randrange(page_bytes)
                (byte,) = os.pread(file.fileno(), 1, at)
                flipped = byte ^ 1 << self.chance.randrange(8)
                os.pwrite(file.fileno(), bytes((flipped,)), at)


class _MoverFault(Fault):
    """The mover is hit: its copies are lost, a successor serves."""

    claims = frozenset({MOVER})
    keeps = frozenset({DAEMON})
    pidfd = -1

    def hit(self, number: signal.Signals) -> None:
        """Signal the mover that there was, and never a later process with its number."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def ready(self, look: Look | None) -> bool:
        """There must be a mover."""
        if not super().ready(look) or self.before is None:
            return False
        try:
            self.pidfd = os.pidfd_open(mover_of(self.before))
        except OSError:
            return False
        return True

    def recovered(self, look: Look) -> bool:
        """A mover serves."""
        if not super().recovered(look):
            return False
        os.close(self.pidfd)
        return True


class MoverKill(_MoverFault):
    """Nothing that it had not reported counts."""

    kind, does = "mover-kill", "SIGKILL of the mover; the daemon starts another"

    def begin(self, now_s: float) -> None:
        """Kill it."""
        self.due_s = now_s
        self.hit(signal.SIGKILL)

    def recovered(self, look: Look) -> bool:
        """Another one has done a copy."""
        assert self.before is not None
        done = [each.counters.get("daemon_copies_ok", 0) for each in (self.before, look)]
        another = mover_of(look) != mover_of(self.before)
        return another and done[0] < done[1] and super().recovered(look)


class MoverStop(_MoverFault):
    """With copies to do it is replaced; without it is simply slow to wake."""

    kind, does = "mover-stop", "SIGSTOP of the mover; replaced if it has work, else SIGCONT"
    keeps = NOTHING

    def begin(self, now_s: float) -> None:
        """Stop it."""
        self.hit(signal.SIGSTOP)
        self.due_s = now_s + self.chance.uniform(*STOP_S)

    def step(self, now_s: float) -> bool:
        """Let it go on, if it still is."""
        if now_s < self.due_s:
            return False
        self.hit(signal.SIGCONT)
        return True


class MoverSlow(_MoverFault):
    """Copies take long and none is lost."""

    kind, does = "mover-slow", "SIGSTOP and SIGCONT of the mover in turn: copies are slow"
    keeps = NOTHING
    steps = 0

    def begin(self, now_s: float) -> None:
        """Stop it for the first time."""
        self.hit(signal.SIGSTOP)
        self.due_s = now_s + SLOW_STEP_S

    def step(self, now_s: float) -> bool:
        """Go on, or stop again."""
        if now_s < self.due_s:
            return False
        self.steps += 1
        self.due_s = now_s + SLOW_STEP_S
        self.hit(signal.SIGCONT if self.steps % 2 else signal.SIGSTOP)
        return self.steps > SLOW_STEPS and bool(self.steps % 2)


KINDS: Final[dict[str, type[Fault]]] = {
    each.kind: each
    for each in (
        SchedulerKill,
        SchedulerStop,
        SchedulerTwin,
        SessionCut,
        DaemonKill,
        DaemonStop,
        DaemonRestart,
        JournalDamage,
        JournalFull,
        PageDamage,
        MoverKill,
        MoverStop,
        MoverSlow,
    )
}


def possible() -> tuple[str, ...]:
    """Kinds that can be done here: without checksums a damaged page would be served."""
    return tuple(kind for kind in KINDS if kind != PageDamage.kind or available())
