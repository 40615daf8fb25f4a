"""A set of a pool's page numbers, one byte each: it is there whole, and never grows with its use.

Owns the bytes. Page lists go through it without a Python step a page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, MutableSet
from itertools import repeat


class PageSet(MutableSet[int]):
    """Page numbers from 0 on; it reaches as far as the highest one that was ever in it."""

    __slots__ = ("_marks",)

    def __init__(self, pages: Iterable[int] = ()) -> None:
        self._marks = bytearray()
        self.update(list(pages))

    def update(self, pages: Collection[int]) -> None:
        """Add all of them."""
        if pages:
            missing = max(pages) + 1 - len(self._marks)
            if missing > 0:
                self._marks += bytes(missing)
            deque(map(self._marks.__setitem__, pages, repeat(1)), 0)

    def difference_update(self, pages: Collection[int]) -> None:
        """Take all of them out that are in it."""
        if pages and max(pages) >= len(self._marks):
            pages = [page for page in pages if page < len(self._marks)]
        deque(map(self._marks.__setitem__, pages, repeat(0)), 0)

    def isdisjoint(self, other: Iterable[int]) -> bool:
        """Whether none of them is in it."""
        pages = other if isinstance(other, Collection) else list(other)
        if pages and max(pages) >= len(self._marks):
            pages = [page for page in pages if page < len(self._marks)]
        return not any(map(self._marks.__getitem__, pages))

    def add(self, value: int) -> None:
        """Add one."""
        self.update((value,))

    def discard(self, value: int) -> None:
        """Take one out if it is in it."""
        if value in self:
            self._marks[value] = 0

    def __contains__(self, page: object) -> bool:
        return isinstance(page, int) and 0 <= page < len(self._marks) and self._marks[page] == 1

    def __iter__(self) -> Iterator[int]:
        at = self._marks.find(1)
        while at >= 0:
            yield at
            at = self._marks.find(1, at + 1)

    def __len__(self) -> int:
        return self._marks.count(1)

    def __repr__(self) -> str:
        return f"<PageSet of {len(self)} pages>"
