"""Restores: what lies beyond the own pool is asked for, filled in, joined, landed or lost.

Owns the questions and the fills under way; moves requests between the look-up and the point from
which they compute. A landing is an insert into the own pool before anybody uses it. It must never
let a page go that a mover may still write into, and never insert what it has not verified.

Joins: a request whose path an open fill of this pool already brings waits for that landing and
then matches on the device, instead of starting another copy. What lies before the fill it has
restored by itself, what lies beyond afterwards. With no request left the fill ends: what lands is
inserted as evictable where the path above it still stands (a thin scheduler does not know and
frees it). Only restores are joined: two requests that *compute* one path at the same time both do,
and the second one's pages are duplicates that its insert gives back to be freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Protocol

from directory.core.actions import AnyReply, Matched, Restored
from directory.core.events import Restore
from directory.core.ids import NO_LEASE
from directory.core.tokens import pack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.compute import Compute
from scheduler_shim.fills import Fill, Fills
from scheduler_shim.own_tree import MirroredTree, question
from scheduler_shim.pools import Pool
from scheduler_shim.request import Phase, Request
from scheduler_shim.room import Room
from scheduler_shim.thin_tree import ThinTree

LOSSES_MAX = 2
"""After so many lost restores a request is admitted without."""


class Around(Protocol):
    """What restores need of the scheduler around them."""

    room: Room
    compute: Compute

    @property
    def pool(self) -> Pool:
        """The scheduler's own."""
        ...

    @property
    def client(self) -> DaemonClient | None:
        """The daemon's, while there is one."""
        ...

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> None:
        """Put the row's first pages into the tree; duplicates are freed."""
        ...

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        ...

    def problem(self, problem: str) -> None:
        """Something happened that never must."""
        ...


