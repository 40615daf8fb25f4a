"""Eviction order of one place: which unleased leaf goes first.

Owns a sorted set of keys and nothing of the tree. Deterministic: equal keys are broken by node
id, and two leaves of one place never share a tick (one operation touches one path).
"""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedSet

from directory.core.ids import NodeId

Key = tuple[int, int, NodeId]


class EvictionOrder:
    """Evictable leaves of a place, coldest class and tick first."""

    __slots__ = ("_by_key", "_keys")

    def __init__(self) -> None:
        self._keys: dict[NodeId, Key] = {}
        self._by_key: SortedSet[Key] = SortedSet()

    def put(self, node: NodeId, rank: int, tick: int) -> None:
        """Add a node or move it. `rank`: 0 goes before 1 whatever the tick."""
        key = (rank, tick, node)
        old = self._keys.get(node)
        if old == key:
            return
        if old is not None:
            self._by_key.remove(old)
        self._keys[node] = key
        self._by_key.add(key)

    def discard(self, node: NodeId) -> None:
        """Take a node out if it is there."""
        key = self._keys.pop(node, None)
        if key is not None:
            self._by_key.remove(key)

    def first(self) -> NodeId | None:
        """Return the node that goes first, or None when nothing can go."""
        return self._by_key[0][2] if self._by_key else None

    def __iter__(self) -> Iterator[NodeId]:
        return (key[2] for key in self._by_key)

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, node: NodeId) -> Key | None:
        """Return the node's present key (for checks)."""
        return self._keys.get(node)
