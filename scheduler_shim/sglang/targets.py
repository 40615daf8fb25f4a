"""Targets: how many pages restores may take, and which.

Owns the share of held-back restores. It must never take what running requests were promised, and
never evict the prefix that is to be continued.
"""

from __future__ import annotations

from array import array

from directory.core.ids import NO_LEASE
from scheduler_shim.fills import Fills
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.request import Request
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.waiting import Around


class Targets:
    """Those of one engine's held-back restores."""

    def __init__(self, around: Around, settings: Settings, fills: Fills) -> None:
        self._around = around
        self._settings = settings
        self._fills = fills

    def worth(self, request: Request, reach: int) -> bool:
        """Whether so few pages as lie between the row and `reach` are restored at all."""
        return reach - len(request.row) >= self._settings.restore_min_pages

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
        requests were promised. What a thin request's lease will protect cannot be had any more;
        what it does protect is not counted as evictable."""
        around = self._around
        tree = around.room.tree
        landing = sum(len(pages) for pages in self._fills.pages())
        there = around.room.allocator.free_count + tree.totals.evictable
        if request.receipt == NO_LEASE and not isinstance(tree, MirroredTree):
            there -= len(request.row)
        share = int(self._settings.share * (there + landing)) - landing
        return min(share, there - around.reserved_pages())

    def take(self, request: Request, count: int) -> array[int]:
        """Take target pages; what is evicted for them is not the prefix that they continue."""
        around = self._around
        tree = around.room.tree
        if not isinstance(tree, MirroredTree):
            targets = around.room.allocate_up_to(count)
            around.look_for_loss()
            return targets
        node = tree.mirror.match(request.key, request.match_tokens).node
        if node is not None:
            tree.mirror.lock(node)
        try:
            return around.room.allocate_up_to(count)
        finally:
            if node is not None:
                tree.mirror.unlock(node)
