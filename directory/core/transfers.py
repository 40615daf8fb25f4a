"""Transfers: which pages are copied where, and what a finished copy means.

Owns the copies in flight and the queue of wished backups. Backups: a node is copied to the host
when its parent is resident there, so the host is closed under ancestors at every moment.
Restores: all or nothing, peers first (validated by span words), the host as their fallback. It
publishes nothing at a pool: only the pool's owner reports what landed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from directory.core import limits
from directory.core.actions import (
    Action,
    Answer,
    CopyKind,
    CopyPart,
    Fence,
    Restored,
    SubmitCopy,
    Word,
)
from directory.core.errors import BadMessage, TooMany
from directory.core.events import CopyDone, Restore
from directory.core.host import HostSlots
from directory.core.ids import CURRENT, FORWARD, HOST, POOL_WORD, NodeId, OpId, Place, PoolId
from directory.core.lease import Lease
from directory.core.node import Node, Residency
from directory.core.place import HostState, PoolState
from directory.core.states import TRANSFER, TransferEvent, TransferState, step
from directory.core.tokens import unpack_pages
from directory.core.tree import Tree


class Copy:
    """One copy in flight. `pools`: every pool it touches; `claim`: host path it holds;
    `again`: a backup's second try."""

    __slots__ = (
        "again",
        "body",
        "claim",
        "end",
        "host_pages",
        "kind",
        "op",
        "peer_pages",
        "pools",
        "seq",
        "state",
        "target",
    )

    def __init__(self, op: OpId, kind: CopyKind, pools: tuple[PoolId, ...]) -> None:
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


