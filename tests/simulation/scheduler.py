"""The model scheduler: the life of its requests, tick by tick.

Owns the requests of one process, from submission to their end. Modelled on SGLang: a waiting queue
whose restores are held back, chunked prefill with inserts of running requests, batches launched
one ahead of their results, decode page by page, abort, retract and finish. Pages that a launched
batch still writes into are freed when SGLang would free them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Generator

from directory.core.events import Flush, Stats
from directory.core.ids import CURRENT, FORWARD
from tests.simulation.contents import GARBAGE
from tests.simulation.own import MirroredOwn, Wait
from tests.simulation.request import ModelRequest, Phase
from tests.simulation.restoring import Restoring
from tests.simulation.streams import Launched


class Batch:
    """A launched batch. `entries`: (request, attempt, units computed when it has run)."""

    __slots__ = ("entries", "works")

    def __init__(self, entries: list[tuple[ModelRequest, int, int]], works: list[Launched]) -> None:
        self.entries = entries
        self.works = works


class ModelScheduler(Restoring):
    """A process and its requests. `finished` are those that ended while it lived."""

    queue: deque[ModelRequest]

    def __init__(self, *arguments: object) -> None:
        self.queue = deque()
        self.running: list[ModelRequest] = []
        self.batches: deque[Batch] = deque()
        self.finished: list[ModelRequest] = []
        self.orders: deque[str] = deque()
        self.own_hits = 0
        self._ticks = 0
        self._short = False
        self._live_us = 0
        super().__init__(*arguments)

    # What the world does to it.

    def submit(self, request: ModelRequest) -> None:
        """Queue a request."""
        self.active[request.number] = request
        if request.all_pages > self.allocator.page_count - len(self.quarantined):
            request.error = "longer than the pool"
            self._end(request)
            return
        self.queue.append(request)
        self.wake()

    def order(self, what: str) -> None:
        """Have something done at the next tick: flush_pool, flush_host, stats, abort, retract."""
        self.orders.append(what)
        self.wake()

    # The tick.

    def tick(self) -> Wait:
        """One batch of work."""
        self.take_answers()
        self._say_who_lives()
        yield from self.take_landings()
        yield from self._take_results()
        yield from self._carry_out_orders()
        yield from self._admit()
        yield from self._launch()
        self.look_for_loss()
        if self.batches and all(w.done for w in self.batches[0].works):
            self.wake()
        self.check()

    def check(self) -> None:
        """Pages are conserved, and the tree agrees with itself."""
        own = self.own
        assert own is not None
        tree = own.tree_pages()
        held = [page for r in self.active.values() for page in r.row[r.tree_pages :]]
        landing = [page for targets, _, _, _ in self.landing.values() for page in targets]
        parts = (
            self.allocator.free_count,
            len(tree),
            len(held),
            len(landing),
            len(self.quarantined),
        )
        mine = [*held, *landing, *self.quarantined]
        if sum(parts) != self.allocator.page_count or len(set(mine)) != len(mine):
            self.wrong(f"pages (free, tree, held, landing, quarantined) {parts} do not add up")
        for request in self.active.values():
            if not tree.issuperset(request.row[: request.tree_pages]):
                self.wrong(f"a page that {request!r} uses has left the tree")
        self._ticks += 1
        if self._ticks % self.world.options.check_every == 0:
            for problem in own.check():
                self.wrong(problem)

    # Running.

    def _admit(self) -> Wait:
        options = self.world.options
        if self._short:
            # Whoever waits for room comes first: newcomers would take it away again.
            self._short = False
            return
        for request in list(self.queue)[: options.waiting_max]:
            if request.phase is Phase.WAITING:
                yield from self.look_up(request)
            if request.phase is not Phase.READY or len(self.running) >= options.running_max:
                continue
            if isinstance(self.own, MirroredOwn):
                self.own.match(request)
            elif options.match_again and request.tree_pages < request.match_pages:
                yield from self.own.look_up(request) if self.own else ()
                self.look_for_loss()
            self.queue.remove(request)
            self.running.append(request)
            request.phase = Phase.RUNNING
            request.launched = request.computed = len(request.row) * request.page_size
            self.own_hits += len(request.row)

    def _launch(self) -> Wait:
        options = self.world.options
        if len(self.batches) >= options.launched_max or not self.running:
            return
        entries: list[tuple[ModelRequest, int, int]] = []
        reads: list[tuple[int, int]] = []
        writes: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        for request in list(self.running):
            if request.phase is not Phase.RUNNING:
                continue
            if request.launched >= request.units:
                yield from self._overshoot(request, writes)
                continue
            last = self._next_units(request)
            if not (yield from self._make_room(request, last)):
                continue
            root = self.root(request)
            contents = request.contents(self.world.contents, root)
            whole = request.launched // request.page_size
            reads += zip(request.row[:whole], contents[:whole], strict=True)
            for at, content in request.written(self.world.contents, root, request.launched, last):
                stream = int(self.rng.random() < options.current_share)
                writes[stream].append((request.row[at], content))
            request.launched = last
            entries.append((request, request.attempt, last))
        entries = [entry for entry in entries if entry[0].attempt == entry[1]]
        if not entries and not writes[0] and not writes[1]:
            return
        works = [self.streams.launch_on_all(FORWARD, reads, writes[FORWARD], self.name)]
        if writes[CURRENT]:
            works.append(self.streams.launch_on_all(CURRENT, [], writes[CURRENT], self.name))
        self.batches.append(Batch(entries, works))
        for request, attempt, last in entries:
            early = self.rng.random() < options.publish_early
            if early and request.attempt == attempt and request.phase is Phase.RUNNING:
                pages = min(last, request.units) // request.page_size
                yield from self.publish(request, pages, self.written(), keep=True)

    def written(self) -> tuple[int, int]:
        """Fence behind which everything launched so far has been written."""
        return self.streams.fence()

    def _next_units(self, request: ModelRequest) -> int:
        """How far the next step of a request computes."""
        if request.launched < request.prompt_units:
            chunk = self.world.options.chunk_pages * request.page_size
            return min(request.launched + chunk, request.prompt_units)
        return min(request.launched + self.rng.randrange(1, request.page_size + 1), request.units)

    def _overshoot(
        self,
        request: ModelRequest,
        writes: tuple[list[tuple[int, int]], list[tuple[int, int]]],
    ) -> Wait:
        """A step beyond the end, launched before the result that ends the request is there."""
        options = self.world.options
        if request.overshot or options.launched_max < 2:
            return
        request.overshot = True
        if self.rng.random() >= options.rate("overshoot") * 10:
            return
        if request.units % request.page_size == 0:
            if not self.allocator.free_count:
                return
            request.row += self.allocator.allocate(1) or ()
        writes[int(self.rng.random() < 0.5)].append((request.row[-1], GARBAGE))
        yield from ()

    def _make_room(self, request: ModelRequest, last: int) -> Generator[None, None, bool]:
        need = -(-last // request.page_size) - len(request.row)
        while need > 0:
            attempt = request.attempt
            pages = yield from self.allocate(need)
            if request.attempt != attempt:
                self.free(pages or array("I"))
                return False
            if pages is not None:
                request.row += pages
                break
            victim = self.running[-1]
            if victim is not request:
                self._retract(victim)
                continue
            self._short = True
            waiting = [r for r in self.queue if r.row and r.phase is Phase.READY]
            if not waiting or len(self.running) > 1:
                if not self._room_may_come():
                    self.wrong(f"there is no room for {request!r}")
                return False
            for other in waiting:
                self.release_row(other)
                other.start_over()
        return True

    def _room_may_come(self) -> bool:
        """Whether something is under way that holds pages. That may be a question that was given
        up: its answer, when it is made, brings a lease that protects pages until it is heard of.
        """
        open_count = self.client.open_count if self.client is not None else 0
        held = self.landing or self.batches or self.quarantined or len(self.running) > 1
        return bool(held or open_count or any(r.row for r in self.queue))

    def _take_results(self) -> Wait:
        while self.batches and all(work.done for work in self.batches[0].works):
            for request, attempt, last in self.batches.popleft().entries:
                if request.attempt != attempt or request.phase is not Phase.RUNNING:
                    continue
                request.computed = last
                if last >= request.units:
                    pages = request.units // request.page_size
                    yield from self.publish(request, pages, self.written(), keep=False)
                    self._end(request)

    def publish(
        self, request: ModelRequest, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Wait:
        """Publish, and if the daemon was lost over it, again without it."""
        if not pages:
            return
        own = self.own
        assert own is not None
        done = yield from own.publish(request, pages, written, keep=keep)
        if self.look_for_loss() or not done:
            assert isinstance(self.own, MirroredOwn)
            self.own.insert(request, pages, written, keep=keep)

    # Ends.

    def _end(self, request: ModelRequest) -> None:
        self.release_row(request)
        request.phase = Phase.ENDED
        del self.active[request.number]
        if request in self.running:
            self.running.remove(request)
        if request in self.queue:
            self.queue.remove(request)
        self.finished.append(request)

    def _retract(self, request: ModelRequest) -> None:
        self.release_row(request)
        self.running.remove(request)
        request.start_over()
        self.queue.appendleft(request)

    # Orders.

    def _carry_out_orders(self) -> Wait:
        while self.orders:
            what = self.orders.popleft()
            if what == "abort" and self.active:
                self._end(self._any_active())
            elif what == "give_up" and self.client is not None:
                self.client.lose("given up")
                self.look_for_loss()
            elif what == "retract" and self.running:
                self._retract(self.rng.choice(self.running))
            elif what == "flush_pool" and self.own is not None:
                yield from self.own.flush()
                self.look_for_loss()
            elif what in ("flush_host", "stats") and self.client is not None:
                body = Flush("host") if what == "flush_host" else Stats(check=True)
                self.housekeeping.add(self.client.ask(body))

    def _any_active(self) -> ModelRequest:
        """A request; one that waits for the daemon more often than others."""
        requests = list(self.active.values())
        waiting = [r for r in requests if r.phase in (Phase.MATCHING, Phase.RESTORING)]
        return self.rng.choice(waiting if waiting and self.rng.random() < 0.7 else requests)

    def _say_who_lives(self) -> None:
        """Requests here, and those whose question was given up but may still bring a lease."""
        now = self.world.heap.now_us
        client = self.client
        if client is None:
            return
        # Before a rest a lease may be left whose receipt nobody knows.
        if now < self._live_us and not (not self.active and client.live_due(idle=True)):
            return
        self._live_us = now + self.world.options.live_us
        client.report_live((request.name, request.attempt) for request in self.active.values())

    def on_housekeeping(self, reply: object) -> None:
        """The daemon's own check must find nothing."""
        violations = getattr(reply, "violations", ())
        if violations:
            self.wrong(f"the daemon's own check: {violations}")
