"""Targets: how many pages restores may take, and which.

Owns the share of held-back restores, and what a thin engine leases for them. It must never take
what running requests were promised, and never evict the prefix that is to be continued.

The share is for those who run and who wait. A request that is alone has nobody to leave anything
to: it may have nearly all there is, and what it will need, restored or computed, is given up while
the answer to its question is on its way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from directory.core.ids import NO_LEASE
from scheduler_shim.fills import Fills
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.request import Request
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.waiting import Around, Entry, Stage
from scheduler_shim.thin_tree import ThinTree

SPARED: Final = 10
"""One page of so many is no target, however alone a request is: targets come back only when their
mover is heard of, and a daemon may stand still."""


class Targets:
    """Those of one engine's held-back restores."""

    def __init__(self, around: Around, settings: Settings, fills: Fills) -> None:
        self.alone = False
        """Whether nothing runs, and one request waits at most. Each turn says it anew."""
        self._around = around
        self._settings = settings
        self._fills = fills

    def worth(self, request: Request, reach: int) -> bool:
        """Whether so few pages as lie between the row and `reach` are restored at all."""
        return reach - len(request.row) >= self._settings.restore_min_pages

    def lease(self, request: Request) -> bool:
        """Thin: lease the path now that a part of it is to be restored; in one call, so that what
        it protects is known at once. False: it is not worth it, or no answer came."""
        tree = self._around.room.tree
        if isinstance(tree, MirroredTree):
            return True
        if not self.worth(request, request.reach) or not isinstance(tree, ThinTree):
            return False
        request.reach = tree.match(request)
        return request.receipt != NO_LEASE

    def wanted(self, request: Request) -> int:
        """Pages to be restored behind a request's row: what is not on its way, as far as there is
        room for it; 0 where it is not worth it."""
        if not self.worth(request, request.reach):
            return 0
        start = len(request.row)
        ahead = self._fills.ahead(request, start)
        end = request.reach if ahead is None else min(request.reach, ahead.start)
        if end <= start:
            return 0
        wanted = min(end - start, self.room_for(request))
        if wanted < self._settings.restore_min_pages:
            self._around.count("restores_without_room")
            return 0
        return wanted

    def room_for(self, request: Request) -> int:
        """Pages that may become targets now: a share of what can be had, and nothing that running
        requests were promised; nearly all of it for a request that is alone, but so much that
        others are served while a daemon that stands still has its targets. What a thin request's
        lease will protect cannot be had any more; what it does protect is not counted as
        evictable."""
        around = self._around
        tree = around.room.tree
        there = around.room.free_count + tree.totals.evictable
        if not isinstance(tree, MirroredTree):
            there -= len(request.row) if request.receipt == NO_LEASE else 0
        elif self.alone:  # what it goes on from is its own, and not given up for its targets
            there -= min(len(request.row), tree.totals.evictable)
        reserved = around.reserved_pages()
        if self.alone and not reserved:
            return there - -(-there // SPARED)
        landing = sum(len(pages) for pages in self._fills.pages())
        share = int(self._settings.share * (there + landing)) - landing
        return min(share, there - reserved)

    def take(self, request: Request, count: int) -> array[int]:
        """Take target pages; what is evicted for them is not the prefix that they continue."""
        around = self._around
        if not isinstance(around.room.tree, MirroredTree):
            targets = around.room.allocate_up_to(count)
            around.look_for_loss()
            return targets
        if count <= around.room.free_count:
            return around.room.allocate_up_to(count)
        with self._kept(request):
            return around.room.allocate_up_to(count)

    def make_ready(self, asking: Iterable[Entry]) -> None:
        """A question is on its way: give up what a request that is alone will take for what it has
        not, wherever that comes from. What it computes besides finds free pages.

        A thin engine's daemon chooses what goes, so there it is not done ahead.
        """
        room = self._around.room
        if not self.alone or not isinstance(room.tree, MirroredTree):
            return
        for entry in list(asking):
            request = entry.request
            if entry.stage is Stage.ASKING:
                missing = request.match_pages - len(request.row)
                rest = 1 + request.all_pages - request.match_pages  # and one for what it says
                count = min(missing, self.room_for(request))
                with self._kept(request):
                    room.make_ready(count, rest)

    @contextmanager
    def _kept(self, request: Request) -> Iterator[None]:
        """Whatever is given up here, it is not what a mirrored pool has of the request's path."""
        tree = self._around.room.tree
        assert isinstance(tree, MirroredTree)
        node = tree.mirror.match(request.key, request.match_tokens).node
        if node is not None:
            tree.mirror.lock(node)
        try:
            yield
        finally:
            if node is not None:
                tree.mirror.unlock(node)
