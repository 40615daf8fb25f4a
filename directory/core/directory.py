"""The Directory: one deterministic state machine over everything the daemon knows.

`handle(event) -> list[Action]` is its only entry. Owns the tree, pools, leases, the host tier's
slots and the transfers; decides matches, leases, evictions and copies. It must never read a
clock, block, touch bytes of a page, or depend on anything but the events so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from directory.core import limits
from directory.core.actions import (
    Action,
    Answer,
    AnyReply,
    Counters,
    Done,
    GaveUp,
    Inserted,
    Locked,
    Matched,
    Refused,
    Registered,
    RegistrationRefused,
    ReleasePool,
    Totals,
)
from directory.core.errors import (
    BadMessage,
    Diverged,
    InternalError,
    TooLarge,
    TreecoredError,
    UnknownPool,
    WrongMode,
)
from directory.core.events import (
    Asked,
    Body,
    CopyDone,
    Event,
    Evict,
    Evicted,
    Flush,
    Insert,
    Lock,
    Match,
    MoverLost,
    PoolClosed,
    PoolRegistered,
    Restore,
    Stats,
    Unlock,
)
from directory.core.host import HostSlots
from directory.core.ids import HOST, NO_LEASE, PoolId
from directory.core.invariants import violations
from directory.core.lease import LeaseTable
from directory.core.node import Node
from directory.core.place import HostState, PoolState
from directory.core.pool import (
    apply_given_up,
    evict_pages,
    flush_pages,
    insert_pages,
    match_own,
)
from directory.core.registry import Registry
from directory.core.states import LeaseEvent
from directory.core.story import Story
from directory.core.transfers import Transfers
from directory.core.tree import Step, Tree

Handler = Callable[[PoolState, int, Any], list[Action]]


class Reach(NamedTuple):
    """How far along a walked path pages can be had: steps used, pages from the root."""

    steps: int
    pages: int


class Directory:
    """The authoritative state of one node. `host_bytes`: memory of the host tier."""

    def __init__(self, *, host_bytes: int = 0, segment_bytes: int = 64 * limits.MIB) -> None:
        self.tree = Tree()
        self.host = HostState()
        self.tree.places[HOST] = self.host
        self.slots = HostSlots(host_bytes, segment_bytes)
        self.leases = LeaseTable(self.tree, self.slots)
        self.registry = Registry(self.tree)
        self.pools = self.registry.pools
        self.counters: dict[str, int] = {}
        self.story = Story()
        self.transfers = Transfers(self.tree, self.host, self.slots, self.pools, self._count)
        self._handlers: dict[type[Body], Handler] = {
            Match: self._match,
            Lock: self._lock,
            Unlock: self._unlock,
            Insert: self._insert,
            Evict: self._evict,
            Evicted: self._evicted,
            Restore: self._restore,
            Flush: self._flush,
            Stats: self._stats,
        }

    def handle(self, event: Event) -> list[Action]:
        """Take in one event and return what is to be done about it.

        A client's mistake is answered with `Refused`; only a defect of treecored itself raises,
        as `InternalError` with the story of what led to it.
        """
        try:
            if isinstance(event, Asked):
                return self._asked(event)
            actions = self._told(event)
            self.registry.forget_closed()
            return actions
        except InternalError as error:
            raise InternalError(f"{error}\nstory:\n{self.story.tell()}") from error

    def _told(self, event: Event) -> list[Action]:
        if isinstance(event, CopyDone):
            self.story.add("copy_done", event.op, event.outcome, event.detail)
            return self.transfers.finish(event)
        if isinstance(event, PoolRegistered):
            return self._register(event)
        if isinstance(event, PoolClosed):
            return self._close(event.pool)
        assert isinstance(event, MoverLost)
        self.story.add("mover_lost", event.detail)
        return self.transfers.lose_all(event.detail or "mover lost")

    def check(self) -> list[str]:
        """Walk the whole state and return every invariant that does not hold, with numbers."""
        return violations(self)

    # Sessions.

    def _register(self, event: PoolRegistered) -> list[Action]:
        try:
            pool = self.registry.register(event)
        except TreecoredError as error:
            return [RegistrationRefused(event.token, error.code, str(error))]
        self.story.add("registered", repr(pool))
        return [Registered(event.token, pool.place, pool.generation)]

    def _close(self, pool_id: PoolId) -> list[Action]:
        pool = self.pools.get(pool_id)
        if pool is None or not pool.live:
            return []
        self.story.add("closed", repr(pool))
        self.registry.begin_close(pool)
        for receipt in list(pool.leases):
            lease = self.leases.get(receipt, pool_id)
            self.leases.release(pool, lease, LeaseEvent.OWNER_GONE)
        self.transfers.doom(pool)
        flush_pages(self.tree, pool)
        return [ReleasePool(pool_id), *self.transfers.pump()]

    # Clients.

    def _asked(self, event: Asked) -> list[Action]:
        pool = self.pools.get(event.pool)
        body = event.body
        name = type(body).__name__
        self.story.add(name, event.pool, event.seq)
        try:
            if pool is None or not pool.live:
                raise UnknownPool(f"pool {event.pool} is not registered; register again")
            self._count(f"asked_{name.lower()}", 1)
            return self._handlers[type(body)](pool, event.seq, body)
        except InternalError:
            raise
        except TreecoredError as error:
            self._count(f"refused_{error.code}", 1)
            actions: list[Action] = [Answer(event.pool, event.seq, Refused(error.code, str(error)))]
            if isinstance(error, Diverged) and pool is not None:
                # What it reported before can no longer be told from what is true: a miss is
                # correct, a wrong page is not. The owner republishes.
                flush_pages(self.tree, pool)
            return actions

    def _match(self, pool: PoolState, seq: int, body: Match) -> list[Action]:
        _check_request(body.request, body.tokens)
        most = len(body.tokens) // (pool.page_size * body.namespace.unit_bytes)
        if not 0 <= body.start_pages <= most:
            raise BadMessage(f"start_pages must be 0 to {most} here, got {body.start_pages}")
        space = self.tree.find_space(pool.fingerprint, body.namespace)
        if space is None:
            return self._answer(pool, seq, Matched(0, b"", 0, 0, 0, 0, NO_LEASE, _totals(pool)))
        steps = self.tree.walk(space, body.tokens)
        own_pages, own, own_node = body.start_pages, b"", space.root
        if pool.mode == "thin":
            own_node, own, own_pages = match_own(self.tree, pool, space, steps)
        reach, host_pages, peer_pages = self._beyond(pool, steps, own_pages)
        receipt = NO_LEASE
        if body.acquire and (reach.pages > own_pages or own):
            receipt = self._acquire(pool, body, steps, reach, own_node)
        self.tree.touch(steps[: reach.steps], HOST, self.host.next_tick())
        self._count("pages_matched_own", own_pages)
        self._count("pages_matched_host", host_pages)
        self._count("pages_matched_peer", peer_pages)
        restorable = host_pages + peer_pages
        return self._answer(
            pool,
            seq,
            Matched(
                own_pages,
                own,
                restorable,
                host_pages,
                peer_pages,
                own_node.id,
                receipt,
                _totals(pool),
            ),
        )

    def _beyond(self, pool: PoolState, steps: list[Step], start: int) -> tuple[Reach, int, int]:
        """Follow a path as far as every page beyond `start` can be had from somewhere."""
        at, host_pages, peer_pages, used = 0, 0, 0, 0
        for node, pages in steps:
            if at + pages > start:
                source = self.transfers.source_for(node, pool.place)
                if source is None:
                    break
                here = at + pages - max(at, start)
                if source == HOST:
                    host_pages += here
                else:
                    peer_pages += here
            at += pages
            used += 1
        return Reach(used, start + host_pages + peer_pages), host_pages, peer_pages

    def _acquire(
        self, pool: PoolState, body: Match, steps: list[Step], reach: Reach, own_node: Node
    ) -> int:
        lease = self.leases.grant(pool, body.request, body.attempt)
        if reach.steps:
            node, pages = steps[reach.steps - 1]
            if pages < node.page_count:
                upper = self.tree.split(node, pages)
                steps[reach.steps - 1] = (upper, pages)
            self.leases.follow(lease, steps[reach.steps - 1][0])
            for node, _ in reversed(steps[: reach.steps]):
                if node.resident(HOST) is not None:
                    self.leases.claim(lease, node, HOST)
                    break
        if own_node.parent is not None:
            self.leases.claim(lease, own_node, pool.place)
        return lease.id

    def _lock(self, pool: PoolState, seq: int, body: Lock) -> list[Action]:
        _check_mode(pool, "thin", "Lock")
        _check_request(body.request)
        node = self.tree.node(body.node)
        if node.space.fingerprint != pool.fingerprint or node.resident(pool.place) is None:
            raise BadMessage(f"node {body.node} has no pages in this pool; match again")
        lease = self.leases.grant(pool, body.request, body.attempt)
        self.leases.claim(lease, node, pool.place)
        return self._answer(pool, seq, Locked(lease.id, _totals(pool)))

    def _unlock(self, pool: PoolState, seq: int, body: Unlock) -> list[Action]:
        lease = self.leases.get(body.receipt, pool.place)
        self.leases.release(pool, lease, LeaseEvent.RELEASE)
        return self._report(pool, seq)

    def _insert(self, pool: PoolState, seq: int, body: Insert) -> list[Action]:
        _check_request(body.request, body.tokens, body.pages)
        lease = None
        if body.receipt:
            _check_mode(pool, "thin", "Insert with a receipt")
            lease = self.leases.get(body.receipt, pool.place)
        space = self.tree.space(pool.fingerprint, body.namespace, pool.page_size, pool.page_bytes)
        try:
            outcome = insert_pages(
                self.tree,
                pool,
                space,
                body.tokens,
                body.pages,
                body.span,
                body.span_value,
                body.written,
            )
        finally:
            if not space.root.children:
                self.tree.prune(space.root)
        if pool.mode == "mirrored" and outcome.duplicates:
            raise Diverged("the report's pages differ from those reported before; republish")
        if lease is not None:
            self.leases.move(lease, outcome.end)
        self.transfers.wish(node for node, _ in outcome.steps)
        self._count("pages_inserted", outcome.fresh_pages)
        actions = self.transfers.pump()
        if pool.mode == "mirrored":
            return actions
        return actions + self._answer(
            pool,
            seq,
            Inserted(
                len(outcome.canonical) // 4,
                outcome.canonical,
                outcome.duplicates,
                outcome.fresh_pages,
                outcome.end.id,
                _totals(pool),
            ),
        )

    def _evict(self, pool: PoolState, seq: int, body: Evict) -> list[Action]:
        _check_mode(pool, "thin", "Evict")
        if not 0 < body.pages <= pool.page_count:
            raise BadMessage(f"evict takes 1 to {pool.page_count} pages, got {body.pages}")
        given = evict_pages(self.tree, pool, body.pages)
        self._count("pool_pages_evicted", len(given.pages) // 4)
        return self._answer(pool, seq, GaveUp(given.pages, given.words, _totals(pool)))

    def _evicted(self, pool: PoolState, seq: int, body: Evicted) -> list[Action]:
        _check_mode(pool, "mirrored", "Evicted")
        count = apply_given_up(self.tree, pool, body.runs, body.words)
        self._count("pool_pages_evicted", count)
        return self._report(pool, seq)

    def _restore(self, pool: PoolState, seq: int, body: Restore) -> list[Action]:
        _check_request(body.request, b"", body.pages)
        lease = self.leases.get(body.receipt, pool.place)
        return self.transfers.restore(pool, seq, body, lease)

    def _flush(self, pool: PoolState, seq: int, body: Flush) -> list[Action]:
        if body.scope == "host":
            self._flush_host()
            return self._answer(pool, seq, Done(_totals(pool)))
        given = flush_pages(self.tree, pool)
        pool.word = max(pool.word, body.pool_word)
        if pool.mode == "thin":
            return self._answer(pool, seq, GaveUp(given.pages, given.words, _totals(pool)))
        return self._answer(pool, seq, Done(_totals(pool)))

    def _flush_host(self) -> None:
        """Free unleased host pages now and the others when their holders let go."""
        for size, order in self.host.orders.items():
            while len(order):
                self.transfers.evict_host(size, self.host.evictable[size] or 1)
        for node in list(self.host.nodes.values()):
            if node.places[HOST].state in ("resident", "filling"):
                self.tree.retire(node, HOST)

    def _stats(self, pool: PoolState, seq: int, body: Stats) -> list[Action]:
        facts = dict(sorted(self.counters.items()))
        facts["nodes"] = len(self.tree.nodes)
        facts["namespaces"] = len(self.tree.spaces)
        facts["pools"] = len(self.pools)
        facts["leases"] = len(self.leases)
        facts["copies_in_flight"] = len(self.transfers.copies)
        facts["backups_waiting"] = len(self.transfers.wished)
        facts["host_pages"] = self.host.pages
        facts["host_pages_leased"] = self.host.locked_pages
        found = tuple(self.check()) if body.check else ()
        return self._answer(pool, seq, Counters(facts, found))

    # Small things.

    def _answer(self, pool: PoolState, seq: int, body: AnyReply) -> list[Action]:
        return [Answer(pool.place, seq, body)]

    def _report(self, pool: PoolState, seq: int) -> list[Action]:
        """A mirrored pool's reports need no answer but the stream's acknowledgement."""
        if pool.mode == "mirrored":
            return []
        return self._answer(pool, seq, Done(_totals(pool)))

    def _count(self, name: str, amount: int) -> None:
        if amount:
            self.counters[name] = self.counters.get(name, 0) + amount


def _totals(pool: PoolState) -> Totals:
    return Totals(pool.evictable_pages, pool.locked_pages)


def _check_mode(pool: PoolState, mode: str, what: str) -> None:
    if pool.mode != mode:
        raise WrongMode(f"{what} is for {mode} pools; this one registered as {pool.mode}")


def _check_request(request: str, tokens: bytes = b"", pages: bytes = b"") -> None:
    if len(request) > limits.REQUEST_CHARS_MAX:
        raise TooLarge(f"a request id has at most {limits.REQUEST_CHARS_MAX} characters")
    if len(tokens) > limits.TOKENS_BYTES_MAX:
        raise TooLarge(f"{len(tokens)} bytes of tokens, at most {limits.TOKENS_BYTES_MAX}")
    if len(pages) > limits.PAGES_BYTES_MAX:
        raise TooLarge(f"{len(pages)} bytes of pages, at most {limits.PAGES_BYTES_MAX}")
