"""A miniature of SGLang's way with loads that land layer by layer, around a real shim.

It admits as SGLang does: match, hold, `begin` for what the match has offered, launch. Its forward
pass reads the loaded pages layer by layer through the counter, and what it read must be right
unless the request is ended for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from directory.core.ids import LANDINGS as FIRST
from directory.core.tokens import unpack_pages
from scheduler_shim.landings import Landings, Streams
from scheduler_shim.request import Request
from scheduler_shim.sglang.layer_counter import Layers
from tests.unit.scheduler_shim.fake_daemon import PAGE_SIZE, FakeDaemon
from tests.unit.scheduler_shim.sglang.rig import KEY, MiniEngine, MiniRequest, leases, prompt

ABC = prompt(1, 2, 3)
OTHERS = (prompt(11, 12, 13), prompt(14, 15, 16), prompt(17, 18, 19), prompt(20, 21, 22))
LAYERS = 2
STREAM = 5


class Row:
    """A running request: the row's tree part, what is loaded behind it, and what is its own."""

    def __init__(self, tree: Request, rest: Request) -> None:
        self.tree = tree
        self.rest = rest
        self.loaded = b""


class LoadRequest(MiniRequest):
    """A request as SGLang has it. `failed`: why it was ended with status 503."""

    failed = ""
    ended = False
    loaded_pages = 0
    retracted_stain = False
    _cache_breakdown_computed = False
    own = b""
    offered = 0

    def finished(self) -> bool:
        """Whether it has its outputs."""
        return self.ended


