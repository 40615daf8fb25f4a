"""The mirror: the directory's own tree, restricted to one pool, inside its scheduler.

Owns the tree, its pool totals and the claims on it; the span words move with it. Every change
comes with the report that tells the daemon about it, to be sent in this order. It must never hand
out a page before the word of its span has moved on, and it never talks to anybody itself.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from directory.core import limits
from directory.core.actions import Totals
from directory.core.errors import InternalError
from directory.core.events import Evicted, Flush, Insert
from directory.core.invariants import tree_violations
from directory.core.namespace import NamespaceKey
from directory.core.node import Node
from directory.core.place import PoolState
from directory.core.pool import (
    InsertOutcome,
    OwnMatch,
    evict_pages,
    flush_pages,
    insert_pages,
    match_path,
    use_path,
)
from directory.core.tree import Tree
from scheduler_shim.spans import SpanTable

PLACE = 1
"""The mirror's only place. It is no registration's number: the mirror outlives registrations."""


class OwnHit(NamedTuple):
    """The pool's part of a path: its deepest node (None: nothing), packed pages, their count, and
    the namespace's version."""

    node: Node | None
    pages: bytes
    page_count: int
    version: int = 0


NOTHING: Final = OwnHit(None, b"", 0)


class Change(NamedTuple):
    """What an insert did and its report. The report's pages are the canonical ones."""

    outcome: InsertOutcome
    report: Insert


class GivenUpPages(NamedTuple):
    """Packed pages that may be freed now, and the reports, in order (none: nothing went)."""

    pages: bytes
    reports: tuple[Evicted | Flush, ...]


