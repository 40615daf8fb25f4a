"""Eviction order of one place: which unleased leaf goes first.

Owns the entries and `Residency.filed`, and nothing else of the tree. A leaf's key is its class and
its last use: at the host, mirrors of pool-resident pages go before others. Deterministic: two
leaves of one place never share a tick, for one operation touches one path.

Entries are looked at when somebody asks who goes first: a leaf that is only used again, leased or
released costs nothing. Each residency has at most one entry that counts, `filed`, and it is not
above its key; the others are outdated. Entries are numbers in arrays, 16 bytes each (ADR 14).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Final

from directory.core.ids import HOST, NodeId, Place
from directory.core.node import NOT_FILED, RESIDENT, Node, Residency

SECOND_CLASS: Final = 1 << 62
"""Above every tick."""
CHUNK: Final = 512
OUTDATED_MIN: Final = 64
"""So many outdated entries, and one for each that counts, may be there before they are dropped."""


def rank(node: Node, place: Place) -> int:
    """Eviction class: at the host, mirrors of pool-resident pages (0) go before others (1)."""
    if place == HOST:
        at = node.here
        while at is not None:
            if at.place > 0:  # a pool: `ids.is_pool`, without the call
                return 0
            at = at.next
        return 1
    return 0


def evictable(residency: Residency) -> bool:
    """Whether these are the last pages of a path at their place, and no lease protects them."""
    return not residency.children and not residency.locks and residency.state is RESIDENT


def key_of(node: Node, residency: Residency) -> int:
    """What decides when a leaf goes: the lowest one first."""
    return residency.tick + SECOND_CLASS if rank(node, residency.place) else residency.tick


class EvictionOrder:
    """Entries (key, node) of one place in the order of their keys, in chunks."""

    __slots__ = ("_chunks", "_lasts", "count", "outdated", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.count = 0
        self.outdated = 0
        self._chunks: list[tuple[array[int], array[int]]] = []
        self._lasts: list[int] = []
        """No entry of the chunk is above; those of later chunks are not below."""

    def file(self, node: Node, residency: Residency) -> None:
        """Have an entry for a leaf, not above its key."""
        key = key_of(node, residency)
        filed = residency.filed
        if filed == NOT_FILED or key < filed:
            self.outdated += filed != NOT_FILED
            residency.filed = key
            self._add(key, node.id)

    def forget(self, residency: Residency, nodes: Mapping[NodeId, Node]) -> None:
        """A residency has gone, or what it has filed counts no more."""
        if residency.filed != NOT_FILED:
            residency.filed = NOT_FILED
            self.outdated += 1
            if self.outdated > self.count // 2 + OUTDATED_MIN:
                self._drop_outdated(nodes)

    def first(self, nodes: Mapping[NodeId, Node]) -> Node | None:
        """Return the leaf that goes first, or None when nothing can go. `nodes`: the tree's."""
        while self._chunks:
            keys, ids = self._chunks[0]
            key, node = keys[0], nodes.get(ids[0])
            residency = None if node is None else node.at(self.place)
            if node is None or residency is None or residency.filed != key:
                self.outdated -= 1
                self._pop()
            elif not evictable(residency):
                residency.filed = NOT_FILED
                self._pop()
            elif key_of(node, residency) == key:
                return node
            else:  # used since: its key is higher now
                self._pop()
                residency.filed = NOT_FILED
                self.file(node, residency)
        return None

    def leaves(self, nodes: Mapping[NodeId, Node]) -> list[NodeId]:
        """Return all that can go, in order. Changes nothing."""
        found: list[tuple[int, NodeId]] = []
        for key, node_id in self:
            node = nodes.get(node_id)
            residency = None if node is None else node.at(self.place)
            if node is None or residency is None or residency.filed != key:
                continue
            if evictable(residency):
                found.append((key_of(node, residency), node_id))
        return [node_id for _, node_id in sorted(set(found))]

    def __iter__(self) -> Iterator[tuple[int, NodeId]]:
        for keys, ids in self._chunks:
            yield from zip(keys, ids, strict=True)

    # Private.

    def _add(self, key: int, node_id: NodeId) -> None:
        self.count += 1
        chunks, lasts = self._chunks, self._lasts
        if not lasts or key >= lasts[-1]:
            if not chunks or len(chunks[-1][0]) >= CHUNK:
                chunks.append((array("Q"), array("Q")))
                lasts.append(key)
            keys, ids = chunks[-1]
            keys.append(key)
            ids.append(node_id)
            lasts[-1] = key
            return
        at = bisect_left(lasts, key)
        keys, ids = chunks[at]
        place = bisect_right(keys, key)
        keys.insert(place, key)
        ids.insert(place, node_id)
        if len(keys) > 2 * CHUNK:
            chunks.insert(at, (keys[:CHUNK], ids[:CHUNK]))
            lasts.insert(at, keys[CHUNK - 1])
            del keys[:CHUNK], ids[:CHUNK]

    def _pop(self) -> None:
        self.count -= 1
        keys, ids = self._chunks[0]
        if len(keys) == 1:
            del self._chunks[0], self._lasts[0]
        else:
            del keys[0], ids[0]

    def _drop_outdated(self, nodes: Mapping[NodeId, Node]) -> None:
        entries = list(self)
        self._chunks, self._lasts = [], []
        self.count = self.outdated = 0
        known: set[tuple[int, NodeId]] = set()
        for entry in entries:
            node = nodes.get(entry[1])
            residency = None if node is None else node.at(self.place)
            if residency is not None and residency.filed == entry[0] and entry not in known:
                known.add(entry)
                self._add(*entry)

    def __repr__(self) -> str:
        return f"<EvictionOrder of {self.place}: {self.count} entries, {self.outdated} outdated>"
