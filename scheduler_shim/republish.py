"""Republication: what a mirror holds, told to a daemon that does not know it yet.

Owns which spans have been said. One report a span, ancestors first, so that at the daemon the
spans are cut as they are here and every later report about them is understood; a span is said as
it is at that moment, its word included. It must never speak of a span that was not said.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Final

from directory.core import limits
from directory.core.actions import GaveUp, Inserted
from directory.core.errors import TreecoredError
from directory.core.events import Evicted, Flush, Insert
from directory.core.node import Node
from scheduler_shim.client import DaemonClient
from scheduler_shim.mirror import PLACE, Mirror

SPANS_PER_BATCH_MAX: Final = 64
BATCH_BYTES_MAX: Final = 1 << 20
"""A batch ends with the report that brings its tokens and pages to so many bytes."""
BATCH_US_MIN: Final = 100
BATCH_US_MAX: Final = 2_000
BATCH_SHARE: Final = 10
"""A batch takes one part in so many of the time since the last one, within the limits above: a
scheduler with long steps is to be known again soon, one that looks all the time is not held up."""
LAST_MAX: Final = 32
"""Thin: so many last answers are waited for."""
OPEN_MAX: Final = 128
"""With so many messages open the next batch waits: the daemon is behind, and taking in the
acknowledgements of more of them at once would make a tick long."""


class Republisher:
    """One mirror and one new registration. `thin`: each report is a question."""

    def __init__(self, mirror: Mirror, client: DaemonClient, *, thin: bool) -> None:
        self.mirror = mirror
        self.client = client
        self.thin = thin
        # Copying them is all that depends on their number at first, within a step of a scheduler.
        # Python's collector does not walk over an array, as it would over a list.
        self._order = array("I", mirror.pool.spans)
        self._next = 0
        """Slots from there on are said in this order; what is said or gone already is passed over.
        """
        self._said: set[int] = set()
        self._owed = 0
        self._asked: dict[int, int] = {}
        """Thin: reports without an answer, and how many pages must be new to the daemon."""
        self.spans_said = 0
        self._last_us = client.now_us()
        self._spare_us = 0
        self._begin()

    def _begin(self) -> None:
        """The pool word first: a new registration's begins at 0, and this one has moved on."""
        word = Flush("pool", self.mirror.pool.word)
        if not self.thin:
            self.client.report(word)
        elif not isinstance(self._call(word), GaveUp):
            self.client.lose("no answer to Flush: the pool's word is not known there")

    @property
    def done(self) -> bool:
        """Whether the daemon knows all."""
        return not self._left and not self._asked

    def batch(self) -> None:
        """Say a bounded number of spans for a bounded time, and beyond both as many as have come
        since the last batch, so that it comes to an end while requests go on."""
        if self.client.lost or self.client.open_count >= OPEN_MAX:
            return
        began_us = self.client.now_us()
        before_us, self._spare_us = self._spare_us, (began_us - self._last_us) // BATCH_SHARE
        spare_us = min(before_us, self._spare_us)  # one long wait is none of its habits
        until_us = began_us + min(max(BATCH_US_MIN, spare_us), BATCH_US_MAX)
        spans, self._owed = SPANS_PER_BATCH_MAX + self._owed, 0
        nbytes = 0
        while spans > 0 and self._left:
            for report in self._next_path(spans):
                self._say(report)
                nbytes += len(report.tokens) + len(report.pages)
                spans -= 1
                late = spans <= SPANS_PER_BATCH_MAX and self.client.now_us() >= until_us
                if late or nbytes >= BATCH_BYTES_MAX or self.client.lost:
                    spans = 0
                if not spans:
                    break
        self.client.send_held()
        if self._asked and not self._left and len(self._asked) <= LAST_MAX:
            # One round trip for the last ones: while it passes, nothing new can come.
            self.finish()
        self._last_us = self.client.now_us()

    def finish(self) -> bool:
        """Say everything now; False when the daemon was lost over it."""
        while not self.done and not self.client.lost:
            self._owed = self._left
            if self._left:
                self.batch()
            if self.client.open_count:
                self.client.wait(limits.RESEND_AFTER_MS * 1_000)
            self.take()
        return not self.client.lost

    def take(self) -> None:
        """Take the daemon's answers. A thin registration's reports must have been taken as they
        are, for nothing that a mirror gives up later could be told it."""
        for seq, reply in self.client.poll():
            fresh = self._asked.pop(seq, None)
            if fresh is None:
                continue
            if not isinstance(reply, Inserted) or reply.duplicates or reply.fresh_pages != fresh:
                self.client.lose("a republished path was not taken as it is")
                return

    # What the mirror's owner does meanwhile.

    def on_insert(self, report: Insert) -> None:
        """A path was inserted into the mirror; a span without new pages has number 0."""
        if report.span:
            self._order.append(report.span)
            self._owed += 1

    def on_given_up(self, reports: Iterable[Evicted | Flush]) -> None:
        """Pages were given up: the daemon hears of those that it was told of. Mirrored only."""
        gone: set[int] = set()
        for report in reports:
            if isinstance(report, Flush):
                self._next = len(self._order)
                self._said.clear()
                self.client.report(report)
                continue
            said = Evicted(
                tuple(run for run in report.runs if run[0] in self._said),
                tuple(word for word in report.words if word[0] in self._said),
            )
            gone.update(slot for slot, _ in report.words if slot not in self.mirror.pool.spans)
            if said.runs:
                self.client.report(said)
        # Only now: a span may have pages in several of the reports.
        self._said -= gone

    # Private.

    @property
    def _left(self) -> int:
        """At most so many spans are to be said; 0: none is."""
        order, spans = self._order, self.mirror.pool.spans
        while self._next < len(order):
            if order[self._next] not in self._said and order[self._next] in spans:
                break
            self._next += 1
        return len(order) - self._next

    def _next_path(self, most: int) -> Iterator[Insert]:
        """Reports of the unsaid spans on the path to one of them, from the root on. What is taken
        from here has to be said before anything else changes."""
        target = self.mirror.pool.spans[self._order[self._next]].parts[-1]
        path = target.path()
        runs = [run.span for node in path for run in node.places[PLACE].runs]
        slots = [slot for slot in dict.fromkeys(runs) if slot not in self._said]
        last, tokens, pages = None, b"", b""
        for slot in slots[:most]:
            ends = self.mirror.pool.spans[slot].parts[-1]
            if ends is not last:
                last, path = ends, ends.path()
                tokens = b"".join([node.edge for node in path])
                pages = b"".join([node.places[PLACE].pages for node in path])
            yield self._report(slot, path, tokens, pages)

    def _report(self, slot: int, path: list[Node], tokens: bytes, pages: bytes) -> Insert:
        """The whole path down to the span's last page; it leads to the span's last node."""
        span = self.mirror.pool.spans[slot]
        last = path[-1]
        count = len(pages) // 4 - _pages_behind(last, slot)
        written = [node.places[PLACE].written for node in path]
        return Insert(
            "republished",
            0,
            last.space.key,
            tokens[: count * last.space.page_key],
            pages[: 4 * count],
            slot,
            span.value,
            (max([forward for forward, _ in written]), max([current for _, current in written])),
            fresh_pages=-1 if self.thin else self._pages_here(slot),
        )

    def _pages_here(self, slot: int) -> int:
        """Pages that the mirror has of a span. What lies above them on the path was said before, so
        just these are new to the daemon: a mirrored report says so, a thin answer is compared."""
        return sum(
            run.length
            for node in self.mirror.pool.spans[slot].parts
            for run in node.places[PLACE].runs
            if run.span == slot
        )

    def _say(self, report: Insert) -> None:
        self._said.add(report.span)
        self.spans_said += 1
        if self.thin:
            self._asked[self.client.ask(report)] = self._pages_here(report.span)
        else:
            # The daemon is woken once a batch: where cores are few it takes the scheduler's.
            self.client.report(report, hold=True)

    def _call(self, body: Flush) -> object:
        try:
            return self.client.call(body)
        except TreecoredError as error:
            return error

    def __repr__(self) -> str:
        return f"<Republisher {self.spans_said} spans said, {self._left} to say>"


def _pages_behind(node: Node, slot: int) -> int:
    """Pages of a node that lie behind a span's last one: they belong to later reports."""
    behind = 0
    for run in reversed(node.places[PLACE].runs):
        if run.span == slot:
            break
        behind += run.length
    return behind
