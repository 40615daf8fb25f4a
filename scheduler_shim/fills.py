"""Fills: restores under way into this pool, and which requests wait for each.

Owns the target pages from the moment they are handed to a mover until its answer has come, and
nothing of the requests. Requests of one pool join a fill by reference; other pools never do,
because a fill's pages are this pool's. It must never let target pages go before the answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from scheduler_shim.mirror import Mirror
from scheduler_shim.request import Request


class Fill:
    """Pages [start, end) of one path, being written by a mover.

    `wanted`: requests that wait for it, by number; with none left the fill ends, though its
    answer is still awaited. `starter`: the request that began it, while it still wants it.
    `open`: whether others may join: not once its deadline has passed or its namespace is over.
    """

    __slots__ = (
        "digests",
        "key",
        "name",
        "open",
        "page_key",
        "seq",
        "stale",
        "start",
        "starter",
        "targets",
        "tokens",
        "wanted",
    )

    def __init__(
        self, seq: int, request: Request, targets: array[int], digests: Sequence[bytes]
    ) -> None:
        """`digests`: what each target must hold in the end, where anybody can say so."""
        self.seq = seq
        self.start = len(request.row)
        self.targets = targets
        self.key = request.key
        self.name = request.name
        self.page_key = request.page_key
        self.tokens = request.tokens[: self.end * request.page_key]
        self.digests = digests
        self.starter: Request | None = request
        self.wanted: dict[int, Request] = {}
        self.open = True
        self.stale = False
        self.add(request)

    @property
    def end(self) -> int:
        """The page of the path behind the last target."""
        return self.start + len(self.targets)

    def agreeing_pages(self, request: Request) -> int:
        """Up to which page what is being filled is what the request may match."""
        if request.key != self.key:
            return 0
        low, high = 0, min(self.end, request.match_pages)
        while low < high:
            middle = (low + high + 1) // 2
            if self.tokens.startswith(request.tokens[: middle * self.page_key]):
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, request: Request) -> None:
        """The request waits for this fill."""
        self.wanted[request.number] = request
        request.fill = self

    def drop(self, request: Request) -> None:
        """The request does not wait any more."""
        self.wanted.pop(request.number, None)
        request.fill = None
        if request is self.starter:
            self.starter = None

    def drop_all(self) -> list[Request]:
        """Nobody waits any more, and nobody may join; returns those who did, the starter first."""
        self.open = False
        requests = list(self.wanted.values())
        for request in requests:
            request.fill = None
        self.wanted.clear()
        return requests

    def orphan(self, mirror: Mirror) -> Request | None:
        """A request whose row is the path to the last target, to publish what landed with.

        None where the path above the targets does not stand any more: they hang in the air.
        """
        hit = mirror.match(self.key, self.tokens)
        if hit.page_count < self.start:
            return None
        orphan = Request(0, self.name, self.key, self.tokens, b"", self.page_key)
        orphan.row.frombytes(hit.pages[: 4 * self.start])
        orphan.tree_pages = self.start
        orphan.row.extend(self.targets)
        return orphan

    def __repr__(self) -> str:
        return f"<Fill {self.seq} of pages {self.start} to {self.end}, {len(self.wanted)} wait>"


class Fills:
    """Every fill whose answer has not come, by the number of its question."""

    def __init__(self) -> None:
        self._by_seq: dict[int, Fill] = {}

    def begin(
        self, seq: int, request: Request, targets: array[int], digests: Sequence[bytes] = ()
    ) -> Fill:
        """A request had a restore started into `targets`, and waits for it."""
        fill = self._by_seq[seq] = Fill(seq, request, targets, digests)
        return fill

    def get(self, seq: int) -> Fill | None:
        """The fill that a question began, if that is what it did."""
        return self._by_seq.get(seq)

    def end(self, fill: Fill) -> None:
        """The answer is here: the targets are the caller's."""
        del self._by_seq[fill.seq]

    def ahead(self, request: Request, start: int) -> Fill | None:
        """The open fill that brings something of the request's path beyond page `start`.

        The one that begins first where there are several, and of those the longest.
        """
        best: Fill | None = None
        order = (0, 0)
        for fill in self._by_seq.values():
            if fill.open:
                agreeing = fill.agreeing_pages(request)
                here = (max(start, fill.start), -agreeing)
                if agreeing > here[0] and (best is None or here < order):
                    best, order = fill, here
        return best

    def pages(self) -> list[array[int]]:
        """The targets of every fill."""
        return [fill.targets for fill in self._by_seq.values()]

    def clear(self) -> list[Fill]:
        """The daemon is lost: forget all fills and return them."""
        fills = list(self._by_seq.values())
        self._by_seq.clear()
        return fills

    def __iter__(self) -> Iterator[Fill]:
        return iter(self._by_seq.values())

    def __len__(self) -> int:
        return len(self._by_seq)

    def __repr__(self) -> str:
        return f"<Fills {list(self._by_seq.values())}>"
