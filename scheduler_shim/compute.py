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
        self.seed = namespace_seed(pool.fingerprint, key)
        """The namespace's: what each page must hold follows from it and the tokens."""
        self._content = PageContent(pool.chunks())
        self._page_of = pool.page_of

    def write(self, request: Request, first: int, last: int) -> tuple[int, int]:
        """Write the row's pages [first, last); returns the timeline values behind them."""
        digests = request.digests(self.seed)
        for at in range(first, last):
            self._content.write(self._page_of(request.row[at]), digests[at])
        self._count("pages_computed", last - first)
        return self._pool.advance()

    def check(self, request: Request) -> int:
        """Read back what the request uses and nobody has read back for it; returns how many pages
        are wrong."""
        digests = request.digests(self.seed)
        places = request.unchecked
        wrong = self.wrong([digests[at] for at in places], [request.row[at] for at in places])
        request.verified += len(places)
        request.wrong += wrong
        request.checked[:] = [(0, request.hit_pages)]
        return wrong

    def wrong(self, digests: Sequence[bytes], pages: Sequence[int]) -> int:
        """How many pages do not hold what their digests demand."""
        return sum(
            not self._content.verify(self._page_of(page), digest)
            for page, digest in zip(pages, digests, strict=True)
        )
