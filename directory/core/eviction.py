"""Eviction order of one place: which unleased leaf goes first.

Owns the entries and `Residency.filed`, and nothing else of the tree. A leaf's key is its class and
its last use. At the host there are two classes, mirrors of pool-resident pages and only copies: of
the coldest leaf of each the mirror goes, unless the only copy is `ONLY_COPY_SPARED` times as old
(ADR 15). Deterministic: two leaves of one place never share a tick, for one operation touches one
path.

Entries are looked at when somebody asks who goes first: a leaf that is only used again, leased or
released costs nothing then. It costs later: the first question after many leaves were used files
each of them anew, 22 ms for 12,000 and 88 ms for 50,000 in one step (measured; not bounded). Each
residency has at most one entry that counts, `filed`, which is not above its key and of its class;
the others are outdated. Entries are numbers in arrays, 16 bytes each (ADR 14).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from directory.core.ids import HOST, NodeId, Place
from directory.core.node import NOT_FILED, RESIDENT, Node, Residency

SECOND_CLASS: Final = 1 << 62
"""Above every tick."""
ONLY_COPY_SPARED: Final = 4
"""At the host, the only copy of a page outlives mirrors that are less than this much younger."""
CHUNK: Final = 512
OUTDATED_MIN: Final = 64
"""So many outdated entries, and one for each that counts, may be there before they are dropped."""
LOOKS: Final = 8
"""From then on each entry that becomes outdated has so many looked at, one after the other: the
round is over, and every outdated entry dropped, before they are an eighth more."""


def rank(node: Node, place: Place) -> int:
    """Eviction class: at the host, mirrors of pool-resident pages (0) and only copies (1)."""
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
    """What decides when a leaf goes: within a class the lowest one first."""
    return residency.tick + SECOND_CLASS if rank(node, residency.place) else residency.tick


def mirror_goes(mirror_tick: int, only_tick: int, now: int) -> bool:
    """Whether of a mirror and an only copy, last used then, the mirror goes."""
    return ONLY_COPY_SPARED * (now - mirror_tick) >= now - only_tick


class EvictionOrder:
    """Entries (key, node) of one place in the order of their keys, in chunks."""

    __slots__ = ("_chunks", "_lasts", "_next", "count", "outdated", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.count = 0
        self.outdated = 0
        self._chunks: list[tuple[array[int], array[int]]] = []
        self._lasts: list[int] = []
        """No entry of the chunk is above; those of later chunks are not below."""
        self._next = 0
        """Entries from this key on are looked at next for outdated ones."""

    def file(self, node: Node, residency: Residency, nodes: Mapping[NodeId, Node]) -> None:
        """Have an entry for a leaf, not above its key and of its class."""
        key = key_of(node, residency)
        filed = residency.filed
        if filed == NOT_FILED or key < filed or filed < SECOND_CLASS <= key:
            residency.filed = key
            self._add(key, node.id)
            if filed != NOT_FILED:
                self._outdate(nodes)

    def forget(self, residency: Residency, nodes: Mapping[NodeId, Node]) -> None:
        """A residency has gone, or what it has filed counts no more."""
        if residency.filed != NOT_FILED:
            residency.filed = NOT_FILED
            self._outdate(nodes)

    def first(self, nodes: Mapping[NodeId, Node], now: int = 0) -> Node | None:
        """Return the leaf that goes first, or None when nothing can go. `nodes`: the tree's; `now`:
        a tick above all that were used (which the host needs)."""
        mirror = self._coldest(nodes, 0)
        if self.place != HOST:
            return mirror
        only = self._coldest(nodes, SECOND_CLASS)
        if mirror is None or only is None:
            return only if mirror is None else mirror
        first = mirror_goes(mirror.there(HOST).tick, only.there(HOST).tick, now)
        return mirror if first else only

    def leaves(self, nodes: Mapping[NodeId, Node], now: int = 0) -> list[NodeId]:
        """Return all that can go, in order. Changes nothing."""
        found: set[tuple[int, NodeId]] = set()
        for key, node_id in self:
            node = nodes.get(node_id)
            residency = None if node is None else node.at(self.place)
            if node is None or residency is None or residency.filed != key:
                continue
            if evictable(residency):
                found.add((key_of(node, residency), node_id))
        mirrors = deque(sorted(entry for entry in found if entry[0] < SECOND_CLASS))
        only = deque(sorted(entry for entry in found if entry[0] >= SECOND_CLASS))
        listed: list[NodeId] = []
        while mirrors or only:
            at_first = mirrors and (
                not only or mirror_goes(mirrors[0][0], only[0][0] - SECOND_CLASS, now)
            )
            listed.append((mirrors if at_first else only).popleft()[1])
        return listed

    def __iter__(self) -> Iterator[tuple[int, NodeId]]:
        for keys, ids in self._chunks:
            yield from zip(keys, ids, strict=True)

    # Private.

    def _coldest(self, nodes: Mapping[NodeId, Node], low: int) -> Node | None:
        """The leaf of the lowest key of a class, of which `low` is the lowest that there may be."""
        while (at := bisect_left(self._lasts, low)) < len(self._lasts):
            entry = bisect_left(self._chunks[at][0], low)
            if entry == len(self._chunks[at][0]):  # the last ones of the chunk have gone
                at, entry = at + 1, 0
                if at == len(self._chunks):
                    break
            keys, ids = self._chunks[at]
            key, node = keys[entry], nodes.get(ids[entry])
            if key >= low + SECOND_CLASS:
                break
            residency = None if node is None else node.at(self.place)
            if node is None or residency is None or residency.filed != key:
                self.outdated -= 1
                self._pop(at, entry)
            elif not evictable(residency):
                residency.filed = NOT_FILED
                self._pop(at, entry)
            elif key_of(node, residency) == key:
                return node
            else:  # used since: its key is higher now
                self._pop(at, entry)
                residency.filed = NOT_FILED
                self.file(node, residency, nodes)
        return None

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

    def _pop(self, at: int, entry: int) -> None:
        self.count -= 1
        keys, ids = self._chunks[at]
        if len(keys) == 1:
            del self._chunks[at], self._lasts[at]
        else:
            del keys[entry], ids[entry]

    def _outdate(self, nodes: Mapping[NodeId, Node]) -> None:
        """One more entry is outdated; where they are many, have some of them dropped."""
        self.outdated += 1
        if self.outdated > self.count // 2 + OUTDATED_MIN:
            self._drop_outdated(nodes)

    def _drop_outdated(self, nodes: Mapping[NodeId, Node]) -> None:
        """Look at the next few entries, and drop those of them that are outdated.

        Those of one key are looked at together, once one of them counts: the same node's may be
        there twice, and then only the first one counts.
        """
        chunks, looks, key = self._chunks, LOOKS, self._next
        counting, ids_counting = NOT_FILED, set[NodeId]()
        at = bisect_left(self._lasts, key)
        entry = bisect_left(chunks[at][0], key) if at < len(chunks) else 0
        while at < len(chunks):
            keys, ids = chunks[at]
            if entry == len(keys):
                at, entry = at + 1, 0
                continue
            key = keys[entry]
            if looks <= 0 and key != counting:
                self._next = key
                return
            looks -= 1
            node = nodes.get(ids[entry])
            residency = None if node is None else node.at(self.place)
            if key != counting:
                ids_counting.clear()
            if residency is None or residency.filed != key or ids[entry] in ids_counting:
                self.outdated -= 1
                self._pop(at, entry)
            else:
                counting = key
                ids_counting.add(ids[entry])
                entry += 1
        self._next = 0

    def __repr__(self) -> str:
        return f"<EvictionOrder of {self.place}: {self.count} entries, {self.outdated} outdated>"