class LoadingEngine(MiniEngine):
    """An engine whose loads land layer by layer.

    `streams`: where a GPU's streams would wait; the pass itself runs when its results are used.
    `refuses`: whom SGLang's last gate turns away after its load has begun. `in_forward`: called
    before each layer is read. `keeps`: requests run on after their first step until `finish`.
    """

    def __init__(
        self,
        daemon: FakeDaemon,
        instance: str,
        *args: Any,
        streams: Streams | None = None,
        **more: Any,
    ) -> None:
        self.streams = streams
        self.synchronized = 0
        self.rows: dict[str, tuple[LoadRequest, Row]] = {}
        self.refuses: set[str] = set()
        self.in_forward: Callable[[int], None] = lambda _: None
        self.keeps = False
        more = {"loads": "layerwise", "layer_ms": 20, **more}
        super().__init__(daemon, instance, *args, **more)
        self.behind = False
        """A pass is over and its results are used one step after its launch, behind a tick."""
        self.stalled = False
        """No pass that was launched is over yet."""
        self._launched: list[tuple[LoadRequest, Row, int]] = []
        self.shim.rows = self._rows_in_tree
        self.shim.loads.publish = self._publish_loaded
        self.shim.loads.abort = self._abort
        if self.shim.loads.offers is not None:
            self.shim.loads.offers.decoding = lambda: bool(self.rows)

    def submit(self, rid: str, tokens: bytes) -> LoadRequest:
        """Append to the queue."""
        request = LoadRequest(rid, tokens, KEY)
        self.queue.append(request)
        return request

    def start(self, rid: str, tokens: bytes) -> LoadRequest:
        """Submit a request and step until it runs or has ended."""
        request = self.submit(rid, tokens)
        for _ in range(50):
            if request not in self.queue:
                return request
            self.step()
            self.daemon.run()
        raise AssertionError(f"{request} is not admitted: {self.shim!r}")

    def finish(self, rid: str) -> None:
        """End a running request, as SGLang does at its last token."""
        for launched in [one for one in self._launched if one[0].rid == rid]:
            self._launched.remove(launched)
            self._forward(*launched)
        if rid not in self.rows:
            return
        request, row = self.rows[rid]
        if not request.failed and self.shim.loads.ready(rid, last=True):
            self._store(request, row, keep=False)
        self._give_back(request, row)

    def abort(self, rid: str) -> None:
        """End a request wherever it is; nothing of it is stored."""
        super().abort(rid)
        if rid in self.rows:
            self._give_back(*self.rows[rid])

    def counter_says(self, layers: int, at: int = 0) -> None:
        """Have a landing counter say that so many more layers are there."""
        table = self.pool.timelines
        table.write(FIRST + at, table.read(FIRST + at) + layers)

    def landed_layers(self, at: int = 0) -> int:
        """What a landing counter says."""
        return self.pool.timelines.read(FIRST + at)

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return self.shim.room.free_count

    # SGLang's way.

    def step(self) -> None:
        """The shim's turn, then everything that can be admitted, each in a pass of its own."""
        self.turn(busy=bool(self.rows) or self.crowd)
        launched = [] if self.stalled else self._launched
        self._launched = self._launched if self.stalled else []
        for request in list(self.queue):
            assert isinstance(request, LoadRequest)
            if not self.closed and not self.shim.held(request.rid):
                self._admit_loading(request)
        for request, row, known in launched:
            self._forward(request, row, known)
        self.check()

    def check(self) -> None:
        """Every invariant; and a counter that a mover may write is nobody else's."""
        super().check()
        assert self.landings.check() == []
        open_now = self.landings.open
        assert all(load.landing in open_now for load in self.shim.loads._by_seq.values())

    def _admit_loading(self, request: LoadRequest) -> None:
        shim, rid = self.shim, request.rid
        key = self._key_of(request)[0]
        tree = shim.request(key, request.tokens)
        found = shim.tree.find(key, tree.match_tokens)
        offered = shim.loads.pages(rid, key, tree.match_tokens, found.pages)
        if shim.held(rid):
            return
        tree.row = unpack_pages(found.pages)
        tree.tree_pages = len(tree.row)
        rest = Request(0, rid, key, b"", b"", tree.page_key)
        row = Row(tree, rest)
        self.rows[rid] = request, row
        held = shim.tree.hold(tree, found)
        lost = shim.look_for_loss()
        assert held or (lost and tree.node is not None), "given up between its match and its lock"
        need = tree.all_pages - tree.tree_pages
        if need > self.free + shim.tree.totals.evictable:
            shim.tree.release(tree)
            del self.rows[rid]
            return
        row.loaded = shim.loads.begin(request, found.pages, offered) if offered else b""
        assert len(row.loaded) // 4 in (0, offered), "all or nothing"
        if rid in self.refuses:
            self.refuses.discard(rid)
            shim.loads.refuse(rid)
            shim.tree.release(tree)
            del self.rows[rid]
            return
        known = tree.tree_pages + len(row.loaded) // 4
        short = tree.all_pages - known - shim.room.allocator.free_count
        if short > 0:
            shim.evict(short)
        new = shim.room.allocator.allocate(tree.all_pages - known)
        assert new is not None, "SGLang ends an engine that has not what it was promised"
        rest.row = new
        request.restored = shim.restored_tokens(rid)[0]
        request.loaded_pages = shim.loads.launch(request) // PAGE_SIZE
        shim.gone(rid)
        self.queue.remove(request)
        request.hit_pages = known
        if self.behind and self.streams is None:
            self._launched.append((request, row, known))
        else:
            self._forward(request, row, known)

    def _forward(self, request: LoadRequest, row: Row, known: int) -> None:
        loads, tree = self.shim.loads, row.tree
        if request.ended:
            return
        compute = self._compute(tree.key)
        all_pages = [*tree.row, *_unpacked(row.loaded), *row.rest.row]
        pages = all_pages[:known]
        wanted = tree.digests(compute.seed)[:known]
        for layer in range(LAYERS):
            self.in_forward(layer)
            loads.counter.wait_until(layer)
        right = self.streams is None and not compute.wrong(wanted, pages)
        loads.results([request], self._synchronize)
        if self.streams is not None:
            right = not compute.wrong(wanted, pages)
        assert loads.counter.consumer_index == -1
        assert right or request.failed, f"{request} was computed from wrong pages"
        if not request.failed:
            whole = Request(0, request.rid, tree.key, tree.tokens, b"", tree.page_key)
            whole.row = array("I", all_pages)
            compute.write(whole, known, whole.all_pages)
            if loads.ready(request.rid):
                self._store(request, row, keep=True)
        if request.failed or not self.keeps:
            self.finish(request.rid)

    def _store(self, request: LoadRequest, row: Row, *, keep: bool) -> None:
        self._merge(row)
        self._put(row, row.tree.full_pages, keep=keep)

    def _publish_loaded(self, req: Any, pages: int) -> None:
        row = self.rows[req.rid][1]
        self._merge(row)
        self._put(row, pages, keep=True)

    def _put(self, row: Row, pages: int, *, keep: bool) -> None:
        done = self.shim.publish(row.tree, pages, self.pool.advance(), keep=keep)
        if done is not None:
            self.shim.room.free(done.duplicates)
            self.shim.look_for_loss()

    def _merge(self, row: Row) -> None:
        """The loaded pages are the row's own, and so all of it is one row."""
        row.tree.row.extend([*_unpacked(row.loaded), *row.rest.row])
        row.loaded, row.rest.row = b"", array("I")

    def _give_back(self, request: LoadRequest, row: Row) -> None:
        """Free what is not the tree's, but for what may still be written into."""
        shim, tree = self.shim, row.tree
        kept = shim.loads.release(request.rid)
        assert kept is None or row.loaded, "only what is being loaded is kept back"
        if kept is None:
            self._merge(row)
        pages = array("I", [*tree.row[tree.tree_pages :], *row.rest.row])
        shim.tree.release(tree)
        shim.room.free(pages)
        request.ended = True
        del self.rows[request.rid]

    def _rows_in_tree(self) -> list[Request]:
        return [part for _, row in self.rows.values() for part in (row.tree, row.rest)]

    def _disown(self, names: bytes) -> None:
        for _, row in self.rows.values():
            if row.loaded == names:
                self._merge(row)
                return
        raise AssertionError("nobody has these pages")

    def _abort(self, req: Any, why: str) -> None:
        assert not req.failed, "it is ended once"
        req.failed = why

    def _layers(self) -> Layers | None:
        self.landings = Landings(self.pool.timelines, self.streams)
        stream = (lambda: STREAM) if self.streams is not None else None
        return Layers(self.landings, LAYERS, self._disown, stream)

    def _synchronize(self) -> None:
        self.synchronized += 1

    def settle(self, limit: int = 2_000) -> None:
        """Step until nothing waits, nothing runs and nothing is left to be said."""
        for _ in range(limit):
            self.step()
            client = self.shim.client
            done = not self.queue and not self._launched
            if done and (client is None or not client.open_count):
                return
            self.daemon.run()
            self.daemon.clock_us += 1_000
        raise AssertionError(f"{self.shim!r} does not come to rest: {self.queue}")


def _unpacked(pages: bytes) -> array[int]:
    row = array("I")
    row.frombytes(pages)
    return row


def at_rest(engine: LoadingEngine) -> None:
    """Nothing is leased, out of use or held; every page is free or in the tree."""
    engine.settle()
    assert engine.rows == {}
    assert engine.shim.outside_pages == 0
    assert engine.free + engine.shim.tree.pages == engine.pool.page_count
    assert leases(engine.daemon) == 0
