"""Closing: the end of a pool, a bounded part of it at a time.

Owns the pools that have ended and are still in the tree. From the first step on nothing of such a
pool is matched, leased or read: it is not live, all that its copies bring is dropped, and no page
is its own any more. What is left are its leases and its entries at nodes, which stand in nobody's
way; taking out those of a large pool at once would have everybody wait for it.
"""

from __future__ import annotations

from typing import Final

from directory.core.ids import PoolId
from directory.core.lease import LeaseTable
from directory.core.node import Node
from directory.core.page_set import PageSet
from directory.core.place import PoolState
from directory.core.states import LeaseEvent
from directory.core.tree import Tree

LOOKS_A_NODE: Final = 32
"""So many span numbers may be passed over for each node that a step may take out."""


class _Left:
    """What is left of a pool. `receipts`: of its leases, for none is added any more. `slot`: the
    next span number to be looked at. `broken_off`: the span at which a step ran out of room on its
    way to the root (0: at none); the next step goes on there."""

    __slots__ = ("broken_off", "pool", "receipts", "slot")

    def __init__(self, pool: PoolState) -> None:
        self.pool = pool
        self.receipts = list(pool.leases)
        self.slot = 1
        self.broken_off = 0


class Closing:
    """Pools that end: the leases of all of them, then the nodes of the first one first.

    `step_max`: leases and nodes of one step."""

    def __init__(self, tree: Tree, leases: LeaseTable, step_max: int) -> None:
        self._tree = tree
        self._leases = leases
        self._step_max: Final = step_max
        self._left: dict[PoolId, _Left] = {}

    def begin(self, pool: PoolState) -> None:
        """A pool is closing."""
        pool.owned = PageSet()
        if pool.leases or pool.spans:
            self._left[pool.place] = _Left(pool)

    @property
    def busy(self) -> bool:
        """Whether something is left."""
        return bool(self._left)

    def holds(self, pool: PoolId) -> bool:
        """Whether something is left of a pool."""
        return pool in self._left

    def step(self) -> None:
        """Take a bounded number of leases and of nodes out."""
        room = self._step_max
        # Leases first, of whichever pool: what they claim cannot be taken out, and what they claim
        # at the host tier is in the way of others.
        for left in self._left.values():
            while left.receipts and room > 0:
                lease = self._leases.get(left.receipts.pop(), left.pool.place)
                self._leases.release(left.pool, lease, LeaseEvent.OWNER_GONE)
                room -= 1
        for left in list(self._left.values()):
            if room > 0:
                room = self._drop(left, room)
            if not left.receipts and not left.pool.spans:
                del self._left[left.pool.place]

    def _drop(self, left: _Left, room: int) -> int:
        """Take nodes out, the lowest ones of spans first; how many more there is room for. Spans
        are gone through by their numbers, which makes no list of them, and once more from the first
        one as long as there are any: what a step could not take out is a leaf the next time."""
        pool, spans = left.pool, left.pool.spans
        looks = room * LOOKS_A_NODE
        while spans and room > 0:
            if left.slot > pool.page_count:
                left.slot = 1
            going_on, left.broken_off = left.broken_off, 0
            span = spans.get(going_on or left.slot)
            looks -= 1
            if span is not None and span.last is not None:
                room = self._climb(left, span.last, room)
            if not going_on and (span is None or room > 0):
                left.slot += 1
            if looks <= 0:
                return 0
        return room

    def _climb(self, left: _Left, node: Node, room: int) -> int:
        """Take a node out if it is a leaf at the pool, and those above it that become leaves."""
        place = left.pool.place
        while room > 0 and not node.there(place).children:
            parent = node.parent
            assert parent is not None, "a root has no pages"
            self._tree.drop(node, place)
            self._tree.prune(node)
            room -= 1
            if parent.parent is None:
                break
            node = parent
            if room == 0:
                left.broken_off = node.there(place).runs[-1].span
        return room

    def __repr__(self) -> str:
        return f"<Closing {[left.pool for left in self._left.values()]}>"
