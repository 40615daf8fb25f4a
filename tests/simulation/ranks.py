"""Rank groups: the further ranks of a scheduler, each with memory, GPU and connection of its own.

Owns the followers of one process and the client that leads them. The ranks run one program, so a
follower does what the first rank does (launches, words, messages), in its order, but later, each
step at a moment of its own. An answer takes effect once every rank has it, and all must be equal.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from directory.core.actions import AnyReply
from directory.core.events import Request
from directory.protocol.ended import Ended
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.session import DaemonAbsent, Registration
from tests.simulation.memory import PoolMemory, SimWords
from tests.simulation.network import SimLink
from tests.simulation.streams import Streams, Work
from transfer.layout import PoolLayout

if TYPE_CHECKING:
    from tests.simulation.daemon import SimDaemon
    from tests.simulation.process import Process

NEVER_MS = 1 << 40
"""A follower has no clock: the first rank's deadlines are the group's."""
LAG_US_MAX = 100_000


class RankClient(DaemonClient):
    """A follower's client: it says what the first rank says and nothing by itself."""

    def _release_late(self, body: AnyReply) -> None:
        """The first rank has it released, for all."""


class Follower:
    """Rank 1 or higher of a process."""

    def __init__(self, process: Process, rank: int, layout: PoolLayout, rng: random.Random) -> None:
        self.process = process
        self.rank = rank
        self.dead = False
        self.memory = PoolMemory(layout, rank)
        heap, options = process.world.heap, process.world.options
        self.streams = Streams(heap, rng, options, self.memory, process.wake, process.wrong)
        self.client: RankClient | None = None
        self.link: SimLink | None = None
        self.registration: Registration | None = None
        self.refused = ""
        self.answers: dict[int, AnyReply | None] = {}
        self._rng = rng
        self._heap = heap
        self._to_do: deque[Callable[[], object]] = deque()

    # What the first rank does.

    def do(self, step: Callable[[], object]) -> None:
        """Do a step of the program a little later than the first rank."""
        self._to_do.append(step)
        if len(self._to_do) == 1:
            self._go_on()

    def _go_on(self) -> None:
        world = self.process.world
        lag_us = self._rng.randrange(1, 100)
        if world.faulty and self._rng.random() < world.options.rate("rank_lag"):
            lag_us = self._rng.randrange(1, LAG_US_MAX)
        self._heap.after(lag_us, self._step)

    def _step(self) -> None:
        if self.dead:
            return
        self._to_do.popleft()()
        if self._to_do:
            self._go_on()
        self.process.wake()

    def say(self, client: RankClient, seq: int, body: Request | Ended, asks: bool) -> None:
        """Say what the first rank has said, under the same number."""
        if client.lost:
            return
        before = client._last_seq
        if asks and not isinstance(body, Ended):
            client.ask(body, NEVER_MS)
        else:
            client.report(body)
        number = client._last_seq
        if number not in (before, seq):  # unchanged: the daemon was lost over it
            self.process.wrong(f"rank {self.rank} numbers {body} {number}, not {seq}")

    @property
    def open_count(self) -> int:
        """Steps to do, and messages that are not done with."""
        return len(self._to_do) + (self.client.open_count if self.client is not None else 0)

    # Registration.

    def register(self, daemon: SimDaemon, link: SimLink, mode: str) -> None:
        """Hand this rank's memory over."""
        if self.dead or link is not self.link:
            return
        process = self.process
        daemon.register(
            link,
            self.memory,
            instance=process.instance,
            fingerprint=process.fingerprint,
            mode="thin" if mode == "thin" else "mirrored",
            answer=self._registered,
            refuse=lambda code: self._refused(link, code),
            world_size=1 + len(process.followers),
            rank=self.rank,
        )

    def _registered(self, link: SimLink, registration: Registration) -> None:
        if link is self.link:
            self.registration = registration
            self.process.wake()

    def _refused(self, link: SimLink, code: str) -> None:
        if link is self.link:
            self.refused = code
            self.process.wake()

    def ready(self, deadlines: Deadlines) -> bool:
        """Whether the daemon knows this rank's connection. Raises `DaemonAbsent` if it will not."""
        link = self.link
        if self.refused or link is None or not link.open or not link.alive:
            raise DaemonAbsent(f"rank {self.rank} is not registered: {self.refused or 'closed'}")
        if self.registration is None:
            return False
        if self.client is None:
            size = 1 + len(self.process.followers)
            self.client = RankClient(
                link, self.registration, deadlines._replace(misses_max=1 << 30), world_size=size
            )
        return self.client.try_attach()

    def disconnect(self) -> None:
        """End the session, for another one."""
        if self.client is not None:
            self.client.close()
        if self.link is not None:
            self.link.close()
        self.client = self.link = self.registration = None
        self.refused = ""
        self.answers.clear()

    def die(self) -> None:
        """The rank's process is gone."""
        self.dead = self.streams.dead = True
        if self.link is not None:
            self.link.close()


