"""A scheduler's room: its free pages, its tree, and who else still has a page.

Owns the allocator, the spans, the tree of either mode and the pages that are out of use. Every
page that leaves the tree goes through here, so that it is freed after its span's word has moved
on and never before. It knows rows only when it must find out what they use.

What is given up for somebody who takes pages from here does not go back to the allocator before:
where that is a device's, giving back and taking again are twenty calls of the device's, and a page
whose word has moved on is as good as a free one. As long as nobody has taken it, it is *spare*:
free for whoever takes pages here, and evictable for whoever knows the allocator alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from directory.core.actions import Totals
from directory.core.ids import NO_LEASE
from scheduler_shim.client import DaemonClient
from scheduler_shim.mirror import Mirror
from scheduler_shim.own_tree import MirroredTree, OwnTree
from scheduler_shim.pools import Allocator, Pool
from scheduler_shim.request import Request
from scheduler_shim.spans import SpanTable
from scheduler_shim.thin_tree import ThinTree


class PageCounts(NamedTuple):
    """Pages by who has them: nobody, the tree, rows alone, movers, and nobody ever again."""

    free: int
    tree: int
    held: int
    landing: int
    quarantined: int


class Room:
    """Pages of one pool. `on_evicted` is called after every eviction, before anything is taken:
    a thin one asks the daemon, and whoever uses this must learn at once when it is lost.
    `before_giving_up` is called before the tree is asked to give anything up. `foreign` counts
    pages that others took from beneath the allocator and that no row here has."""

    def __init__(
        self,
        pool: Pool,
        client: DaemonClient | None,
        *,
        allocator: Allocator,
        thin: bool,
        before_giving_up: Callable[[], object],
        on_evicted: Callable[[], object],
        count: Callable[[str, int], None],
        foreign: Callable[[], int] = lambda: 0,
    ) -> None:
        self.allocator = allocator
        self._pool = pool
        self._foreign = foreign
        self._before_giving_up = before_giving_up
        self._on_evicted = on_evicted
        self._count = count
        self._spans = SpanTable(pool.words, pool.page_count)
        self._quarantined = array("I")
        self._spare = array("I")  # given up by a mirror, and neither taken nor given back yet
        self._movers_gone = False  # and this process may write yet, for one that is dead
        self.on_quiet: Callable[[], object] = lambda: None
        """Called when no mover has the pool any more and nothing is written for one, before the
        quarantine is released."""
        self.tree: OwnTree
        if thin and client is not None:
            self.tree = ThinTree(self._spans, client)
        else:
            self.tree = MirroredTree(self._new_mirror(), client)

    @property
    def usable_pages(self) -> int:
        """Pages of the pool that are not quarantined."""
        return self._pool.page_count - len(self._quarantined)

    @property
    def quarantined(self) -> array[int]:
        """Pages that somebody may still write into; to be looked at only."""
        return self._quarantined

    @property
    def free_count(self) -> int:
        """Pages that can be taken without giving anything up."""
        return self.allocator.free_count + len(self._spare)

    @property
    def totals(self) -> Totals:
        """What whoever knows the allocator alone can have evicted, and what is protected."""
        totals = self.tree.totals
        return Totals(totals.evictable + len(self._spare), totals.protected)

    def allocate(self, count: int) -> array[int] | None:
        """Take `count` pages, evicting where there are too few; all or none."""
        self._give_up(count - self.free_count, keep=True)
        return self._take(count)

    def allocate_up_to(self, count: int) -> array[int]:
        """Take as many of `count` pages as there is room for."""
        self._make_room(count - self.free_count)
        return self._take(min(count, self.free_count)) or array("I")

    def make_ready(self, count: int, leave: int) -> None:
        """Give up now what is short of `count` pages that somebody is about to take here, and of
        `leave` more for whoever knows the allocator alone, which get there by `sent`."""
        self._make_room(count + leave - self.free_count)

    def sent(self, row: array[int], targets: bytes) -> None:
        """A restore is under way, behind a row: do meanwhile what would have to be done when it has
        landed. What is spare goes to whoever computes the rest, and where the path lies is found.
        """
        self._free_spare(len(self._spare))
        self.allocator.expect(row.tobytes() + targets)

    def _make_room(self, short: int) -> None:
        """Give up `short` pages, or as many as there are."""
        if isinstance(self.tree, MirroredTree):  # which gives up all of them or none
            short = min(short, self.tree.totals.evictable)
        self._give_up(short, keep=True)

    def _take(self, count: int) -> array[int] | None:
        """Take `count` of the free pages, spare ones first; all or none."""
        spare = min(count, len(self._spare))
        more = self.allocator.allocate(count - spare) if count > spare else array("I")
        if more is None:
            return None
        cut = len(self._spare) - spare
        taken = self._spare[cut:]
        del self._spare[cut:]
        return taken + more

    def free(self, pages: bytes | array[int]) -> int:
        """Give pages back (packed or not); returns how many."""
        if not pages:
            return 0
        self.allocator.free(pages)
        return len(pages) // 4 if isinstance(pages, bytes) else len(pages)

    def evict(self, count: int) -> int:
        """Free at most `count` pages, what was given up before first, then unprotected ones of the
        tree, coldest first; returns how many."""
        freed = self._free_spare(count)
        return freed + self._give_up(count - freed, keep=False)

    def _give_up(self, count: int, *, keep: bool) -> int:
        """Give up at most `count` pages of the tree and free them; with `keep` a mirror's are spare
        instead. A thin tree's are not: if its daemon is lost now, whatever no row has is freed."""
        if count <= 0:
            return 0
        self._before_giving_up()
        given = self.tree.evict(count)
        if keep and isinstance(self.tree, MirroredTree):
            self._spare.frombytes(given)
        else:
            self.free(given)
        self._count("pages_evicted", len(given) // 4)
        self._on_evicted()
        return len(given) // 4

    def _free_spare(self, count: int) -> int:
        """Give at most `count` spare pages back to the allocator; returns how many."""
        cut = len(self._spare) - min(max(count, 0), len(self._spare))
        spare = self._spare[cut:]
        del self._spare[cut:]
        return self.free(spare)

    def flush(self) -> None:
        """Give up every page of the tree that no request uses."""
        self._free_spare(len(self._spare))
        self._before_giving_up()
        self._count("pages_flushed", self.free(self.tree.flush()))
        self._on_evicted()

    def quarantine(self, pages: array[int]) -> None:
        """Keep pages out of use: somebody may still write into them."""
        self._quarantined.extend(pages)

    def release_quarantine(self) -> int:
        """No mover writes into quarantined pages any more; returns how many are free again. Where
        this process may write into them yet, for a mover that is dead, `release_late` has them."""
        self._movers_gone = True
        return self.release_late()

    @property
    def late(self) -> bool:
        """Whether `release_late` has anything to look at."""
        return self._movers_gone

    def release_late(self) -> int:
        """Free what no mover has any more once this process does not write into it either, which
        is not waited for; returns how many pages."""
        if not self._movers_gone or not self._pool.at_rest:
            return 0
        self._movers_gone = False
        self.on_quiet()
        pages, self._quarantined = self._quarantined, array("I")
        return self.free(pages)

    def lose_daemon(self, requests: Iterable[Request]) -> None:
        """Go on without a daemon. `requests`: all that hold a row.

        A mirror simply stays. In place of a thin tree comes a mirror: the pool word voids every
        read of the pool, what running rows have of the tree is put into the mirror and protected
        there, and all other pages are free.
        """
        self._movers_gone = False  # what is quarantined now was the last daemon's mover's
        if isinstance(self.tree, MirroredTree):
            self.tree.client = None
            return
        self._spans.give_up_all()
        self.tree = tree = MirroredTree(self._new_mirror(), None)
        used = set(self._quarantined)
        for request in requests:
            used.update(request.row)
            if request.tree_pages:
                tree.publish(request, request.tree_pages, self._pool.advance(), keep=True)
        self.free(array("I", (page for page in self.allocator.used() if page not in used)))

    def return_to(self, client: DaemonClient, requests: Iterable[Request], *, thin: bool) -> bool:
        """Go on with a daemon that knows what the mirror holds. `requests`: all that hold a row.

        A mirror simply reports from now on. A thin tree takes a mirror's place once every row's
        part of the tree is leased; False, with everything as before, when that was not answered.
        """
        tree = self.tree
        assert isinstance(tree, MirroredTree)
        if not thin:
            tree.client, tree.returning = client, None
            return True
        rows = [request for request in requests if request.tree_pages]
        thin_tree = ThinTree(self._spans, client)
        for request in rows:
            if not client.lost and not thin_tree.protect(request, self._pool.advance()):
                client.lose("no answer to Insert: a row is not protected")
        if client.lost:
            for request in rows:
                request.receipt = NO_LEASE
            return False
        for request in rows:
            request.node = None
        self._free_spare(len(self._spare))
        self.tree = thin_tree
        return True

    def counts(self, requests: Collection[Request], landing: Collection[array[int]]) -> PageCounts:
        """Where the pages are; the sum is the pool's page count whenever nothing is amiss."""
        return PageCounts(
            self.free_count,
            self.tree.pages,
            sum(len(request.row) - request.tree_pages for request in requests) + self._foreign(),
            sum(len(pages) for pages in landing),
            len(self._quarantined),
        )

    def check(self, requests: Collection[Request], landing: Collection[array[int]]) -> list[str]:
        """Return what does not hold: conservation of pages, the tree, the spans."""
        found: list[str] = []
        counts = self.counts(requests, landing)
        if sum(counts) != self._pool.page_count:
            found.append(f"pages: {counts} do not add up to {self._pool.page_count}")
        mine = [page for r in requests for page in r.row[r.tree_pages :]]
        mine += [page for pages in landing for page in pages]
        mine += self._quarantined
        mine += self._spare
        if isinstance(self.tree, MirroredTree):
            mine += self.tree.mirror.page_list()
        free = set(range(self._pool.page_count)).difference(self.allocator.used())
        if len(set(mine)) != len(mine) or not free.isdisjoint(mine):
            found.append("pages: a page is held twice, or held and free")
        if any(not free.isdisjoint(r.row) for r in requests):
            found.append("pages: a row has a page that is free")
        return found + self.tree.check()

    def _new_mirror(self) -> Mirror:
        return Mirror(
            self._spans,
            fingerprint=self._pool.fingerprint,
            page_size=self._pool.page_size,
            page_count=self._pool.page_count,
            page_bytes=self._pool.page_bytes,
        )

    def __repr__(self) -> str:
        return f"<Room {self.free_count} free, {self.tree.pages} in the tree>"
