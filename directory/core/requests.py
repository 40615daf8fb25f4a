"""What clients ask and report: one method a message body.

Owns no state of its own; decides matches, leases and evictions over the tree, the leases and the
transfers that `Directory` hands in. A client's mistake raises a typed error before anything is
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from directory.core import limits
from directory.core.actions import (
    Action,
    Answer,
    AnyReply,
    Done,
    GaveUp,
    Inserted,
    Locked,
    Matched,
    Totals,
)
from directory.core.errors import BadMessage, Diverged, TooLarge, WrongMode
from directory.core.events import (
    Body,
    Evict,
    Evicted,
    Flush,
    Insert,
    Live,
    Lock,
    Match,
    Restore,
    Unlock,
)
from directory.core.ids import HOST, NO_LEASE, LeaseId
from directory.core.lease import LeaseTable
from directory.core.node import Node
from directory.core.place import HostState, PoolState
from directory.core.pool import (
    apply_given_up,
    check_prompt,
    evict_pages,
    insert_pages,
    match_again,
)
from directory.core.states import LeaseEvent
from directory.core.transfers import Transfers
from directory.core.tree import Step, Tree

Handler = Callable[[PoolState, int, Any], list[Action]]


class Requests:
    """The handlers, by message body."""

    def __init__(
        self,
        tree: Tree,
        host: HostState,
        leases: LeaseTable,
        transfers: Transfers,
        count: Callable[[str, int], None],
    ) -> None:
        self.tree = tree
        self.host = host
        self.leases = leases
        self.transfers = transfers
        self._count = count
        self.handlers: dict[type[Body], Handler] = {
            Match: self._match,
            Lock: self._lock,
            Unlock: self._unlock,
            Insert: self._insert,
            Evict: self._evict,
            Evicted: self._evicted,
            Restore: self._restore,
            Flush: self._flush,
            Live: self._live,
        }

    def _match(self, pool: PoolState, seq: int, body: Match) -> list[Action]:
        tokens, namespace = body.tokens, body.namespace
        page_key = pool.page_size * namespace.unit_bytes
        most = len(tokens) // page_key
        _check_request(body.request, tokens)
        if most > limits.PROMPT_PAGES_MAX:
            check_prompt(page_key, tokens)
        if not 0 <= body.start_pages <= most:
            raise BadMessage(f"start_pages must be 0 to {most} here, got {body.start_pages}")
        space = self.tree.find_space(pool.fingerprint, namespace)
        if space is None:
            return self._answer(pool, seq, Matched(0, b"", 0, 0, 0, 0, NO_LEASE, _totals(pool)))
        tick = self.host.next_tick()
        if pool.mode == "thin":
            found = match_again(self.tree, pool, space, tokens, tick)
            own_node, own, own_pages = found.node, found.pages, found.page_count
            beyond, at = found.beyond, own_pages
        else:
            own_node, own, own_pages = space.root, b"", body.start_pages
            beyond, at = self.tree.walk(space, tokens), 0
        used = host_pages = peer_pages = host_reach = 0
        if beyond:
            used, host_pages, peer_pages = self._beyond(pool, beyond, at, own_pages)
            if peer_pages:
                host_reach = _host_reach(beyond[:used], at, own_pages)
            elif host_pages:
                host_reach = own_pages + host_pages
        receipt, restorable = NO_LEASE, host_pages + peer_pages
        if body.acquire and (restorable or own):
            receipt = self._acquire(pool, body, own_node, beyond, used)
        if used:
            self.tree.touch(beyond[:used], HOST, tick)
        if own_pages:
            self._count("pages_matched_own", own_pages)
        if restorable:
            self._count("pages_matched_host", host_pages)
            self._count("pages_matched_peer", peer_pages)
        matched = Matched(
            own_pages,
            own,
            restorable,
            host_pages,
            peer_pages,
            own_node.id,
            receipt,
            Totals(pool.pages - pool.locked_pages, pool.locked_pages),
            host_reach,
        )
        return [Answer(pool.place, seq, matched)]

    def _beyond(
        self, pool: PoolState, steps: list[Step], at: int, start: int
    ) -> tuple[int, int, int]:
        """Follow a path from page `at` on as far as every page beyond `start` can be had from
        somewhere: steps that are used, pages out of the host tier and out of other pools."""
        host_pages, peer_pages, used = 0, 0, 0
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
        return used, host_pages, peer_pages

    def _acquire(
        self, pool: PoolState, body: Match, own_node: Node, beyond: list[Step], used: int
    ) -> int:
        """Lease the own pool's part of a path, and `used` steps beyond it as far as the host has
        them."""
        lease = self.leases.grant(pool, body.request, body.attempt)
        if beyond:
            # Where the own pool has all of it, nothing can be restored: no host slot is pinned.
            end = own_node
            if used:
                end, pages = beyond[used - 1]
                if pages < end.page_count:
                    end = self.tree.split(end, pages)
                    beyond[used - 1] = (end, pages)
            if end.parent is not None:
                self.leases.follow(lease, end)
            while end.parent is not None:
                if end.resident(HOST) is not None:
                    self.leases.claim(lease, end, HOST)
                    break
                end = end.parent
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

    def _unlock(self, pool: PoolState, seq: int, body: Unlock) -> list[Action]:  # noqa: ARG002
        lease = self.leases.get(body.receipt, pool.place)
        self.leases.release(pool, lease, LeaseEvent.RELEASE)
        return []  # nobody waits for it, in either mode: it is acknowledged, as reports are

    def _insert(self, pool: PoolState, seq: int, body: Insert) -> list[Action]:
        _check_request(body.request, body.tokens)
        check_prompt(pool.page_size * body.namespace.unit_bytes, body.tokens)
        _check_request(body.request, b"", body.pages)
        if body.fresh_pages != -1:
            # A thin client is told: what it gives up after a divergence nobody could name.
            _check_mode(pool, "mirrored", "Insert with fresh_pages")
        lease = None
        if body.receipt:
            _check_mode(pool, "thin", "Insert with a receipt")
            lease = self.leases.get(body.receipt, pool.place)
        space = self.tree.space(
            pool.fingerprint,
            body.namespace,
            pool.page_size,
            pool.page_bytes,
            len(pool.members),
        )
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
                body.fresh_pages,
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
        given = evict_pages(self.tree, pool, min(body.pages, limits.GAVE_UP_PAGES_MAX))
        self.transfers.doom_overtaken(pool)
        self._count("pool_pages_evicted", len(given.pages) // 4)
        return self._answer(pool, seq, GaveUp(given.pages, given.words, _totals(pool)))

    def _evicted(self, pool: PoolState, seq: int, body: Evicted) -> list[Action]:
        _check_mode(pool, "mirrored", "Evicted")
        longest = max(len(body.runs), len(body.words))
        if longest > limits.GAVE_UP_PAGES_MAX:
            raise TooLarge(f"{longest} runs or words, at most {limits.GAVE_UP_PAGES_MAX}")
        count = apply_given_up(self.tree, pool, body.runs, body.words)
        self.transfers.doom_overtaken(pool)
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
        most = limits.GAVE_UP_PAGES_MAX if pool.mode == "thin" else pool.evictable_pages
        given = evict_pages(self.tree, pool, most)
        pool.word = max(pool.word, body.pool_word)
        self.transfers.doom_overtaken(pool)
        if pool.mode == "thin":
            return self._answer(pool, seq, GaveUp(given.pages, given.words, _totals(pool)))
        return self._answer(pool, seq, Done(_totals(pool)))

    def _flush_host(self) -> None:
        """Free unleased host pages now and the others when their holders let go."""
        for size, order in self.host.orders.items():
            while order.first(self.tree.nodes) is not None:
                self.transfers.evict_host(size, self.host.evictable[size] or 1)
        for node in list(self.host.nodes.values()):
            if node.places[HOST].state in ("resident", "filling"):
                self.transfers.journal.give_up(node.places[HOST])
                self.tree.retire(node, HOST)

    def _live(self, pool: PoolState, seq: int, body: Live) -> list[Action]:
        if len(body.requests) > limits.LIVE_REQUESTS_MAX:
            raise TooLarge(f"{len(body.requests)} requests, at most {limits.LIVE_REQUESTS_MAX}")
        if body.first:
            # What is granted from here on, while further parts arrive, is not concerned.
            pool.unlisted = dict.fromkeys(pool.leases)
        elif pool.unlisted is None:
            raise BadMessage("a list of live requests goes on that has not begun")
        listed = set(body.requests)
        for receipt in list(pool.unlisted):
            owner = self.leases.owner(receipt)
            if owner is None or (owner.request, owner.attempt) in listed:
                del pool.unlisted[receipt]
        if body.last:
            self._unlist(pool, pool.unlisted)
            pool.unlisted = None
        return self._report(pool, seq)

    def _unlist(self, pool: PoolState, receipts: Iterable[LeaseId]) -> None:
        for receipt in receipts:
            lease = self.leases.get(receipt, pool.place)
            self.leases.release(pool, lease, LeaseEvent.UNLIST)
            self._count("leases_unlisted", 1)

    # Small things.

    def _answer(self, pool: PoolState, seq: int, body: AnyReply) -> list[Action]:
        return [Answer(pool.place, seq, body)]

    def _report(self, pool: PoolState, seq: int) -> list[Action]:
        """A mirrored pool's reports need no answer but the stream's acknowledgement."""
        if pool.mode == "mirrored":
            return []
        return self._answer(pool, seq, Done(_totals(pool)))


def _host_reach(steps: Sequence[Step], at: int, start: int) -> int:
    """Where the last page of a path from page `at` on that the host tier has ends; 0 where that is
    not beyond `start`. What it has of a path it has from the root on."""
    reach = 0
    for node, pages in steps:
        at += pages
        if node.resident(HOST) is None:
            break
        reach = at
    return reach if reach > start else 0


def _totals(pool: PoolState) -> Totals:
    return Totals(pool.pages - pool.locked_pages, pool.locked_pages)


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
