"""The reference scheduler: a request's whole life over one pool, with pages that can be checked.

Owns the requests in progress; room.py owns the free pages and the tree, restores.py what movers
write. It "computes" a page by writing what follows from the token path up to it, so every
restored or reused page is verified against what it must hold. It does its work in ticks and never
waits, except in thin mode for the daemon's answers, each with a deadline. It must never free a
page that a row, the tree or a restore still has, and never hide a wrong page.

Prompts are computed in chunks, and each is published as soon as it is written: the request goes
on, its claim moved to the longer path. Only whole pages are published; the page of a partial tail
is freed at the end. Two requests that compute one path at once both compute; the second insert
finds the pages there, and its own are freed once its row is swapped (restores.py: what is joined).

Degraded mode: when the client is lost, a mirrored scheduler goes on with its mirror alone. A thin
one bumps the pool word, puts what its running rows have of the tree into a fresh mirror, frees
the rest and goes on mirrored. With a `dial` it registers again and republishes (returning.py), and
a thin one is thin again. Targets of restores that were never answered stay quarantined until a
registration is answered, because a mover may write into them as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from directory.core.namespace import NamespaceKey
from directory.core.tokens import unpack_pages
from scheduler_shim.admission import refusal
from scheduler_shim.client import DaemonClient
from scheduler_shim.compute import Compute
from scheduler_shim.connection import Connection
from scheduler_shim.dial import Dial
from scheduler_shim.link import monotonic_us
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.pools import SharedPool
from scheduler_shim.request import Phase, Request
from scheduler_shim.restores import Restores
from scheduler_shim.room import PageCounts, Room
from scheduler_shim.tally import Tally
from scheduler_shim.telling import tell
from scheduler_shim.worker_messages import Finished


class ReferenceScheduler(Tally):
    """One pool's scheduler. `client` None: no daemon, from the start (then it is mirrored).

    `chunk_pages`: pages of a prompt that are computed and published at a time; 0: all of it.
    `dial`: how to register again (None: never); `seed`: of the jitter between its tries.
    """

    def __init__(
        self,
        pool: SharedPool,
        client: DaemonClient | None,
        *,
        instance: str,
        thin: bool = False,
        key: NamespaceKey | None = None,
        concurrency: int = 1,
        chunk_pages: int = 0,
        dial: Dial | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.pool = pool
        self.moved = False
        """Whether the last tick changed anything: if so, tick again before waiting."""
        self._instance = instance
        self._key = key or NamespaceKey()
        self._page_key = pool.page_size * self._key.unit_bytes
        self._concurrency = concurrency
        self._chunk_pages = chunk_pages
        self._dial = dial
        self.compute = Compute(pool, self._key, self.count)
        self._restores = Restores(self)
        self._queue: deque[Request] = deque()
        self._active: dict[int, Request] = {}
        self._done: list[Finished] = []
        self._short = False
        self._late_before = 0
        self._connection = Connection(
            client,
            dial=dial,
            thin=thin,
            seed=seed,
            rows=self._active.values,
            on_lost=self._on_lost,
            count=self.count,
        )
        self.room = Room(
            pool,
            client,
            allocator=pool.make_allocator(),
            thin=thin,
            before_giving_up=self._before_giving_up,
            on_evicted=self._look_for_loss,
            count=self.count,
        )
        self._connection.bind(self.room)

    # What a driver calls.

    def submit(self, number: int, prompt: bytes, output: bytes = b"") -> None:
        """Queue a request. `prompt`, `output`: packed token ids. Impossible ones end at once."""
        name = f"{self._instance}-{number}"
        request = Request(number, name, self._key, prompt, output, self._page_key)
        request.started_us = self._now_us()
        error = refusal(request, self.room.usable_pages)
        if error:
            self._end(request, error)
        else:
            self._queue.append(request)

    def abort(self, number: int) -> bool:
        """End a request wherever it is; all it holds is released. False: it is not here (any
        more), and nothing happens. What it has published stays in the tree, and pages that a
        mover writes into stay out of use until it is done with them."""
        request = self._active.get(number)
        if request is None:
            request = next((r for r in self._queue if r.number == number), None)
            if request is None:
                return False
            self._queue.remove(request)
        self.count("aborted")
        self._end(request, "aborted")
        return True

    def retract(self, number: int) -> bool:
        """Send a request in progress back to the head of the queue; all it holds is released as
        by an abort, and it starts over. False: it is not in progress, and nothing happens."""
        request = self._active.pop(number, None)
        if request is None:
            return False
        self._tell(request)
        self._release(request)
        request.start_over()
        self._queue.appendleft(request)
        self.count("retracted")
        return True

    def bump_weights(self) -> None:
        """The weights are about to change: nothing computed under the old ones is used again.

        Every request in progress starts over, the own pool is flushed under the old epoch, and
        from here on the namespace is that of the next weight epoch. Restores under way end as
        lost and their pages are freed. Other schedulers keep what they have under the old epoch.
        """
        for number in reversed(list(self._active)):
            self.retract(number)
        self._restores.end_namespace()
        self.flush()
        self._key = msgspec.structs.replace(self._key, weight_epoch=self._key.weight_epoch + 1)
        self.compute = Compute(self.pool, self._key, self.count)
        for request in self._queue:
            request.rekey(self._key)
        self.count("weight_bumps")

    def tick(self) -> list[Finished]:
        """Do one batch of work: take answers, admit, and bring every request a step further."""
        self.moved = False
        self._take_answers()
        self._late_before = self._late_answers
        # Whoever waits for room comes first: newcomers would take it away again.
        while self._queue and len(self._active) < self._concurrency and not self._short:
            request = self._queue.popleft()
            self._active[request.number] = request
            self.moved = True
            self._restores.look_up(request)
        self._short = False
        for request in list(self._active.values()):
            self._advance(request)
        if not self.moved and self._active:
            self._unstick()
        self._look_for_loss()
        self.moved |= self._connection.step()
        self._say_who_lives()
        done, self._done = self._done, []
        return done

    def flush(self) -> None:
        """Give up every page of the tree that no request uses."""
        self.room.flush()

    def close(self) -> None:
        """End the session, or the way to the next one. Repeatable."""
        self._connection.close()

    @property
    def client(self) -> DaemonClient | None:
        """The daemon's, while there is one."""
        return self._connection.client

    @property
    def degraded(self) -> str:
        """Why there is no daemon any more; empty while there is (or never was) one."""
        return self._connection.degraded

    @property
    def last_loss(self) -> str:
        """Why the last daemon was lost; it stays when there is one again."""
        return self._connection.last_loss

    @property
    def idle(self) -> bool:
        """Whether no request is queued or in progress and nothing is to be said."""
        return not self._queue and not self._active and not self._done

    @property
    def wake_us(self) -> int | None:
        """When to tick again at the latest for a daemon's sake, by the clock of the dial."""
        return self._connection.wake_us

    @property
    def mode(self) -> str:
        """How the tree is kept now: mirrored, thin, or degraded (mirrored without a daemon)."""
        return "degraded" if self.client is None else self.room.tree.mode

    @property
    def requests(self) -> Mapping[int, Request]:
        """Requests in progress by number; to be looked at only."""
        return self._active

    @property
    def pages(self) -> PageCounts:
        """Where the pool's pages are."""
        return self.room.counts(self._active.values(), self._restores.fills.pages())

    def check(self) -> list[str]:
        """Return what does not hold: conservation of pages, the tree, the spans, past problems."""
        fills = self._restores.fills.pages()
        return [*self.problems, *self.room.check(self._active.values(), fills)]

    # Steps of a request.

    def _advance(self, request: Request) -> None:
        """Compute a chunk of the prompt and publish it; then the output, if any; then end."""
        if request.phase is Phase.ADMITTED:
            if not self._grow(request, self._chunk_end(request, request.hit_pages)):
                return
            wrong = self.compute.check(request)
            if wrong:
                self.problem(f"request {request.number}: {wrong} pages of its own pool are wrong")
            request.computed = request.hit_pages
            request.phase = Phase.COMPUTING
        if request.phase is Phase.COMPUTING:
            last = self._chunk_end(request, request.computed)
            if not self._grow(request, last):
                return
            written = self.compute.write(request, request.computed, last)
            request.computed = last
            self.moved = True
            finished = last == self._prompt_end(request)
            keep = request.has_output or not finished
            self.publish(request, min(last, request.prompt_pages), written, keep=keep)
            if not finished:
                return
            request.phase = Phase.DECODING
            if request.has_output:
                return
        if request.phase is Phase.DECODING:
            if request.has_output:
                if not self._grow(request, request.all_pages):
                    return
                written = self.compute.write(request, request.prompt_pages, request.all_pages)
                self.publish(request, request.full_pages, written, keep=False)
            self._end(request)
            self.moved = True

    def _prompt_end(self, request: Request) -> int:
        """Where computing the prompt ends: a page that output shares with it comes with that."""
        return request.prompt_pages if request.has_output else request.all_pages

    def _chunk_end(self, request: Request, first: int) -> int:
        end = self._prompt_end(request)
        return min(first + self._chunk_pages, end) if self._chunk_pages else end

    def _grow(self, request: Request, pages: int) -> bool:
        """Have at least `pages` pages in the row, all of them at once unless in chunks."""
        wanted = pages if self._chunk_pages else request.all_pages
        if len(request.row) < wanted:
            new = self.room.allocate(wanted - len(request.row))
            if new is None:
                self._short = True
                return False
            request.row.extend(new)
        return True

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> None:
        """Put the row's first pages into the tree. The row is swapped to the canonical pages
        before a duplicate is freed: whatever reads through the row never sees a recycled page."""
        if not pages:
            return
        tree = self.room.tree
        result = tree.publish(request, pages, written, keep=keep)
        if result is None and self._look_for_loss():
            result = self.room.tree.publish(request, pages, written, keep=keep)
        if result is None:
            self.count("inserts_refused")
            return
        request.row[:pages] = unpack_pages(result.canonical)
        request.tree_pages = request.accepted_pages = result.accepted_pages
        self.count("duplicates_freed", self.room.free(result.duplicates))
        self._look_for_loss()

    def _end(self, request: Request, error: str = "") -> None:
        self._tell(request)
        self._release(request)
        request.phase = Phase.ENDED
        self._active.pop(request.number, None)
        self.count("requests_failed" if error else "requests")
        self._done.append(request.finished(self._now_us(), error))

    def _tell(self, request: Request) -> None:
        """Report a request that leaves, if the daemon wants to hear of it."""
        client = self.client
        if client is not None and not client.lost:
            wanted = client.registration.ended
            ended = tell(request, self.pool.page_size, client.now_us(), wanted)
            if ended is not None:
                client.report(ended)

    def _release(self, request: Request) -> None:
        """Let go of all that a request holds, but for the targets of a restore under way."""
        self._restores.release(request)
        self.room.tree.release(request)
        self.room.free(request.row[request.tree_pages :])
        del request.row[:]
        request.tree_pages = 0

    def _unstick(self) -> None:
        """All requests wait for room that only they themselves hold: the youngest steps back."""
        waiting = (Phase.MATCHING, Phase.RESTORING)
        if len(self._restores.fills) or any(r.phase in waiting for r in self._active.values()):
            return
        client = self.client
        if client is not None and not isinstance(self.room.tree, MirroredTree):
            # A thin lease protects own pages. One that a late answer brings is nobody's here:
            # wait for it, and when it has just been released, ask for room once more.
            self.moved = self._late_answers != self._late_before
            if self.moved or client.abandoned_count:
                return
        request = list(self._active.values())[-1]
        self.moved = True
        if len(self._active) == 1:
            self._end(request, f"{request.all_pages} pages are more than the pool can give")
        else:
            self.retract(request.number)

    # The daemon, and getting on without.

    def _take_answers(self) -> None:
        client = self.client
        if client is None:
            return
        for seq, reply in client.poll():
            self.moved = True
            self._restores.take(seq, reply)
        if client.refused:
            refusal = client.refused[0]
            self.problem(f"a report was refused: {refusal.code}: {refusal.message}")
            client.lose(f"a report was refused: {refusal.message}")

    @property
    def _late_answers(self) -> int:
        return self.client.counters.get("answers_late", 0) if self.client is not None else 0

    def _say_who_lives(self) -> None:
        """List the requests in progress when it is time; those in the queue hold nothing."""
        client = self.client
        if client is not None and client.live_due(idle=not self._queue and not self._active):
            client.report_live(name for r in self._active.values() for name in r.alive_as)

    def _look_for_loss(self) -> bool:
        return self._connection.look_for_loss()

    def _on_lost(self) -> None:
        self._restores.lose_daemon(self._active.values())

    def _before_giving_up(self) -> None:
        self.moved |= self._connection.before_giving_up()

    def _now_us(self) -> int:
        if self.client is not None:
            return self.client.now_us()
        return self._dial.now_us() if self._dial is not None else monotonic_us()

    def __repr__(self) -> str:
        return f"<ReferenceScheduler {self.mode}, {len(self._queue)} queued, {self._active}>"
