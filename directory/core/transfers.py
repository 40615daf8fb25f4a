"""Transfers: which pages are copied where, and what a finished copy means.

Owns the copies in flight and the queue of wished backups. Backups: a node is copied to the host
when its parent is resident there, so the host is closed under ancestors at every moment.
Restores: all or nothing, peers first (validated by span words), the host as their fallback; by
layers out of the host alone. It publishes nothing at a pool: only its owner reports what landed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from directory.core import limits
from directory.core.actions import Action, Answer, CopyKind, CopyPart, Restored
from directory.core.copies import Copy, Guard, add_part, submissions
from directory.core.errors import BadMessage, TooMany
from directory.core.events import CopyDone, Restore
from directory.core.host import HostSlots
from directory.core.ids import HOST, LANDINGS, OpId, Place, PoolId
from directory.core.journal import HostJournal
from directory.core.lease import Lease
from directory.core.node import RESIDENT, Node
from directory.core.place import HostState, PoolState
from directory.core.states import TRANSFER, TransferEvent, TransferState, step
from directory.core.tokens import unpack_pages
from directory.core.tree import Tree


class Transfers:
    """Copies in flight by operation, and backups that wait for their turn, in order.

    `shards`: copies of groups by the numbers of their further ranks' shards. `ending`: whether
    something is left of a pool that has ended; each step of that pumps."""

    def __init__(
        self,
        tree: Tree,
        host: HostState,
        slots: HostSlots,
        pools: dict[PoolId, PoolState],
        journal: HostJournal,
        count: Callable[[str, int], None],
        ending: Callable[[], bool],
    ) -> None:
        self._tree = tree
        self._host = host
        self._slots = slots
        self._pools = pools
        self.journal = journal
        self._count = count
        self._ending = ending
        self.copies: dict[OpId, Copy] = {}
        self.shards: dict[OpId, Copy] = {}
        self.wished = tree.wished
        self._backups = 0
        self._begins = True
        self._last_op: OpId = 0

    # Backups.

    def wish(self, nodes: Iterable[Node], *, not_pool: PoolId = 0) -> None:
        """Queue nodes (ancestors first) for backup where the host has nothing of them yet.

        `not_pool`: a pool that a first try lost them from, and that is not to be the source."""
        for node in nodes if self._begins else ():
            if node.at(HOST) is not None or node.id in self.wished:
                continue
            if node.id not in self._tree.nodes:
                continue  # merged into its child meanwhile
            if len(self.wished) >= limits.BACKUPS_PENDING_MAX:
                self._count("backups_dropped", node.page_count)
                return
            self.wished[node.id] = not_pool

    def begin_no_backups(self) -> None:
        """The daemon ends: a backup that is begun now would cost cold pages, and never land."""
        self._begins = False
        self.wished.clear()

    def pump(self) -> list[Action]:
        """Start queued backups up to the limit in flight. Of wishes that come to nothing a bounded
        number is looked at while a backup or a pool's end is under way: it sees to the others."""
        actions: list[Action] = []
        idle = 0
        while self.wished and self._backups < limits.BACKUPS_IN_FLIGHT_MAX:
            if idle >= limits.BACKUPS_LOOKED_AT_MAX and self._backups:
                break
            if idle >= limits.ENDED_WISHES_LOOKED_AT_MAX and self._ending():
                break
            node_id, not_pool = self.wished.popitem(last=False)
            begun = self._begin_backup(self._tree.nodes[node_id], not_pool)
            idle += not begun
            actions += begun
        return actions

    def _begin_backup(self, node: Node, not_pool: PoolId) -> list[Action]:
        if node.at(HOST) is not None:
            return []
        parent = node.parent
        assert parent is not None
        # The node may have been split while it waited: its upper part goes first.
        while parent.parent is not None and parent.at(HOST) is None:
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
        self.journal.invalidate(slots)
        copy = self._new_copy("backup", (source,))
        copy.again = not_pool != 0
        self._tree.begin_fill(node, HOST, slots, copy.op, self._host.next_tick())
        self._backups += 1
        residency = node.there(source)
        if parent.parent is not None:
            # What is above cannot be evicted before the copy has ended, so it does not count as
            # evictable either: a reservation knows exactly what it can have.
            self._tree.lock(parent, HOST)
            copy.claim = parent
        guard = Guard()
        guard.source(pool, residency)
        parts = (CopyPart(source, residency.pages, HOST, slots),)
        return [*submissions(copy, parts, guard, self._pools)]

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
            node = order.first(self._tree.nodes, self._host.tick + 1)
            if node is None:
                break
            if node.page_count > want - done:
                self._tree.split(node, node.page_count - (want - done))
            done += node.page_count
            self.journal.give_up(node.there(HOST))
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
        self._check_landing(pool, body.landing)
        if pool.restores >= limits.RESTORES_PER_POOL_MAX:
            raise TooMany(f"{pool.restores} restores are in flight; wait for some to land")
        # A stream that waits for layers must not wait for another pool's stream: that one can be
        # waiting for layers out of this pool.
        return self._begin_restore(pool, seq, body, lease.end, peers=not body.landing[0])

    def _check_landing(self, pool: PoolState, landing: tuple[int, int]) -> None:
        counter, first = landing
        if not counter:
            return
        if not LANDINGS <= counter < LANDINGS + limits.LANDING_COUNTERS_MAX:
            raise BadMessage(
                f"landing counters are {LANDINGS} to "
                f"{LANDINGS + limits.LANDING_COUNTERS_MAX - 1}, got {counter}"
            )
        if not 0 <= first <= limits.LANDING_VALUE_MAX - limits.BUFFERS_PER_POOL_MAX:
            raise BadMessage(f"landing counter {counter} cannot begin at {first}")
        for op in pool.copies:
            other = self.copies[op]
            if other.target == pool.place and other.body and other.body.landing[0] == counter:
                raise BadMessage(
                    f"landing counter {counter} serves a restore that has not been answered"
                )

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
                residency = node.there(source)
                if source == HOST:
                    host_pages += last - first
                else:
                    guard.source(self._pools[source], residency)
                add_part(
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
        return [*submissions(copy, tuple(parts), guard, self._pools)]

    # Endings.

    def finish(self, event: CopyDone) -> list[Action]:
        """Take in a finished copy; an operation of no copy in flight has no effect.

        A group's copy has ended when all of its shards have."""
        copy = self.copies.get(event.op) or self.shards.pop(event.op, None)
        if copy is None or (copy.open and event.op not in copy.open):
            self._count("late_completions", 1)
            return []
        if copy.open:
            ended = copy.take(event)
            if ended is None:
                return []
            event = ended
        del self.copies[copy.op]
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

    def _release_claim(self, copy: Copy) -> None:
        if copy.claim is None:
            return
        freed = self._tree.unlock(copy.claim, HOST)
        if freed:
            self._slots.release(copy.claim.space.page_bytes, freed)
        if copy.claim.id in self._tree.nodes:
            self._tree.prune(copy.claim)

    def _finish_backup(self, copy: Copy, landed: bool, event: CopyDone) -> list[Action]:
        self._backups -= 1
        size = self._tree.fills[copy.op][0].space.page_bytes
        if landed:
            nodes, freed = self._tree.land(copy.op, HOST)
            self.journal.validate(node for node in nodes if node.id in self._tree.nodes)
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
        self._release_claim(copy)
        return []

    def _finish_restore(self, copy: Copy, landed: bool, event: CopyDone) -> list[Action]:
        self._release_claim(copy)
        pool = self._pools[copy.target]
        pool.restores -= 1
        assert copy.body is not None
        pool.filling.difference_update(unpack_pages(copy.body.pages))
        if not pool.live:
            # A scheduler alone is gone with its session; of a group some ranks are still there,
            # and only now are the target pages quiet.
            return self._lost(copy.target, copy.seq, "its group is gone") if pool.log else []
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
            self.copies[op].doom()

    def doom_reads(self, pool: PoolState) -> None:
        """A pool's reports cannot be trusted: nothing that is read from it counts."""
        for op in pool.copies:
            if self.copies[op].target != pool.place:
                self.copies[op].doom()

    def doom_overtaken(self, pool: PoolState) -> None:
        """A group has given pages up: nothing counts that was to be read from them.

        One rank's report decides for all, and the others bump their words later. Until they do
        their pages may be filled anew by the group's next restore, and their words say nothing.
        """
        if pool.log is None:
            return
        for op in pool.copies:
            copy = self.copies[op]
            for word in copy.words:
                if word.pool == pool.place and not pool.says(word.slot, word.value):
                    copy.doom()
                    break

    def lose_all(self, detail: str) -> list[Action]:
        """The mover is dead: end every copy that was in flight as failed."""
        actions: list[Action] = []
        for copy in list(self.copies.values()):
            for op in list(copy.open) or [copy.op]:
                actions += self.finish(CopyDone(op, "failed", detail))
        return actions

    # Private.

    def _source(
        self, node: Node, *, not_pool: PoolId = 0, peers: bool = True, hosts: bool = True
    ) -> Place | None:
        """Return where to read a node from: a live pool first, then the host, else None."""
        if peers:
            at = node.here
            while at is not None:
                pool = self._pools.get(at.place)
                if at.state is RESIDENT and at.place != not_pool and pool is not None and pool.live:
                    return at.place
                at = at.next
        return HOST if hosts and node.resident(HOST) is not None else None

    def source_for(self, node: Node, pool: PoolId) -> Place | None:
        """Return from where a pool would restore a node now, or None."""
        return self._source(node, not_pool=pool)

    def _new_copy(self, kind: CopyKind, pools: tuple[PoolId, ...]) -> Copy:
        ranks = len(self._pools[pools[0]].members)
        copy = Copy(self._last_op + 1, kind, pools, ranks)
        self._last_op += ranks
        self.copies[copy.op] = copy
        self.shards.update((op, copy) for op in copy.open if op != copy.op)
        for place in pools:
            self._pools[place].copies[copy.op] = None
        return copy

    def _lost(self, pool: PoolId, seq: int, detail: str) -> list[Action]:
        self._count("restores_lost", 1)
        return [Answer(pool, seq, Restored(False, 0, 0, 0, 0, detail))]
