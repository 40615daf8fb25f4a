"""The event loop: one thread, one epoll, callbacks by descriptor.

Owns the epoll and the table of callbacks. It decides nothing, and it must never block while a
source that epoll cannot see (ZeroMQ's) still has something: such a source is asked before. While
one thing follows close upon another it looks for the next one for a moment before it sleeps:
waking up takes longer than most of what is asked; likewise while something is expected
(expecting.py). Of several that wait, those come first that took least the last time, and what would
make a turn long is left for the next one, before which it is looked who has come. What callbacks
find that can wait they put off (`later`); a turn does one piece of that at most (turns.py): a match
is not to wait for reports that came a moment earlier.
"""

import os
import select
from collections.abc import Callable, Hashable
from time import monotonic_ns
from typing import Final, Protocol

from directory.core.limits import POOLS_MAX
from directory.daemon.cores import cores
from directory.daemon.turns import Piece, Rank, Turns
from directory.daemon.waking import Waking

Callback = Callable[[int], None]
"""Called with the epoll event mask."""

EVENTS_PER_WAKE_MAX: Final = 4 * POOLS_MAX
"""More than all descriptors of all sessions: who is put off stays readable, and must not take the
place of somebody who asks."""
SPIN_NS: Final = 50_000
"""How long the loop looks before it sleeps, while things come as close as that upon another; what
it is where nobody says otherwise."""
YIELDED_NS: Final = 8_000
"""Giving way to nobody takes less: whoever asked had to run on this very core first."""
SHARED_MAX: Final = 8
"""So often in a row that was so; then the loop sleeps once. Who only looks and gives way is hardly
ever put on another core; who is woken is put on one that is idle, if there is one."""

TURN_NS: Final = 300_000
"""How long a turn may take, by what its callbacks took the last time; one is always called. What is
left counts as half as long the next time, so that it is never left for long."""


class HiddenSource(Protocol):
    """Something readable whose descriptor is only edge-triggered, as a ZeroMQ socket's is."""

    def fileno(self) -> int:
        """The descriptor that announces changes."""
        ...

    def woken(self) -> None:
        """The descriptor has announced something."""
        ...

    def pending(self) -> bool:
        """Whether there is something to read now."""
        ...

    def drain(self) -> None:
        """Read a bounded amount."""
        ...


