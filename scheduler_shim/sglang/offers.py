"""Offers: what lies in the host tier beyond the pool, told to SGLang as a hit that it may load.

Owns which waiting requests have one. An offered request is not held back: SGLang is told the length
by its match, and has it loaded when it admits the request. It must never offer what has moved
since: what the pool has now, the answer's lease and the loads under way are compared at each match.

With `adaptive` loads nothing is offered, and what was is taken back, while a request of the batch
that runs waits for its next token: a pass that follows a load lasts as long as the load, and every
such request waits for it. What would have been offered is restored while its request is held back:
a few requests a tick, and where each of them costs a round trip that is waited for (thin) one. The
others are held back until it is their turn, or nothing decodes any more. Who was held back comes
when its restore has landed, a moment that nobody chose, mostly in the middle of another's pass: so
what decodes has a step before it is admitted (`waits_a_step`).

A mirrored offer keeps the lease of its answer, so that the host tier cannot lose it; a thin one
leases when it is taken, because a thin lease protects own pages, too, and a waiting request must
not take room from the head of the queue.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from directory.core.actions import Matched
from directory.core.ids import NO_LEASE
from directory.core.namespace import NamespaceKey
from scheduler_shim.fills import Fills
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.request import Request
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.waiting import Around, Entry, Stage

RECALLS_MAX: Final = 8
"""So many offers of a mirrored engine one tick takes back at most."""
LEASES_MAX: Final = 1
"""The same of a thin one, where each is leased by a call that is waited for: from tick to tick,
those included that are held back as soon as their answer comes."""
OPEN: Final = frozenset({Stage.OFFERED, Stage.RECALLED})
"""Stages of requests that have an offer, or had one that is being taken back."""


class LookUps(Protocol):
    """What is asked of the look-ups (held.py)."""

    fills: Fills

    def join(self, entry: Entry) -> bool:
        """Wait for a restore that brings the page behind the row anyway."""
        ...

    def match_own(self, request: Request) -> None:
        """Put what the own pool has by now into the row, where this side keeps the tree."""
        ...

    def room_for(self, entry: Entry) -> int:
        """Pages that a restore for a request that is held back could have as targets now."""
        ...

    def restore(self, entry: Entry) -> bool:
        """Hold a request back for what lies beyond its row; False: nothing comes."""
        ...

    def lease(self, request: Request) -> bool:
        """Thin: lease the path in one call; the row and the reach are brought up to date."""
        ...

    def let_go(self, request: Request) -> None:
        """Nothing elsewhere is needed any more; the request may go on without waiting."""
        ...


class Offer(NamedTuple):
    """One waiting request's. `leased_from`: the page from which on its path is leased; `crowded`:
    there was no room to restore it while it is held back."""

    entry: Entry
    leased_from: int
    crowded: bool


class Offers:
    """One engine's. Mutated by its scheduler's thread alone."""

    def __init__(self, around: Around, settings: Settings) -> None:
        self.chunked: Callable[[], int] = lambda: 0
        """Tokens that a prompt in chunks has yet to take. The hooks set it."""
        self.decoding: Callable[[], bool] = lambda: False
        """Whether a request that has its first token waits for the next. The hooks set it."""
        self.passed: Callable[[], bool] = lambda: False
        """Whether the batch before was a pass over prompts. The hooks set it."""
        self.followed: Callable[[str], bool] = lambda _: False
        """Whether somebody behind a request makes a pass come now anyway. The hooks set it."""
        self._around = around
        self._settings = settings
        self._open: dict[str, Offer] = {}
        self._stepped: set[str] = set()  # who has let a step go first, since the last step
        self._left = LEASES_MAX  # of those that may still be taken back before the next tick

    def make(self, look_ups: LookUps, entry: Entry, reply: Matched) -> bool:
        """Offer what an answer says lies beyond the row, or hold the request back for that in its
        turn; False: hold it back now.

        What comes out of other pools lands whole, so its requests are held back for it, and with
        `adaptive` loads all are while something decodes. Where that finds no room for as much as
        the host tier has, the host tier's part is offered all the same: an offer needs room only
        when SGLang has it. Such a load never reads a pool, because its answer's lease holds all of
        it at the host; so a thin one is not offered where pools are to be read, which has no lease
        until it is taken.
        """
        request, fills = entry.request, look_ups.fills
        start, reach = len(request.row), min(request.reach, reply.host_reach)
        if reach <= start or reach - start < self._settings.restore_min_pages:
            return False
        holds = bool(reply.peer_pages) or self._holds
        crowded = holds and look_ups.room_for(entry) < reach - start
        recalled = holds and not crowded
        if recalled and reply.peer_pages:
            return False
        if request.receipt == NO_LEASE if self._mirrored else reply.peer_pages:
            return False
        self._open = {rid: o for rid, o in self._open.items() if o.entry.stage in OPEN}
        if len(self._open) + len(fills) >= self._settings.fills_max:
            return False
        if fills.ahead(request, start) is not None:
            return False
        if crowded:
            self._around.count("offers_crowded")
        request.reach = reach
        offer = Offer(entry, start if self._mirrored else 0, crowded)
        self._open[entry.rid] = offer
        if not recalled:
            entry.stage = Stage.OFFERED
            self._around.count("offers")
            return True
        entry.stage = Stage.RECALLED
        if self._mirrored or self._left > 0:
            self._hold_back(look_ups, offer)
        if self.offered(entry.rid):
            self._around.count("offers")
        return True

    def tick(self, look_ups: LookUps) -> None:
        """Something may decode by now: hold those back that were offered a load before, each in its
        turn. Where nothing does, those whose turn has not come have their offers again."""
        around = self._around
        self._left = RECALLS_MAX if self._mirrored else LEASES_MAX
        if not self._open or around.client is None:
            return
        holds = self._holds
        for entry, _, crowded in self._open.values():
            if holds and not crowded and entry.stage is Stage.OFFERED:
                entry.stage = Stage.RECALLED
                entry.since_us = around.now_us()  # it was admissible until now
            elif not holds and entry.stage is Stage.RECALLED:
                entry.stage = Stage.OFFERED
        for offer in list(self._open.values()) if holds else ():
            if offer.entry.stage is Stage.RECALLED and around.client is not None:
                self._take_back(look_ups, offer)
        self._open = {rid: o for rid, o in self._open.items() if o.entry.stage in OPEN}

    def _take_back(self, look_ups: LookUps, offer: Offer) -> None:
        entry, request = offer.entry, offer.entry.request
        look_ups.match_own(request)
        if len(request.row) < offer.leased_from:
            self._look_up_anew(look_ups, entry)
            return
        entry.asked_us = self._around.now_us()
        if look_ups.join(entry):
            self._around.count("offers_held_back")
        elif self._left > 0:
            if look_ups.room_for(entry) < request.reach - len(request.row):
                self._crowd(offer)
            elif not self._hold_back(look_ups, offer):
                self._look_up_anew(look_ups, entry)

    def _hold_back(self, look_ups: LookUps, offer: Offer) -> bool:
        """Restore what there seems to be room for. Where there is none after all, the request has
        its offer; where its path could not be leased (False) it is let go on without."""
        entry, request = offer.entry, offer.entry.request
        self._left -= 1
        reach = request.reach
        if look_ups.restore(entry):
            self._around.count("offers_held_back")
            return True
        leased = request.receipt != NO_LEASE
        if not (leased and self._mirrored):
            look_ups.let_go(request)
        if leased:
            request.reach = reach
            self._crowd(offer)
        return leased

    def _crowd(self, offer: Offer) -> None:
        """Let an offer stand for want of room, whatever decodes."""
        offer.entry.stage = Stage.OFFERED
        self._open[offer.entry.rid] = offer._replace(crowded=True)
        self._around.count("offers_crowded")

    def pages(
        self, look_ups: LookUps, rid: str, key: NamespaceKey, tokens: bytes, own: bytes
    ) -> int:
        """Pages that can be loaded for a request now. `tokens`: whole pages, as far as they may
        match; `own`: the packed pages that the pool has of them."""
        offer = self._open.get(rid)
        if offer is None or offer.entry.stage is not Stage.OFFERED:
            return 0
        entry, leased_from = offer.entry, offer.leased_from
        request, start = entry.request, len(own) // 4
        if request.key != key or not request.tokens.startswith(tokens) or start < leased_from:
            # It is another request by now, or a part of its own prefix went, which nobody leased.
            self._look_up_anew(look_ups, entry)
            return 0
        request.row = _unpacked(own)
        if look_ups.join(entry):
            entry.since_us = self._around.now_us()  # it was admissible until now
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
        if offer is None or offer.entry.stage is not Stage.OFFERED:
            return None
        request = offer.entry.request
        request.row = _unpacked(own)
        leased = look_ups.lease(request) and request.receipt != NO_LEASE
        if leased and request.row.tobytes() == own and request.reach >= len(own) // 4 + count:
            return request
        look_ups.let_go(request)
        return None

    def offered(self, rid: str) -> bool:
        """Whether a waiting request has an offer."""
        offer = self._open.get(rid)
        return offer is not None and offer.entry.stage is Stage.OFFERED

    def waits_a_step(self, rid: str, *, restored: bool) -> bool:
        """Whether a waiting request is admitted a step later, for what decodes: with `adaptive`
        loads, if it was `restored` while it was held back and a pass has just run. Once: if that
        is followed by a pass of others, it is admitted with the next one. Not where somebody
        behind it makes a pass come now: what decodes would wait for that pass, then for its own."""
        if self._settings.loads != "adaptive" or not self.passed():
            self._stepped.clear()
            return False
        if not restored or rid in self._stepped or not self.decoding() or self.followed(rid):
            return False
        self._stepped.add(rid)
        self._around.count("steps_first")
        return True

    def stepped(self, rid: str) -> bool:
        """Whether a waiting request has let a step go first, and comes with the next pass."""
        return rid in self._stepped

    @property
    def revocable(self) -> bool:
        """Whether something that decodes by the next tick takes an offer back: it must have one,
        whatever else it would find to do."""
        return self._settings.loads == "adaptive" and any(
            not offer.crowded and offer.entry.stage in OPEN for offer in self._open.values()
        )

    def withdraw_all(self, look_ups: LookUps) -> None:
        """Offer nothing any more of what was answered so far."""
        for offer in self._open.values():
            if offer.entry.stage in OPEN:
                look_ups.let_go(offer.entry.request)
        self._open.clear()

    def _look_up_anew(self, look_ups: LookUps, entry: Entry) -> None:
        if entry.stage is Stage.OFFERED:  # it was admissible until now
            entry.since_us = self._around.now_us()
        look_ups.let_go(entry.request)
        entry.stage = Stage.NEW

    @property
    def _holds(self) -> bool:
        """Whether requests are held back now for what could land layer by layer."""
        return self._settings.loads == "adaptive" and self.decoding()

    @property
    def _mirrored(self) -> bool:
        return isinstance(self._around.room.tree, MirroredTree)

    def __repr__(self) -> str:
        return f"<Offers {list(self._open)}>"


def _unpacked(pages: bytes) -> array[int]:
    row = array("I")
    row.frombytes(pages)
    return row
