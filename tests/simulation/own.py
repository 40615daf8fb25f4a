"""A model scheduler's tree over its own pool: kept by itself (mirrored) or by the daemon (thin).

Owns what differs between the modes, over the real Mirror, SpanTable and DaemonClient. A method
that may have to wait for the daemon is a generator that yields while it waits. It frees pages only
after their words have moved on.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from typing import Protocol

from directory.core import limits
from directory.core.actions import AnyReply, GaveUp, Inserted, Locked, Matched
from directory.core.events import Evict, Flush, Insert, Lock, Match, Request, Unlock
from directory.core.ids import NO_LEASE
from directory.core.node import Node
from directory.core.tokens import pack_pages, unpack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.mirror import GivenUpPages, Mirror
from scheduler_shim.spans import SpanTable
from tests.simulation.lockstep import Shadow
from tests.simulation.request import ModelRequest

Wait = Generator[None, None, None]


class Pages(Protocol):
    """What a tree needs of its scheduler."""

    client: DaemonClient | None

    def free(self, pages: bytes | array[int] | list[int]) -> None:
        """Give pages back to the allocator."""
        ...

    def call(self, body: Request) -> Generator[None, None, AnyReply | None]:
        """Ask the daemon and wait; None when the deadline passed or the daemon is lost."""
        ...


class Own(Protocol):
    """The tree over the own pool."""

    mode: str

    def look_up(self, request: ModelRequest) -> Generator[None, None, Matched | None]:
        """Put the own prefix into the row, protected; thin: the answer tells what lies beyond."""
        ...

    def publish(
        self, request: ModelRequest, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Generator[None, None, bool]:
        """Publish the row's first pages; duplicates are freed after the row was swapped."""
        ...

    def evict(self, count: int) -> Wait:
        """Give up at most `count` unprotected pages."""
        ...

    def flush(self) -> Wait:
        """Give up every unprotected page."""
        ...

    def release(self, request: ModelRequest) -> None:
        """Let go of what protects the request's row, and of its lease."""
        ...

    def tree_pages(self) -> set[int]:
        """Pages in the tree."""
        ...

    def check(self) -> list[str]:
        """What does not hold."""
        ...


