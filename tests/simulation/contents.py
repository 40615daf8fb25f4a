"""What pages must hold: a number for every token path, so that contents can be compared.

Owns the numbering. Equal numbers mean the same pool fingerprint, the same namespace and the same
tokens from the root on; nothing else in the simulation says what a page must hold.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from directory.core.namespace import NamespaceKey

GARBAGE = 0
"""Number of what a forward pass writes beyond the end of a request: right for no path."""


class Cell(NamedTuple):
    """One layer's part of a page: what it holds, which layer it was written as, and by whom."""

    content: int
    layer: int
    writer: str


class Contents:
    """Content numbers, chained: a page's number follows from its ancestors' and its tokens."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def root(self, fingerprint: bytes, key: NamespaceKey) -> int:
        """Where the chain of a namespace begins."""
        return self._number((fingerprint, key))

    def page(self, above: int, tokens: bytes) -> int:
        """The page (whole or partial) that follows `above` with these packed tokens."""
        return self._number((above, tokens))

    def path(self, root: int, tokens: bytes, page_key: int) -> list[int]:
        """Numbers of all whole pages of `tokens`."""
        numbers = []
        at = root
        for start in range(0, len(tokens) - len(tokens) % page_key, page_key):
            at = self.page(at, tokens[start : start + page_key])
            numbers.append(at)
        return numbers

    def _number(self, what: Hashable) -> int:
        number = self._numbers.get(what)
        if number is None:
            number = self._numbers[what] = len(self._numbers) + 1
        return number
