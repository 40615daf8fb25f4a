"""The stand-in for a forward pass: it fills pages, lets the fences pass, and reads pages back.

Owns the namespace's seed and the access to page bytes. Timelines pass only after the bytes they
speak of have been written. It must never write a page that is not the request's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from directory.core.namespace import NamespaceKey
from scheduler_shim.content import PageContent, namespace_seed
from scheduler_shim.pools import SharedPool
from scheduler_shim.request import Request


class Compute:
    """Computes and checks the pages of one pool in one namespace."""

    def __init__(
        self, pool: SharedPool, key: NamespaceKey, count: Callable[[str, int], None]
    ) -> None:
        self._count = count
        self._pool = pool
        self._seed = namespace_seed(pool.fingerprint, key)
        self._content = PageContent(pool.chunks())

    def write(self, request: Request, first: int, last: int) -> tuple[int, int]:
        """Write the row's pages [first, last); returns the timeline values behind them."""
        digests = request.digests(self._seed)
        for at in range(first, last):
            self._content.write(request.row[at], digests[at])
        self._count("pages_computed", last - first)
        return self._pool.advance()

    def check(self, request: Request, pages: Sequence[int], first: int) -> int:
        """Read back pages that should hold the path from its page `first` on, and count them for
        the request; returns how many are wrong."""
        digests = request.digests(self._seed)
        wrong = sum(
            not self._content.verify(page, digests[at]) for at, page in enumerate(pages, first)
        )
        request.verified += len(pages)
        request.wrong += wrong
        return wrong
