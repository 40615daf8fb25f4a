"""Leases: named claims on paths, and their receipts.

Owns the lease objects and counts their claims in the tree. A receipt is a lease id, bound to the
pool (instance and generation) that was granted it, and works once.
"""

from __future__ import annotations

from collections.abc import Iterator

from directory.core import limits
from directory.core.errors import StaleReceipt, TooMany
from directory.core.host import HostSlots
from directory.core.ids import LeaseId, Owner, Place, PoolId
from directory.core.node import Node
from directory.core.place import PoolState
from directory.core.states import LEASE, LeaseEvent, LeaseState, step
from directory.core.tree import Tree


class Lease:
    """One lease. `claims`: place -> deepest node claimed there (its ancestors are held too).

    `end`: the last node of the path that was matched, resident or not; a restore follows it.
    """

    __slots__ = ("claims", "end", "id", "owner", "state")

    def __init__(self, lease_id: LeaseId, owner: Owner) -> None:
        self.id = lease_id
        self.owner = owner
        self.end: Node | None = None
        self.claims: dict[Place, Node] = {}
        self.state = step(LEASE, LeaseState.FREE, LeaseEvent.GRANT, "a new lease")

    def __repr__(self) -> str:
        at = {place: node.id for place, node in self.claims.items()}
        return f"Lease({self.id}, {self.owner.pool}/{self.owner.request}, {self.state}, {at})"


class LeaseTable:
    """Every lease that is held, by id; counts their claims in the tree."""

    def __init__(self, tree: Tree, slots: HostSlots) -> None:
        self._tree = tree
        self._slots = slots
        self._held: dict[LeaseId, Lease] = {}
        self._last: LeaseId = 0

    def grant(self, pool: PoolState, request: str, attempt: int) -> Lease:
        """Make a lease without claims; raises `TooMany` beyond the pool's limit."""
        if len(pool.leases) >= limits.LEASES_PER_POOL_MAX:
            raise TooMany(f"{len(pool.leases)} leases are held by this pool; release some")
        self._last += 1
        lease = Lease(self._last, Owner(pool.place, request, attempt))
        self._held[lease.id] = lease
        pool.leases[lease.id] = None
        return lease

    def get(self, receipt: LeaseId, pool: PoolId) -> Lease:
        """Return a pool's own held lease, or raise `StaleReceipt` and touch nothing."""
        lease = self._held.get(receipt)
        if lease is None:
            used = 0 < receipt <= self._last
            raise StaleReceipt(
                f"receipt {receipt} was released before"
                if used
                else f"receipt {receipt} was never granted in this epoch"
            )
        if lease.owner.pool != pool:
            raise StaleReceipt(f"receipt {receipt} belongs to another scheduler")
        return lease

    def owner(self, receipt: LeaseId) -> Owner | None:
        """Whose a held lease is; None for one that is held no more."""
        lease = self._held.get(receipt)
        return None if lease is None else lease.owner

    def claim(self, lease: Lease, node: Node, place: Place) -> None:
        """Hold a node's path at a place."""
        self._tree.lock(node, place)
        lease.claims[place] = node

    def follow(self, lease: Lease, end: Node) -> None:
        """Remember where the leased path ends, whether or not anything is held there."""
        end.ends += 1
        lease.end = end

    def move(self, lease: Lease, end: Node) -> None:
        """Move the claim on the owner's pool to another path (a running request grew)."""
        lease.state = step(LEASE, lease.state, LeaseEvent.MOVE, lease)
        place = lease.owner.pool
        old = lease.claims.pop(place, None)
        if end.parent is not None:
            self.claim(lease, end, place)
        if old is not None:
            self._tree.unlock(old, place)
            self._tree.prune(old)

    def release(self, pool: PoolState, lease: Lease, event: LeaseEvent) -> None:
        """Held -> released: undo every claim; the receipt is used from here on."""
        lease.state = step(LEASE, lease.state, event, lease)
        del self._held[lease.id]
        del pool.leases[lease.id]
        if lease.end is not None:
            lease.end.ends -= 1
        for place, node in lease.claims.items():
            freed = self._tree.unlock(node, place)
            if freed:
                self._slots.release(node.space.page_bytes, freed)
            if node.id in self._tree.nodes:
                self._tree.prune(node)
        if lease.end is not None and lease.end.id in self._tree.nodes:
            self._tree.prune(lease.end)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._held.values())
