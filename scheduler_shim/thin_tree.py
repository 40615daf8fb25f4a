"""A thin scheduler's tree: the daemon keeps it, and every question is one round trip.

Owns the totals as they were told last, and nothing of the tree. It must never go on as if a
question had been answered: where it is not known whose pages are, or what is protected, the daemon
is given up, and what the caller's rows say counts from then on.
"""

from __future__ import annotations

from array import array

from directory.core.actions import GaveUp, Inserted, Locked, Matched, Totals
from directory.core.errors import TreecoredError
from directory.core.events import Evict, Flush, Insert, Lock, Match, Mode, Unlock
from directory.core.ids import NO_LEASE
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.own_tree import Found, Published, held_bytes, question
from scheduler_shim.request import Request
from scheduler_shim.spans import SpanTable


class ThinTree:
    """The tree is the daemon's; every question is one round trip."""

    mode: Mode = "thin"

    def __init__(self, spans: SpanTable, client: DaemonClient) -> None:
        self._spans = spans
        self._client = client
        self._totals = Totals()
        self._stale = True  # leases were released since the totals were told
        self._in_vain = False  # in this tick they were asked for, and no answer came

    def find(self, key: NamespaceKey, tokens: bytes, before: Found | None = None) -> Found:  # noqa: ARG002 - the daemon knows
        """Ask, without a lease."""
        reply = self._call(Match("find", 0, key, tokens, acquire=False)) if tokens else None
        if not isinstance(reply, Matched):
            return Found(b"")
        self._tell(reply.totals)
        return Found(reply.own, node_id=reply.node)

    def touch(self, key: NamespaceKey, tokens: bytes) -> None:
        """Told, not asked: whatever the daemon answers is thrown away."""
        self._client.report(Match("touch", 0, key, tokens, acquire=False))

    def hold(self, request: Request, found: Found) -> bool:
        """Lease the node, or the path once more where the node's number is another one now.

        Without an answer the daemon is given up: the caller's row counts then, as every row does.
        """
        if not found.pages:
            return True
        reply = self._call(Lock(request.name, request.attempt, found.node_id))
        if isinstance(reply, TreecoredError):
            tokens = request.tokens[: held_bytes(request, found)]
            reply = self._call(Match(request.name, request.attempt, request.key, tokens))
        if not isinstance(reply, Matched | Locked):
            self._client.lose("no answer to Lock: what was found would not be protected")
            return False
        self._tell(reply.totals)
        request.lease(reply.receipt)
        if isinstance(reply, Locked) or reply.own == found.pages:
            return True
        self.release(request)
        return False

    def match(self, request: Request) -> int:
        """Put what the pool holds of the path into the row, protected by a lease.

        Returns up to which page the path can be had; a refusal or no answer is a miss.
        """
        try:
            reply = self._client.call(question(request)) if request.match_pages else None
        except TreecoredError:
            reply = None
        if not isinstance(reply, Matched):
            return len(request.row)
        self._tell(reply.totals)
        # The new lease is there before that of an earlier attempt goes.
        self.release(request)
        request.lease(reply.receipt)
        request.row = array("I")
        request.row.frombytes(reply.own)
        request.tree_pages = request.hit_pages = reply.own_pages
        return reply.own_pages + reply.restorable_pages

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Published | None:
        """Ask the daemon to insert. Without an answer nobody here knows whose the pages are, so
        the daemon is given up: its claim on the pool ends with the session."""
        slot, value = self._spans.allocate()
        message = Insert(
            request.name,
            request.attempt,
            request.key,
            request.tokens[: pages * request.page_key],
            pack_pages(request.row[:pages]),
            slot,
            value,
            written,
            request.receipt,
        )
        try:
            reply = self._client.call(message)
        except TreecoredError:
            self._spans.publish(slot, 0)
            return None
        if not isinstance(reply, Inserted):
            self._spans.publish(slot, 0)
            self._client.lose("no answer to Insert: whose the pages are is not known")
            return None
        self._spans.publish(slot, reply.fresh_pages)
        self._tell(reply.totals)
        if keep and request.receipt == NO_LEASE and reply.accepted_pages:
            self._lock(request, reply.node)
        return Published(reply.canonical, reply.duplicates)

    def protect(self, request: Request, written: tuple[int, int]) -> bool:
        """Have the row's part of the tree, which the daemon has, leased; whether it is."""
        done = self.publish(request, request.tree_pages, written, keep=True)
        return done is not None and not done.duplicates and request.receipt != NO_LEASE

    def _lock(self, request: Request, node: int) -> None:
        reply = self._call(Lock(request.name, request.attempt, node))
        if isinstance(reply, Locked):
            self._tell(reply.totals)
            request.lease(reply.receipt)
        else:
            self._client.lose("no answer to Lock: the row would not be protected")

    def evict(self, pages: int) -> bytes:
        """Ask the daemon to choose; words first, then the pages are the caller's."""
        given, more = b"", True
        while more and len(given) < 4 * pages:
            some, more = self._give_up(self._call(Evict(pages - len(given) // 4)))
            given += some
        return given

    def flush(self) -> bytes:
        """Have everything that no lease protects given up."""
        given, more = b"", True
        while more:
            some, more = self._give_up(self._call(Flush("pool")))
            given += some
        return given

    def _give_up(self, reply: object) -> tuple[bytes, bool]:
        """What went, and whether to ask again: one answer names only so many pages."""
        if not isinstance(reply, GaveUp):
            self._client.lose("no answer to Evict or Flush: which pages went is not known")
            return b"", False
        for slot, value, count in reply.words:
            self._spans.give_up(slot, value, count)
        self._tell(reply.totals)
        return reply.pages, bool(reply.pages) and reply.totals.evictable > 0

    def new_tick(self) -> None:
        """What was asked in vain may be asked again."""
        self._in_vain = False

    def _tell(self, totals: Totals) -> None:
        self._totals, self._stale = totals, False

    def _call(self, body: Match | Lock | Evict | Flush) -> object:
        try:
            return self._client.call(body)
        except TreecoredError as error:
            return error

    def release(self, request: Request) -> None:
        """Have the lease released; nobody waits for it."""
        if request.receipt != NO_LEASE:
            self._client.report(Unlock(request.receipt))
            self._stale = True
        request.receipt = NO_LEASE

    @property
    def pages(self) -> int:
        """Pages in the tree, by the words that guard them."""
        return self._spans.live_pages

    @property
    def totals(self) -> Totals:
        """As the newest answer told them. What was released since is asked for once more; without
        an answer it still counts as protected, for the rest of this tick: SGLang reads one of both
        numbers, then the other, and ends an engine where they do not add up. The sum is this
        side's own and always exact."""
        if self._stale and not self._in_vain:
            reply = self._call(Match("totals", 0, NamespaceKey(), b"", acquire=False))
            if isinstance(reply, Matched):
                self._tell(reply.totals)
            else:
                self._in_vain = True
        protected = min(self._totals.protected, self.pages)
        return Totals(self.pages - protected, protected)

    def check(self) -> list[str]:
        """All that a thin shim keeps are its spans."""
        return self._spans.check()
