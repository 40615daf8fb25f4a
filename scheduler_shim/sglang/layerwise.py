"""Layer-wise loads: a request is admitted at once, and its forward pass follows the landing layers.

Owns every load from SGLang's `init_load_back` until both are over: its answer, and the row that has
its target pages. Those count as the row's own from the start; they keep their names until the load
is answered and settled, and are then pages like computed ones, published by whoever publishes the
row. It must never publish a page of a load that was not answered as landed, never let one go that a
mover may still write into, and never let a request that was computed over a lost load answer:
exactly that request ends, with SGLang's status 503.

    begun -> launched (admitted, the next forward pass waits) -> answered -> settled
    begun -> loose (not admitted: a held-back restore from here on)
    launched -> loose (its row went before the answer: the targets stay out of use until then)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from directory.core.actions import AnyReply, Restored
from directory.core.events import Restore
from directory.core.ids import NO_LEASE
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages
from scheduler_shim.fills import Fill
from scheduler_shim.landings import LoadLost
from scheduler_shim.questions import LiveRequest
from scheduler_shim.request import Request
from scheduler_shim.sglang.checking import Unchecked
from scheduler_shim.sglang.layer_counter import LayerCounter, Layers
from scheduler_shim.sglang.load import AroundLoads, Load, LoadLookUps, count_bytes, end_request
from scheduler_shim.sglang.looks import PEEK_US, Looks
from scheduler_shim.sglang.offers import Offers
from scheduler_shim.sglang.settings import Settings
from transfer.ipc.marks import mark

logger = logging.getLogger(__name__)


class Layerwise:
    """One engine's. `layers` None: the pool cannot, or the settings do not want it."""

    def __init__(self, around: AroundLoads, settings: Settings, layers: Layers | None) -> None:
        self.counter = LayerCounter(layers.number if layers is not None else 0)
        self.publish: Callable[[Any, int], None] = lambda _req, _pages: None
        """Put a running request's first pages into the tree. The cache sets it."""
        self.on_launch: Callable[[Any], None] = lambda _: None
        """A request was admitted with a load. The cache sets it."""
        self.abort: Callable[[Any, str], None] = end_request
        self.checks = Unchecked()
        self.look_ups: LoadLookUps
        self.defect: Exception | None = None
        """What went wrong in a wait; the next tick raises it, where it can be dealt with."""
        self._around = around
        self._settings = settings
        self._layers = layers
        self._offers = Offers(around, settings)
        self._by_rid: dict[str, Load] = {}  # those whose targets an admitted request has
        self._by_seq: dict[int, Load] = {}  # those that are not answered
        self._answered: list[Load] = []  # those that have not been settled

    @property
    def enabled(self) -> bool:
        """Whether there are any loads at all."""
        return self._layers is not None

    # Offers.

    @property
    def offers(self) -> Offers | None:
        """Where look-ups offer what they have found; None: nowhere."""
        return self._offers if self._layers is not None else None

    def pages(self, rid: str, key: NamespaceKey, tokens: bytes, own: bytes) -> int:
        """Pages beyond the pool's that a match may report for a request (see `Offers.pages`)."""
        if self._layers is None or self._around.client is None:
            return 0
        return self._offers.pages(self.look_ups, rid, key, tokens, own)

    # From the admission on.

    def begin(self, req: Any, own: bytes, count: int) -> bytes:
        """Have `count` pages behind the own ones loaded for a request that is being admitted.

        All or nothing. Returns the packed names of the targets, or nothing: compute them.
        """
        if self._layers is None or req.rid in self._by_rid:
            return b""
        request = self._offers.take(self.look_ups, req.rid, own, count)
        load = self._start(req, request, count, self._layers) if request is not None else None
        if load is None:
            if request is not None:
                self.look_ups.let_go(request)
            self._around.count("loads_declined")
            return b""
        self._by_rid[load.rid] = self._by_seq[load.fill.seq] = load
        self._around.count("loads")
        mark("load", load.rid, load.fill.seq, count)
        self._around.count("pages_asked_for", count)
        return load.targets

    def _start(self, req: Any, request: Request, count: int, layers: Layers) -> Load | None:
        around = self._around
        targets = around.room.allocate(count)
        if targets is None:
            return None
        client = around.client  # asked for now: the eviction may have lost it
        landing = layers.landings.begin(layers.number) if client is not None else None
        if client is not None and landing is not None:
            # Quiet once everything is done that was given to the streams, the naming included.
            quiet = around.pool.advance()
            name, attempt, start = request.name, request.attempt, len(request.row)
            pages = pack_pages(targets)
            seq = client.ask(
                Restore(name, attempt, request.receipt, start, pages, quiet, landing.wire),
                client.deadlines.restore_ms,
            )
            if seq:
                fill = self.look_ups.fills.begin(seq, request, targets)
                return Load(req, request, fill, landing, self.wait)
            landing.take_answer(landed=False)
        around.room.free(targets)
        return None

    def launch(self, req: Any) -> int:
        """A request was admitted; returns how many tokens are being loaded for it."""
        load = self._by_rid.get(req.rid)
        if load is None or load.launched:
            return 0
        load.launched = True
        load.fill.drop(load.request)
        self.look_ups.hand_over(load.rid)
        self.counter.begin(load)
        self.on_launch(req)
        if load.lost:  # by the lock that came with the admission
            self._end(load)
        return len(load.fill.targets) * self._around.pool.page_size

    def refuse(self, rid: str) -> None:
        """A request was not admitted after all: it waits for its load like any held-back one."""
        load = self._by_rid.get(rid)
        if load is not None and not load.launched:
            del self._by_rid[rid]
            load.in_row = False
            self._around.count("loads_put_back")
            self.look_ups.wait_for(rid)

    def targets_of(self, rid: str) -> bytes:
        """Packed names of what is being loaded for a request that has no row yet."""
        load = self._by_rid.get(rid)
        return load.targets if load is not None and not load.settled else b""

    # The forward pass.

    def wait(self, load: Load, layer: int) -> bool:
        """A layer of a load is about to be read. False: nothing more is to be waited for."""
        if layer in load.waited:  # by a stream, and what is asked now comes behind that
            return not load.lost
        try:
            if self._layers is not None and self._layers.stream is not None:
                return self._wait_in_stream(load, layer, self._layers.stream())
            return self._wait_here(load, layer)
        except Exception as error:  # the forward pass of the whole batch would die of it
            logger.exception("treecored: waiting for a load failed")
            self.defect = error
            self._lose(load, f"{type(error).__name__}: {error}")
            return False

    def _wait_here(self, load: Load, layer: int) -> bool:
        """This thread runs the forward pass: wait in it, and look out for a loss meanwhile."""
        looks, give_up_us = Looks(), 0
        while load.wants(layer):
            if looks.slept():
                continue
            now_us = self._around.now_us()
            give_up_us = give_up_us or now_us + 1_000 * self._settings.layer_ms
            self._look_at_answers(load)
            if now_us >= give_up_us and load.wants(layer):
                self._lose(load, f"layer {layer} was not there after {self._settings.layer_ms} ms")
                # Whoever does not copy now will not copy the next ones in time either.
                self._offers.withdraw_all(self.look_ups)
                self._around.count("layers_timed_out")
        return not load.lost and not load.complete

    def _look_at_answers(self, load: Load) -> None:
        """An answer decides at once; it is taken later, where pages may change hands."""
        for seq, reply in self._around.peek(PEEK_US):
            if seq == load.fill.seq and reply is not None:
                if isinstance(reply, Restored) and reply.landed:
                    load.complete = True
                else:
                    self._lose(load, getattr(reply, "detail", "") or "it was refused")
        client = self._around.client
        if client is None or client.lost:
            self._lose(load, "the daemon is gone")

    def _wait_in_stream(self, load: Load, layer: int, stream: int) -> bool:
        """A stream runs it: let that one wait, once a layer. What came of it `results` finds out.

        Whatever the stream runs later comes after the waits, decode batches of others included; so
        nothing is left to be waited for behind the last layer, which lands after all others.
        """
        if not load.lost and layer not in load.waited:
            load.waited.add(layer)
            mark("waits", load.rid, layer)
            try:
                load.landing.wait_in_stream(stream, layer, self._settings.layer_ms / 1_000)
            except LoadLost as error:
                self._lose(load, str(error))
        return not load.lost and layer < self.counter.num_layers - 1

    def results(self, reqs: Collection[Any], synchronize: Callable[[], object]) -> None:
        """A batch's outputs are about to be used: end those of its requests whose load is lost.

        `synchronize`: waits until the batch has been computed.
        """
        loads = [load for load in self._by_rid.values() if load.unproven and load.req in reqs]
        for load in loads:
            self._wait_here(load, self.counter.num_layers - 1)
        if loads:
            synchronize()
        for load in loads:
            self.counter.end(load)
            load.unproven = False
            if any(load.landing.stream_lost(layer) for layer in load.waited):
                self._lose(load, load.landing.lost or "a layer was not there in time")

    def _lose(self, load: Load, why: str) -> None:
        """A load is lost while it is wanted: end what was computed from it, and nothing else."""
        if load.lost:
            return
        load.lost = why
        load.landing.give_up(why)
        if load.launched and load.in_row:
            self._end(load)

    def _end(self, load: Load) -> None:
        self._around.count("loads_lost_in_flight")
        logger.warning("treecored: request %s ends, its load is lost: %s", load.rid, load.lost)
        self.abort(load.req, f"treecored: the load of a cached prefix was lost: {load.lost}")

    # Answers.

    def take(self, fill: Fill, reply: AnyReply) -> bool:
        """A fill was answered. False: no row has its targets, they are the caller's."""
        load = self._by_seq.pop(fill.seq, None)
        if load is None:
            return False
        landed = isinstance(reply, Restored) and reply.landed
        proven = landed or load.look()
        detail = getattr(reply, "detail", "") or "it was refused"
        load.landed = load.landing.take_answer(landed=landed, detail=detail)
        load.answered = True
        if not load.in_row:
            if load.launched:
                self._around.room.tree.release(load.request)
            return False
        self._around.room.tree.release(load.request)
        self._around.count("landed" if load.landed else "lost")
        self.checks.restored(fill, reply if load.landed else None, layerwise=True)
        if isinstance(reply, Restored):
            count_bytes(self._around, reply)
        if not proven:
            self._lose(load, detail)
        self._answered.append(load)
        return True

    def tick(self) -> None:
        """Between two steps: settle what was answered, and let go on whoever waits for it."""
        if self.defect is not None:
            defect, self.defect = self.defect, None
            raise defect
        self.checks.tick()
        self._offers.tick(self.look_ups)
        answered, self._answered = self._answered, []
        for load in answered:
            if self._settle(load) and load.landed and not load.lost:
                self.checks.about(load)
                self.publish(load.req, load.fill.end)
            self.look_ups.wake(load.fill, landed=load.landed)

    @property
    def has_turns(self) -> bool:
        """Whether `tick` may have something to do."""
        late = self.defect is not None or len(self._answered) > 0
        return late or self.checks.has_turns or self._offers.revocable

    def _settle(self, load: Load) -> bool:
        """The targets are quiet: they are the row's own, like computed pages. False: they were,
        or the row is gone, and then whoever has settled it has published it, too."""
        if load.settled or not load.in_row or self._layers is None:
            return False
        load.settled = True
        self._layers.disown(load.targets)
        return True

    # The row.

    def ready(self, rid: str, *, last: bool = False) -> bool:
        """Whether a request's pages may be published beyond what it has locked.

        `last`: the request has ended, so this waits for the answer a moment.
        """
        load = self._by_rid.get(rid)
        self.checks.about(load)
        if load is None:
            return True
        if not load.answered:
            self._await(load, self._settings.match_ms if last else 0)
        if load.answered:
            self._settle(load)
        return load.landed and not load.lost

    def _await(self, load: Load, wait_ms: int) -> None:
        around = self._around
        around.take_answers()
        give_up_us = around.now_us() + 1_000 * wait_ms
        while not load.answered and around.client is not None and around.now_us() < give_up_us:
            around.client.wait(PEEK_US)
            around.take_answers()

    def release(self, rid: str) -> tuple[int, int] | None:
        """A row is given back; the pages [first, last) of it that must not be freed by that."""
        load = self._by_rid.pop(rid, None)
        if load is None:
            return None
        self.counter.end(load)
        if load.answered:
            self._settle(load)
        load.in_row = False
        if load.settled:
            return None
        if load.orphan:
            self._around.room.quarantine(load.fill.targets)
        return load.fill.start, load.fill.end

    def release_kv(self, kv: Any) -> tuple[int, int] | None:
        """As `release`, of the request whose record of KV this is."""
        for rid, load in self._by_rid.items():
            if getattr(load.req, "kv", None) is kv:
                return self.release(rid)
        return None

    # Losses.

    def lose_daemon(self) -> list[Fill]:
        """No answer will come any more. Returns the fills whose targets rows have: they are not
        quarantined yet, because their rows count them."""
        if self._layers is None:
            return []
        kept: list[Fill] = []
        for load in self._by_seq.values():
            load.request.seq, load.request.receipt = 0, NO_LEASE
            complete = load.look()
            if not complete:
                self._lose(load, "the daemon is gone")
            if load.in_row:
                kept.append(load.fill)
                if complete:
                    # A counter at its end was written after the last copy was seen done.
                    self._end_unanswered(load)
                else:
                    load.orphan = True
        self._by_seq.clear()
        self._layers.landings.lose_all("the daemon is gone")
        return kept

    def quiet(self) -> None:
        """No mover has this pool any more."""
        if self._layers is None:
            return
        for load in self._by_rid.values():
            if load.orphan:
                self._end_unanswered(load)
        self._layers.landings.settle()

    def _end_unanswered(self, load: Load) -> None:
        load.answered, load.orphan = True, False
        self._answered.append(load)

    # What is to be seen.

    @property
    def alive(self) -> list[LiveRequest]:
        """The names by which loads hold leases of the daemon."""
        return [name for load in self._by_seq.values() for name in load.request.alive_as]

    @property
    def rows(self) -> list[Request]:
        """Rows' targets that still have names: whoever counts or frees pages must know of them."""
        return [load.row for load in self._by_rid.values() if not load.settled]

    def has(self, fill: Fill) -> bool:
        """Whether a fill's targets count as a row's."""
        load = self._by_seq.get(fill.seq)
        return load is not None and load.in_row

    def __repr__(self) -> str:
        return f"<Layerwise {list(self._by_rid.values())}, {self._offers!r}>"