class Loop:
    """Callbacks of file descriptors, and at most one hidden source."""

    def __init__(self, spin_ns: int = SPIN_NS) -> None:
        """`spin_ns`: how long it looks before it sleeps; 0: it sleeps at once, but for
        what is expected (`look_out`)."""
        self._spin_ns = spin_ns
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callback] = {}
        self._hidden: HiddenSource | None = None
        self._hidden_fd = -1
        self.cores: Final = cores()
        self._can_spin = self.cores > 1
        self._close = False  # what came last came close upon its forerunner
        self._shared = 0  # so often in a row whoever asked had to have this core first
        self._took_ns: dict[int, int] = {}  # by descriptor, the last time
        self._again: set[int] = set()  # to be called the next time, whatever epoll says
        self._turns = Turns()
        self._look_out_ns = 0
        self.looked_ns = 0
        """So long it has looked for what had not come: processor time that no work needed."""
        self._after: list[Callable[[], None]] = []
        self._waking = Waking()
        self.asked = False
        """Whether a question was answered in this turn; who answers one says so here."""
        self.waited_for = False
        """Whether anything else that somebody waits for was carried out in this turn."""
        self.reported = False
        """Whether reports were carried out in this turn and nothing that somebody waits for."""

    def watch(self, fd: int, callback: Callback) -> None:
        """Call back whenever the descriptor is readable or has hung up."""
        self._epoll.register(fd, select.EPOLLIN)
        self._callbacks[fd] = callback

    def want_write(self, fd: int, wanted: bool) -> None:
        """Also (or no longer) call back when the descriptor is writable."""
        self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, before it is closed. Repeatable."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            self._took_ns.pop(fd, None)
            self._again.discard(fd)
            self._turns.drop(fd)

    def call_again(self, fd: int) -> None:
        """Call a descriptor's callback in the next turn (mask 0 if epoll has nothing of it): what
        it has read and left must not wait until more comes."""
        if fd in self._callbacks:
            self._again.add(fd)

    def later(self, who: Hashable, rank: Rank, piece: Piece) -> None:
        """Put off what can wait. What a descriptor puts off is forgotten with it, and until it is
        done its callback hears nothing of what there is to read."""
        self._turns.put(who, rank, piece)

    def forget(self, who: Hashable) -> None:
        """Do nothing any more of what somebody has put off."""
        self._turns.drop(who)

    def look_out(self, until_ns: int) -> None:
        """Look for what comes next until then instead of sleeping: it is expected, and is over
        sooner than being woken takes."""
        self._look_out_ns = max(self._look_out_ns, until_ns)

    def after_turn(self, work: Callable[[], None]) -> None:
        """Do something once all that this turn answers has gone."""
        self._after.append(work)

    def watch_hidden(self, source: HiddenSource) -> None:
        """Serve the one source that epoll cannot see the state of."""
        self._hidden_fd = source.fileno()
        self._epoll.register(self._hidden_fd, select.EPOLLIN)
        self._hidden = source

    def turn(self, timeout_s: float | None) -> None:
        """Wait for something (at most `timeout_s`; None: for ever) and serve it, once.

        What would make the turn a long one is left to the next.
        """
        hidden, turns = self._hidden, self._turns
        if self._again or turns.count or (hidden is not None and hidden.pending()):
            timeout_s = 0
        ready = self._wait(timeout_s)
        if turns.count:
            # Who waits for a turn reads nothing before it: even to say so would take time of those
            # who ask, where there are many.
            ready = [one for one in ready if one[1] != select.EPOLLIN or not turns.waits(one[0])]
        if self._again:
            told = {fd for fd, _ in ready}
            ready += [(fd, 0) for fd in self._again if fd not in told]
        self.asked = self.waited_for = self.reported = False
        took_ns = self._call(ready) if ready else 0
        if hidden is not None and hidden.pending():
            self._waking.asked()  # what it is is not known here
            turns.put(self._hidden_fd, Rank.REPORTS, hidden.drain)
        if turns.count:
            self._work(took_ns)
        if self.asked or self.waited_for:
            self._waking.asked()
        elif self.reported:
            self._waking.reported()
        while self._after:
            self._after.pop()()

    def _work(self, took_ns: int) -> None:
        """Do a piece of what can wait, if there is time for it. `took_ns`: what came before."""
        turns = self._turns
        if not self.asked:
            turns.take()()
            return
        turns.asked(took_ns)
        if turns.earned:
            begun = monotonic_ns()
            turns.take()()
            turns.spent(monotonic_ns() - begun)

    def _call(self, ready: list[tuple[int, int]]) -> int:
        """Call back, and return how long that took."""
        took, callbacks, hidden = self._took_ns, self._callbacks, self._hidden
        if len(ready) > 1:
            ready.sort(key=lambda one: took.get(one[0], 0))
            called = [(callbacks.get(fd), fd, events) for fd, events in ready]
        else:
            ((fd, events),) = ready
            called = [(callbacks.get(fd), fd, events)]
        begun = at = monotonic_ns()
        for callback, fd, events in called:
            if fd == self._hidden_fd and hidden is not None:
                hidden.woken()
            # A callback may have closed a descriptor whose event is still in this batch.
            if callback is None or callbacks.get(fd) is not callback:
                continue
            if at > begun and at - begun + took.get(fd, 0) > TURN_NS:
                took[fd] = took.get(fd, 0) // 2
                continue
            self._again.discard(fd)
            callback(events)
            ended = monotonic_ns()
            if fd in callbacks:
                took[fd] = ended - at
            at = ended
        return at - begun

    def waiting(self) -> bool:
        """Whether anything is there to be served now; nothing of it is taken."""
        if self._again or self._turns.count or self._epoll.poll(0, 1):
            return True
        return self._hidden is not None and self._hidden.pending()

    def _wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        poll = self._epoll.poll
        if timeout_s == 0:
            return poll(timeout_s, EVENTS_PER_WAKE_MAX)
        begun = at = monotonic_ns()
        if not self._can_spin:
            return self._waking.sleep(poll, timeout_s, EVENTS_PER_WAKE_MAX, begun)
        until = max(self._look_out_ns, begun + self._spin_ns if self._close else 0)
        if until > begun:
            if timeout_s is not None:
                until = min(until, begun + int(timeout_s * 1e9))
            while not (ready := poll(0, EVENTS_PER_WAKE_MAX)):
                before, at = at, monotonic_ns()
                if at - before <= YIELDED_NS:  # else somebody had the core
                    self.looked_ns += at - before
                if at >= until:
                    break
                os.sched_yield()  # whoever asks may have been put on this very core
            else:
                self._shared = self._shared + 1 if monotonic_ns() - at > YIELDED_NS else 0
                if self._shared >= SHARED_MAX:
                    self._shared, self._close = 0, False
                return ready
            if timeout_s is not None:
                timeout_s = max(0.0, timeout_s - (until - begun) / 1e9)
        ready = self._waking.sleep(poll, timeout_s, EVENTS_PER_WAKE_MAX, begun)
        # Being woken takes time by itself, hence twice as much here.
        self._close = bool(ready) and monotonic_ns() - begun < 2 * self._spin_ns
        return ready

    def close(self) -> None:
        """Let go of the epoll; the descriptors are their owners' to close."""
        self._epoll.close()
        self._callbacks.clear()
        self._hidden = None
