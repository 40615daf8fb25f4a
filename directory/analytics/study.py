"""One pass over records: everything that a report says, gathered at once.

Owns the order in which the parts see a record, and what is assumed for a trace: one cache that
all requests share, with `capacity` pages or without end. Memory grows with the different pages
and with requests, not with the pages that requests list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from directory.analytics.attribution import Attribution, Cause, Verdict
from directory.analytics.causes import CauseSums, extent_of
from directory.analytics.record import Access, Began, Dropped, Frame, Room
from directory.analytics.reuse import ReuseDistances
from directory.analytics.source import Source
from directory.analytics.totals import Beside, Timeline, Totals
from directory.analytics.workingset import WorkingSets

TENANTS_MAX: Final = 10_000
OTHERS: Final = "(others)"
EVERYONE: Final = "(all)"
UNKNOWN_TIER: Final = "unknown"

OnRequest = Callable[[Access, Verdict], None]


class Tenant(msgspec.Struct):
    """One line of the table of tenants. pages: different pages that it brought in first."""

    totals: Totals = msgspec.field(default_factory=Totals)
    pages: int = 0
    evicted_tokens: int = 0


class Rooms(NamedTuple):
    """Memory that a log names, at its end. Pages of `page_bytes` (None: not known)."""

    host_pages: int
    device_pages: int
    pools: int
    page_bytes: int | None


class Study:
    """Figures of one source. Mutated by `add` and `end`."""

    def __init__(
        self,
        *,
        observed: bool,
        every_block: bool = False,
        capacity: int | None = None,
        on_request: OnRequest | None = None,
    ) -> None:
        """capacity: pages of the cache assumed for a trace; None: it never evicts."""
        self.observed = observed
        self.every_block = every_block
        self.capacity = capacity
        self._on_request = on_request
        self.reuse = ReuseDistances()
        self.attribution = Attribution(self.reuse)
        self.totals = Totals()
        self.beside = Beside()
        self.timeline = Timeline()
        self.working = WorkingSets()
        self.tenants: dict[str, Tenant] = {}
        self.instances: dict[str, Totals] = {}
        self.causes = {cause: CauseSums() for cause in Cause}
        self.evicted_from: dict[str, int] = {}
        self.dropped_records = 0
        self.keyed = False
        self.first_us: int | None = None
        self.last_us = 0
        self.page_tokens = 0
        self.other_page_sizes = 0
        self._rooms: dict[tuple[str, str], Room] = {}

    @classmethod
    def of(
        cls,
        source: Source,
        *,
        capacity: int | None = None,
        on_request: OnRequest | None = None,
    ) -> Study:
        """Read a source to its end. Raises `SourceError`."""
        study = cls(
            observed=source.observed,
            every_block=source.every_block,
            capacity=capacity,
            on_request=on_request,
        )
        for frame in source.frames():
            study.add(frame)
        study.end()
        return study

    def add(self, frame: Frame) -> None:
        """Take a frame in."""
        if isinstance(frame, Access):
            self._access(frame)
            return
        self.attribution.note(frame)
        if isinstance(frame, Room):
            self._rooms[frame.tier, frame.instance] = frame
        elif isinstance(frame, Dropped):
            self.dropped_records += frame.records
        elif isinstance(frame, Began):
            self.keyed = self.keyed or frame.keyed

    def end(self) -> None:
        """Call after the last frame."""
        self.working.end(self.reuse)

    @property
    def rooms(self) -> Rooms:
        """The memory that is there at the end."""
        live = [room for room in self._rooms.values() if room.pages]
        host = sum(room.pages for room in live if room.tier == "host")
        pools = [room for room in live if room.tier == "device"]
        sizes = {room.page_bytes for room in live if room.page_tokens == self.page_tokens}
        return Rooms(
            host,
            sum(room.pages for room in pools),
            len(pools),
            sizes.pop() if len(sizes) == 1 else None,
        )

    def _access(self, access: Access) -> None:
        if access.tokens <= 0:
            return
        if not self.page_tokens:
            self.page_tokens = access.page_tokens
        if access.page_tokens != self.page_tokens:
            # Pages of another size are another kind of thing: one curve cannot speak of both.
            self.other_page_sizes += 1
            self._beside(access)
            if access.kind == "request":
                self._sum(access, access.hit.total // access.page_tokens, 0)
            return
        path, size = access.path, access.page_tokens
        extent = extent_of(access, path) if self.observed else len(path)
        hittable = len(path) if self.every_block else min(access.hittable, len(path))
        counts = access.kind == "request"
        self._beside(access)
        self.working.before(access.at_us, self.reuse)
        touched = self.reuse.add(
            path,
            namespace=access.namespace,
            extent=extent,
            blocks=access.blocks,
            hittable=hittable,
            counts=counts,
        )
        if counts:
            if self.observed:
                hit, simulated = access.hit.total // size, 0
            else:
                known = touched.walk.known
                held = known if self.capacity is None else touched.hits(self.capacity)
                hit = min(held, hittable)
                simulated = min(hit * size, access.tokens)
            verdict = self.attribution.judge(access, touched.walk, hit, hittable)
            self._count(access, hit, simulated, verdict, max(0, extent - touched.walk.known))
        self.attribution.touch(access, extent)

    def _beside(self, access: Access) -> None:
        self.first_us = access.at_us if self.first_us is None else min(self.first_us, access.at_us)
        self.last_us = max(self.last_us, access.at_us)
        self.beside.lookups += access.lookups
        self.beside.retries += access.kind == "retry"
        self.beside.recomputations += access.kind == "recompute"
        self.beside.probes += access.kind == "probe"

    def _count(
        self, access: Access, hit: int, simulated: int, verdict: Verdict, new_pages: int
    ) -> None:
        tenant = self._sum(access, hit, simulated)
        tenant.pages += new_pages
        if verdict.cause is not None:
            self.causes[verdict.cause].requests += 1
        for part in verdict.parts:
            self.causes[part.cause].tokens += part.tokens
            if part.cause is Cause.EVICTED:
                tenant.evicted_tokens += part.tokens
                self._evicted(verdict, part.tokens)
        if self._on_request is not None:
            self._on_request(access, verdict)

    def _evicted(self, verdict: Verdict, tokens: int) -> None:
        if self.observed:
            tier = (verdict.gone.tier if verdict.gone else "") or UNKNOWN_TIER
            self.evicted_from[tier] = self.evicted_from.get(tier, 0) + tokens

    def _sum(self, access: Access, hit: int, simulated: int) -> Tenant:
        self.totals.add(access, hit, simulated)
        self.timeline.add(access, hit, simulated)
        tenant = self._tenant(access)
        tenant.totals.add(access, hit, simulated)
        if access.instance:
            self.instances.setdefault(access.instance, Totals()).add(access, hit, simulated)
        return tenant

    def _tenant(self, access: Access) -> Tenant:
        name = access.tenant or access.namespace.hex() or EVERYONE
        tenant = self.tenants.get(name)
        if tenant is None:
            if len(self.tenants) >= TENANTS_MAX:
                name = OTHERS
            tenant = self.tenants.setdefault(name, Tenant())
        return tenant
