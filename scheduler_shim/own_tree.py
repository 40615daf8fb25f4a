"""Who keeps the pool's tree: the scheduler itself (mirrored) or the daemon (thin).

Owns what differs between the two modes: how pages are published, given up and protected. Both
give the same pages and the same duplicates for the same calls. It never touches the allocator or
a page's bytes: what comes back from here is the caller's to free, its span word has moved on.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol

from directory.core.actions import GaveUp, Inserted, Locked, Matched
from directory.core.errors import TreecoredError
from directory.core.events import Evict, Flush, Insert, Lock, Match, Mode, Unlock
from directory.core.ids import NO_LEASE
from directory.core.node import Node
from directory.core.tokens import pack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.mirror import GivenUpPages, Mirror
from scheduler_shim.republish import Republisher
from scheduler_shim.request import Request
from scheduler_shim.spans import SpanTable


def question(request: Request) -> Match:
    """What lies beyond the request's own pages? A mirrored answer is beyond, a thin one is all."""
    return Match(request.name, request.attempt, request.key, request.match_tokens, len(request.row))


class Published(NamedTuple):
    """Packed pages now in the tree for the path, and packed pages of the row that are not."""

    canonical: bytes
    duplicates: bytes

    @property
    def accepted_pages(self) -> int:
        """Pages of the path that are in the tree: whole ones, a partial tail is never stored."""
        return len(self.canonical) // 4


class OwnTree(Protocol):
    """The tree over the scheduler's own pool.

    A method that needed the daemon and had no answer leaves the client `lost`: the caller looks,
    and goes on with another tree.
    """

    mode: Mode

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Published | None:
        """Publish the row's first `pages` pages; with `keep` they are protected afterwards.

        None: nothing was published, the pages are the request's own as before.
        """
        ...

    def evict(self, pages: int) -> bytes:
        """Give up at most `pages` unprotected pages, coldest first."""
        ...

    def flush(self) -> bytes:
        """Give up every unprotected page."""
        ...

    def release(self, request: Request) -> None:
        """Let go of what protects the request's row, and of its lease."""
        ...

    @property
    def pages(self) -> int:
        """Pages in the tree."""
        ...

    def check(self) -> list[str]:
        """What does not hold."""
        ...


class MirroredTree:
    """The tree is here; the daemon, if there is one, is told.

    `returning`: a new daemon that is being told what the mirror holds, while `client` is None.
    """

    mode: Mode = "mirrored"

    def __init__(self, mirror: Mirror, client: DaemonClient | None) -> None:
        self.mirror = mirror
        self.client = client
        self.returning: Republisher | None = None

    def match(self, request: Request) -> None:
        """Put the longest prefix that the pool holds into the row, and protect it."""
        hit = self.mirror.match(request.key, request.match_tokens)
        self._protect(request, hit.node)
        row = array("I")
        row.frombytes(hit.pages)
        request.row = row
        request.tree_pages = request.hit_pages = hit.page_count

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Published | None:
        """Insert at once, then report."""
        outcome, report = self.mirror.insert(
            request.name,
            request.attempt,
            request.key,
            request.tokens[: pages * request.page_key],
            pack_pages(request.row[:pages]),
            written,
        )
        if keep and outcome.end.parent is not None:
            self._protect(request, outcome.end)
        if self.client is not None and pages:
            self.client.report(report)
        elif self.returning is not None:
            self.returning.on_insert(report)
        return Published(outcome.canonical, outcome.duplicates)

    def evict(self, pages: int) -> bytes:
        """All or nothing: without enough unprotected pages nothing is given up for nothing."""
        if pages > self.mirror.totals.evictable:
            return b""
        return self._give_up(self.mirror.evict(pages))

    def flush(self) -> bytes:
        """Give up, then report."""
        return self._give_up(self.mirror.flush())

    def _give_up(self, given: GivenUpPages) -> bytes:
        if given.report is not None:
            if self.client is not None:
                self.client.report(given.report)
            elif self.returning is not None:
                self.returning.on_given_up(given.report)
        return given.pages

    def release(self, request: Request) -> None:
        """Unlock here, and have the lease released."""
        self._protect(request, None)
        self.release_lease(request)

    def release_lease(self, request: Request) -> None:
        """Have the lease on pages elsewhere released."""
        if request.receipt != NO_LEASE and self.client is not None:
            self.client.report(Unlock(request.receipt))
        request.receipt = NO_LEASE

    def _protect(self, request: Request, node: Node | None) -> None:
        """Move a request's lock; the new one is taken before the old one is let go."""
        old, request.node = request.node, node
        if node is not None:
            self.mirror.lock(node)
        if old is not None:
            self.mirror.unlock(old)

    @property
    def pages(self) -> int:
        """Pages in the tree."""
        return self.mirror.pool.pages

    def check(self) -> list[str]:
        """The mirror's own check."""
        return self.mirror.check()


class ThinTree:
    """The tree is the daemon's; every question is one round trip."""

    mode: Mode = "thin"

    def __init__(self, spans: SpanTable, client: DaemonClient) -> None:
        self._spans = spans
        self._client = client

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
        return reply.pages, bool(reply.pages) and reply.totals.evictable > 0

    def _call(self, body: Lock | Evict | Flush) -> object:
        try:
            return self._client.call(body)
        except TreecoredError as error:
            return error

    def release(self, request: Request) -> None:
        """Have the lease released; nobody waits for it."""
        if request.receipt != NO_LEASE:
            self._client.report(Unlock(request.receipt))
        request.receipt = NO_LEASE

    @property
    def pages(self) -> int:
        """Pages in the tree, by the words that guard them."""
        return self._spans.live_pages

    def check(self) -> list[str]:
        """All that a thin shim keeps are its spans."""
        return self._spans.check()
