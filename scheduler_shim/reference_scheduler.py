"""The reference scheduler: a request's whole life over one pool, with pages that can be checked.

Owns the requests in progress and the pages that movers write into; room.py owns the free pages
and the tree. It "computes" a page by writing what follows from the token path up to it, so every
restored or reused page is verified against what it must hold. It does its work in ticks and never
waits, except in thin mode for the daemon's answers, each with a deadline. It must never free a
page that a row, the tree or a restore still has, and never hide a wrong page.

Degraded mode: when the client is lost, a mirrored scheduler goes on with its mirror alone. A thin
one bumps the pool word, puts what its running rows have of the tree into a fresh mirror, frees
the rest and goes on mirrored. Targets of restores that were never answered stay out of use: only
a registration with the next daemon proves that no mover writes into them any more. Registering
again is not done here yet.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping

from directory.core.actions import AnyReply, Matched, Restored
from directory.core.events import Restore
from directory.core.ids import NO_LEASE
from directory.core.limits import TOKENS_BYTES_MAX
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.compute import Compute
from scheduler_shim.link import monotonic_us
from scheduler_shim.own_tree import MirroredTree, ThinTree, question
from scheduler_shim.pools import SharedPool
from scheduler_shim.request import Phase, Request
from scheduler_shim.room import PageCounts, Room
from scheduler_shim.worker_messages import Finished

LOSSES_MAX = 2
"""After so many lost restores a request is admitted without."""
PROBLEMS_KEPT_MAX = 64


class ReferenceScheduler:
    """One pool's scheduler. `client` None: no daemon, from the start (then it is mirrored)."""

    def __init__(
        self,
        pool: SharedPool,
        client: DaemonClient | None,
        *,
        instance: str,
        thin: bool = False,
        key: NamespaceKey | None = None,
        concurrency: int = 1,
    ) -> None:
        self.pool = pool
        self.client = client
        self.counters: dict[str, int] = {}
        self.problems: list[str] = []
        """What must never happen and did; a check reports it."""
        self.moved = False
        """Whether the last tick changed anything: if so, tick again before waiting."""
        self._instance = instance
        self._key = key or NamespaceKey()
        self._page_key = pool.page_size * self._key.unit_bytes
        self._concurrency = concurrency
        self._compute = Compute(pool, self._key, self._count)
        self._room = Room(
            pool, client, thin=thin, on_evicted=self._look_for_loss, count=self._count
        )
        self._queue: deque[Request] = deque()
        self._active: dict[int, Request] = {}
        self._asking: dict[int, Request] = {}
        self._landing: dict[int, array[int]] = {}
        self._done: list[Finished] = []
        self._short = False
        self.degraded = ""
        """Why there is no daemon any more; empty while there is (or never was) one."""

    # What a driver calls.

    def submit(self, number: int, prompt: bytes, output: bytes = b"") -> None:
        """Queue a request. `prompt`, `output`: packed token ids. Impossible ones end at once."""
        name = f"{self._instance}-{number}"
        request = Request(number, name, self._key, prompt, output, self._page_key)
        request.started_us = self._now_us()
        tokens = prompt + output
        error, usable = "", self._room.usable_pages
        if not prompt or len(prompt) % 4 or len(output) % 4:
            error = "a prompt needs at least one token of 4 bytes"
        elif len(tokens) > TOKENS_BYTES_MAX:
            error = f"{len(tokens) // 4} tokens, at most {TOKENS_BYTES_MAX // 4}"
        elif request.all_pages > usable:
            error = f"{len(tokens) // 4} tokens need {request.all_pages} pages of {usable}"
        if error:
            self._end(request, error)
        else:
            self._queue.append(request)

    def abort(self, number: int) -> bool:
        """End a request wherever it is; all it holds is released. False: it is not here (any
        more), and nothing happens. Pages that a mover writes into stay out of use until it is
        done with them."""
        request = self._active.get(number)
        if request is None:
            request = next((r for r in self._queue if r.number == number), None)
            if request is None:
                return False
            self._queue.remove(request)
        self._count("aborted")
        self._end(request, "aborted")
        return True

    def tick(self) -> list[Finished]:
        """Do one batch of work: take answers, admit, and bring every request a step further."""
        self.moved = False
        self._take_answers()
        # Whoever waits for room comes first: newcomers would take it away again.
        while self._queue and len(self._active) < self._concurrency and not self._short:
            request = self._queue.popleft()
            self._active[request.number] = request
            self.moved = True
            self._look_up(request)
        self._short = False
        for request in list(self._active.values()):
            self._advance(request)
        if not self.moved and self._active:
            self._unstick()
        self._look_for_loss()
        done, self._done = self._done, []
        return done

    def flush(self) -> None:
        """Give up every page of the tree that no request uses."""
        self._room.flush()

    @property
    def idle(self) -> bool:
        """Whether no request is queued or in progress and nothing is to be said."""
        return not self._queue and not self._active and not self._done

    @property
    def mode(self) -> str:
        """How the tree is kept now: mirrored, thin, or degraded (mirrored without a daemon)."""
        return "degraded" if self.client is None else self._room.tree.mode

    @property
    def requests(self) -> Mapping[int, Request]:
        """Requests in progress by number; to be looked at only."""
        return self._active

    @property
    def pages(self) -> PageCounts:
        """Where the pool's pages are."""
        return self._room.counts(self._active.values(), self._landing.values())

    def check(self) -> list[str]:
        """Return what does not hold: conservation of pages, the tree, the spans, past problems."""
        return [*self.problems, *self._room.check(self._active.values(), self._landing.values())]

    # Steps of a request.

    def _look_up(self, request: Request) -> None:
        """Find what the own pool holds, and ask for what lies beyond."""
        tree = self._room.tree
        if isinstance(tree, MirroredTree):
            tree.match(request)
            request.phase = Phase.ADMITTED
            if self.client is not None and request.own_pages < request.match_pages:
                request.seq = self.client.ask(question(request))
                if request.seq:
                    self._asking[request.seq] = request
                    request.phase = Phase.MATCHING
            return
        assert isinstance(tree, ThinTree)
        request.phase = Phase.ADMITTED
        self._restore(request, tree.match(request))

    def _on_matched(self, request: Request, reply: AnyReply | None) -> None:
        """Mirrored: what lies beyond the own pool is known now."""
        request.phase = Phase.ADMITTED
        if not isinstance(reply, Matched):
            self._count("matches_missed")
            return
        request.receipt = reply.receipt
        end = request.own_pages + reply.restorable_pages
        tree = self._room.tree
        if len(self._active) > 1 and isinstance(tree, MirroredTree):
            # Others may have published parts of the path meanwhile; what is here needs no copy.
            tree.match(request)
        self._restore(request, end)

    def _restore(self, request: Request, end: int) -> None:
        """Have pages from the row's end up to page `end` restored, as far as there is room."""
        start = len(request.row)
        targets = array("I")
        if request.receipt != NO_LEASE and end > start:
            targets = self._room.allocate_up_to(end - start)
        if self.client is not None and targets:
            quiet = self.pool.now()
            message = Restore(
                request.name, request.attempt, request.receipt, start, pack_pages(targets), quiet
            )
            seq = self.client.ask(message, self.client.deadlines.restore_ms)
            if seq:
                request.seq = seq
                request.phase = Phase.RESTORING
                self._asking[seq] = request
                self._landing[seq] = targets
                self._count("restores")
                return
        self._room.free(targets)
        self._let_lease_go(request)

    def _on_landed(self, request: Request, targets: array[int], reply: AnyReply) -> None:
        """The targets are quiet; with a landing they hold what the path demands."""
        landed = isinstance(reply, Restored) and reply.landed
        if landed:
            wrong = self._compute.check(request, targets, len(request.row))
            if wrong:
                self._problem(f"request {request.number}: {wrong} restored pages are wrong")
                landed = False
        if not landed:
            self._room.free(targets)
            self._on_lost_restore(request)
            return
        assert isinstance(reply, Restored)
        request.row.extend(targets)
        request.host_pages += reply.host_pages
        request.peer_pages += reply.peer_pages
        self._count("bytes_restored_host", reply.host_pages * self.pool.page_bytes)
        self._count("bytes_restored_peer", reply.peer_pages * self.pool.page_bytes)
        self._publish(request, len(request.row), self.pool.now(), keep=True)
        request.phase = Phase.ADMITTED
        self._let_lease_go(request)

    def _on_lost_restore(self, request: Request) -> None:
        """Once more from the look-up on, then without."""
        self._count("restores_lost")
        request.losses += 1
        request.phase = Phase.ADMITTED
        self._let_lease_go(request)
        if request.losses < LOSSES_MAX:
            request.attempt += 1
            self._look_up(request)

    def _advance(self, request: Request) -> None:
        """Compute the prompt and publish it; then the output, if there is one; then end."""
        if request.phase is Phase.ADMITTED:
            missing = request.all_pages - len(request.row)
            pages = self._room.allocate(missing)
            if pages is None:
                self._short = True
                return
            request.row.extend(pages)
            wrong = self._compute.check(request, request.row[: request.own_pages], 0)
            if wrong:
                self._problem(f"request {request.number}: {wrong} pages of its own pool are wrong")
            last = request.prompt_pages if request.has_output else request.all_pages
            written = self._compute.write(request, request.hit_pages, last)
            self._publish(request, request.prompt_pages, written, keep=request.has_output)
            request.phase = Phase.DECODING
            self.moved = True
            if request.has_output:
                return
        if request.phase is Phase.DECODING:
            if request.has_output:
                written = self._compute.write(request, request.prompt_pages, request.all_pages)
                self._publish(request, request.full_pages, written, keep=False)
            self._end(request)
            self.moved = True

    def _publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> None:
        """Put the row's first pages into the tree. The row is swapped to the canonical pages
        before a duplicate is freed: whatever reads through the row never sees a recycled page."""
        if not pages:
            return
        tree = self._room.tree
        result = tree.publish(request, pages, written, keep=keep)
        if result is None and self._look_for_loss():
            result = self._room.tree.publish(request, pages, written, keep=keep)
        if result is None:
            self._count("inserts_refused")
            return
        canonical = array("I")
        canonical.frombytes(result.canonical)
        request.row[:pages] = canonical
        request.tree_pages = pages
        self._count("duplicates_freed", self._room.free(result.duplicates))
        self._look_for_loss()

    def _end(self, request: Request, error: str = "") -> None:
        self._release(request)
        request.phase = Phase.ENDED
        self._active.pop(request.number, None)
        self._count("requests_failed" if error else "requests")
        self._done.append(request.finished(self._now_us(), error))

    def _release(self, request: Request) -> None:
        """Let go of all that a request holds, but for the targets of a restore under way."""
        if request.seq:
            self._asking.pop(request.seq, None)
            if request.seq not in self._landing and self.client is not None:
                self.client.abandon(request.seq)
            request.seq = 0
        self._room.tree.release(request)
        self._room.free(request.row[request.tree_pages :])
        request.row = array("I")
        request.tree_pages = 0

    # The daemon, and getting on without.

    def _unstick(self) -> None:
        """All requests wait for room that only they themselves hold: the youngest steps back."""
        if self._landing or any(r.phase is not Phase.ADMITTED for r in self._active.values()):
            return
        request = list(self._active.values())[-1]
        self.moved = True
        if len(self._active) == 1:
            self._end(request, f"{request.all_pages} pages are more than the pool can give")
            return
        self._release(request)
        request.start_over()
        del self._active[request.number]
        self._queue.appendleft(request)
        self._count("retracted")

    def _take_answers(self) -> None:
        client = self.client
        if client is None:
            return
        for seq, reply in client.poll():
            self.moved = True
            request = self._asking.pop(seq, None)
            if request is not None:
                request.seq = 0
            if seq not in self._landing:
                if request is not None:
                    self._on_matched(request, reply)
            elif reply is None:
                # The mover may still write into the targets: they stay out of use until it says.
                self._count("restores_expired")
                if request is not None:
                    request.phase = Phase.ADMITTED
                    self._let_lease_go(request)
            else:
                targets = self._landing.pop(seq)
                if request is None:
                    self._room.free(targets)
                else:
                    self._on_landed(request, targets, reply)
        if client.refused:
            refusal = client.refused[0]
            self._problem(f"a report was refused: {refusal.code}: {refusal.message}")
            client.lose(f"a report was refused: {refusal.message}")

    def _let_lease_go(self, request: Request) -> None:
        """Mirrored: nothing elsewhere is needed any more. A thin lease protects own pages too."""
        if isinstance(self._room.tree, MirroredTree):
            self._room.tree.release_lease(request)

    def _look_for_loss(self) -> bool:
        """Go on without the daemon if it is lost; says whether it was lost just now."""
        client = self.client
        if client is None or not client.lost:
            return False
        self.client = None
        self.degraded = client.lost
        self._count("degraded")
        for targets in self._landing.values():
            self._room.quarantine(targets)
        self._landing.clear()
        self._asking.clear()
        for request in self._active.values():
            request.seq, request.receipt = 0, NO_LEASE
            if request.phase in (Phase.MATCHING, Phase.RESTORING):
                request.phase = Phase.ADMITTED
        self._room.lose_daemon(self._active.values())
        return True

    def __repr__(self) -> str:
        return f"<ReferenceScheduler {self.mode}, {len(self._queue)} queued, {self._active}>"

    def _problem(self, problem: str) -> None:
        """Remember the first of what must never happen, and count all of it."""
        self._count("problems")
        if len(self.problems) < PROBLEMS_KEPT_MAX:
            self.problems.append(problem)

    def _now_us(self) -> int:
        return self.client.now_us() if self.client is not None else monotonic_us()

    def _count(self, name: str, amount: int = 1) -> None:
        if amount:
            self.counters[name] = self.counters.get(name, 0) + amount
