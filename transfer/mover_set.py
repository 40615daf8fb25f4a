"""Several movers, one a GPU, that the daemon sees as one: who imports what, and who carries a copy.

Owns the handles of movers that were started together. Every pool is offered to all of them; its
*home* is the mover of the GPU that it lies on, and the home's answer is the pool's. A copy goes to
a mover that has all of its pools, the target's home if it may. Where none has them, because two
GPUs cannot reach one another, the copy is void at once: the directory then takes the host tier for
its source, filled by one mover and emptied by another. They live and die together: when one is lost
all of them are replaced, so nobody has to know which of them had which copy.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from directory.core.actions import SubmitCopy
from directory.core.errors import ProtocolError
from directory.core.events import CopyDone
from directory.core.ids import PoolId, is_pool
from directory.core.limits import MOVER_SILENCE_MS_MAX
from transfer.copies import involved_pools
from transfer.host_tier import HostTierMemory
from transfer.imports import STAGE_FDS
from transfer.ipc.memory import MemoryHandle
from transfer.ipc.sync import SyncHandle
from transfer.layout import PoolLayout
from transfer.messages import Imported, Pong, Ready, Released, Reply
from transfer.mover_handle import TIMELINE, MoverHandle

PREFIX = "cuda:"


MAPPING_SILENCE_S = 30.0
"""Of a mover that is mapping memory or giving it back, which takes as long as it takes."""


class Placed:
    """A pool. `home`: number of its GPU's mover (None: none has that GPU, so the first one that
    can map it); `waits`: movers that have not answered; `reach`: those that have it."""

    def __init__(self, home: int | None, movers: int) -> None:
        self.home = home
        self.waits = set(range(movers))
        self.reach: set[int] = set()
        self.leaving: set[int] = set()
        self.answers: dict[int, Imported] = {}
        self.details: list[str] = []
        self.dropped = False
        """Refused, and given back by those that had mapped it: nobody waits for that."""


class MoverSet:
    """Running (or dead) movers; used as a `MoverHandle` is."""

    want_write = False
    """What waits to be sent is sent when `receive` is called: `fileno` says when that can be."""

    def __init__(
        self,
        movers: Sequence[MoverHandle],
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = MOVER_SILENCE_MS_MAX / 1_000,
    ) -> None:
        """Take the movers over. `silence_s`: one that has copies and says nothing for so long,
        while others speak, is killed, and all of them are lost with it. Raises `OSError`: they
        are still yours."""
        self._movers = list(movers)
        self._clock = clock
        self._silence_s = silence_s
        self._homes = {m.device.removeprefix(PREFIX): n for n, m in enumerate(self._movers)}
        self._pools: dict[PoolId, Placed] = {}
        self._copies: dict[int, int] = {}  # number of the mover by op
        self._held: list[SubmitCopy] = []  # until their pools' imports are answered
        self._heard = [0.0] * len(self._movers)
        self._asked: set[int] = set()
        self._ready = 0
        self._pongs: set[int] = set()
        self._own: list[Reply] = []  # what is to be said without a mover
        self._writing = [False] * len(self._movers)
        with ExitStack() as made:  # what is open when one of these fails is closed
            self._channels = made.enter_context(select.epoll())
            self._deaths = made.enter_context(select.epoll())
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            made.callback(os.close, self._event)
            self._channels.register(self._event, select.EPOLLIN)
            for mover in self._movers:
                self._channels.register(mover.fileno(), select.EPOLLIN)
                self._deaths.register(mover.pidfd, select.EPOLLIN)
            made.pop_all()
        self.device = ",".join(mover.device for mover in self._movers)
        self.pidfd = self._deaths.fileno()
        """Readable once any of them is dead."""

    @classmethod
    def spawn(
        cls, devices: str, *, options: Sequence[str] = (), held_fds: Sequence[int] = ()
    ) -> MoverSet:
        """Start a mover for each device of a list with commas; raises `OSError`."""
        started: list[MoverHandle] = []
        try:
            for device in devices.split(","):
                mover = MoverHandle.spawn(device, options=options, held_fds=held_fds)
                started.append(mover)
            return cls(started)
        except OSError:
            for mover in started:
                mover.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the first."""
        return self._movers[0].pid

    def fileno(self) -> int:
        """Readable when any of them has said something, or can be told more."""
        return self._channels.fileno()

    def flush(self) -> bool:
        """Send what can be sent now; says whether all is gone."""
        gone = [mover.flush() for mover in self._movers]
        return all(gone)

    # What they are told.

    def open_tier(self, tier: HostTierMemory) -> int:
        """Hand the tier to all; returns how many `TierOpened` will answer."""
        return sum(self._told(n, mover.open_tier(tier)) for n, mover in enumerate(self._movers))

    def open_checksums(
        self, tier: HostTierMemory, table: int, *, verify: bool, scrub_bytes_s: int
    ) -> int:
        """The same with the table of checksums; only the first one reads the tier through."""
        answers = 0
        for n, mover in enumerate(self._movers):
            scrub = 0 if n else scrub_bytes_s
            answers += mover.open_checksums(tier, table, verify=verify, scrub_bytes_s=scrub)
            self._watch_writing(n)
        return answers

    def import_pool(
        self,
        pool: PoolId,
        layout: PoolLayout,
        handles: Sequence[MemoryHandle],
        fds: Sequence[int],
        sync: SyncHandle = TIMELINE,
        page_table: bool = False,
        staging: bool = False,
    ) -> None:
        """Offer a pool to all; one `Imported` answers. Only its home asks its stager."""
        home = self._homes.get(handles[0].device) if handles else 0
        self._pools[pool] = Placed(home, len(self._movers))
        for n, mover in enumerate(self._movers):
            staged = staging and n == home
            given = fds if staged or not staging else fds[:-STAGE_FDS]
            mover.import_pool(pool, layout, handles, given, sync, page_table, staged)
            self._watch_writing(n)

    def release_pool(self, pool: PoolId) -> None:
        """Have all close a pool; one `Released` answers."""
        placed = self._pools.setdefault(pool, Placed(None, 0))
        placed.dropped = False  # even if all were closing it already: whoever asks is answered
        placed.leaving = set(range(len(self._movers)))
        for n, mover in enumerate(self._movers):
            mover.release_pool(pool)
            self._watch_writing(n)

    def submit(self, copy: SubmitCopy) -> None:
        """Hand a copy to a mover that has its pools, once all have said what they have; without
        one it is void."""
        if any(self._pools[pool].waits for pool in involved_pools(copy) if pool in self._pools):
            self._held.append(copy)
            return
        number = self._carrier(copy)
        if number is None:
            pools = ", ".join(map(str, sorted(involved_pools(copy))))
            self._say(CopyDone(copy.op, "void", f"no mover reaches all of the pools {pools}"))
            return
        if number not in self._copies.values():
            self._heard[number] = self._clock()
        self._copies[copy.op] = number
        self._movers[number].submit(copy)
        self._watch_writing(number)

    def expect(self, pool: PoolId) -> None:
        """A copy into the pool is likely to be asked for in a moment, of the mover of its GPU: if
        that has none now, it looks for it."""
        placed = self._pools.get(pool)
        if placed is None or placed.home is None:
            return
        if placed.home not in self._copies.values():
            self._movers[placed.home].expect(pool)
            self._watch_writing(placed.home)

    def ping(self, token: int) -> None:
        """Ask all for a sign of life; one `Pong` answers, when all have given it."""
        self._pongs = set(range(len(self._movers)))
        for n, mover in enumerate(self._movers):
            mover.ping(token)
            self._watch_writing(n)

    def shutdown(self) -> None:
        """Ask all to end by themselves."""
        for n, mover in enumerate(self._movers):
            mover.shutdown()
            self._watch_writing(n)

    # What they say.

    def receive(self) -> list[Reply]:
        """What they have said, as if it were one. Raises as `MoverHandle.receive`, once what was
        said before has been given."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass
        heard, self._own = self._own, []
        problem: ProtocolError | OSError | None = None
        for n, mover in enumerate(self._movers):
            try:
                if mover.want_write:
                    mover.flush()
                    self._watch_writing(n)
                replies = mover.receive()
            except (ProtocolError, OSError) as error:
                problem = error
                continue
            if replies:
                self._heard[n] = self._clock()
                self._asked.discard(n)
            for reply in replies:
                heard += self._take(n, reply)
        held, self._held = self._held, []
        for copy in held:
            self.submit(copy)
        if problem is not None and not heard:
            raise problem
        self._look_for_silence()
        return heard

    def _take(self, n: int, reply: Reply) -> list[Reply]:
        match reply:
            case Ready():
                self._ready += 1
                whole = self._ready == len(self._movers)
                return [Ready(self.pid, self.device)] if whole else []
            case Imported():
                return self._imported(n, reply)
            case Released():
                return self._released(n, reply)
            case Pong():
                self._pongs.discard(n)
                return [] if self._pongs else [reply]
            case CopyDone():
                self._copies.pop(reply.op, None)
        return [reply]

    def _imported(self, n: int, reply: Imported) -> list[Reply]:
        placed = self._pools.get(reply.pool)
        if placed is None or n not in placed.waits:
            return []
        placed.waits.remove(n)
        placed.answers[n] = reply
        if reply.ok:
            placed.reach.add(n)
        if placed.waits or placed.leaving:
            return []
        if placed.home is None and placed.reach:
            placed.home = min(placed.reach)
        answer = placed.answers[placed.home or 0]
        if not answer.ok and placed.reach:
            placed.dropped, placed.leaving = True, set(placed.reach)
            for number in placed.reach:
                self._movers[number].release_pool(reply.pool)
                self._watch_writing(number)
        elif not answer.ok:
            del self._pools[reply.pool]
        return [answer]

    def _released(self, n: int, reply: Released) -> list[Reply]:
        placed = self._pools.get(reply.pool)
        if placed is None or n not in placed.leaving:
            return []
        placed.leaving.remove(n)
        if reply.detail:
            placed.details.append(f"{self._movers[n].device}: {reply.detail}")
        if placed.leaving:
            return []
        del self._pools[reply.pool]
        return [] if placed.dropped else [Released(reply.pool, "; ".join(placed.details))]

    def _carrier(self, copy: SubmitCopy) -> int | None:
        """Who carries a copy: the target's home, else the source's, else anybody with all pools."""
        wanted = [
            place
            for part in copy.parts
            for place in (part.target, part.source)
            if is_pool(place) and place in self._pools
        ]
        homes = [home for place in wanted if (home := self._pools[place].home) is not None]
        pools = [self._pools[pool] for pool in involved_pools(copy) if pool in self._pools]
        if not pools:
            return 0  # which says what is wrong with it
        able = set.intersection(*(placed.reach for placed in pools))
        return next((n for n in (*homes, *sorted(able)) if n in able), None)

    def _look_for_silence(self) -> None:
        """Kill a mover that has copies and says nothing while others do; its death is noticed."""
        mapping = {n for placed in self._pools.values() for n in placed.waits | placed.leaving}
        now = self._clock()
        for n in set(self._copies.values()):
            silent = now - self._heard[n]
            if silent >= (MAPPING_SILENCE_S if n in mapping else self._silence_s):
                self._movers[n].kill()
            elif silent >= self._silence_s / 2 and n not in self._asked | mapping:
                self._asked.add(n)
                self._movers[n].ping(0)
                self._watch_writing(n)

    def _say(self, reply: Reply) -> None:
        self._own.append(reply)
        os.eventfd_write(self._event, 1)

    def _told(self, n: int, answers: int) -> int:
        self._watch_writing(n)
        return answers

    def _watch_writing(self, n: int) -> None:
        mover = self._movers[n]
        if mover.want_write != self._writing[n]:
            self._writing[n] = mover.want_write
            more = select.EPOLLOUT if mover.want_write else 0
            self._channels.modify(mover.fileno(), select.EPOLLIN | more)

    # Their end.

    def exit_status(self) -> int | None:
        """Of the first that has ended, or None."""
        ends = (mover.exit_status() for mover in self._movers)
        return next((status for status in ends if status is not None), None)

    def terminate(self, how: signal.Signals) -> None:
        """Signal those that live."""
        for mover in self._movers:
            mover.terminate(how)

    def kill(self) -> None:
        """End all of them without their help."""
        self.terminate(signal.SIGKILL)

    def close(self) -> int:
        """Kill and reap all of them, and close everything. Repeatable."""
        self.kill()
        statuses = [mover.close() for mover in self._movers]
        if self.pidfd >= 0:
            self._channels.close()
            self._deaths.close()
            os.close(self._event)
            self.pidfd = -1
        return statuses[0]

    def __repr__(self) -> str:
        return f"<MoverSet {self._movers}>"