class Restores:
    """Questions and fills of one scheduler; mutated by its thread alone."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._asking: dict[int, Request] = {}
        self.fills = Fills()

    # Towards a landing.

    def look_up(self, request: Request) -> None:
        """Find what the own pool holds, and ask for what lies beyond."""
        client, tree = self._around.client, self._around.room.tree
        request.phase = Phase.ADMITTED
        request.lookups += 1
        if client is not None and not request.looked_us:
            request.looked_us = client.now_us()
        if isinstance(tree, ThinTree):
            request.reach = tree.match(request)
            self._answered(request)
            self._restore(request)
            return
        assert isinstance(tree, MirroredTree)
        tree.match(request)
        if client is not None and len(request.row) < request.match_pages:
            request.seq = client.ask(question(request))
            if request.seq:
                self._asking[request.seq] = request
                request.phase = Phase.MATCHING

    def take(self, seq: int, reply: AnyReply | None) -> None:
        """An answer has come, or (None) its deadline has passed."""
        request = self._asking.pop(seq, None)
        fill = self.fills.get(seq)
        if request is not None:
            request.seq = 0
            self._on_matched(request, reply)
        elif fill is not None and reply is None:
            # The mover may still write into the targets: they stay out of use until it says.
            self._around.count("restores_expired")
            for waiting in fill.drop_all():
                waiting.phase = Phase.ADMITTED
                self._let_lease_go(waiting)
        elif fill is not None:
            self.fills.end(fill)
            self._on_answer(fill, reply)

    def release(self, request: Request) -> None:
        """The request wants nothing more; a fill under way goes on without it."""
        if request.fill is not None:
            request.fill.drop(request)
        if request.seq:
            del self._asking[request.seq]
            if self._around.client is not None:
                self._around.client.abandon(request.seq)
            request.seq = 0

    def end_namespace(self) -> None:
        """What is under way belongs to a namespace that is over: none of it is ever inserted."""
        for fill in self.fills:
            fill.drop_all()
            fill.stale = True

    def lose_daemon(self, requests: Collection[Request]) -> None:
        """No answer will come; whoever waits for one goes on without."""
        for fill in self.fills.clear():
            fill.drop_all()
            self._around.room.quarantine(fill.targets)
        self._asking.clear()
        for request in requests:
            request.seq, request.receipt = 0, NO_LEASE
            if request.phase in (Phase.MATCHING, Phase.RESTORING):
                request.phase = Phase.ADMITTED

    def _on_matched(self, request: Request, reply: AnyReply | None) -> None:
        """Mirrored: what lies beyond the own pool is known now."""
        request.phase = Phase.ADMITTED
        if not isinstance(reply, Matched):
            self._around.count("matches_missed")
            return
        self._answered(request)
        request.lease(reply.receipt)
        request.reach = len(request.row) + reply.restorable_pages
        self._match_own(request)
        self._restore(request)

    def _answered(self, request: Request) -> None:
        """The first look-up of a request has its answer."""
        client = self._around.client
        if client is not None and not request.latency_us:
            request.latency_us = client.now_us() - request.looked_us

    def _match_own(self, request: Request) -> None:
        """Others may have published parts of the path meanwhile; what is here needs no copy."""
        tree = self._around.room.tree
        if isinstance(tree, MirroredTree):
            tree.match(request)
        elif isinstance(tree, ThinTree):
            request.reach = tree.match(request)

    def _restore(self, request: Request) -> None:
        """Join a fill, or have the pages from the row's end on restored as far as there is room."""
        around, start, end = self._around, len(request.row), request.reach
        fill = self.fills.ahead(request, start)
        if fill is not None and fill.start <= start:
            fill.add(request)
            request.phase = Phase.RESTORING
            around.count("restores_joined")
            return
        if fill is not None:
            end = min(end, fill.start)
        targets = array("I")
        if request.receipt != NO_LEASE and end > start:
            targets = around.room.allocate_up_to(end - start)
        if around.client is not None and targets:
            quiet = around.pool.now()
            message = Restore(
                request.name, request.attempt, request.receipt, start, pack_pages(targets), quiet
            )
            seq = around.client.ask(message, around.client.deadlines.restore_ms)
            if seq:
                request.restoring_us = around.client.now_us()
                digests = request.digests(around.compute.seed)
                self.fills.begin(seq, request, targets, digests[start : start + len(targets)])
                request.phase = Phase.RESTORING
                around.count("restores")
                return
        around.room.free(targets)
        self._let_lease_go(request)

    # Landings.

    def _on_answer(self, fill: Fill, reply: AnyReply | None) -> None:
        """The targets are quiet; with a landing they hold what the path demands."""
        requests = fill.drop_all()
        starter = fill.starter if fill.starter in requests else None
        landed = isinstance(reply, Restored) and reply.landed and not fill.stale
        if landed:
            wrong = self._around.compute.wrong(fill.digests, fill.targets)
            if starter is not None:
                starter.verified += len(fill.targets)
                starter.wrong += wrong
                starter.checked.append((fill.start, fill.end))
            if wrong:
                self._around.problem(f"{fill.name}: {wrong} restored pages are wrong")
                landed = False
        for request in requests:
            request.phase = Phase.ADMITTED
        if not landed:
            self._around.count("restores_lost")
            self._around.room.free(fill.targets)
            for request in requests:
                self._on_lost(request)
            return
        assert isinstance(reply, Restored)
        page_bytes = self._around.pool.page_bytes
        self._around.count("bytes_restored_host", reply.host_pages * page_bytes)
        self._around.count("bytes_restored_peer", reply.peer_pages * page_bytes)
        if not requests:
            self._keep_landed(fill)
            return
        if starter is not None:
            lead = starter
            if self._around.client is not None:
                lead.restore_us += self._around.client.now_us() - lead.restoring_us
            lead.host_pages += reply.host_pages
            lead.peer_pages += reply.peer_pages
        else:
            lead = max(requests, key=fill.agreeing_pages)
        self._insert_landed(fill, lead)
        for request in requests:
            if request is not lead:
                self._match_own(request)
            self._restore(request)  # what lies beyond: nothing, another fill, or a rest of it

    def _insert_landed(self, fill: Fill, lead: Request) -> None:
        """Insert what landed, as far as the lead's path goes; the rest is free again."""
        if lead is fill.starter:
            lead.row.extend(fill.targets)
        else:
            # Its row may reach into the fill by now: what it has there is in the tree, and the
            # insert gives the other copy back.
            count = fill.agreeing_pages(lead) - fill.start
            lead.row = lead.row[: fill.start] + fill.targets[:count]
            lead.tree_pages = fill.start
            self._around.room.free(fill.targets[count:])
        lead.hit_pages = len(lead.row)
        self._around.publish(lead, len(lead.row), self._around.pool.now(), keep=True)

    def _keep_landed(self, fill: Fill) -> None:
        """Nobody waits: insert as evictable if the path above still stands, else free."""
        around, tree = self._around, self._around.room.tree
        orphan = fill.orphan(tree.mirror) if isinstance(tree, MirroredTree) else None
        if orphan is not None:
            around.publish(orphan, fill.end, around.pool.now(), keep=False)
            around.count("landings_kept")
            return
        around.room.free(fill.targets)
        around.count("landings_freed")

    def _on_lost(self, request: Request) -> None:
        """Once more from the look-up on, then without."""
        request.losses += 1
        self._let_lease_go(request)
        if request.losses < LOSSES_MAX:
            request.attempt += 1
            self.look_up(request)

    def _let_lease_go(self, request: Request) -> None:
        """Mirrored: nothing elsewhere is needed any more. A thin lease protects own pages too."""
        tree = self._around.room.tree
        if isinstance(tree, MirroredTree):
            tree.release_lease(request)

    def __repr__(self) -> str:
        return f"<Restores {len(self._asking)} asked, {self.fills!r}>"
