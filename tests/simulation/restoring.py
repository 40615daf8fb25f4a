"""Look-ups and restores of a model scheduler: what lies beyond the own pool, and how it lands.

Owns the questions and the targets of restores of one process, and the room for them. A restore is
held back: its request waits, the others go on, and what lands is inserted into the own pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator

from directory.core.actions import Matched, Restored
from directory.core.events import Match, Restore
from directory.core.ids import CURRENT, FORWARD, NO_LEASE
from directory.core.tokens import pack_pages
from tests.simulation.own import MirroredOwn, Wait
from tests.simulation.process import Process
from tests.simulation.request import ModelRequest, Phase

LOSSES_MAX = 2


class Restoring(Process):
    """A process that looks its requests up and has what is elsewhere restored."""

    def __init__(self, *arguments: object) -> None:
        self.restored_pages = 0
        self.housekeeping: set[int] = set()
        super().__init__(*arguments)  # type: ignore[arg-type]  # the world makes it

    def publish(
        self, request: ModelRequest, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Wait:
        """Publish the row's first pages."""
        raise NotImplementedError

    def on_housekeeping(self, reply: object) -> None:
        """The answer to a question about no request."""
        raise NotImplementedError

    def look_up(self, request: ModelRequest) -> Wait:
        own = self.own
        assert own is not None
        self.look_for_loss()
        matched = yield from own.look_up(request)
        if self.look_for_loss() or own is not self.own:
            own = self.own
            assert own is not None
            matched = yield from own.look_up(request)
        request.phase = Phase.READY
        if isinstance(own, MirroredOwn):
            short = len(request.row) < request.match_pages
            if self.client is not None and short and request.losses < LOSSES_MAX:
                body = Match(
                    request.name,
                    request.attempt,
                    request.key,
                    request.match_tokens,
                    len(request.row),
                )
                request.seq = self.client.ask(body)
                if request.seq:
                    self.asked_as[request.seq] = (request.name, request.attempt)
                    self.asking[request.seq] = request
                    request.phase = Phase.MATCHING
        elif isinstance(matched, Matched) and request.losses < LOSSES_MAX:
            yield from self._restore(request, matched.own_pages + matched.restorable_pages)

    def _on_matched(self, request: ModelRequest, reply: object) -> Wait:
        request.phase = Phase.READY
        if isinstance(reply, Matched):
            request.receipt = reply.receipt
            end = len(request.row) + reply.restorable_pages
            if isinstance(self.own, MirroredOwn):
                self.own.match(request)
            yield from self._restore(request, end)

    def _restore(self, request: ModelRequest, end: int) -> Wait:
        start = len(request.row)
        targets = array("I")
        if request.receipt != NO_LEASE and end > start:
            targets = yield from self.allocate_up_to(end - start)
        client = self.client
        if client is not None and targets and request.receipt != NO_LEASE:
            body = Restore(
                request.name,
                request.attempt,
                request.receipt,
                start,
                pack_pages(targets),
                self.quiet(),
            )
            seq = client.ask(body, client.deadlines.restore_ms)
            if seq:
                request.seq = seq
                request.phase = Phase.RESTORING
                self.landing[seq] = (targets, request, request.attempt, start)
                if isinstance(self.own, MirroredOwn) and not self.world.options.hold_locks:
                    self.own.protect(request, None)
                    request.row, request.tree_pages = [], 0
                return
        self.free(targets)
        self._let_lease_go(request)

    def quiet(self) -> tuple[int, int]:
        """Fence behind which pages that are free now are written into by nothing launched."""
        return self.streams.fence()

    def take_landings(self) -> Wait:
        while self.landed:
            seq, reply = self.landed.pop(0)
            targets, request, attempt, start = self.landing.pop(seq)
            if request.phase is Phase.ENDED or request.attempt != attempt or request.seq != seq:
                self.free(targets)
                continue
            request.seq = 0
            request.phase = Phase.READY
            landed = isinstance(reply, Restored) and reply.landed
            if landed:
                self._verify(request, targets, start)
                landed = yield from self._publish_landed(request, targets, start)
            else:
                self.free(targets)
            if landed:
                self._let_lease_go(request)
            else:
                self._lose_restore(request)
        for seq in list(self.replies):
            asked = self.asking.pop(seq, None)
            if asked is not None:
                reply_to_match = self.replies.pop(seq)
                if asked.seq == seq:
                    asked.seq = 0
                    yield from self._on_matched(asked, reply_to_match)
            elif seq in self.housekeeping:
                self.housekeeping.discard(seq)
                self.on_housekeeping(self.replies.pop(seq))

    def _verify(self, request: ModelRequest, targets: array[int], start: int) -> None:
        contents = request.contents(self.world.contents, self.root(request))
        for at, page in enumerate(targets, start):
            for memory in (self.memory, *(follower.memory for follower in self.followers)):
                problem = memory.wrong(page, contents[at])
                if problem:
                    self.wrong(f"restored for {request!r}: {problem}")
        self.restored_pages += len(targets)

    def _publish_landed(
        self, request: ModelRequest, targets: array[int], start: int
    ) -> Generator[None, None, bool]:
        """The landing is an insert into the own pool. False: the path above is gone."""
        own = self.own
        if isinstance(own, MirroredOwn):
            if not self.world.options.hold_locks:
                own.match(request)
            if len(request.row) < start:
                self.free(targets)
                return False
            request.row = request.row[:start] + targets.tolist()
            request.tree_pages = start
        else:
            request.row.extend(targets)
        line = self.memory.timelines.values
        yield from self.publish(
            request, len(request.row), (line[FORWARD], line[CURRENT]), keep=True
        )
        return True

    def _lose_restore(self, request: ModelRequest) -> None:
        """Once more from the look-up on, then without."""
        request.losses += 1
        if isinstance(self.own, MirroredOwn):
            self.own.release_lease(request)
        if request.losses < LOSSES_MAX:
            self.release_row(request)
            request.start_over()

    def _let_lease_go(self, request: ModelRequest) -> None:
        if isinstance(self.own, MirroredOwn):
            self.own.release_lease(request)

    def release_row(self, request: ModelRequest) -> None:
        """Let go of all that a request holds, but for the targets of a restore under way."""
        if request.seq:
            if request.seq not in self.landing and self.client is not None:
                self.client.abandon(request.seq)
            self.asking.pop(request.seq, None)
            request.seq = 0
        if self.own is not None:
            self.own.release(request)
        self.free(request.row[request.tree_pages :])
        request.row, request.tree_pages = [], 0

    # Room.

    def allocate(self, count: int) -> Generator[None, None, array[int] | None]:
        own = self.own
        assert own is not None
        short = count - self.allocator.free_count
        if short > 0:
            yield from own.evict(short)
            self.look_for_loss()
        return self.allocator.allocate(count)

    def allocate_up_to(self, count: int) -> Generator[None, None, array[int]]:
        own = self.own
        assert own is not None
        short = count - self.allocator.free_count
        if isinstance(own, MirroredOwn):
            short = min(short, own.mirror.totals.evictable)
        if short > 0:
            yield from own.evict(short)
            self.look_for_loss()
        return self.allocator.allocate(min(count, self.allocator.free_count)) or array("I")

    def root(self, request: ModelRequest) -> int:
        return self.world.contents.root(self.fingerprint, request.key)
