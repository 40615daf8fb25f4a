"""Republication: what a mirror holds, told to a daemon that does not know it yet.

Owns which spans have been said. One report a span, ancestors first, so that at the daemon the
spans are cut as they are here and every later report about them is understood; a span is said as
it is at that moment, its word included. It must never speak of a span that was not said.

A step must not depend on how many spans there are: slots are gone through by their numbers, so no
list is made of them, and one is looked at again until its span is said.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Final

from directory.core import limits
from directory.core.actions import GaveUp, Inserted
from directory.core.errors import TreecoredError
from directory.core.events import Evicted, Flush, Insert
from scheduler_shim.client import DaemonClient
from scheduler_shim.mirror import Mirror
from scheduler_shim.slot_marks import SlotMarks
from scheduler_shim.way import Way

SPANS_PER_BATCH_MAX: Final = 64
BATCH_BYTES_MAX: Final = 1 << 18
"""A batch ends with the report that brings its tokens and pages to so many bytes, once more is said
than has come since the last one."""
STEP_US_MIN: Final = 70
STEP_US_MAX: Final = 2_000
STEP_SHARE: Final = 10
"""A step takes one part in so many of the time since the last one, within the limits above: a
scheduler with long steps is to be known again soon, one that looks all the time is not held up."""
WAITS: Final = 8
"""That time is the shortest of so many: where others took the core, it was none of its own."""
SLOTS_A_LOOK: Final = 32
"""So many slots are passed over between two looks at the clock."""
LAST_MAX: Final = 32
"""Thin: so many last answers are waited for."""
HOLD_MAX: Final = 16
"""Messages wait for each other until there are so many of them, or all is said: waking the daemon
costs as much as two of them. Where steps come seldom they do not wait."""
HEAR_AT: Final = 16
"""Answers are looked for with so many messages sent and open, and once all is said: a look costs as
much as four reports."""
OPEN_MAX: Final = 64
OPEN_THIN_MAX: Final = 32
"""With so many messages open the next batch waits: the daemon is behind, and taking in the
acknowledgements (thin: the answers) of more of them at once, or sending them again, would make a
tick long."""


class Republisher:
    """One mirror and one new registration. `thin`: each report is a question."""

    def __init__(self, mirror: Mirror, client: DaemonClient, *, thin: bool) -> None:
        self.mirror = mirror
        self.client = client
        self.thin = thin
        self._open_max = OPEN_THIN_MAX if thin else OPEN_MAX
        self._slot = 1
        """Spans of lower slots are said, or came after this was made."""
        self._way: Way | None = None
        """The path that is being said."""
        self._heard = False  # a step ended with answers since a span was said
        self._paused = False  # the last step that could have said something made a way only
        self._late = array("I")
        self._late_at = 0
        """Slots of spans that came since, and the first one that may have to be said."""
        self._said = SlotMarks()
        self._owed = 0
        self._asked: dict[int, int] = {}
        """Thin: reports without an answer, and how many pages must be new to the daemon."""
        self.spans_said = 0
        self._held = 0
        """At most so many messages were said and not sent."""
        self._soon = False  # whether the last step was so short a time ago that they can wait
        self._last_us = client.now_us()
        self._late_us = 0
        """Then two thirds of a step's time are over."""
        self._way_us = 0
        """So long took the last way."""
        self._waits_us = deque([0], maxlen=WAITS)
        self._begin()

    def _begin(self) -> None:
        """The pool word first: a new registration's begins at 0, and this one has moved on."""
        word = Flush("pool", self.mirror.pool.word)
        if not self.thin:
            self.client.report(word, hold=True)  # it goes with the first spans
        elif not isinstance(self._call(word), GaveUp):
            self.client.lose("no answer to Flush: the pool's word is not known there")

    @property
    def done(self) -> bool:
        """Whether the daemon knows all."""
        return not self._left and not self._asked

    def step(self) -> None:
        """Send what is held and take the daemon's answers when it is time for that, then say a
        bounded number of spans, all in a bounded time; and beyond both one more than have come
        since it last said any, so that it comes to an end while requests go on.
        """
        client = self.client
        began_us = client.now_us()
        waited_us = began_us - self._last_us
        self._waits_us.append(waited_us)
        self._soon = waited_us <= STEP_SHARE * STEP_US_MIN
        share_us = min(self._waits_us) // STEP_SHARE
        step_us = min(max(STEP_US_MIN, share_us), STEP_US_MAX)
        self._late_us, until_us = began_us + 2 * step_us // 3, began_us + step_us
        enough = self._hear_due and self._hear() and self._left
        if not enough and not client.lost and client.open_count < self._open_max:
            self._batch(until_us)
        self._last_us = client.now_us()

    @property
    def _hear_due(self) -> bool:
        """Whether to look for answers. Where that was a step already it is a span's turn first,
        if one may be said."""
        open_count = self.client.open_count
        if not self._left or open_count >= self._open_max:
            return True
        return not self._heard and open_count - self._held >= HEAR_AT

    def _hear(self) -> bool:
        """Take the answers; whether it is late then, and that is enough for a step."""
        client = self.client
        self.take()
        if client.refused and not client.lost:
            client.lose(f"a report was refused: {client.refused[0].message}")
        self._heard = client.now_us() >= self._late_us
        return self._heard

    def _batch(self, until_us: int) -> None:
        owed, self._owed = self._owed, 0
        self._say_some(owed, until_us)
        if self._asked and not self._left and len(self._asked) <= LAST_MAX:
            # One round trip for the last ones: while it passes, nothing new can come.
            self.finish()

    def finish(self) -> bool:
        """Say everything now; False when the daemon was lost over it."""
        self._late_us = sys.maxsize
        while not self.done and not self.client.lost:
            if self._left and self.client.open_count < self._open_max:
                self._say_some(self._left, sys.maxsize)
            if self.client.open_count:
                self.client.wait(limits.RESEND_AFTER_MS * 1_000)
            self.take()
        return not self.client.lost

    def take(self) -> None:
        """Send what is held and take the daemon's answers. A thin registration's reports must have
        been taken as they are, for nothing that a mirror gives up later could be told it."""
        self._send()
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
            self._late.append(report.span)
            self._owed += 1

    def on_given_up(self, reports: Iterable[Evicted | Flush]) -> None:
        """Pages were given up: the daemon hears of those that it was told of. Mirrored only."""
        gone: set[int] = set()
        for report in reports:
            if isinstance(report, Flush):
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
        for slot in gone:
            self._said.discard(slot)

    # Private.

    @property
    def _left(self) -> int:
        """So many spans are to be said. What is said and goes is not counted as said any more."""
        return len(self.mirror.pool.spans) - len(self._said)

    def _say_some(self, owed: int, until_us: int) -> None:
        """Say spans for so long; one more than `owed` of them however long it takes, and however
        many bytes: with no more than come meanwhile it would never come to an end. Beyond that
        no way is begun that would not be over in time if it took as long as the last one, and no
        span that took half as long: the first one of a step takes longest."""
        client, spans, said = self.client, self.mirror.pool.spans, self._said
        left = SPANS_PER_BATCH_MAX + owed
        nbytes = 0
        now_us = client.now_us()
        while left > 0 and not client.lost:
            paid = left < SPANS_PER_BATCH_MAX
            if paid and not self._on_way and now_us + self._way_us > until_us:
                break
            way = self._next_way(until_us)
            if way is None:
                break
            if not nbytes and self._pause():
                self._owed += owed
                return
            now_us = client.now_us()
            while left > 0 and way.slots:
                slot = way.slots.pop()
                if slot in said:
                    continue
                span = spans[slot]
                # Below the path it may go on in another branch.
                whole = way if span.last is way.spans[slot].node else Way(span.parts[-1])
                report = whole.report(slot, span.value, thin=self.thin)
                self._say(report, whole.spans[slot].fresh)
                nbytes += len(report.tokens) + len(report.pages)
                left -= 1
                paid = left < SPANS_PER_BATCH_MAX
                began_us, now_us = now_us, client.now_us()
                over = nbytes >= BATCH_BYTES_MAX or now_us + (now_us - began_us) // 2 > until_us
                if (paid and over) or client.lost:
                    left = 0
        if self._held >= HOLD_MAX or not self._soon or not self._left:
            self._send()

    def _pause(self) -> bool:
        """Whether it is late when the way is made, and that is enough for a step. Not for two in a
        row: the way may be of no use any more by then."""
        self._paused = not self._paused and self.client.now_us() >= self._late_us
        return self._paused

    @property
    def _on_way(self) -> bool:
        """Whether there is a path with spans that are to be said, and it is what it was."""
        way = self._way
        return way is not None and bool(way.slots) and not way.outdated

    def _next_way(self, until_us: int) -> Way | None:
        """A path with spans that are to be said, if one is found in time."""
        if not self._on_way:
            began_us = self.client.now_us()
            slot = self._next_slot(until_us) if self._left else 0
            # What is above the span's last page has to be said before it, what is below after it.
            self._way = Way.beyond(self.mirror.pool.spans[slot].parts[-1]) if slot else None
            self._way_us = self.client.now_us() - began_us
        return self._way

    def _next_slot(self, until_us: int) -> int:
        """The slot of a span that is to be said; 0 where the time was over before one was found,
        or there is none."""
        spans, said = self.mirror.pool.spans, self._said
        passed = 0
        while self._slot <= self.mirror.pool.page_count:
            if self._slot in spans and self._slot not in said:
                return self._slot
            self._slot += 1
            passed += 1
            if passed % SLOTS_A_LOOK == 0 and self.client.now_us() >= until_us:
                return 0
        while self._late_at < len(self._late):
            slot = self._late[self._late_at]
            if slot in spans and slot not in said:
                return slot
            self._late_at += 1
            passed += 1
            if passed % SLOTS_A_LOOK == 0 and self.client.now_us() >= until_us:
                return 0
        self._slot = 1  # one came of which nobody has told; the next batch looks for it
        return 0

    def _say(self, report: Insert, fresh: int) -> None:
        self._said.add(report.span)
        self.spans_said += 1
        self._heard = False
        if self.thin:
            self._asked[self.client.ask(report)] = fresh
        else:
            # The daemon is woken once for many: where cores are few it takes the scheduler's.
            self.client.report(report, hold=True)
            self._held += 1

    def _send(self) -> None:
        self.client.send_held()
        self._held = 0

    def _call(self, body: Flush) -> object:
        try:
            return self.client.call(body)
        except TreecoredError as error:
            return error

    def __repr__(self) -> str:
        return f"<Republisher {self.spans_said} spans said, {self._left} to say>"