class Mirror:
    """One pool's tree. Mutated by its scheduler's thread alone."""

    def __init__(
        self,
        spans: SpanTable,
        *,
        fingerprint: bytes,
        page_size: int,
        page_count: int,
        page_bytes: int,
    ) -> None:
        self._spans = spans
        self._fingerprint = fingerprint
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._tree = Tree()
        self._claims: dict[int, tuple[Node, int]] = {}
        self.pool = PoolState(
            PLACE,
            instance="mirror",
            generation=0,
            fingerprint=fingerprint,
            page_size=page_size,
            page_count=page_count,
            page_bytes=page_bytes,
            mode="mirrored",
        )
        self.pool.word = spans.word(0)
        self._tree.places[PLACE] = self.pool

    def match(self, key: NamespaceKey, tokens: bytes, before: OwnHit | None = None) -> OwnHit:
        """Return the longest prefix of whole pages that the pool holds, and mark it used.

        `before`: what the same tokens had when they were matched the last time. As long as its node
        is there, so is its path: only what comes after it is looked up, and where nothing of the
        namespace has changed, or nothing comes after it, nothing is.
        """
        if before is not None and before.node is not None and self.holds(before.node):
            node = before.node
            complete = before.page_count == len(tokens) // node.space.page_key
            if complete or node.space.version == before.version:
                use_path(self._tree, self.pool, node)
                return before
        else:
            before = None
        space = self._tree.find_space(self._fingerprint, key)
        if space is None:
            return NOTHING
        known = OwnMatch(before.node, before.pages, 0, []) if before and before.node else None
        hit = match_path(self._tree, self.pool, space, tokens, after=known)
        if not hit.page_count:
            return NOTHING
        return OwnHit(hit.node, hit.pages, hit.page_count, hit.node.space.version)

    def holds(self, node: Node) -> bool:
        """Whether a node that was matched is still there; then its path ends where it did."""
        return self._tree.nodes.get(node.id) is node

    def lock(self, node: Node) -> None:
        """Protect the pages of a node and its ancestors once more."""
        self._tree.lock(node, PLACE)
        held = self._claims.get(node.id, (node, 0))[1]
        self._claims[node.id] = (node, held + 1)

    def unlock(self, node: Node) -> None:
        """Undo one `lock`; raises `InternalError` when the node is not locked by it."""
        held = self._claims.get(node.id, (node, 0))[1]
        if not held:
            raise InternalError(f"{node!r} is not locked")
        if held == 1:
            del self._claims[node.id]
        else:
            self._claims[node.id] = (node, held - 1)
        self._tree.unlock(node, PLACE)
        if node.id in self._tree.nodes:
            self._tree.prune(node)

    def insert(
        self,
        request: str,
        attempt: int,
        key: NamespaceKey,
        tokens: bytes,
        pages: bytes,
        written: tuple[int, int],
    ) -> Change:
        """Publish a row's pages for the whole path of `tokens` (whole pages, 4 bytes a page).

        The outcome's duplicates are the caller's to free, after it has put the canonical pages
        into its row. Raises `BadMessage` before anything is changed.
        """
        space = self._tree.space(self._fingerprint, key, self._page_size, self._page_bytes)
        slot, value = self._spans.allocate()
        fresh = 0
        try:
            outcome = insert_pages(
                self._tree, self.pool, space, tokens, pages, slot, value, written
            )
            fresh = outcome.fresh_pages
        finally:
            self._spans.publish(slot, fresh)
            if not space.root.children:
                self._tree.prune(space.root)
        span, span_value = (slot, value) if fresh else (0, 0)
        report = Insert(
            request,
            attempt,
            key,
            tokens,
            outcome.canonical,
            span,
            span_value,
            written,
            fresh_pages=fresh,
        )
        return Change(outcome, report)

    def again(self, request: str, attempt: int, key: NamespaceKey, tokens: bytes) -> Insert | None:
        """Mark a path used of which the pool holds every page (whole pages of `tokens`), and return
        the report that says so; None where it does not. Nothing is new, so no word is opened."""
        hit = self.match(key, tokens)
        if hit.node is None or hit.page_count * hit.node.space.page_key != len(tokens):
            return None
        return Insert(request, attempt, key, tokens, hit.pages, 0, 0, (0, 0), fresh_pages=0)

    def evict(self, pages: int) -> GivenUpPages:
        """Give up at most `pages` pages, coldest first; the words have moved on already.

        What one report cannot name goes in portions, each with a report and new words of its own,
        as the daemon gives up a thin pool's pages. The first report is read while the words have
        moved on for all of them: a copy that is held to it is void, which is safe.
        """
        pages_given: list[bytes] = []
        reports: list[Evicted | Flush] = []
        left = pages
        while left > 0:
            given = evict_pages(self._tree, self.pool, min(left, limits.GAVE_UP_PAGES_MAX))
            for slot, value, count in given.words:
                self._spans.give_up(slot, value, count)
            if not given.pages:
                break
            left -= len(given.pages) // limits.PAGE_NUMBER_BYTES
            pages_given.append(given.pages)
            runs = tuple((run.span, run.first, run.length) for run in given.runs)
            reports.append(Evicted(runs, tuple((slot, value) for slot, value, _ in given.words)))
        return GivenUpPages(b"".join(pages_given), tuple(reports))

    def flush(self) -> GivenUpPages:
        """Give up every page that no lock protects.

        With nothing locked the pool word alone voids all readers. Otherwise the reports name
        what went, because the daemon does not know what the locks protect.
        """
        if self.pool.locked_pages:
            return self.evict(self.pool.evictable_pages)
        given = flush_pages(self._tree, self.pool)
        self.pool.word = self._spans.give_up_all()
        return GivenUpPages(given.pages, (Flush("pool", self.pool.word),))

    @property
    def totals(self) -> Totals:
        """Pages that no lock protects, and pages under one."""
        return Totals(self.pool.evictable_pages, self.pool.locked_pages)

    def page_list(self) -> array[int]:
        """Every page of the tree, of whole paths; for checks."""
        pages = array("I")
        for node in self._tree.nodes.values():
            pages.frombytes(node.there(PLACE).pages)
        return pages

    def check(self) -> list[str]:
        """Walk the tree and return every invariant that does not hold, words included."""
        ends = [node for node, held in self._claims.values() for _ in range(held)]
        found = tree_violations(self._tree, {PLACE: ends})
        for slot, span in self.pool.spans.items():
            if self._spans.word(slot) != span.value:
                found.append(f"words: span {slot} is {self._spans.word(slot)}, not {span.value}")
            pages = sum(
                run.length
                for node in span.parts
                for run in node.places[PLACE].runs
                if run.span == slot
            )
            if self._spans.live(slot) != pages:
                found.append(
                    f"spans: slot {slot} counts {self._spans.live(slot)}, the tree {pages}"
                )
        if self._spans.live_pages != self.pool.pages:
            found.append(
                f"spans: {self._spans.live_pages} pages are live, the tree has {self.pool.pages}"
            )
        return found + self._spans.check()

    def __repr__(self) -> str:
        return f"<Mirror {self.totals}, {len(self._tree.nodes)} nodes>"
