"""Reuse distances: how large an LRU cache must be for each page of a request to be a hit.

Owns the exact stack distances and the miss-ratio curve. The cache is one of whole pages, evicted
leaf first in order of last use, as the tree does it: a request touches its whole path, a page is
hit only if all before it are, and of pages touched together the deepest goes first. So the pages
stand in a stack (latest request on top, within a request the first page on top), a cache of C
pages holds its upper C, and the *reuse distance* of a page is its position there, 1 being the top,
at the moment of the match. A page is a hit exactly where capacity >= distance.

The pages last touched by one request form one stretch of its path, so the stack is kept as a
weight a request (Fenwick tree over requests) and a request costs as many steps as it has
stretches, not pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple

from directory.analytics.paths import PathTree, Walk
from directory.analytics.record import NO_NAMESPACE, Digests


class Fenwick:
    """Sums over a growing row of integers, in logarithmic time."""

    def __init__(self) -> None:
        self._sums = [0]
        self.total = 0

    def append(self, value: int) -> None:
        """Add a position with a value."""
        self.total += value
        at = len(self._sums)
        stop = at - (at & -at)
        child = at - 1
        while child > stop:
            value += self._sums[child]
            child -= child & -child
        self._sums.append(value)

    def add(self, index: int, value: int) -> None:
        """Change the value at a position (from 0 up) by `value`."""
        self.total += value
        at, size, sums = index + 1, len(self._sums), self._sums
        while at < size:
            sums[at] += value
            at += at & -at

    def after(self, index: int) -> int:
        """Sum of the values behind a position."""
        at, sums, prefix = index + 1, self._sums, 0
        while at:
            prefix += sums[at]
            at -= at & -at
        return self.total - prefix

    def __len__(self) -> int:
        return len(self._sums) - 1


class Reach(NamedTuple):
    """`pages` neighbouring pages of a path have distances first, first + 1, ..."""

    first: int
    pages: int


class Touched(NamedTuple):
    """What one access met. `reaches`: the known pages in path order, distances rising."""

    walk: Walk
    reaches: list[Reach]

    def hits(self, capacity: int) -> int:
        """Leading pages that an LRU cache of `capacity` pages would have held."""
        hits = 0
        for first, pages in self.reaches:
            if first + pages - 1 > capacity:
                return hits + max(0, capacity - first + 1)
            hits += pages
        return hits


class ReuseDistances:
    """The stack of one cache that all namespaces share. Mutated by `add` only."""

    def __init__(self) -> None:
        self._trees: dict[bytes, PathTree] = {}
        self._weights = Fenwick()
        # Distance -> change of the number of pages that have it; cumulated by `curve`.
        self._changes: dict[int, int] = {}
        self.known_pages = 0
        self.blocks = 0

    def add(
        self,
        path: Digests,
        *,
        namespace: bytes = NO_NAMESPACE,
        extent: int | None = None,
        blocks: int | None = None,
        hittable: int | None = None,
        counts: bool = True,
    ) -> Touched:
        """Let a request touch its path; returns what it met.

        extent: pages that it published or hit (None: all). blocks: of its prompt, in the
        denominator (None: as many as digests). hittable: leading pages that can be hits. counts:
        whether it is a query of its own; a retry, probe or recomputation is not, and only moves
        its pages to the top.
        """
        tick = len(self._weights)
        tree = self._trees.get(namespace)
        if tree is None:
            tree = self._trees[namespace] = PathTree()
        pages = len(path) if extent is None else min(extent, len(path))
        walk = tree.touch(path, tick, pages)
        after = self._weights.after
        reaches = [Reach(after(stretch.tick) + 1, stretch.pages) for stretch in walk.stretches]
        if counts:
            self._count(reaches, len(path) if hittable is None else hittable)
            self.blocks += len(path) if blocks is None else blocks
        left = pages
        for stretch in walk.stretches:
            if left <= 0:
                break
            self._weights.add(stretch.tick, -min(stretch.pages, left))
            left -= stretch.pages
        self._weights.append(pages)
        return Touched(walk, reaches)

    @property
    def pages(self) -> int:
        """Different pages seen, over all namespaces."""
        return sum(tree.pages for tree in self._trees.values())

    @property
    def ticks(self) -> int:
        """Accesses seen."""
        return len(self._weights)

    def touched_since(self, tick: int) -> int:
        """Different pages touched by access `tick` (from 0 up) or a later one."""
        return self._weights.after(tick - 1)

    def tree(self, namespace: bytes = NO_NAMESPACE) -> PathTree | None:
        """The paths of a namespace."""
        return self._trees.get(namespace)

    def curve(self) -> Curve:
        """The miss-ratio curve of everything counted so far."""
        return Curve.of(self._changes, self.blocks)

    def _count(self, reaches: list[Reach], hittable: int) -> None:
        left, changes = hittable, self._changes
        for first, pages in reaches:
            pages = min(pages, left)
            if pages <= 0:
                break
            changes[first] = changes.get(first, 0) + 1
            changes[first + pages] = changes.get(first + pages, 0) - 1
            left -= pages
            self.known_pages += pages

    def __repr__(self) -> str:
        return f"<ReuseDistances {self.ticks} accesses, {self.pages} pages>"


class Curve:
    """Block hits of an LRU cache as a function of its capacity in pages; exact at every point."""

    def __init__(self, starts: list[int], rates: list[int], hits: list[int], blocks: int) -> None:
        self._starts = starts
        self._rates = rates
        self._hits = hits
        self.blocks = blocks

    @classmethod
    def of(cls, changes: dict[int, int], blocks: int) -> Curve:
        """Build it from distance -> change of the number of pages with that distance."""
        starts = sorted(changes)
        rates = list(accumulate(changes[start] for start in starts))
        lengths = [after - start for start, after in pairwise(starts)]
        within = (rate * length for rate, length in zip(rates, lengths, strict=False))
        return cls(starts, rates, [0, *accumulate(within)], blocks)

    def hits(self, capacity: int) -> int:
        """Pages with a distance of at most `capacity`."""
        at = bisect_right(self._starts, capacity) - 1
        if at < 0:
            return 0
        return self._hits[at] + self._rates[at] * (capacity - self._starts[at] + 1)

    def ratio(self, capacity: int) -> float:
        """Block hit ratio of an LRU cache of `capacity` pages; 0 without blocks."""
        return self.hits(capacity) / self.blocks if self.blocks else 0.0

    @property
    def hits_max(self) -> int:
        """Hits of a cache that never evicts."""
        return self._hits[-1] if self._starts else 0

    @property
    def ratio_max(self) -> float:
        """Block hit ratio of a cache that never evicts."""
        return self.hits_max / self.blocks if self.blocks else 0.0

    @property
    def distance_max(self) -> int:
        """The largest distance of any reuse: no larger cache has more hits."""
        return self._starts[-1] - 1 if self._starts else 0

    def capacity_for(self, share: float) -> int:
        """The smallest capacity with at least `share` (0 to 1) of the hits there can be."""
        wanted = share * self.hits_max
        low, high = 0, self.distance_max
        while low < high:
            middle = (low + high) // 2
            if self.hits(middle) >= wanted:
                high = middle
            else:
                low = middle + 1
        return low

    def histogram(self, edges: Iterable[int]) -> list[int]:
        """Pages by distance: up to the first edge, up to the second, ..."""
        counts, before = [], 0
        for edge in edges:
            hits = self.hits(edge)
            counts.append(hits - before)
            before = hits
        return counts
