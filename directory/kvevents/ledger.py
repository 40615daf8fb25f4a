"""The ledger: which block hashes each scheduler has in its pool or can load from the host tier.

Owns the pages and who holds them, fed by records; it tells what changed between two calls of
`settle`, for each scheduler and tier, as events in the order that consumers need: removed before
stored, parents before children, and what is removed in one tier is stored again for the tier that
is left. Pages of namespaces whose hashes are equal (extra keys, weight epochs) are one page with
several holders, and it is removed when the last one is gone. It knows no socket and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from directory.core.ids import HOST, NodeId, Place, PoolId
from directory.kvevents.blocks import CPU, GPU, Page, Stored, chains
from directory.kvevents.hashing import chain, published, seed
from directory.kvevents.records import (
    AnyRecord,
    Begin,
    Changed,
    Closed,
    Forget,
    Opened,
    SpaceNamed,
    Whole,
)

Holder = tuple[Place, int]
"""A place and the number of a namespace."""
SAME_MAX: Final = 65_536
ROOT: Final[tuple[bytes, int]] = (b"", 0)


class Change(NamedTuple):
    """What a scheduler lost and got since it was last asked; by medium."""

    removed: dict[str, list[int]]
    stored: list[Stored]


class Family:
    """Pools of one fingerprint: the pages that any of them may load, by hash."""

    def __init__(self) -> None:
        self.pages: dict[int, Page] = {}
        self.touched: dict[int, tuple[Page, tuple[Holder, ...]]] = {}
        """Pages of which a holder came or went, and who held them before."""


class Ledger:
    """Everything that was told so far. `whole`: not in the middle of being told everything."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.whole = False
        self.open: dict[PoolId, Opened] = {}
        self._families: dict[int, Family] = {}
        self._spaces: dict[int, SpaceNamed] = {}
        self._seeds: dict[int, bytes] = {}
        self._ends: dict[NodeId, tuple[bytes, int]] = {}
        """The digest of the last page of a node's path, and how many pages that has."""
        self._same: dict[tuple[Holder, ...], tuple[Holder, ...]] = {}
        """Equal lists of holders are one object: there may be millions of pages."""

    def __len__(self) -> int:
        return sum(len(family.pages) for family in self._families.values())

    def take(self, record: AnyRecord) -> None:
        """Take in one record."""
        match record:
            case Changed():
                self._change(record)
            case SpaceNamed():
                self._spaces[record.number] = record
                self._seeds[record.number] = seed(record.cache_salt, record.adapter)
            case Opened():
                self.open[record.pool] = record
            case Closed():
                self.open.pop(record.pool, None)
            case Forget():
                self._forget(record)
            case Begin():
                self._begin()
            case Whole():
                self.whole = True

    def settle(self) -> dict[PoolId, Change]:
        """Return what changed for each open pool since the last call."""
        changes: dict[PoolId, Change] = {}
        for number, family in self._families.items():
            if family.touched:
                pools = [pool for pool, o in self.open.items() if o.family == number]
                self._settle(family, pools, changes)
                family.touched.clear()
        return changes

    def snapshot(self, pool: PoolId) -> list[Stored]:
        """Return everything that an open pool has or can load, parents first.

        Its own pool last: a viewer shows the medium that it was told last.
        """
        family = self._families.get(self.open[pool].family)
        stored: list[Stored] = []
        if family is None:
            return stored
        for place, medium in ((HOST, CPU), (pool, GPU)):
            stored += self.stored(
                (page, medium)
                for page in family.pages.values()
                if any(holder[0] == place for holder in page.holders)
            )
        return stored

    def touched(self) -> set[int]:
        """Return the hashes of which a holder came or went since the last `settle`."""
        return {block for family in self._families.values() for block in family.touched}

    def blocks(self) -> set[int]:
        """Return every hash that is held anywhere."""
        return {block for family in self._families.values() for block in family.pages}

    def find(self, block: int, page_size: int) -> tuple[Page | None, set[Place]]:
        """Return a page of this hash and where it is, in all families with pages of one size."""
        found: Page | None = None
        places: set[Place] = set()
        for family in self._families.values():
            page = family.pages.get(block)
            if page is not None and self._spaces[page.space].page_size == page_size:
                found = page
                places.update(place for place, _ in page.holders)
        return found, places

    def stored(self, pages: Iterable[tuple[Page, str]]) -> list[Stored]:
        """Return the events that tell of pages and what each is in, parents first."""
        return chains(pages, self._spaces)

    # Private.

    def _change(self, record: Changed) -> None:
        space = self._spaces[record.space]
        page_key = space.page_size * space.unit_bytes
        digest, depth = self._ends[record.base] if record.base else ROOT
        if not record.base:
            digest = self._seeds[record.space]
        for node, edge in record.above:
            digest = chain(digest, edge, page_key)[-1]
            depth += len(edge) // page_key
            self._ends[node] = digest, depth
        digests = chain(digest, record.edge, page_key)
        self._ends[record.node] = digests[-1], depth + len(digests)
        family = self._families.setdefault(space.family, Family())
        parent = published(digest) if depth else None
        holder = (record.place, record.space)
        for at, digest in enumerate(digests):
            block = published(digest)
            page = family.pages.get(block)
            if page is None:
                if not record.here:
                    parent = block
                    continue
                before = family.touched.get(block)
                page = (
                    Page(block, parent, depth + at, record.edge, at)
                    if before is None
                    else (before[0])
                )
                family.pages[block] = page
            self._hold(family, page, holder, here=record.here)
            parent = block

    def _hold(self, family: Family, page: Page, holder: Holder, *, here: bool) -> None:
        held = page.holders
        if (holder in held) == here:
            return
        family.touched.setdefault(page.block, (page, held))
        now = (*held, holder) if here else tuple(other for other in held if other != holder)
        page.holders = self._same.setdefault(now, now)
        if now:
            page.space = now[0][1]
        else:
            del family.pages[page.block]

    def _settle(self, family: Family, pools: list[PoolId], changes: dict[PoolId, Change]) -> None:
        news: dict[PoolId, _News] = {pool: _News() for pool in pools}
        for page, held in family.touched.values():
            before = {place for place, _ in held}
            now = {place for place, _ in page.holders}
            if before == now:
                continue
            for pool in pools if (HOST in before) != (HOST in now) else (before ^ now):
                if pool in news:
                    news[pool].tell(page, pool, before, now)
        for pool, new in news.items():
            if new.any:
                gpu, cpu = ((page, GPU) for page in new.gpu), ((page, CPU) for page in new.cpu)
                changes[pool] = Change(new.removed, self.stored(cpu) + self.stored(gpu))

    def _forget(self, record: Forget) -> None:
        for node in record.nodes:
            self._ends.pop(node, None)
        for number in record.spaces:
            self._spaces.pop(number, None)
            self._seeds.pop(number, None)
        if len(self._same) > SAME_MAX:
            self._same.clear()

    def __repr__(self) -> str:
        return f"<Ledger {len(self)} pages, {len(self.open)} pools, whole={self.whole}>"


class _News:
    """What one pool is to be told of one settlement."""

    def __init__(self) -> None:
        self.removed: dict[str, list[int]] = {}
        self.gpu: list[Page] = []
        self.cpu: list[Page] = []

    @property
    def any(self) -> bool:
        return bool(self.removed or self.gpu or self.cpu)

    def tell(self, page: Page, pool: PoolId, before: set[Place], now: set[Place]) -> None:
        """Removed from a tier, new in one; or still there, which a viewer has to be told again."""
        lost = False
        for place, medium in ((pool, GPU), (HOST, CPU)):
            if place in before and place not in now:
                self.removed.setdefault(medium, []).append(page.block)
                lost = True
        for place, pages in ((pool, self.gpu), (HOST, self.cpu)):
            if place in now and (lost or place not in before):
                pages.append(page)
