"""Lockstep: a mirror that is told the same as the daemon must answer the same.

Owns a shadow of one thin pool: the shim's own Mirror, fed with the questions that the daemon was
asked, in stream order. Every answer of the daemon about the own pool is compared with the
shadow's: pages, duplicates, what is evicted in which order, span words, totals. It changes nothing
of what it watches.
"""

from __future__ import annotations

from typing import NamedTuple

from directory.core.actions import GaveUp, Inserted, Locked, Matched, Totals
from directory.core.events import Evicted, Flush, Insert, Match
from directory.core.node import Node
from scheduler_shim.mirror import Mirror
from scheduler_shim.spans import SpanTable
from tests.simulation.memory import PoolMemory, SimWords


class Diverging(AssertionError):
    """Daemon and mirror answered differently at the same position of one stream."""


class _Hit(NamedTuple):
    """What the shadow says to a Match, and the totals before the lease that it asks for."""

    node: Node | None
    pages: bytes
    page_count: int


class Shadow:
    """The mirrored twin of a thin pool."""

    def __init__(self, memory: PoolMemory, fingerprint: bytes) -> None:
        layout = memory.layout
        self._words = SimWords(layout.page_count + 1)
        self._words.values = list(memory.words.values)
        self._mirror = Mirror(
            SpanTable(self._words, layout.page_count),
            fingerprint=fingerprint,
            page_size=layout.page_size,
            page_count=layout.page_count,
            page_bytes=layout.page_bytes,
        )
        self._locks: dict[int, Node] = {}
        self._end: Node | None = None
        self.compared = 0

    @property
    def evictable(self) -> int:
        """Pages that nothing protects."""
        return self._mirror.totals.evictable

    def match(self, body: Match) -> _Hit:
        """A Match was sent."""
        hit = self._mirror.match(body.namespace, body.tokens)
        return _Hit(hit.node, hit.pages, hit.page_count)

    def matched(self, hit: _Hit, reply: Matched) -> None:
        """Its answer came."""
        if reply.receipt and hit.node is not None:
            self._mirror.lock(hit.node)
            self._locks[reply.receipt] = hit.node
        self._same("Match", (hit.page_count, hit.pages), (reply.own_pages, reply.own), reply.totals)

    def inserted(self, body: Insert, reply: Inserted) -> None:
        """An Insert was answered."""
        outcome, report = self._mirror.insert(
            body.request, body.attempt, body.namespace, body.tokens, body.pages, body.written
        )
        self._end = outcome.end
        if body.receipt:
            old = self._locks.pop(body.receipt, None)
            if outcome.end.parent is not None:
                self._mirror.lock(outcome.end)
                self._locks[body.receipt] = outcome.end
            if old is not None:
                self._mirror.unlock(old)
        mine = (outcome.canonical, outcome.duplicates, outcome.fresh_pages)
        theirs = (reply.canonical, reply.duplicates, reply.fresh_pages)
        self._same("Insert", mine, theirs, reply.totals)
        if report.span and (report.span, report.span_value) != (body.span, body.span_value):
            raise Diverging(f"span {report.span} where the pool took {body.span}")

    def locked(self, reply: Locked) -> None:
        """The end of the last insert was locked."""
        assert self._end is not None
        self._mirror.lock(self._end)
        self._locks[reply.receipt] = self._end
        self._same("Lock", 0, 0, reply.totals)

    def unlocked(self, receipt: int) -> None:
        """A receipt was released."""
        node = self._locks.pop(receipt, None)
        if node is not None:
            self._mirror.unlock(node)

    def evicted(self, count: int, reply: GaveUp) -> None:
        """Pages were given up."""
        pages, reports = self._mirror.evict(count)
        assert len(reports) <= 1, "no more than one answer names"
        assert not any(isinstance(report, Flush) for report in reports)
        words = reports[0].words if reports and isinstance(reports[0], Evicted) else ()
        theirs = tuple((slot, value) for slot, value, _ in reply.words)
        self._same("Evict", (pages, words), (reply.pages, theirs), reply.totals)

    def check(self) -> list[str]:
        """The shadow's own invariants."""
        return self._mirror.check()

    def _same(self, what: str, mine: object, theirs: object, totals: Totals) -> None:
        self.compared += 1
        if mine != theirs:
            raise Diverging(f"{what}: the mirror says {mine}, the daemon {theirs}")
        if self._mirror.totals != totals:
            raise Diverging(f"{what}: the mirror counts {self._mirror.totals}, the daemon {totals}")
