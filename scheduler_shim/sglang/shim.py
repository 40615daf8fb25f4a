"""The shim: everything between one SGLang scheduler and the daemon, on the scheduler's thread.

Owns the client and the way back to one, the room with its tree, the held-back restores, the weight
epoch and the counters. The cache (cache.py) asks it, SGLang's loop drives it through `tick`
(hooks.py). It must never raise into SGLang's loop over a daemon that is slow, confused or gone,
never wait longer than a deadline, and never let a page go that a mover may still write into.

Degraded mode is not a second path: without a client the tree is a mirror that nobody is told about
and nothing lies beyond. A defect of the shim's own ends the session the same way (`fail`), for
good: the engine goes on with its own pool.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Final

from directory.core.actions import AnyReply
from directory.core.errors import TreecoredError
from directory.core.ids import NO_LEASE
from directory.core.namespace import NamespaceKey
from directory.core.tokens import unpack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.connection import Connection
from scheduler_shim.dial import Dial
from scheduler_shim.link import monotonic_us
from scheduler_shim.own_tree import OwnTree, Published
from scheduler_shim.pools import Allocator, Pool
from scheduler_shim.request import Request
from scheduler_shim.room import Room
from scheduler_shim.sglang.held import HeldBack
from scheduler_shim.sglang.layer_counter import Layers
from scheduler_shim.sglang.layerwise import Layerwise
from scheduler_shim.sglang.moments import Moments
from scheduler_shim.sglang.rest import Rest
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.stats import StatsFile
from scheduler_shim.sglang.waiting import KeyOf, Waiting, nothing_to_look_up
from scheduler_shim.tally import Tally

logger = logging.getLogger(__name__)

DRAIN_POLL_US: Final = 1_000
EVICT_WAIT_MS: Final = 500


class Shim(Tally):
    """One engine process's. `client` None: no daemon yet, or never (`dial` None).

    `unnamed`: pages that SGLang has for itself, of running rows and of its own needs.
    `start_over`: SGLang calls every page free; those with these names (packed) are not.
    """

    def __init__(
        self,
        pool: Pool,
        allocator: Allocator,
        client: DaemonClient | None,
        settings: Settings,
        *,
        dial: Dial | None = None,
        unnamed: Callable[[], int] = lambda: 0,
        start_over: Callable[[bytes], None] = lambda _: None,
        layers: Layers | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.pool = pool
        self.settings = settings
        self.key_epoch = 0
        """Weight epoch of what is computed now; any number, the same one is never used again."""
        self.rows: Callable[[], Collection[Request]] = list
        """Every request of the cache's that has a row in the tree. The cache sets it."""
        self.key_of: KeyOf = nothing_to_look_up
        """Namespace and tokens of a waiting request. The cache sets it."""
        self.failure = ""  # the defect of its own over which it gave the daemon up for good
        self._dial = dial
        self._start_over = start_over
        self._reserved: Callable[[], int] = lambda: 0
        self._numbers = 0
        self._tick_us_max = 0
        self._stats = StatsFile(settings.stats_file)
        thin = settings.mode == "thin"
        self._early: list[tuple[int, AnyReply | None]] = []
        self.loads = Layerwise(self, settings, layers)
        """Loads that a forward pass follows layer by layer, where the settings want them."""
        key_of: KeyOf = lambda req: self.key_of(req)  # noqa: E731, PLW0108 - it is set later
        self._held = HeldBack(self, settings, key_of, self.loads)
        self._moments = Moments(self, self._held, settings)
        self._rest = Rest(self, self._held, self.loads)
        self.ended: list[Any] = []
        """SGLang's requests that gave their rows back and were not told of. The cache appends."""
        self._connection = Connection(
            client,
            dial=dial,
            thin=thin,
            seed=seed,
            rows=self._all_rows,
            on_lost=self._on_lost,
            count=self.count,
        )
        self.room = Room(
            pool,
            client,
            allocator=allocator,
            thin=thin,
            before_giving_up=self._connection.before_giving_up,
            on_evicted=self.look_for_loss,
            count=self.count,
            foreign=unnamed,
        )
        self.room.on_quiet = self.loads.quiet
        self._connection.bind(self.room)

    # What the cache asks.

    @property
    def tree(self) -> OwnTree:
        """The room's; another one after the daemon is lost or back."""
        return self.room.tree

    @property
    def client(self) -> DaemonClient | None:
        """The daemon's, while there is one."""
        return self._connection.client

    def request(self, key: NamespaceKey, tokens: bytes) -> Request:
        """A request with a number and a name that no other one of this engine has."""
        self._numbers += 1
        page_key = self.pool.page_size * key.unit_bytes
        return Request(self._numbers, f"s{self._numbers}", key, tokens, b"", page_key)

    def in_force(self, request: Request) -> bool:
        """Whether a request's namespace is of the present weights. What one that lived through an
        update has computed is never published."""
        return request.key.weight_epoch == self.key_epoch

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Published | None:
        """Put the row's first pages into the tree; the row is swapped to the canonical ones.

        The caller rewrites SGLang's row, frees the duplicates and looks for a loss, in this order.
        None: nothing was published, and the pages are the request's own as before.
        """
        if not pages or not self.in_force(request) or not request.fits(pages):
            return None
        result = self._try_publish(request, pages, written, keep=keep)
        if result is None and self.look_for_loss():
            result = self._try_publish(request, pages, written, keep=keep)
        if result is None:
            self.count("inserts_refused")
            return None
        if result.duplicates:
            request.row[: result.accepted_pages] = unpack_pages(result.canonical)
        request.tree_pages = request.accepted_pages = result.accepted_pages
        return result

    def look_for_loss(self) -> bool:
        """Go on without the daemon if it is lost; says whether it was lost just now."""
        if not self._connection.look_for_loss():
            return False
        logger.warning("treecored: going on without the daemon: %s", self._connection.degraded)
        return True

    def evict(self, pages: int) -> int:
        """Give up and free `pages` unprotected pages, or as many as there are; returns how many.

        Where there are too few while movers write into others, this waits for those: SGLang ends
        an engine that is short of what it has promised.
        """
        doubts = self.tree.doubts  # an answer that ends them may come in the eviction
        freed = self.room.evict(min(pages, self.room.totals.evictable))
        if freed < pages and (doubts or self.tree.doubts):  # more may go than is promised
            freed += self.room.evict(pages - freed)
        if freed < pages and len(self._held.fills):
            self.count("evictions_waited")
            self._held.forget_all()
            self._drain(EVICT_WAIT_MS)
            freed += self.room.evict(min(pages - freed, self.room.totals.evictable))
        return freed

    def reserved_pages(self) -> int:
        """Pages that requests in progress have yet to take, as SGLang's loop told it last."""
        return -(-self._reserved() // self.pool.page_size)

    @property
    def outside_pages(self) -> int:
        """Pages that a mover may write into: neither free nor in the tree nor SGLang's own."""
        return sum(len(pages) for pages in self._landing()) + len(self.room.quarantined)

    # SGLang's loop.

    def tick(
        self,
        waiting: Sequence[Waiting],
        *,
        busy: bool,
        reserved: Callable[[], int] = lambda: 0,
    ) -> None:
        """Before a scheduling step: take answers, look at the queue, start restores; wait a moment.
        `busy`: whether anything runs; `reserved`: tokens that requests have yet to take."""
        begin_us = self.now_us()
        self._reserved = cache(reserved)  # nobody is admitted in a tick, and it is asked often
        self._held.targets.alone = not busy and len(waiting) < 2
        self.take_answers()
        self.loads.tick()
        asked = False
        if self.client is not None and self.settings.loads != "none":
            asked = self._held.tick(waiting, begin_us)
        self.look_for_loss()
        if self._connection.step():
            logger.info("treecored: the daemon is back, as %s", self.tree.mode)
        self._say_who_lives(idle=(idle := not busy and not waiting))
        took_us = self.now_us() - begin_us
        self._tick_us_max = max(self._tick_us_max, took_us)
        self.count("ticks")
        self.count("ticks_us", took_us)
        self._moments.wait(waiting, busy=busy, asked_us=begin_us if asked else None)
        self._reserved = reserved
        self._stats.offer(begin_us, self.stats, idle=idle)
        self._rest.until(*self._stats.dues_us, waiting[: self.settings.window])

    def rests(self, waiting: Sequence[Waiting], busy: Callable[[], bool]) -> bool:
        """Whether a turn has nothing to do, and is left out. `busy`: whether anything runs."""
        head = waiting[: self.settings.window]
        return not self.ended and not self._early and self._rest.holds(head, busy)

    def take_answers(self) -> None:
        """Take what the daemon has answered, and find out whether it is lost."""
        client = self.client
        if client is None:
            return
        early, self._early = self._early, []
        for seq, reply in early + self._others(client):
            self._held.take(seq, reply, client.now_us())
        if client.refused and not client.lost:
            first = client.refused[0]
            self.problem(f"a report was refused: {first.code}: {first.message}")
            client.lose(f"a report was refused: {first.message}")
        self.look_for_loss()

    def peek(self, wait_us: int) -> Sequence[tuple[int, AnyReply | None]]:
        """Answers that have come and were not taken; waits a moment where there are none yet.

        In a forward pass no page may change hands, so they are only looked at there.
        """
        if self.client is not None:
            self.client.wait(wait_us)
            self._early += self._others(self.client)
        return self._early

    def _others(self, client: DaemonClient) -> list[tuple[int, AnyReply | None]]:
        """What has come and is not the tree's: that takes its own first, and may wait for more."""
        return [(seq, reply) for seq, reply in client.poll() if not self.tree.take(seq, reply)]

    def held(self, rid: str) -> bool:
        """Whether a waiting request is to stay in the queue for now."""
        return self._held.held(rid)

    def restored_tokens(self, rid: str) -> tuple[int, int]:
        """Tokens restored for a waiting request, and how many out of others' pools."""
        return self._held.restored_tokens(rid)

    def gone(self, rid: str) -> None:
        """A request left the queue. Repeatable."""
        self._held.gone(rid)

    # Flush, weights, memory.

    def flush(self) -> None:
        """Give up the tree but what is locked. Waits for movers, but not for ever: targets that
        are not quiet by then stay `outside`."""
        self._held.end_namespaces()
        self._drain(self.settings.flush_wait_ms)
        self.room.flush()
        self.count("flushes")

    def after_clear(self) -> None:
        """SGLang has called every page free: take back what movers may still write into."""
        pages = [*self._landing(), self.room.quarantined]
        self._start_over(b"".join(some.tobytes() for some in pages))

    def change_weights(self, epoch: int) -> None:
        """The weights have changed: nothing that was computed before is found from here on."""
        self._held.end_namespaces()
        self.key_epoch = epoch
        self.count("weight_changes")

    def suspend(self, why: str) -> None:
        """The pool's memory is about to go: end the registration and look for no other one."""
        self._held.end_namespaces()
        self._drain(self.settings.flush_wait_ms)
        if self.client is not None:
            self.client.lose(why)
            self.look_for_loss()
        self._connection.end_return()

    def resume(self) -> None:
        """The pool's memory is back."""
        if not self.failure:
            self._connection.begin_return()

    def fail(self, why: str) -> None:
        """A defect of the shim's own: give the daemon up for good and go on with the own pool."""
        if not self.failure:
            self.failure = why
            self.problem(why)
        if self.client is not None:
            self.client.lose(why)
            self.look_for_loss()
        self._connection.end_return()

    def close(self) -> None:
        """End the session. Repeatable."""
        self._stats.write(self.stats())
        self._connection.close()

    # What is to be seen.

    def now_us(self) -> int:
        """The clock of the client, or of whoever makes one."""
        if self.client is not None:
            return self.client.now_us()
        return self._dial.now_us() if self._dial is not None else monotonic_us()

    @property
    def mode(self) -> str:
        """How the tree is kept now: mirrored, thin, or degraded (mirrored without a daemon)."""
        return "degraded" if self.client is None else self.tree.mode

    def stats(self) -> dict[str, object]:
        """Counters and gauges, for tests and for people."""
        rtt = self.client.rtt_us if self.client is not None else None
        client = self.client.counters if self.client is not None else {}
        return {
            **self.counters,
            **{f"client_{name}": value for name, value in client.items()},
            "turns_left_out": self._rest.turns,
            "mode": self.mode,
            "why_degraded": self._connection.degraded,
            "last_loss": self._connection.last_loss,
            "failure": self.failure,
            "problems_seen": list(self.problems),
            "held_now": self._held.held_count,
            "outside_pages": self.outside_pages,
            "tree_pages": self.tree.pages,
            "free_pages": self.room.free_count,
            "tick_us_max": self._tick_us_max,
            "stage_requests": self.pool.stage_requests,
            "rtt_us_p50": rtt.percentile(50) if rtt is not None else 0,
            "rtt_us_p99": rtt.percentile(99) if rtt is not None else 0,
        }

    def check(self) -> list[str]:
        """What does not hold: conservation of pages, the tree, the spans, past problems."""
        return [*self.problems, *self.room.check(self._all_rows(), self._landing())]

    # Private.

    def _try_publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Published | None:
        try:
            return self.tree.publish(request, pages, written, keep=keep)
        except TreecoredError as error:
            self.problem(f"{request.name}: {error}")
            return None

    def _say_who_lives(self, *, idle: bool) -> None:
        client = self.client
        if client is not None and client.live_due(idle=idle):
            rows = [name for request in self.rows() for name in request.alive_as]
            client.report_live([*rows, *self._held.alive, *self.loads.alive])

    def _drain(self, wait_ms: int) -> None:
        """Wait until no mover writes into the pool any more, or time is up."""
        give_up_us = self.now_us() + 1_000 * wait_ms
        while len(self._held.fills) and self.client is not None and self.now_us() < give_up_us:
            self.client.wait(DRAIN_POLL_US)
            self.take_answers()

    def _all_rows(self) -> list[Request]:
        return [*self.rows(), *self._held.rows, *self.loads.rows]

    def _landing(self) -> list[array[int]]:
        """Targets of restores that no row has."""
        return [fill.targets for fill in self._held.fills if not self.loads.has(fill)]

    def _on_lost(self) -> None:
        self._early.clear()
        self._held.lose_daemon()
        for request in self.rows():
            request.seq, request.receipt = 0, NO_LEASE

    def __repr__(self) -> str:
        return f"<Shim {self.mode}, {self._held!r}, {self.room!r}>"
