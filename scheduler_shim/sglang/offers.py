"""Offers: what lies in the host tier beyond the pool, told to SGLang as a hit that it may load.

Owns which waiting requests have one. An offered request is not held back: SGLang is told the length
by its match, and has it loaded when it admits the request. It must never offer what has moved
since: what the pool has now, the answer's lease and the loads under way are compared at each match.

A mirrored offer keeps the lease of its answer, so that the host tier cannot lose it; a thin one
leases when it is taken, because a thin lease protects own pages, too, and a waiting request must
not take room from the head of the queue.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

from directory.core.actions import Matched
from directory.core.ids import NO_LEASE
from directory.core.namespace import NamespaceKey
from scheduler_shim.fills import Fills
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.request import Request
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.waiting import Around, Entry, Stage


class LookUps(Protocol):
    """What is asked of the look-ups (held.py)."""

    fills: Fills

    def join(self, entry: Entry) -> bool:
        """Wait for a restore that brings the page behind the row anyway."""
        ...

    def lease(self, request: Request) -> bool:
        """Thin: lease the path in one call; the row and the reach are brought up to date."""
        ...

    def let_go(self, request: Request) -> None:
        """Nothing elsewhere is needed any more; the request may go on without waiting."""
        ...


class Offers:
    """One engine's. Mutated by its scheduler's thread alone."""

    def __init__(self, around: Around, settings: Settings) -> None:
        self.chunked: Callable[[], int] = lambda: 0
        """Tokens that a prompt in chunks has yet to take. The hooks set it."""
        self._around = around
        self._settings = settings
        self._open: dict[str, tuple[Entry, int]] = {}  # with the page from which on it is leased

    def make(
        self, look_ups: LookUps, entry: Entry, reply: Matched, *, crowded: bool = False
    ) -> bool:
        """Offer what an answer says lies beyond the row, if it can land layer by layer.

        What comes out of other pools lands whole, so its requests are held back for it. Where they
        found no room for that (`crowded`), as much of it as the host tier has, too, is offered
        from there: an offer needs room only when SGLang has it. Such a load never reads a pool,
        because its answer's lease holds all of it at the host; so a thin one is not offered, which
        has no lease until it is taken.
        """
        request, fills = entry.request, look_ups.fills
        start = len(request.row)
        reach = min(request.reach, reply.host_reach) if crowded else request.reach
        if (reply.peer_pages and not crowded) or (crowded and not self._mirrored):
            return False
        if reach <= start or reach - start < self._settings.restore_min_pages:
            return False
        if self._mirrored and request.receipt == NO_LEASE:
            return False
        self._open = {
            rid: offer for rid, offer in self._open.items() if offer[0].stage is Stage.OFFERED
        }
        if len(self._open) + len(fills) >= self._settings.fills_max:
            return False
        if fills.ahead(request, start) is not None:
            return False
        if crowded:
            self._around.count("offers_crowded")
        request.reach = reach
        entry.stage = Stage.OFFERED
        self._open[entry.rid] = entry, start if self._mirrored else 0
        self._around.count("offers")
        return True

    def pages(
        self, look_ups: LookUps, rid: str, key: NamespaceKey, tokens: bytes, own: bytes
    ) -> int:
        """Pages that can be loaded for a request now. `tokens`: whole pages, as far as they may
        match; `own`: the packed pages that the pool has of them."""
        offer = self._open.get(rid)
        if offer is None or offer[0].stage is not Stage.OFFERED:
            return 0
        entry, leased_from = offer
        request, start = entry.request, len(own) // 4
        if request.key != key or not request.tokens.startswith(tokens) or start < leased_from:
            # It is another request by now, or a part of its own prefix went, which nobody leased.
            look_ups.let_go(request)
            entry.stage = Stage.NEW
            return 0
        request.row = _unpacked(own)
        if look_ups.join(entry):
            return 0
        end = min(request.reach, len(tokens) // request.page_key)
        ahead = look_ups.fills.ahead(request, start)
        if ahead is not None:
            end = min(end, ahead.start)
        if end - start < self._settings.restore_min_pages:
            look_ups.let_go(request)
            return 0
        return end - start

    def take(self, look_ups: LookUps, rid: str, own: bytes, count: int) -> Request | None:
        """The request of an offer that SGLang has accepted, its row the own pages and its path
        leased up to `count` pages beyond; None where it is not there any more."""
        offer = self._open.pop(rid, None)
        if offer is None or offer[0].stage is not Stage.OFFERED:
            return None
        request = offer[0].request
        request.row = _unpacked(own)
        leased = look_ups.lease(request) and request.receipt != NO_LEASE
        if leased and request.row.tobytes() == own and request.reach >= len(own) // 4 + count:
            return request
        look_ups.let_go(request)
        return None

    def offered(self, rid: str) -> bool:
        """Whether a waiting request has an offer."""
        offer = self._open.get(rid)
        return offer is not None and offer[0].stage is Stage.OFFERED

    def withdraw_all(self, look_ups: LookUps) -> None:
        """Offer nothing any more of what was answered so far."""
        for entry, _ in self._open.values():
            if entry.stage is Stage.OFFERED:
                look_ups.let_go(entry.request)
        self._open.clear()

    @property
    def _mirrored(self) -> bool:
        return isinstance(self._around.room.tree, MirroredTree)

    def __repr__(self) -> str:
        return f"<Offers {list(self._open)}>"


def _unpacked(pages: bytes) -> array[int]:
    row = array("I")
    row.frombytes(pages)
    return row
