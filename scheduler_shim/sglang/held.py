"""Held-back restores: waiting requests whose prefix lies elsewhere wait until it has landed here.

Owns, for every request near the head of SGLang's queue, where its look-up stands, and the restores
under way. It decides who is held back and for how long; it never touches SGLang's objects, and
nothing in it waits: answers are taken when they are there.

A held request owns nothing of the pool. Its own prefix is not locked while it waits, and what lands
is inserted as evictable where the path above it still stands (else it is freed): so it cannot take
room from the request at the head of the queue. Afterwards the request simply matches on the device.
It is admitted without when nothing worth it lies beyond, when there is no room that it may have,
after two lost landings, and after `hold_ms_max`; a restore that nobody waits for goes on.

A thin tree's lease on the own prefix lasts as long as the restore, because only the daemon knows
what stands; with nobody waiting a thin landing is freed. What a thin engine asks is asked without a
lease, and leased by a call of its own when a restore is worth it: nothing may protect own pages
without this side's knowing at once, or SGLang would be promised pages that cannot be evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from directory.core.actions import AnyReply, Matched, Restored
from directory.core.events import Restore
from directory.core.ids import NO_LEASE
from directory.core.tokens import pack_pages, unpack_pages
from scheduler_shim.fills import Fill, Fills
from scheduler_shim.own_tree import MirroredTree, question
from scheduler_shim.questions import LiveRequest
from scheduler_shim.request import Request
from scheduler_shim.sglang.landings import Landings
from scheduler_shim.sglang.layerwise import Layerwise
from scheduler_shim.sglang.load import count_bytes
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.targets import Targets
from scheduler_shim.sglang.waiting import HELD, Around, Entry, KeyOf, Stage, Waiting, due_us
from scheduler_shim.thin_tree import ThinTree
from transfer.ipc.marks import mark


class HeldBack:
    """The look-ups and restores of one engine; mutated by its scheduler's thread alone."""

    def __init__(self, around: Around, settings: Settings, key_of: KeyOf, loads: Layerwise) -> None:
        self.fills = Fills()
        self.changes = 0
        """How often a look-up has gone, or waits for something else: also between two ticks."""
        self._around = around
        self._loads = loads
        loads.look_ups = self
        self._landings = Landings(around)
        self.targets = Targets(around, settings, self.fills)
        self._settings = settings
        self._key_of = key_of
        self._entries: dict[str, Entry] = {}
        self._by_number: dict[int, Entry] = {}
        self._asking: dict[int, Entry] = {}
        self._tick = 0

    # What the shim calls.

    def tick(self, waiting: Sequence[Waiting], now_us: int) -> bool:
        """Look at the head of the queue: start look-ups (True: some are asked), forget who is gone,
        end long waits. What was asked is said, and room made ready until it is answered."""
        self._tick += 1
        asks, reask_us = self._settings.asks_max, 1_000 * self._settings.reask_ms
        for position, req in enumerate(waiting):
            if position >= self._settings.window:
                break
            entry = self._entries.get(req.rid)
            if entry is None:
                entry = self._enter(req, now_us)
            entry.seen = self._tick
            if asks > 0 and (entry.stage is Stage.NEW or entry.worth_asking(now_us, reask_us)):
                asks -= self._look_up(entry, now_us)
        for entry in list(self._entries.values()):
            if entry.seen != self._tick:
                self._forget(entry)
            elif now_us - entry.since_us >= 1_000 * self._settings.hold_ms_max:
                self._pass_overdue(entry)
        if self._around.client is not None:
            self._around.client.send_held()
        self.targets.make_ready(self._asking.values())
        return asks < self._settings.asks_max

    def take(self, seq: int, reply: AnyReply | None, now_us: int) -> None:
        """An answer has come, or (None) its deadline has passed."""
        entry = self._asking.pop(seq, None)
        fill = self.fills.get(seq)
        if entry is not None:
            entry.request.seq = 0
            self._on_matched(entry, reply, now_us)
        elif fill is not None and reply is None:
            # The mover may still write into the targets: they stay out of use until it says.
            self._around.count("restores_expired")
            for request in fill.drop_all():
                self.let_go(request)
        elif fill is not None and reply is not None:
            self.fills.end(fill)
            mark("answered", seq)
            if not self._loads.take(fill, reply):
                self._on_answer(fill, reply, now_us)

    def held(self, rid: str) -> bool:
        """Whether a request is to stay in the queue for now."""
        return (entry := self._entries.get(rid)) is not None and entry.stage in HELD

    def restored_tokens(self, rid: str) -> tuple[int, int]:
        """Tokens restored for a request while it waited, and how many out of others' pools."""
        entry = self._entries.get(rid)
        return entry.told(self._around.pool.page_size) if entry is not None else (0, 0)

    def gone(self, rid: str) -> None:
        """A request is admitted, or ended. Repeatable; the next tick would find out by itself."""
        if (entry := self._entries.get(rid)) is not None:
            self._forget(entry)

    def forget_all(self) -> None:
        """Nobody waits any more; restores under way go on."""
        for entry in list(self._entries.values()):
            self._forget(entry)

    def end_namespaces(self) -> None:
        """The weights are about to change: what is under way is never inserted."""
        self.forget_all()
        for fill in self.fills:
            fill.drop_all()
            fill.stale = True

    def lose_daemon(self) -> None:
        """No answer will come; everybody goes on without."""
        in_rows = self._loads.lose_daemon()
        for fill in self.fills.clear():
            fill.drop_all()
            if fill not in in_rows:
                self._around.room.quarantine(fill.targets)
        for entry in self._entries.values():
            entry.request.seq, entry.request.receipt = 0, NO_LEASE
            entry.stage = Stage.PASSED
        self._entries.clear()
        self._by_number.clear()
        self._asking.clear()

    @property
    def rows(self) -> Sequence[Request]:
        """The row that is being inserted: whoever keeps the tree next must know of it."""
        return self._landings.rows

    def asking(self, since_us: int) -> bool:
        """Whether somebody is held back for an answer to what was asked since."""
        asking = (entry for entry in self._asking.values() if entry.stage is Stage.ASKING)
        return any(entry.asked_us >= since_us for entry in asking)

    @property
    def held_count(self) -> int:
        """Requests that are held back now."""
        return sum(entry.stage in HELD for entry in self._entries.values())

    @property
    def due_us(self) -> int:
        """When the clock alone has `tick` do something for them, if no answer is awaited."""
        return due_us(self._entries.values(), self._settings.reask_ms)

    @property
    def alive(self) -> list[LiveRequest]:
        """The names by which requests may hold leases of the daemon."""
        return [name for entry in self._entries.values() for name in entry.request.alive_as]

    # Look-ups.

    def _enter(self, req: Waiting, now_us: int) -> Entry:
        key, tokens = self._key_of(req)
        entry = Entry(req.rid, self._around.request(key, tokens), now_us)
        self._entries[req.rid] = self._by_number[entry.request.number] = entry
        mark("seen", req.rid)
        return entry

    def _look_up(self, entry: Entry, now_us: int) -> int:
        """Find what the own pool has, join what is on its way, ask for the rest; how many asks."""
        request, client = entry.request, self._around.client
        again = entry.stage is Stage.PASSED
        entry.stage = Stage.PASSED
        entry.asked_us = now_us
        if client is None:
            return 0
        tree = self._around.room.tree
        if isinstance(tree, MirroredTree):
            self.match_own(request)
            if self.join(entry) or not self.targets.worth(request, request.match_pages):
                return 0
        elif request.match_pages < self._settings.restore_min_pages:
            return 0
        if len(self.fills) >= self._settings.fills_max:
            self._around.count("restores_put_off")
            return 0
        body = question(request)
        if isinstance(tree, ThinTree):
            entry.changes = tree.asks(request.key, request.match_tokens)
            body = msgspec.structs.replace(body, acquire=False)
        request.seq = client.ask(body, hold=True)
        if request.seq:
            self._asking[request.seq] = entry
            mark("asked", entry.rid, request.seq)
            # Who is asked for again because it has waited long is not held back for the answer.
            entry.stage = Stage.PASSED if again else Stage.ASKING
            self._around.count("asked")
        return 1

    def _on_matched(self, entry: Entry, reply: AnyReply | None, now_us: int) -> None:
        """What lies beyond the own pool is known now."""
        request, tree = entry.request, self._around.room.tree
        held, entry.stage = entry.stage, Stage.PASSED
        if not isinstance(reply, Matched):
            self._around.count("matches_missed")
            return
        beyond = reply.restorable_pages
        mark("matched", entry.rid, beyond, reply.peer_pages)
        if isinstance(tree, MirroredTree):
            request.lease(reply.receipt)
            request.reach = len(request.row) + beyond
            asked_from = len(request.row)
            self.match_own(request)
            if len(request.row) < asked_from:
                # A part of the own prefix went meanwhile, and the lease does not cover that.
                self.let_go(request)
                if held is Stage.ASKING:
                    self._look_up(entry, now_us)
                return
        elif isinstance(tree, ThinTree):
            request.row = unpack_pages(reply.own)
            request.reach = reply.own_pages + beyond
            tree.remember(request.key, request.match_tokens, reply, entry.changes)
        offers = self._loads.offers
        if self.join(entry) or (offers is not None and offers.make(self, entry, reply)):
            return
        if not (self.lease(request) and self._restore(entry)):
            self.let_go(request)

    def lease(self, request: Request) -> bool:
        """Lease the path where that is a thin engine's; False: nothing is to be restored."""
        return self.targets.lease(request)

    def match_own(self, request: Request) -> None:
        """Put what a mirrored pool holds into the row. Nothing is locked by it; a thin tree says it
        with the lease."""
        tree = self._around.room.tree
        if isinstance(tree, MirroredTree):
            request.found = tree.find(request.key, request.match_tokens, request.found)
            request.row = unpack_pages(request.found.pages)

    # Restores.

    def join(self, entry: Entry) -> bool:
        """Wait for a restore that brings the page behind the row anyway."""
        start = len(entry.request.row)
        fill = self.fills.ahead(entry.request, start)
        if fill is None or fill.start > start or not entry.waits_again:
            return False
        fill.add(entry.request)
        self._wait_for_fill(entry)
        self._around.count("restores_joined")
        return True

    def _wait_for_fill(self, entry: Entry) -> None:
        """Hold it back for this one, but not for ever: its fills are counted."""
        self.changes += 1
        entry.stage = Stage.FILLING
        entry.since_us = entry.asked_us
        entry.fills += 1

    def room_for(self, entry: Entry) -> int:
        """Pages that a restore for a request that is held back could have as targets now."""
        return self.targets.room_for(entry.request) if entry.waits_again else 0

    def restore(self, entry: Entry) -> bool:
        """Hold a request back until what lies beyond its row is here, as far as there is room."""
        return self.join(entry) or (self.lease(entry.request) and self._restore(entry))

    def _restore(self, entry: Entry) -> bool:
        request, around = entry.request, self._around
        may = request.receipt != NO_LEASE and entry.waits_again
        wanted = self.targets.wanted(request) if may else 0
        if not wanted:
            return False
        targets = self.targets.take(request, wanted)
        client, start = around.client, len(request.row)
        if client is not None and targets:
            # The targets are quiet once everything is done that was given to the streams so far,
            # the writing of their names included.
            quiet, packed = around.pool.advance(), pack_pages(targets)
            message = Restore(request.name, request.attempt, request.receipt, start, packed, quiet)
            seq = client.ask(message, client.deadlines.restore_ms)
            if seq:
                self.fills.begin(seq, request, targets)
                self._wait_for_fill(entry)
                mark("restore", entry.rid, seq, len(targets))
                around.room.sent(request.row, packed)
                around.count("restores")
                around.count("pages_asked_for", len(targets))
                return True
        around.room.free(targets)
        return False

    # Landings.

    def _on_answer(self, fill: Fill, reply: AnyReply | None, now_us: int) -> None:
        """The targets are quiet; with a landing they hold what the path demands."""
        requests = fill.drop_all()
        entries = [self._by_number[request.number] for request in requests]
        landed = False
        if isinstance(reply, Restored) and reply.landed and not fill.stale:
            self._around.count("landed")
            count_bytes(self._around, reply)
            self._loads.checks.restored(fill, reply)
            for entry in entries:
                entry.peers += reply.peer_pages
            landed = self._landings.insert(fill, requests)
        else:
            self._around.count("lost")
            self._around.room.free(fill.targets)
        self._go_on(fill, entries, now_us, landed=landed)

    def _go_on(self, fill: Fill, entries: Sequence[Entry], now_us: int, *, landed: bool) -> None:
        """Those who waited for a fill match what is in the tree now, or look it up once more."""
        for entry in entries:
            request = entry.request
            self.let_go(request)
            entry.asked_us = now_us
            reach = fill.agreeing_pages(request)
            if landed:
                entry.restored += (reach - fill.start) * self._around.pool.page_size
                if reach >= request.match_pages:
                    continue  # all of it is here
            else:
                request.losses += 1
            if entry.tries_again and entry.rid in self._entries:
                request.attempt += 1
                entry.stage = Stage.NEW
                self._look_up(entry, now_us)

    # Loads, which go on with their requests (layerwise.py).

    def wait_for(self, rid: str) -> None:
        """A request is not admitted with its load: it is held back for it."""
        if (entry := self._entries.get(rid)) is not None:
            entry.asked_us = self._around.now_us()  # it was admissible until now
            self._wait_for_fill(entry)

    def hand_over(self, rid: str) -> None:
        """A request is admitted with its load, which has its lease from here on."""
        if (entry := self._entries.pop(rid, None)) is not None:
            del self._by_number[entry.request.number]

    def wake(self, fill: Fill, *, landed: bool) -> None:
        """A load that others wait for is over, and in the tree if it landed."""
        entries = [self._by_number[request.number] for request in fill.drop_all()]
        self._go_on(fill, entries, self._around.now_us(), landed=landed)

    # Ends.

    def _pass_overdue(self, entry: Entry) -> None:
        if entry.stage in HELD:
            self._around.count("held_too_long")
            self._let_go_of_all(entry)
            entry.stage = Stage.PASSED

    def _forget(self, entry: Entry) -> None:
        self._let_go_of_all(entry)
        del self._entries[entry.rid]
        del self._by_number[entry.request.number]

    def _let_go_of_all(self, entry: Entry) -> None:
        """It waits for nothing any more; a restore under way goes on without it."""
        request = entry.request
        if request.fill is not None:
            request.fill.drop(request)
        if request.seq:
            del self._asking[request.seq]
            if self._around.client is not None:
                self._around.client.abandon(request.seq)
            request.seq = 0
        self.let_go(request)

    def let_go(self, request: Request) -> None:
        """Nothing elsewhere is needed any more; it may go on without waiting."""
        self._around.room.tree.release(request)
        if (entry := self._by_number.get(request.number)) is not None:
            entry.stage = Stage.PASSED
            self.changes += 1

    def __repr__(self) -> str:
        return f"<HeldBack {self.held_count} of {len(self._entries)} held, {self.fills!r}>"
