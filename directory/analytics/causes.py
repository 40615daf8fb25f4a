"""Causes while they happen: sums of why tokens were computed, of records as they are written.

Owns the sums by instance and a bounded memory of the paths that were published. What is told apart
is what `attribution` tells apart, so a report of the same records has the same sums. Two
generations are remembered: the present one, and the one before it, until the present one is full.
So a path that nobody used while `pages_max` other pages came may be forgotten, and is then new; one
that was used since is not. It must never do more at once than a small piece: a long path is
taken in piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from directory.analytics.attribution import Cause, causes_of
from directory.analytics.paths import Known, PathTree
from directory.analytics.record import Access, Digests

PAGES_MAX: Final = 1 << 20
"""Of one generation; a page takes 8 bytes, and 16 in any namespace but the first."""
NODES_MAX: Final = 1 << 15
"""Of one generation; a node takes some 250 bytes."""
DROPPED_A_TIME: Final = 128
PAGES_AT_ONCE: Final = 4_096
"""Pages that are taken in at once."""
INSTANCES_MAX: Final = 1_024
OTHERS: Final = "(others)"


UNKNOWN: Final = Known(0, forked=False)


class CauseSums(msgspec.Struct):
    """requests: whose first computed token has this cause; tokens: computed for this cause."""

    requests: int = 0
    tokens: int = 0


class _Seen(NamedTuple):
    """What is known of a path: in its namespace, and in any (pages)."""

    here: Known
    anywhere: int


NOTHING: Final = _Seen(UNKNOWN, 0)


class _Generation:
    """The paths of a stretch of time, by namespace and of all others than the first one together:
    where there is one namespace, as almost everywhere, there is one tree."""

    def __init__(self) -> None:
        self.first = PathTree()
        self.first_namespace: bytes | None = None
        self.spaces: dict[bytes, PathTree] = {}
        self.others = PathTree()
        self.nodes = 0

    @property
    def pages(self) -> int:
        """Pages of all trees."""
        return self.first.pages + 2 * self.others.pages

    def look(self, namespace: bytes, path: Digests) -> _Seen:
        """What it knows of a path."""
        if self.first_namespace is None:
            return NOTHING
        elsewhere = self.others.known(path).pages if self.spaces else 0
        if namespace == self.first_namespace:
            here = self.first.known(path)
        else:
            tree = self.spaces.get(namespace)
            here = tree.known(path) if tree is not None else UNKNOWN
            elsewhere = max(elsewhere, self.first.known(path).pages)
        return _Seen(here, max(here.pages, elsewhere))

    def take(self, namespace: bytes, path: Digests, tick: int, extent: int) -> _Seen:
        """Take in what was published; what it knew of the path before."""
        if self.first_namespace is None:
            self.first_namespace = namespace
        first = self.first
        if namespace == self.first_namespace:
            elsewhere = self.others.known(path).pages if self.spaces else 0
            here = self._take(first, path, tick, extent)
        else:
            tree = self.spaces.get(namespace)
            if tree is None:
                tree = self.spaces[namespace] = PathTree()
            here = self._take(tree, path, tick, extent)
            elsewhere = self._take(self.others, path, tick, extent).pages
            elsewhere = max(elsewhere, first.known(path).pages)
        return _Seen(here, max(here.pages, elsewhere))

    def _take(self, tree: PathTree, path: Digests, tick: int, extent: int) -> Known:
        self.nodes -= len(tree)
        known = tree.take(path, tick, extent)
        self.nodes += len(tree)
        return known

    def drop(self, nodes: int) -> bool:
        """Let go of a part of it; whether some is left."""
        if self.spaces:
            namespace, tree = next(reversed(self.spaces.items()))
            if not tree.drop(nodes):
                del self.spaces[namespace]
            return True
        return self.first.drop(nodes) or self.others.drop(nodes)


class Causes:
    """Judges records in the order in which they are written. Mutated by `add` and `work` only."""

    def __init__(self, *, pages_max: int = PAGES_MAX, nodes_max: int = NODES_MAX) -> None:
        self.sums: dict[tuple[str, Cause], CauseSums] = {}
        """By instance and cause; what was never met is not there."""
        self._pages_max = pages_max
        self._nodes_max = nodes_max
        self._instances: set[str] = set()
        self._young, self._old = _Generation(), _Generation()
        self._dropped = _Generation()
        self._tick = 0

    def add(self, access: Access) -> None:
        """Judge a record against all before it, then remember what it left behind."""
        for _ in self.work(access, access.path):
            pass

    def work(self, access: Access, path: Digests) -> Iterator[None]:
        """The same in pieces, of a record whose digests are those of `path`, whatever it says
        itself. No other record is to be judged before the last of them."""
        self._dropped.drop(DROPPED_A_TIME)
        if access.tokens <= 0:
            return
        namespace = access.namespace
        self._tick += 1
        young = self._young
        end = extent = extent_of(access, path)
        if extent > PAGES_AT_ONCE:
            end = min(extent, young.look(namespace, path).here.pages + PAGES_AT_ONCE)
        known = young.take(namespace, path, self._tick, end)
        if access.kind == "request":
            self._judge(access, path, known)
        while end < extent:
            yield
            end = min(extent, end + PAGES_AT_ONCE)
            young.take(namespace, path, self._tick, end)
        if young.pages > self._pages_max or young.nodes > self._nodes_max:
            self._dropped = self._old
            self._young, self._old = _Generation(), young

    @property
    def pages(self) -> int:
        """Pages remembered, those of all namespaces but the first of a generation twice."""
        return self._young.pages + self._old.pages

    def _judge(self, access: Access, path: Digests, young: _Seen) -> None:
        """`young`: what the present generation knew before."""
        known, forked = young.here
        anywhere = young.anywhere
        old = self._old.look(access.namespace, path)
        # Each generation knows whole beginnings of paths, so together they know the longer one.
        if old is not NOTHING:
            anywhere = max(anywhere, old.anywhere)
            if old.here.pages > known:
                known, forked = old.here
            elif old.here.pages == known:
                forked = forked or old.here.forked
        parts = causes_of(
            access,
            access.hit.total // access.page_tokens,
            min(access.hittable, len(path)),
            known,
            forked,
            anywhere,
        )
        requests = 1
        for cause, _, tokens in parts:
            sums = self._sums(access.instance, cause)
            sums.tokens += tokens
            sums.requests += requests
            requests = 0

    def _sums(self, instance: str, cause: Cause) -> CauseSums:
        sums = self.sums.get((instance, cause))
        if sums is not None:
            return sums
        if instance not in self._instances:
            if len(self._instances) < INSTANCES_MAX:
                self._instances.add(instance)
            else:
                instance = OTHERS
        return self.sums.setdefault((instance, cause), CauseSums())

    def __repr__(self) -> str:
        return f"<Causes {self._tick} records, {self.pages} pages>"


def extent_of(access: Access, path: Digests) -> int:
    """Pages of a path that a request hit or published."""
    size = access.page_tokens
    return min(len(path), (access.hit.total + access.inserted + size - 1) // size)
