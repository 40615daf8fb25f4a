"""The gate: which copies are handed to a mover now, which wait for one, and which fail at once.

Owns the copies that wait while no mover serves, and a breaker for each kind of copy. What waits was
never touched by anybody, so it can be cancelled when its time is over; what a mover has is the
mover's until it answers or is dead. It tells nobody: who asks is told what has failed.
"""

from collections import Counter

from directory.core.actions import SubmitCopy
from directory.core.events import CopyDone
from directory.core.ids import OpId
from directory.core.limits import COPY_WAIT_MS_MAX
from directory.daemon.breaker import Breaker, BreakerState


class Gate:
    """Before the movers of one daemon. `counters`: the daemon's."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._breakers: dict[str, Breaker] = {}
        self._waiting: dict[OpId, tuple[SubmitCopy, int]] = {}  # with since when, oldest first
        self._failed: list[CopyDone] = []
        self._kinds: dict[OpId, str] = {}  # of copies that a mover has, until their end is told

    @property
    def busy(self) -> bool:
        """Whether a mover has copies whose end was not told."""
        return bool(self._kinds)

    @property
    def in_flight(self) -> int:
        """Copies that a mover has, or has ended without that being told yet."""
        return len(self._kinds)

    def kind_of(self, op: OpId) -> str | None:
        """Of a copy that a mover has; None for no such."""
        return self._kinds.get(op)

    def admit(self, copy: SubmitCopy, now: int, *, serving: bool) -> bool:
        """Whether to hand a copy on at once; else it waits, or fails."""
        breaker = self._breakers.get(copy.kind)
        if breaker is not None and not breaker.allows(copy.op, now):
            self._fail(copy, f"copies of kind {copy.kind} keep failing; they are tried again soon")
            return False
        if not serving:
            self._waiting[copy.op] = (copy, now)
            return False
        self._kinds[copy.op] = copy.kind
        return True

    def to_submit(self) -> list[SubmitCopy]:
        """A mover serves: take what has waited for it."""
        copies = [copy for copy, _ in self._waiting.values()]
        self._waiting.clear()
        self._kinds.update((copy.op, copy.kind) for copy in copies)
        return copies

    def ended(self, done: CopyDone, now: int) -> None:
        """A mover has ended a copy."""
        kind = self._kinds.pop(done.op, None)
        if kind is None or (kind not in self._breakers and not done.broken):
            return  # nothing of its kind has ever failed
        breaker = self._breakers.setdefault(kind, Breaker(kind))
        self._count_opened(breaker.ended(done.op, broken=done.broken, now=now))

    def mover_lost(self, now: int) -> None:
        """The mover is dead. Nothing waits any more: the directory ends every copy it knows of.

        However many copies of a kind it had, that is one failure of the kind.
        """
        by_kind: dict[str, set[OpId]] = {}
        for op, kind in self._kinds.items():
            by_kind.setdefault(kind, set()).add(op)
        for kind, ops in by_kind.items():
            breaker = self._breakers.setdefault(kind, Breaker(kind))
            self._count_opened(breaker.mover_lost(ops, now))
        self.clear(now)

    def clear(self, now: int) -> None:
        """Forget every copy: those a mover had, those that wait, those that failed untold."""
        for copy, _ in self._waiting.values():
            self._forget(copy, now)
        self._kinds.clear()
        self._waiting.clear()
        self._failed.clear()

    def due_us(self) -> int | None:
        """When `failed` has something to say, or None."""
        if self._failed:
            return 0
        for _, since in self._waiting.values():
            return since + COPY_WAIT_MS_MAX * 1000
        return None

    def failed(self, now: int) -> list[CopyDone]:
        """Ends of copies that were refused, or have waited for too long."""
        while self._waiting:
            copy, since = next(iter(self._waiting.values()))
            if now < since + COPY_WAIT_MS_MAX * 1000:
                break
            del self._waiting[copy.op]
            self._forget(copy, now)
            self._counters["copies_overdue"] += 1
            self._failed.append(
                CopyDone(copy.op, "failed", f"no mover has served for {COPY_WAIT_MS_MAX} ms")
            )
        failed, self._failed = self._failed, []
        return failed

    def open_kinds(self) -> list[str]:
        """Kinds of copies that are not tried now."""
        breakers = self._breakers.values()
        return sorted(b.kind for b in breakers if b.state is not BreakerState.CLOSED)

    def _fail(self, copy: SubmitCopy, why: str) -> None:
        self._counters["copies_not_tried"] += 1
        self._failed.append(CopyDone(copy.op, "failed", why))

    def _forget(self, copy: SubmitCopy, now: int) -> None:
        breaker = self._breakers.get(copy.kind)
        if breaker is not None:
            breaker.forget(copy.op, now)

    def _count_opened(self, opened: bool) -> None:
        if opened:
            self._counters["breakers_opened"] += 1

    def __repr__(self) -> str:
        return f"<Gate {len(self._kinds)} in flight, {len(self._waiting)} wait>"
