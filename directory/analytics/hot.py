"""Which prefixes are hit most of late, in bounded memory and without keeping any path.

Owns the counts: of the digests at which a hit prefix is 1, 2, 4, 8, ... pages long, and at its
end. It must never grow beyond its bound: the coldest half goes, and what stays is halved, so that
a prefix that was hot yesterday makes room.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from directory.analytics.record import Digests

KEPT_MAX: Final = 4_096
LENGTHS_KEPT_MAX: Final = 1_024
LONGER_SHARE: Final = 0.8
"""A prefix is left out of the list where a longer one has so much of its hits."""


class Hot(NamedTuple):
    """A prefix: digest of its last page, its namespace, pages, and hits of late."""

    digest: int
    namespace: bytes
    pages: int
    hits: int


class HotPrefixes:
    """Counts of hit prefixes. Mutated by `add` alone."""

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self._kept_max = kept_max
        # (namespace, digest) -> [pages, hits, key of the next shorter one]
        self._counts: dict[tuple[bytes, int], _Count] = {}

    def add(self, namespace: bytes, path: Digests, pages: int) -> None:
        """A request hit the first `pages` pages of its path."""
        pages = min(pages, len(path))
        above: tuple[bytes, int] | None = None
        for length in _lengths(pages):
            key = (namespace, path[length - 1])
            count = self._counts.get(key)
            if count is None:
                count = self._counts[key] = _Count(length, above)
            count.hits += 1
            above = key
        if len(self._counts) > self._kept_max:
            self._thin()

    def hottest(self, most: int) -> list[Hot]:
        """Those that saved most pages, without prefixes of one another that say the same."""
        longer: dict[tuple[bytes, int], int] = {}
        for count in self._counts.values():
            if count.above is not None:
                longer[count.above] = max(longer.get(count.above, 0), count.hits)
        found = [
            Hot(digest, namespace, count.pages, count.hits)
            for (namespace, digest), count in self._counts.items()
            if count.hits > 1 and longer.get((namespace, digest), 0) < LONGER_SHARE * count.hits
        ]
        found.sort(key=lambda hot: (-hot.hits * hot.pages, hot.digest))
        return found[:most]

    def _thin(self) -> None:
        ranked = sorted(self._counts.items(), key=lambda item: -item[1].hits)
        self._counts = dict(ranked[: self._kept_max // 2])
        for count in self._counts.values():
            count.hits = (count.hits + 1) // 2


class _Count:
    __slots__ = ("above", "hits", "pages")

    def __init__(self, pages: int, above: tuple[bytes, int] | None) -> None:
        self.pages = pages
        self.above = above
        self.hits = 0


@lru_cache(LENGTHS_KEPT_MAX)
def _lengths(pages: int) -> tuple[int, ...]:
    lengths = [1 << bit for bit in range(pages.bit_length()) if 1 << bit < pages]
    return (*lengths, pages) if pages else ()
