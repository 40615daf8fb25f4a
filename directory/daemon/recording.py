"""Recording: what the daemon keeps of ended requests, of evictions, and of the memory there is.

Owns the sums, the access log where there is one, and what was evicted of late. It hears of things
on the daemon's thread and only appends then; digests, packing and writing are done in small pieces
while nobody waits for an answer. It must never change the directory, never raise for what a disk
does, and never hold more than its bounds.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from typing import Final, NamedTuple

import structlog

from directory.analytics.block import Pathed
from directory.analytics.causes import Causes
from directory.analytics.hot import HotPrefixes
from directory.analytics.log import AccessLog
from directory.analytics.record import Access, Eviction, Frame, Hit, Named, Reason, Room, Tier
from directory.analytics.recorder import Chains, Ends, Recorder, Work
from directory.core.events import Asked, CloseMore, Event, Flush, PoolClosed
from directory.core.ids import HOST, Place, PoolId
from directory.core.limits import POOLS_MAX
from directory.core.namespace import NamespaceKey
from directory.core.node import Node, Space, Tap
from directory.core.place import PoolState
from directory.daemon import clock
from directory.daemon.moments import Moments
from directory.daemon.names import Names, fields_of
from directory.daemon.pacing import (
    BATCH_FILL,
    BATCH_US,
    PRESSED_FILL,
    again_us,
    burst_us,
    is_late,
)
from directory.daemon.stats import Sums
from directory.protocol.admin import CauseReport, HotPrefix, LogReport
from directory.protocol.ended import Ended, Wanted, unsound

log = structlog.get_logger("recording")

FLUSH_US: Final = 1_000_000
"""What a crash of the daemon may cost of the log, beside what has not had its turn (pacing.py)."""
FLUSH_EARLY_US: Final = 150_000
"""So much before that the log is written if it works anyway: that is no work by itself then."""
CLOSE_US_MAX: Final = 500_000
"""So long the daemon's end waits for the log. Of what its schedulers had then hardly anything is
in it: their ends go one step far, and that their pools are gone says it all."""
PIECES_A_TURN_MAX: Final = 128
POLICY: Final = "lru"
GONE_MAX: Final = 65_536
ITEM_BYTES: Final = 600
"""What a queued item keeps alive beside its tokens, roughly."""


class Gone(NamedTuple):
    """Pages given up of late, from one page on along a path."""

    at_us: int
    tier: Tier
    instance: str
    reason: Reason
    pages: int


class Recording:
    """All that is remembered. Mutated by the daemon's thread alone.

    `log`: None where no access log is kept; then there are sums only. `host_bytes`: of the tier.
    """

    def __init__(
        self,
        log: AccessLog | None,
        *,
        host_bytes: int,
        now_us: int,
        clock: Callable[[], int] = clock.now_us,
    ) -> None:
        self.event: Event | None = None
        """What the directory is taking in: what it gives up now, it gives up for this."""
        self.sums = Sums()
        self.names = Names()
        self.chains = Chains()
        self.hot = HotPrefixes()
        self.causes = Causes()
        """Of the requests in the log; without a log nobody says their paths."""
        self._ends: Ends = OrderedDict()
        """Of nodes of the directory's tree."""
        self.gone: OrderedDict[tuple[bytes, int], Gone] = OrderedDict()
        """By namespace digest and digest of the first page that went."""
        self.past: Counter[str] = Counter()
        """What directories of earlier epochs had counted."""
        self.refused = 0
        """Reports of ended requests of which nothing was believed."""
        self._clock = clock
        self._log = log
        self._recorder = Recorder(log) if log is not None else None
        self._host_bytes = host_bytes
        self._wall_us = time.time_ns() // 1000 - now_us
        self.started_us = self._wall_us + now_us
        self._pools: dict[PoolId, PoolState] = {}
        self._went: OrderedDict[PoolId, str] = OrderedDict()
        """The instances of the last ones that went: what they had goes bit by bit."""
        self._sizes: set[int] = set()
        self._named: set[bytes] = set()
        self._flush_us = now_us
        self._worked_us = now_us
        self.ready_us: int | None = None
        """From when on there is something worth doing once nobody asks for anything, or None."""
        self.pressed = False
        """Whether some of it must be done even while somebody asks."""
        self._moments: dict[Tier, Moments] = {"device": Moments(), "host": Moments()}

    @property
    def wanted(self) -> Wanted:
        """What schedulers are to say of ended requests."""
        return "sums" if self._log is None else "paths"

    def wall_us(self, now_us: int) -> int:
        """Microseconds since 1970 of a moment of the daemon's clock."""
        return self._wall_us + now_us

    # What happens. All of it is on the way of somebody's answer.

    def watch(self) -> Tap:
        """Return the tap of a new directory, whose nodes' numbers say nothing of earlier ones."""
        self._ends = OrderedDict()
        return self.tap

    def tap(self, node: Node, place: Place, sign: int) -> None:
        """The tree tells of pages that come and go."""
        if sign > 0:
            return
        tier: Tier = "host" if place == HOST else "device"
        pages, reason = node.page_count, _reason(self.event)
        self.sums.evicted(tier, reason, pages)
        if self._recorder is None or not self._recorder.has_room(ITEM_BYTES):
            return
        now_us = self._clock()
        self._moments[tier].add(now_us, pages)
        pool = self._pools.get(place)
        instance = pool.instance if pool is not None else self._went.get(place, "")
        # The path that ends with a node of one id stays the same whatever splits and merges do.
        ends, base, above, at = self._ends, 0, [], node.parent
        while at is not None and at.parent is not None:
            known = ends.get(at.id)
            if known is not None:
                base = known
                break
            above.append((at.id, at.edge))
            at = at.parent
        above.reverse()
        gone = Gone(self.wall_us(now_us), tier, instance, reason, pages)
        first = node.edge[: node.space.page_key]
        work = self._eviction(
            self.chains.follow(ends, above, len(first), base), first, node.space, gone
        )
        # The edges are the tree's own bytes.
        self._offer(work, now_us, ITEM_BYTES + len(first))

    def ended(self, pool: PoolState, ended: Ended, now_us: int) -> None:
        """A request has left a scheduler."""
        problem = unsound(ended)
        if problem:
            self.refused += 1
            return
        self.sums.ended(pool.instance, ended, pool.page_size)
        if self._recorder is not None:
            work = self._access(pool, ended, now_us)
            self._offer(work, now_us, ITEM_BYTES + len(ended.tokens))

    def pool_came(self, pool: PoolState, now_us: int) -> None:
        """A pool was taken in (told once a group)."""
        self._pools[pool.place] = pool
        if self._recorder is None:
            return
        at_us = self.wall_us(now_us)
        if pool.page_bytes not in self._sizes and self._host_bytes >= pool.page_bytes:
            self._sizes.add(pool.page_bytes)
            self._offer(
                Room(
                    at_us=at_us,
                    tier="host",
                    pages=self._host_bytes // pool.page_bytes,
                    page_tokens=pool.page_size,
                    page_bytes=pool.page_bytes,
                ),
                now_us,
            )
        self._offer(_room(pool, at_us, pool.page_count), now_us)

    def pool_went(self, pool: PoolId, now_us: int) -> None:
        """A pool is gone. Repeatable, and of any rank's number."""
        gone = self._pools.pop(pool, None)
        if gone is None:
            return
        self._went[pool] = gone.instance
        if len(self._went) > POOLS_MAX:
            self._went.popitem(last=False)
        if self._recorder is not None:
            self._offer(_room(gone, self.wall_us(now_us), 0), now_us)

    # Work, in its time.

    def work(self, now_us: int, waiting: Callable[[], bool]) -> None:
        """Nobody asks for anything: do what there is, until somebody does (`waiting`)."""
        self._go_on(now_us, waiting)

    def hurry(self, now_us: int) -> None:
        """Somebody asks all the time: do as much as the queue needs, and no more."""
        fill = 0.0 if self._recorder is None else self._recorder.fill
        since_us = self.ready_us
        late = is_late(since_us, now_us)
        allowed_us = burst_us(now_us - self._worked_us, fill, late=late)
        if allowed_us:
            give_up_us = self._clock() + allowed_us
            self._go_on(now_us, lambda: self._clock() >= give_up_us)
            if late and self._recorder is not None and self._recorder.busy:
                self.ready_us = since_us  # what is left waits no less for it

    def _go_on(self, now_us: int, over: Callable[[], bool]) -> None:
        recorder, access_log = self._recorder, self._log
        if recorder is None or access_log is None:
            return
        at_us, broken_off = self.wall_us(now_us), False
        # Where somebody always asks before the queue is empty, it is not waited for that.
        due = now_us >= self._flush_us and access_log.unwritten > 0
        try:
            for _ in range(PIECES_A_TURN_MAX):
                if due and not access_log.busy:
                    access_log.begin_flush(at_us)
                    self._flush_us, due = now_us + FLUSH_US, False
                elif not recorder.step(at_us):
                    break
                if over():
                    broken_off = True
                    break
            if not recorder.busy and now_us >= self._flush_us - FLUSH_EARLY_US:
                access_log.begin_flush(at_us)
                self._flush_us = now_us + FLUSH_US
        except Exception as error:
            # The log is for people: a defect in it must not end what schedulers live on.
            log.error("the access log is given up", exc_info=error)
            self._recorder = self._log = None
            self.ready_us, self.pressed = None, False
            return
        self._worked_us = self._clock()
        self.pressed = recorder.fill >= PRESSED_FILL
        self.ready_us = self._flush_us if access_log.unwritten else None
        if recorder.busy:
            self.ready_us = now_us + again_us(recorder.fill) if broken_off else now_us

    def _offer(self, item: Frame | Work, now_us: int, nbytes: int = ITEM_BYTES) -> None:
        recorder = self._recorder
        if recorder is None or not recorder.offer(item, nbytes):
            return
        if len(recorder) == 1:
            self.ready_us = now_us + BATCH_US
        fill = recorder.fill
        if fill >= BATCH_FILL:
            self.ready_us = min(self.ready_us or now_us, now_us)
            self.pressed = fill >= PRESSED_FILL

    def close(self, now_us: int) -> None:
        """Write what is left, as far as there is time. Repeatable."""
        if self._recorder is None or self._log is None:
            return
        at_us, give_up_us = self.wall_us(now_us), self._clock() + CLOSE_US_MAX
        while self._recorder.step(at_us):
            if self._clock() >= give_up_us:
                self._recorder.give_up()
        self._log.close(at_us)

    # What is to be seen.

    def log_report(self) -> LogReport | None:
        """How the log does."""
        if self._log is None or self._recorder is None:
            return None
        log = self._log
        return LogReport(
            str(log.folder),
            log.frames_written,
            log.bytes_written,
            log.records_lost,
            len(self._recorder) + log.unwritten,
            log.last_error,
        )

    def missed(self) -> tuple[CauseReport, ...]:
        """Why tokens were computed, by instance and cause; nothing without an access log."""
        return tuple(
            CauseReport(instance, cause.value, sums.requests, sums.tokens)
            for (instance, cause), sums in sorted(self.causes.sums.items())
        )

    def hottest(self, most: int) -> tuple[HotPrefix, ...]:
        """The prefixes that saved most pages of late; none without an access log."""
        return tuple(
            HotPrefix(f"{hot.digest:016x}", hot.namespace.hex(), hot.pages, hot.hits)
            for hot in self.hot.hottest(most)
        )

    # Work, in pieces.

    def _access(self, pool: PoolState, ended: Ended, now_us: int) -> Work:
        page_bytes = pool.page_size * ended.namespace.unit_bytes
        digests = yield from self.chains.pieces(ended.tokens, page_bytes)
        namespace = self.names.digest(pool.fingerprint, ended.namespace)
        named = self._name(namespace, pool.fingerprint, ended.namespace)
        if named is not None:
            yield named
        hit = Hit(*ended.hit)
        if ended.kind == "request":
            self.hot.add(namespace, digests, hit.total // pool.page_size)
        since_us = now_us - ended.age_us
        access = Access(
            at_us=self.wall_us(since_us),
            tokens=ended.prompt_tokens,
            page_tokens=pool.page_size,
            digests=b"",
            instance=pool.instance,
            request=ended.request,
            attempt=ended.attempt,
            kind=ended.kind,
            namespace=namespace,
            tenant=ended.tenant,
            hit=hit,
            found=ended.found,
            restored=ended.restored,
            inserted=ended.inserted,
            evicted_device=self._moments["device"].between(since_us, now_us),
            evicted_host=self._moments["host"].between(since_us, now_us),
            latency_us=ended.latency_us,
            restore_us=ended.restore_us,
            lookups=ended.lookups,
            output_tokens=ended.output_tokens,
        )
        yield from self.causes.work(access, digests)
        return Pathed(access, digests)

    def _eviction(
        self, above: Generator[None, None, int], first: bytes, space: Space, gone: Gone
    ) -> Work:
        """`above`: makes the digest that stands before the `first` page that went."""
        previous = yield from above
        digest = self.chains.one(first, previous)
        fingerprint, key = space.fingerprint, space.key
        namespace = self.names.digest(fingerprint, key)
        named = self._name(namespace, fingerprint, key)
        if named is not None:
            yield named
        self.gone[namespace, digest] = gone
        self.gone.move_to_end((namespace, digest))
        if len(self.gone) > GONE_MAX:
            self.gone.popitem(last=False)
        return Eviction(
            at_us=gone.at_us,
            tier=gone.tier,
            digest=digest,
            pages=gone.pages,
            namespace=namespace,
            instance=gone.instance,
            reason=gone.reason,
            policy=POLICY,
        )

    def _name(self, namespace: bytes, fingerprint: bytes, key: NamespaceKey) -> Named | None:
        """What a namespace's digest stands for, the first time."""
        if namespace in self._named:
            return None
        self._named.add(namespace)
        return Named(namespace=namespace, fields=fields_of(fingerprint, key))


def _reason(event: Event | None) -> Reason:
    """Why pages go while an event is taken in."""
    if isinstance(event, PoolClosed | CloseMore):
        return "pool_gone"
    if isinstance(event, Asked) and isinstance(event.body, Flush):
        return "flush"
    return "capacity"


def _room(pool: PoolState, at_us: int, pages: int) -> Room:
    return Room(
        at_us=at_us,
        tier="device",
        pages=pages,
        page_tokens=pool.page_size,
        page_bytes=pool.page_bytes,
        instance=pool.instance,
    )
