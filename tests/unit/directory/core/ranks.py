"""Groups of ranks that run one program, each at its own pace.

Owns the ranks and how far each has come. A rank is a scheduler like any other; its timeline is the
number of steps that it has done, so a fence on step n passes at a rank once it has done step n.
Whatever the ranks are told must be the same, and so what they do.
"""

from __future__ import annotations

from collections.abc import Callable

from directory.core.actions import AnyReply
from directory.core.events import Mode
from tests.unit.directory.core.world import Scheduler, World

Step = Callable[["Rank"], bool]
"""One step of a program; False while it must wait for an answer, and then nothing was done."""


def group_world(ranks: int = 2, host_pages: int = 32) -> World:
    """A world whose host tier has so many pages, each with a shard for every rank."""
    return World(host_pages=host_pages * ranks, segment_pages=4 * ranks)


class Rank(Scheduler):
    """One rank; `restoring`: (message, receipt) of the restore that it waits for."""

    def __init__(
        self, world: World, name: str, mode: Mode, rank: int, world_size: int, pages: int
    ) -> None:
        super().__init__(world, name, mode, pages=pages, world_size=world_size, rank=rank)
        self.rank = rank
        self.done = 0
        self.restoring: tuple[int, int] | None = None
        world.timelines[self.pool] = 0

    def run(self, step: Step) -> bool:
        """Do the next step of the program unless it has to wait."""
        self.written = (self.done + 1, self.done + 1)
        self.quiet = (self.done, self.done)
        if not step(self):
            return False
        self.done += 1
        self.world.timelines[self.pool] = self.done
        return True

    def heard(self) -> dict[int, AnyReply]:
        """Every answer so far, by message."""
        return {seq: body for (pool, seq), body in self.world.answers.items() if pool == self.pool}


class Group:
    """The ranks of one instance and the program that all of them run."""

    def __init__(
        self, world: World, name: str, ranks: int, mode: Mode = "thin", *, pages: int = 32
    ) -> None:
        self.world = world
        self.program: list[Step] = []
        self.ranks = [Rank(world, name, mode, rank, ranks, pages) for rank in range(ranks)]

    def advance(self, rank: int) -> bool:
        """Let a rank do its next step, if there is one and it need not wait."""
        one = self.ranks[rank]
        return one.done < len(self.program) and one.run(self.program[one.done])

    def all_do(self, *steps: Step, order: list[int] | None = None) -> None:
        """Append steps and have every rank do them, one rank after the other."""
        self.program += steps
        for rank in order or range(len(self.ranks)):
            while self.advance(rank):
                pass

    def check(self) -> None:
        """At rest: every rank was told the same and is in the same state."""
        first = self.ranks[0]
        for rank in self.ranks:
            assert rank.done == len(self.program)
            assert rank.heard() == first.heard()
            assert (rank.seq, rank.free, rank.live) == (first.seq, first.free, first.live)
            rank.check()
        log = self.world.directory.registry.members[first.pool].log
        assert log is not None
        assert len(log) == 0


# Steps.


def publish(*tokens: int) -> Step:
    """Compute and insert a path."""

    def step(rank: Rank) -> bool:
        rank.publish(tokens)
        return True

    return step


def evict(count: int) -> Step:
    """Give pages up."""

    def step(rank: Rank) -> bool:
        rank.evict(count)
        return True

    return step


def fetch(*tokens: int) -> Step:
    """Match, and ask for what lies beyond the own pages. One restore at a time."""

    def step(rank: Rank) -> bool:
        if rank.restoring is not None:
            return True
        own = len(rank.own(tokens)) // 4 if rank.mode == "mirrored" else 0
        got = rank.match(tokens, own=own)
        seq = rank.restore(tokens, got) if got.restorable_pages else 0
        if seq:
            rank.restoring = (seq, got.receipt)
        elif got.receipt:
            rank.unlock(got.receipt)
        return True

    return step


def land(rank: Rank) -> bool:
    """Wait for the restore and take its pages in."""
    if rank.restoring is None:
        return True
    seq, receipt = rank.restoring
    if rank.landed(seq) is None:
        return False
    rank.restoring = None
    rank.unlock(receipt)
    return True
