"""Eviction order of one place: which unleased leaf goes first.

Owns the keys and nothing of the tree. Deterministic: equal keys are broken by node id, and two
leaves of one place never share a tick (one operation touches one path). A leaf that is only used
again costs nothing but its new key: entries are put right when somebody asks which one is first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sortedcontainers import SortedList

from directory.core.ids import NodeId

Key = tuple[int, int, NodeId]

OUTDATED_MIN: Final = 64
"""So many outdated entries, and one for each leaf, may be there before they are made anew."""


class EvictionOrder:
    """Evictable leaves of a place, coldest class and tick first.

    For each of them there is at least one entry that is not above its key; others are outdated.
    """

    __slots__ = ("_entries", "_keys")

    def __init__(self) -> None:
        self._keys: dict[NodeId, Key] = {}
        self._entries: SortedList[Key] = SortedList()

    def put(self, node: NodeId, rank: int, tick: int) -> None:
        """Add a node or move it. `rank`: 0 goes before 1 whatever the tick."""
        keys = self._keys
        key = (rank, tick, node)
        old = keys.get(node)
        keys[node] = key
        if old is None or key < old:
            self._entries.add(key)
            if len(self._entries) > 2 * len(keys) + OUTDATED_MIN:
                self._entries = SortedList(keys.values())

    def discard(self, node: NodeId) -> None:
        """Take a node out if it is there."""
        self._keys.pop(node, None)

    def first(self) -> NodeId | None:
        """Return the node that goes first, or None when nothing can go."""
        entries, keys = self._entries, self._keys
        while entries:
            entry = entries[0]
            key = keys.get(entry[2])
            if key is None:
                entries.pop(0)
            elif key == entry:
                return entry[2]
            else:
                entries.pop(0)
                entries.add(key)  # used since: its key is higher now
        return None

    def __iter__(self) -> Iterator[NodeId]:
        return (key[2] for key in sorted(self._keys.values()))

    def __len__(self) -> int:
        return len(self._keys)

    def key(self, node: NodeId) -> Key | None:
        """Return the node's present key (for checks)."""
        return self._keys.get(node)
