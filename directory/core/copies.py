"""Copies: one transfer in flight as the directory sees it, and how it is handed to a mover.

Owns what belongs to a single copy: its guard (fences and words), its life cycle, and for a group
of ranks the shards it consists of. It decides nothing about the tree. A copy ends once, when all
of its shards have ended, and never lands on the word of some of them.
"""

from __future__ import annotations

from directory.core.actions import CopyKind, CopyPart, Fence, Landing, SubmitCopy, Word
from directory.core.events import CopyDone, Restore
from directory.core.ids import CURRENT, FORWARD, POOL_WORD, OpId, Place, PoolId
from directory.core.node import Node, Residency
from directory.core.place import PoolState
from directory.core.states import TRANSFER, TransferEvent, TransferState, step


class Copy:
    """One copy in flight. `pools`: every pool it touches; `claim`: host path it holds;
    `again`: a backup's second try; `words`: what its sources were reported with.

    A group's copy has one shard a rank, each with a number of its own: the copy's for rank 0, the
    following ones for the others. `open`: shards that have not ended (empty without a group).
    """

    __slots__ = (
        "again",
        "body",
        "claim",
        "end",
        "host_pages",
        "kind",
        "op",
        "open",
        "peer_pages",
        "pools",
        "seq",
        "so_far",
        "state",
        "target",
        "words",
    )

    def __init__(self, op: OpId, kind: CopyKind, pools: tuple[PoolId, ...], ranks: int = 1) -> None:
        self.op = op
        self.kind = kind
        self.pools = pools
        self.claim: Node | None = None
        self.again = False
        self.state = step(TRANSFER, TransferState.IDLE, TransferEvent.SUBMIT, f"copy {op}")
        self.target: PoolId = 0
        self.seq = 0
        self.body: Restore | None = None
        self.end: Node | None = None
        self.host_pages = 0
        self.peer_pages = 0
        self.words: tuple[Word, ...] = ()
        self.open: dict[OpId, None] = dict.fromkeys(range(op, op + ranks) if ranks > 1 else ())
        self.so_far = CopyDone(op, "ok")

    def take(self, event: CopyDone) -> CopyDone | None:
        """Take in a shard's end; returns the whole copy's end once none is open.

        A failure outweighs a void one, and either outweighs those that were copied.
        """
        del self.open[event.op]
        before = self.so_far
        worst = max(before, event, key=lambda ended: ("ok", "void", "failed").index(ended.outcome))
        self.so_far = CopyDone(
            self.op,
            worst.outcome,
            worst.detail,
            before.nbytes + event.nbytes,
            max(before.duration_us, event.duration_us),
        )
        return None if self.open else self.so_far

    def landing(self) -> Landing | None:
        """Where the mover tells layer by layer what has landed: only of pages of the host tier.

        What comes out of pools counts when it has been validated as a whole, and in a group not
        before all ranks' words were: that only the directory can say.
        """
        if self.body is None or not self.body.landing[0] or self.peer_pages:
            return None
        return Landing(self.target, *self.body.landing)

    def doom(self) -> None:
        """Whatever the mover reports of it, nothing that it brings counts."""
        self.state = step(TRANSFER, self.state, TransferEvent.DOOM, self)

    def __repr__(self) -> str:
        return f"Copy({self.op}, {self.kind}, {self.state}, pools={self.pools})"


class Guard:
    """Fences and words gathered for one copy: the latest fence a timeline, each word once."""

    def __init__(self) -> None:
        self._fences: dict[tuple[PoolId, int], int] = {}
        self._words: dict[tuple[PoolId, int], int] = {}

    def written(self, pool: PoolId, values: tuple[int, int]) -> None:
        """Wait for both timelines of a pool; a value of 0 has passed from the start."""
        for timeline, value in zip((FORWARD, CURRENT), values, strict=True):
            if value > self._fences.get((pool, timeline), 0):
                self._fences[pool, timeline] = value

    def source(self, pool: PoolState, residency: Residency) -> None:
        """Read these pages of a pool only after they are written and while they are kept."""
        self.written(pool.place, residency.written)
        self._words[pool.place, POOL_WORD] = pool.word
        for run in residency.runs:
            self._words[pool.place, run.span] = pool.span_value(run.span)

    def fences(self) -> tuple[Fence, ...]:
        """Return the fences."""
        return tuple(Fence(pool, line, value) for (pool, line), value in self._fences.items())

    def words(self) -> tuple[Word, ...]:
        """Return the words."""
        return tuple(Word(pool, slot, value) for (pool, slot), value in self._words.items())


def submissions(
    copy: Copy, parts: tuple[CopyPart, ...], guard: Guard, pools: dict[PoolId, PoolState]
) -> list[SubmitCopy]:
    """Return what a mover is told of a copy: itself, or a shard for every rank of its group.

    All pools of a copy have the same fingerprint and so as many ranks. Rank r reads and writes its
    own pools' memory and its part of each host slot, `shard_bytes` at r times that.
    """
    fences, words = guard.fences(), guard.words()
    copy.words = words
    landing = copy.landing()
    if not copy.open:
        return [SubmitCopy(copy.op, copy.kind, parts, fences, words, landing=landing)]
    pool = pools[copy.pools[0]]
    shards: list[SubmitCopy] = []
    for rank, op in enumerate(copy.open):
        member: dict[Place, PoolId] = {place: pools[place].members[rank] for place in copy.pools}
        shards.append(
            SubmitCopy(
                op,
                copy.kind,
                tuple(
                    CopyPart(
                        member.get(part.source, part.source),
                        part.source_pages,
                        member.get(part.target, part.target),
                        part.target_pages,
                    )
                    for part in parts
                ),
                tuple(Fence(member[f.pool], f.timeline, f.value) for f in fences),
                tuple(Word(member[word.pool], word.slot, word.value) for word in words),
                pool.page_bytes,
                rank * pool.shard_bytes,
                landing and Landing(member[landing.pool], landing.counter, landing.first),
            )
        )
    return shards


def add_part(
    parts: list[CopyPart], source: Place, pages: bytes, target: Place, targets: bytes
) -> None:
    """Add pages to a copy's parts; neighbours from one source become one part."""
    if parts and parts[-1].source == source:
        last = parts[-1]
        parts[-1] = CopyPart(source, last.source_pages + pages, target, last.target_pages + targets)
    else:
        parts.append(CopyPart(source, pages, target, targets))
