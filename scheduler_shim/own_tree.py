"""Who keeps the pool's tree: the scheduler itself, as here, or the daemon (thin_tree.py).

Owns what differs between the two modes: how pages are published, given up and protected. Both
give the same pages and the same duplicates for the same calls. It never touches the allocator or
a page's bytes: what comes back from here is the caller's to free, its span word has moved on.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol

from directory.core.actions import AnyReply, Totals
from directory.core.errors import TreecoredError
from directory.core.events import Insert, Match, Mode, Unlock
from directory.core.ids import NO_LEASE, NodeId
from directory.core.namespace import NamespaceKey
from directory.core.node import Node
from directory.core.tokens import pack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.mirror import GivenUpPages, Mirror, OwnHit
from scheduler_shim.republish import Republisher
from scheduler_shim.request import Request


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


class Found(NamedTuple):
    """What the own pool has of a path, protected by nobody: packed pages and the last node, by
    itself (mirrored, with all that was found) or by its number (thin). `changes` (thin): how often
    the pool's part of the tree had changed by then."""

    pages: bytes
    node: Node | None = None
    node_id: NodeId = 0
    hit: OwnHit | None = None
    changes: int = 0


class OwnTree(Protocol):
    """The tree over the scheduler's own pool.

    A method that needed the daemon and had no answer leaves the client `lost`: the caller looks,
    and goes on with another tree.
    """

    mode: Mode
    gathers: bool
    """Whether what is published is told together with what comes next: the caller sends it."""

    @property
    def doubts(self) -> bool:
        """Whether more may be evictable than `totals` says: leases may be out that nobody has."""
        ...

    def find(self, key: NamespaceKey, tokens: bytes, before: Found | None = None) -> Found:
        """The longest prefix of whole pages that the pool holds, marked used and not protected.

        `before`: what these very tokens had the last time. If that object itself comes back, they
        have the same now; another one may say the same all the same. Nothing where no answer came:
        a miss is always right.
        """
        ...

    def touch(self, key: NamespaceKey, tokens: bytes) -> None:
        """Mark what the pool holds of a path as used; nobody waits for it."""
        ...

    def hold(self, request: Request, found: Found) -> bool:
        """Protect what was found for the request's tokens; its row has the pages already.

        False: not all of it is there any more, or nobody knows; nothing is protected then.
        """
        ...

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Published | None:
        """Publish the row's first `pages` pages; with `keep` they are protected afterwards.

        None: nothing was published, the pages are the request's own as before.
        """
        ...

    def use_again(self, request: Request, tokens: bytes) -> bool:
        """Whether the pool holds every page of a path (whole pages) that a request has computed:
        it is marked used then, and told of, and nothing of the row needs to be published. False
        too where only the daemon knows."""
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

    def take(self, seq: int, reply: AnyReply | None) -> bool:
        """An answer has come, or (None) its deadline has passed; whether the tree had asked."""
        ...

    @property
    def pages(self) -> int:
        """Pages in the tree."""
        ...

    @property
    def totals(self) -> Totals:
        """Pages that nobody protects, and pages that somebody does."""
        ...

    def check(self) -> list[str]:
        """What does not hold."""
        ...


class MirroredTree:
    """The tree is here; the daemon, if there is one, is told.

    `returning`: a new daemon that is being told what the mirror holds, while `client` is None.
    """

    mode: Mode = "mirrored"
    doubts = False  # every lock is here

    def __init__(self, mirror: Mirror, client: DaemonClient | None) -> None:
        self.mirror = mirror
        self.client = client
        self.gathers = False
        self.returning: Republisher | None = None

    def match(self, request: Request) -> None:
        """Put the longest prefix that the pool holds into the row, and protect it."""
        hit = self.mirror.match(request.key, request.match_tokens)
        self._protect(request, hit.node)
        row = array("I")
        row.frombytes(hit.pages)
        request.row = row
        request.tree_pages = request.hit_pages = hit.page_count

    def find(self, key: NamespaceKey, tokens: bytes, before: Found | None = None) -> Found:
        """Look it up, or only what is new of it."""
        hit = self.mirror.match(key, tokens, before.hit if before is not None else None)
        if before is not None and hit is before.hit:
            return before
        return Found(hit.pages, hit.node, hit=hit)

    def touch(self, key: NamespaceKey, tokens: bytes) -> None:
        """A look-up does it."""
        self.mirror.match(key, tokens)

    def hold(self, request: Request, found: Found) -> bool:
        """Lock the node. It may have been merged away since: the path says which one it is now."""
        if not found.pages:
            return True
        node = found.node
        if node is None or not self.mirror.holds(node):
            hit = self.mirror.match(request.key, request.tokens[: held_bytes(request, found)])
            if hit.pages != found.pages:
                return False
            node = hit.node
        self._protect(request, node)
        return True

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
        if pages:
            self._tell(report)
        return Published(outcome.canonical, outcome.duplicates)

    def use_again(self, request: Request, tokens: bytes) -> bool:
        """A look-up says it; its report is that of an insert without anything new. What is wrong
        with the path or the tree is for the insert to say, whose caller goes on without."""
        if not request.fits(len(tokens) // request.page_key):
            return False
        try:
            report = self.mirror.again(request.name, request.attempt, request.key, tokens)
        except TreecoredError:
            return False
        if report is not None:
            self._tell(report)
        return report is not None

    def _tell(self, report: Insert) -> None:
        if self.client is not None:
            self.client.report(report, hold=self.gathers)
        elif self.returning is not None:
            self.returning.on_insert(report)

    def evict(self, pages: int) -> bytes:
        """All or nothing: without enough unprotected pages nothing is given up for nothing."""
        if pages > self.mirror.totals.evictable:
            return b""
        return self._give_up(self.mirror.evict(pages))

    def flush(self) -> bytes:
        """Give up, then report."""
        return self._give_up(self.mirror.flush())

    def _give_up(self, given: GivenUpPages) -> bytes:
        if self.client is not None:
            for report in given.reports:
                self.client.report(report)
        elif self.returning is not None:
            self.returning.on_given_up(given.reports)
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

    def take(self, seq: int, reply: AnyReply | None) -> bool:  # noqa: ARG002 - nobody is asked
        """Nothing is asked here."""
        return False

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

    @property
    def totals(self) -> Totals:
        """The mirror's."""
        return self.mirror.totals

    def check(self) -> list[str]:
        """The mirror's own check."""
        return self.mirror.check()


def held_bytes(request: Request, found: Found) -> int:
    """Bytes of the tokens whose pages were found."""
    return len(found.pages) // 4 * request.page_key