class Transfers:
    """Copies in flight by operation, and backups that wait for their turn, in order."""

    def __init__(
        self,
        tree: Tree,
        host: HostState,
        slots: HostSlots,
        pools: dict[PoolId, PoolState],
        count: Callable[[str, int], None],
    ) -> None:
        self._tree = tree
        self._host = host
        self._slots = slots
        self._pools = pools
        self._count = count
        self.copies: dict[OpId, Copy] = {}
        self.wished: dict[NodeId, PoolId] = {}
        self._backups = 0
        self._last_op: OpId = 0

    # Backups.

    def wish(self, nodes: Iterable[Node], *, not_pool: PoolId = 0) -> None:
        """Queue nodes (ancestors first) for backup where the host has nothing of them yet.

        `not_pool`: a pool that a first try lost them from, and that is not to be the source."""
        for node in nodes:
            if HOST in node.places or node.id in self.wished:
                continue
            if len(self.wished) >= limits.BACKUPS_PENDING_MAX:
                self._count("backups_dropped", node.page_count)
                return
            self.wished[node.id] = not_pool

    def pump(self) -> list[Action]:
        """Start queued backups up to the limit in flight."""
        actions: list[Action] = []
        while self.wished and self._backups < limits.BACKUPS_IN_FLIGHT_MAX:
            node_id = next(iter(self.wished))
            not_pool = self.wished.pop(node_id)
            node = self._tree.nodes.get(node_id)
            if node is not None:
                actions += self._begin_backup(node, not_pool)
        return actions

    def _begin_backup(self, node: Node, not_pool: PoolId) -> list[Action]:
        if HOST in node.places:
            return []
        parent = node.parent
        assert parent is not None
        # The node may have been split while it waited: its upper part goes first.
        while parent.parent is not None and HOST not in parent.places:
            node, parent = parent, parent.parent
        if parent.parent is not None and parent.resident(HOST) is None:
            return []  # When the parent lands, its children are wished for again.
        source = self._source(node, hosts=False, not_pool=not_pool)
        if source is None:
            return []
        if node.page_count > limits.BACKUP_PAGES_MAX:
            node = self._tree.split(node, limits.BACKUP_PAGES_MAX)
        slots = self._reserve(node)
        if slots is None:
            self._count("backups_refused", node.page_count)
            return []
        pool = self._pools[source]
        copy = self._new_copy("backup", (source,))
        copy.again = not_pool != 0
        self._tree.begin_fill(node, HOST, slots, copy.op, self._host.next_tick())
        self._backups += 1
        residency = node.places[source]
        guard = Guard()
        guard.source(pool, residency)
        part = CopyPart(source, residency.pages, HOST, slots)
        return [SubmitCopy(copy.op, "backup", (part,), guard.fences(), guard.words())]

    def _reserve(self, node: Node) -> bytes | None:
        """Take slots for a node, evicting cold host pages if need be; all or nothing."""
        size, count = node.space.page_bytes, node.page_count
        parent = node.parent
        assert parent is not None
        protect = parent.parent is not None
        if protect:
            self._tree.lock(parent, HOST)
        slots = self._slots.reserve(size, count)
        if slots is None:
            short = count - self._slots.free_count(size)
            if self._host.evictable.get(size, 0) >= short:
                self.evict_host(size, short)
                slots = self._slots.reserve(size, count)
        if protect:
            self._tree.unlock(parent, HOST)
        return slots

    def evict_host(self, page_bytes: int, want: int) -> int:
        """Free at least `want` slots of a page size if unleased pages allow; returns the count."""
        order = self._host.orders.get(page_bytes)
        done = 0
        while order is not None and done < want:
            first = order.first()
            if first is None:
                break
            node = self._tree.nodes[first]
            if node.page_count > want - done:
                self._tree.split(node, node.page_count - (want - done))
            done += node.page_count
            self._slots.release(page_bytes, self._tree.drop(node, HOST))
            self._tree.prune(node)
        self._count("host_pages_evicted", done)
        return done

    # Restores.

    def restore(self, pool: PoolState, seq: int, body: Restore, lease: Lease) -> list[Action]:
        """Start a restore along a lease's path; answers at once when it cannot be done."""
        pages = unpack_pages(body.pages)
        wanted = set(pages)
        if not pages or len(wanted) != len(pages) or max(wanted) >= pool.page_count:
            raise BadMessage("restore targets must be distinct pages of the pool, at least one")
        if not (pool.owned.isdisjoint(wanted) and pool.filling.isdisjoint(wanted)):
            raise BadMessage("a restore target is in use already; allocate free pages")
        if body.start_page < 0:
            raise BadMessage(f"start_page must not be negative, got {body.start_page}")
        if pool.restores >= limits.RESTORES_PER_POOL_MAX:
            raise TooMany(f"{pool.restores} restores are in flight; wait for some to land")
        return self._begin_restore(pool, seq, body, lease.end, peers=True)

    def _begin_restore(
        self, pool: PoolState, seq: int, body: Restore, end: Node | None, *, peers: bool
    ) -> list[Action]:
        if end is None or end.id not in self._tree.nodes:
            return self._lost(pool.place, seq, "the path is not in the tree any more")
        stop = body.start_page + len(body.pages) // 4
        guard = Guard()
        guard.written(pool.place, body.quiet)
        parts: list[CopyPart] = []
        host_pages, claim, at = 0, None, 0
        for node in end.path():
            first, last = max(at, body.start_page), min(at + node.page_count, stop)
            if node.resident(HOST) is not None and first < stop:
                claim = node
            if first < last:
                source = self._source(node, not_pool=pool.place, peers=peers)
                if source is None:
                    return self._lost(pool.place, seq, "a page is restorable from nowhere now")
                residency = node.places[source]
                if source == HOST:
                    host_pages += last - first
                else:
                    guard.source(self._pools[source], residency)
                _add_part(
                    parts,
                    source,
                    residency.pages[4 * (first - at) : 4 * (last - at)],
                    pool.place,
                    body.pages[4 * (first - body.start_page) : 4 * (last - body.start_page)],
                )
            at += node.page_count
        if at < stop:
            return self._lost(pool.place, seq, "the leased path is shorter than the targets")
        sources = tuple(dict.fromkeys(part.source for part in parts))
        peer_pages = stop - body.start_page - host_pages
        kind: CopyKind = "mixed"
        if not host_pages or not peer_pages:
            kind = "load_back" if host_pages else "peer_copy"
        copy = self._new_copy(kind, (pool.place, *(s for s in sources if s != HOST)))
        copy.target, copy.seq, copy.body, copy.end = pool.place, seq, body, end
        copy.host_pages, copy.peer_pages = host_pages, peer_pages
        if claim is not None:
            self._tree.lock(claim, HOST)
            copy.claim = claim
        pool.restores += 1
        pool.filling.update(unpack_pages(body.pages))
        return [SubmitCopy(copy.op, kind, tuple(parts), guard.fences(), guard.words())]

    # Endings.

    def finish(self, event: CopyDone) -> list[Action]:
        """Take in a finished copy; an operation of no copy in flight has no effect."""
        copy = self.copies.pop(event.op, None)
        if copy is None:
            self._count("late_completions", 1)
            return []
        doomed = copy.state is TransferState.DOOMED
        copy.state = step(TRANSFER, copy.state, TransferEvent.FINISH, copy)
        for place in copy.pools:
            del self._pools[place].copies[copy.op]
        outcome = "void" if doomed and event.outcome == "ok" else event.outcome
        self._count(f"{copy.kind}_{outcome}", 1)
        if copy.kind == "backup":
            actions = self._finish_backup(copy, outcome == "ok", event)
        else:
            actions = self._finish_restore(copy, outcome == "ok", event)
        return actions + self.pump()

    def _finish_backup(self, copy: Copy, landed: bool, event: CopyDone) -> list[Action]:
        self._backups -= 1
        size = self._tree.fills[copy.op][0].space.page_bytes
        if landed:
            nodes, freed = self._tree.land(copy.op, HOST)
            self._count("bytes_backed_up", event.nbytes)
            self._count("pages_backed_up", sum(node.page_count for node in nodes))
            for node in nodes:
                self.wish(node.children.values())
        else:
            nodes, freed = self._tree.lose(copy.op, HOST)
            # Another pool that holds the node becomes the source; the owner that gave the
            # pages up is not asked again before it reports them anew. One second try only: two
            # pools that both fail must not hand a backup to and fro for ever.
            if not copy.again:
                alive = [node for node in nodes if node.id in self._tree.nodes]
                self.wish(alive, not_pool=copy.pools[0])
        self._slots.release(size, freed)
        return []

    def _finish_restore(self, copy: Copy, landed: bool, event: CopyDone) -> list[Action]:
        if copy.claim is not None:
            size = copy.claim.space.page_bytes
            freed = self._tree.unlock(copy.claim, HOST)
            if freed:
                self._slots.release(size, freed)
        pool = self._pools[copy.target]
        pool.restores -= 1
        assert copy.body is not None
        pool.filling.difference_update(unpack_pages(copy.body.pages))
        if not pool.live:
            return []
        if landed:
            self._count("bytes_restored", event.nbytes)
            self._count("host_pages_restored", copy.host_pages)
            self._count("peer_pages_restored", copy.peer_pages)
            body = Restored(True, copy.host_pages, copy.peer_pages, event.nbytes, event.duration_us)
            return [Answer(copy.target, copy.seq, body)]
        if copy.peer_pages and event.outcome != "failed":
            return self._begin_restore(pool, copy.seq, copy.body, copy.end, peers=False)
        return self._lost(copy.target, copy.seq, event.detail or event.outcome)

    def doom(self, pool: PoolState) -> None:
        """A pool's owner is gone: nothing that its copies bring counts."""
        for op in pool.copies:
            copy = self.copies[op]
            copy.state = step(TRANSFER, copy.state, TransferEvent.DOOM, copy)

    def lose_all(self, detail: str) -> list[Action]:
        """The mover is dead: end every copy that was in flight as failed."""
        actions: list[Action] = []
        for op in list(self.copies):
            actions += self.finish(CopyDone(op, "failed", detail))
        return actions

    # Private.

    def _source(
        self, node: Node, *, not_pool: PoolId = 0, peers: bool = True, hosts: bool = True
    ) -> Place | None:
        """Return where to read a node from: a live pool first, then the host, else None."""
        if peers:
            for place in node.places:
                pool = self._pools.get(place)
                if pool is not None and place != not_pool and pool.live and node.resident(place):
                    return place
        return HOST if hosts and node.resident(HOST) is not None else None

    def source_for(self, node: Node, pool: PoolId) -> Place | None:
        """Return from where a pool would restore a node now, or None."""
        return self._source(node, not_pool=pool)

    def _new_copy(self, kind: CopyKind, pools: tuple[PoolId, ...]) -> Copy:
        self._last_op += 1
        copy = self.copies[self._last_op] = Copy(self._last_op, kind, pools)
        for place in pools:
            self._pools[place].copies[copy.op] = None
        return copy

    def _lost(self, pool: PoolId, seq: int, detail: str) -> list[Action]:
        self._count("restores_lost", 1)
        return [Answer(pool, seq, Restored(False, 0, 0, 0, 0, detail))]


def _add_part(
    parts: list[CopyPart], source: Place, pages: bytes, target: Place, targets: bytes
) -> None:
    if parts and parts[-1].source == source:
        last = parts[-1]
        parts[-1] = CopyPart(source, last.source_pages + pages, target, last.target_pages + targets)
    else:
        parts.append(CopyPart(source, pages, target, targets))