class MirroredOwn:
    """The tree is here; the daemon, if there is one, is told."""

    mode = "mirrored"

    def __init__(self, pages: Pages, mirror: Mirror) -> None:
        self.mirror = mirror
        self._pages = pages

    def look_up(self, request: ModelRequest) -> Generator[None, None, Matched | None]:
        """At once."""
        self.match(request)
        yield from ()
        return None

    def match(self, request: ModelRequest) -> None:
        """Put the longest own prefix into the row, and protect it."""
        hit = self.mirror.match(request.key, request.match_tokens)
        self.protect(request, hit.node)
        request.row = unpack_pages(hit.pages).tolist()
        request.tree_pages = hit.page_count

    def publish(
        self, request: ModelRequest, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Generator[None, None, bool]:
        """At once."""
        self.insert(request, pages, written, keep=keep)
        yield from ()
        return True

    def insert(
        self, request: ModelRequest, pages: int, written: tuple[int, int], *, keep: bool
    ) -> None:
        """Insert into the mirror, then report."""
        outcome, report = self.mirror.insert(
            request.name,
            request.attempt,
            request.key,
            request.packed[: pages * request.page_key],
            pack_pages(request.row[:pages]),
            written,
        )
        if keep and outcome.end.parent is not None:
            self.protect(request, outcome.end)
        if self._pages.client is not None and pages:
            self._pages.client.report(report)
        request.row[:pages] = unpack_pages(outcome.canonical).tolist()
        request.tree_pages = pages
        self._pages.free(outcome.duplicates)

    def evict(self, count: int) -> Wait:
        """All or nothing."""
        if count <= self.mirror.totals.evictable:
            self._give_up(self.mirror.evict(count))
        yield from ()

    def flush(self) -> Wait:
        """At once."""
        self._give_up(self.mirror.flush())
        yield from ()

    def _give_up(self, given: GivenUpPages) -> None:
        if self._pages.client is not None:
            for report in given.reports:
                self._pages.client.report(report)
        self._pages.free(given.pages)

    def release(self, request: ModelRequest) -> None:
        """Unlock here, and report the receipt."""
        self.protect(request, None)
        self.release_lease(request)

    def release_lease(self, request: ModelRequest) -> None:
        """Report the receipt of pages elsewhere."""
        if request.receipt != NO_LEASE and self._pages.client is not None:
            self._pages.client.report(Unlock(request.receipt))
        request.receipt = NO_LEASE

    def protect(self, request: ModelRequest, node: Node | None) -> None:
        """Move a request's lock; the new one is taken before the old one is let go."""
        old, request.node = request.node, node
        if node is not None:
            self.mirror.lock(node)
        if old is not None:
            self.mirror.unlock(old)

    def tree_pages(self) -> set[int]:
        """Pages in the mirror."""
        return set(self.mirror.pool.owned)

    def check(self) -> list[str]:
        """The mirror's own check."""
        return self.mirror.check()


class ThinOwn:
    """The tree is the daemon's. An unanswered question about the pool gives the daemon up."""

    mode = "thin"

    def __init__(self, pages: Pages, spans: SpanTable, shadow: Shadow) -> None:
        self.shadow: Shadow | None = shadow
        self._pages = pages
        self._spans = spans
        self._tree: set[int] = set()

    def look_up(self, request: ModelRequest) -> Generator[None, None, Matched | None]:
        """One round trip; the new lease is there before the old one goes."""
        body = Match(request.name, request.attempt, request.key, request.match_tokens)
        token = self.shadow.match(body) if self.shadow else None
        reply = yield from self._pages.call(body)
        if not isinstance(reply, Matched):
            self.shadow = None
            return None
        if self.shadow and token is not None:
            self.shadow.matched(token, reply)
        self.release(request)
        request.receipt = reply.receipt
        request.row = unpack_pages(reply.own).tolist()
        request.tree_pages = reply.own_pages
        return reply

    def publish(
        self, request: ModelRequest, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Generator[None, None, bool]:
        """One round trip, and another for a lock where there was no lease."""
        slot, value = self._spans.allocate()
        body = Insert(
            request.name,
            request.attempt,
            request.key,
            request.packed[: pages * request.page_key],
            pack_pages(request.row[:pages]),
            slot,
            value,
            written,
            request.receipt,
        )
        reply = yield from self._pages.call(body)
        if not isinstance(reply, Inserted):
            self.shadow = None
            self._spans.publish(slot, 0)
            self._lose(f"no answer to Insert: {reply}")
            return False
        if self.shadow:
            self.shadow.inserted(body, reply)
        self._spans.publish(slot, reply.fresh_pages)
        canonical = unpack_pages(reply.canonical).tolist()
        request.row[:pages] = canonical
        request.tree_pages = pages
        self._tree.update(canonical)
        self._pages.free(reply.duplicates)
        if keep and request.receipt == NO_LEASE and reply.accepted_pages:
            locked = yield from self._pages.call(Lock(request.name, request.attempt, reply.node))
            if not isinstance(locked, Locked):
                self._lose(f"no answer to Lock: {locked}")
                return False
            if self.shadow:
                self.shadow.locked(locked)
            request.receipt = locked.receipt
        return True

    def evict(self, count: int) -> Wait:
        """The daemon chooses; words first, then the pages are free."""
        more = True
        while more and count > 0:
            reply = yield from self._pages.call(Evict(count))
            more = self._give_up(reply, count)
            count -= len(reply.pages) // 4 if isinstance(reply, GaveUp) else 0

    def flush(self) -> Wait:
        """As `evict`, for everything that no lease protects."""
        more = True
        while more:
            reply = yield from self._pages.call(Flush("pool"))
            more = self._give_up(reply, self.shadow.evictable if self.shadow else 0)

    def _give_up(self, reply: AnyReply | None, count: int) -> bool:
        """What went of `count` pages; whether to ask again, for one answer names only so many."""
        if not isinstance(reply, GaveUp):
            self.shadow = None
            self._lose(f"no answer to Evict or Flush: {reply}")
            return False
        if self.shadow:
            self.shadow.evicted(min(count, limits.GAVE_UP_PAGES_MAX), reply)
        for slot, value, given in reply.words:
            self._spans.give_up(slot, value, given)
        self._tree.difference_update(unpack_pages(reply.pages))
        self._pages.free(reply.pages)
        return bool(reply.pages) and reply.totals.evictable > 0

    def release(self, request: ModelRequest) -> None:
        """Report the receipt."""
        if request.receipt != NO_LEASE and self._pages.client is not None:
            self._pages.client.report(Unlock(request.receipt))
            if self.shadow:
                self.shadow.unlocked(request.receipt)
        request.receipt = NO_LEASE

    def _lose(self, reason: str) -> None:
        if self._pages.client is not None:
            self._pages.client.lose(reason)

    def tree_pages(self) -> set[int]:
        """Pages that answers have taken in and not given up."""
        return self._tree

    def check(self) -> list[str]:
        """Spans and pages agree."""
        found = self._spans.check()
        if self._spans.live_pages != len(self._tree):
            found.append(f"{self._spans.live_pages} pages are live, {len(self._tree)} in the tree")
        if self.shadow:
            found += self.shadow.check()
        return found