class LeadingClient(DaemonClient):
    """The first rank's client. What it says all say, and what it hears counts once all have it."""

    def __init__(
        self,
        link: SimLink,
        registration: Registration,
        deadlines: Deadlines,
        followers: list[Follower],
        wrong: Callable[[str], None],
    ) -> None:
        super().__init__(link, registration, deadlines, world_size=1 + len(followers))
        self._followers = followers
        self._wrong = wrong
        self._waiting: dict[int, AnyReply] = {}
        self._passed: list[int] = []

    def try_attach(self) -> bool:
        """Whether all ranks are attached."""
        try:
            ready = [follower.ready(self.deadlines) for follower in self._followers]
        except DaemonAbsent as error:
            self.lose(str(error))
            raise
        return super().try_attach() and all(ready)

    def poll(self) -> list[tuple[int, AnyReply | None]]:
        """Answers that every rank has."""
        for seq, reply in super().poll():
            if reply is not None:
                self._waiting[seq] = reply
            else:
                self._passed.append(seq)
        passed: list[tuple[int, AnyReply | None]] = [(seq, None) for seq in self._passed]
        self._passed.clear()
        for follower in self._followers:
            self._hear(follower)
        for seq, reply in list(self._waiting.items()):
            if all(seq in follower.answers for follower in self._followers):
                for follower in self._followers:
                    theirs = follower.answers.pop(seq)
                    if theirs != reply:
                        self._wrong(f"rank {follower.rank} is told {theirs}, rank 0 {reply}")
                passed.append((seq, self._waiting.pop(seq)))
        return [] if self.lost else passed

    def _hear(self, follower: Follower) -> None:
        client = follower.client
        if client is None:
            return
        follower.answers.update(client.poll())
        for refused in client.refused:
            self._wrong(f"a report of rank {follower.rank} was refused: {refused}")
        if client.lost:
            self.lose(f"rank {follower.rank}: {client.lost}")

    def abandon(self, seq: int) -> None:
        """Want an answer no more, also one that not every rank has yet."""
        reply = self._waiting.pop(seq, None)
        if reply is None:
            super().abandon(seq)
        else:
            self._release_late(reply)

    def lose(self, reason: str) -> None:
        """All ranks give the daemon up together."""
        super().lose(reason)
        self._waiting.clear()
        for follower in self._followers:
            if follower.client is not None:
                follower.client.lose(f"its group gave up: {reason}")

    @property
    def open_count(self) -> int:
        """Of all ranks."""
        behind = sum(follower.open_count for follower in self._followers)
        return super().open_count + len(self._waiting) + behind

    def _push(self, body: Request | Ended, *, asks: bool, hold: bool = False) -> int:
        seq = super()._push(body, asks=asks, hold=hold)
        for follower in self._followers:
            if seq and follower.client is not None:
                follower.do(partial(follower.say, follower.client, seq, body, asks))
        return seq


class GroupWork:
    """A launch on every rank's GPU."""

    def __init__(self, works: list[Work], ranks: int) -> None:
        self._works = works
        self._ranks = ranks

    @property
    def done(self) -> bool:
        """Whether every rank has run it."""
        return len(self._works) == self._ranks and all(work.done for work in self._works)


class GroupStreams(Streams):
    """The first rank's GPU; what is launched on it is launched on all."""

    def __init__(self, followers: list[Follower], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._followers = followers

    def launch_on_all(
        self,
        stream: int,
        reads: list[tuple[int, int]],
        writes: list[tuple[int, int]],
        writer: str,
    ) -> Work | GroupWork:
        """Queue work on every rank."""
        works = [self.launch(stream, reads, writes, writer)]
        for follower in self._followers:
            launch = partial(follower.streams.launch, stream, reads, writes, writer)
            follower.do(partial(_launch, works, launch))
        return GroupWork(works, 1 + len(self._followers))


def _launch(works: list[Work], launch: Callable[[], Work]) -> None:
    works.append(launch())


class GroupWords(SimWords):
    """The first rank's words; what is written there is written at all ranks."""

    def __init__(self, count: int, followers: list[Follower]) -> None:
        super().__init__(count)
        self._followers = followers

    def _store(self, index: int, value: int) -> None:
        super()._store(index, value)
        for follower in self._followers:
            follower.do(partial(follower.memory.words._store, index, value))
