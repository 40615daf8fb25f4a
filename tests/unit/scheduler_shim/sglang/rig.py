"""A miniature of an SGLang scheduler around a real shim, on a daemon in the same process.

It has a waiting queue, admits in order as SGLang does, computes by writing what each page must
hold, and reads back every page that it did not compute. Everything the shim does is real.
"""

from __future__ import annotations

from array import array

from directory.core.events import Mode
from directory.core.namespace import NamespaceKey
from directory.core.tokens import unpack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.compute import Compute
from scheduler_shim.pools import SharedPool
from scheduler_shim.renamed import RenamedPool
from scheduler_shim.request import Request
from scheduler_shim.session import DaemonAbsent
from scheduler_shim.sglang.layer_counter import Layers
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.shim import Shim
from scheduler_shim.sglang.waiting import Waiting
from tests.unit.scheduler_shim.fake_daemon import BYTES_PER_TOKEN, PAGE_SIZE, FakeDaemon, FakeLink

KEY = NamespaceKey()
LANDINGS = 4
"""So many loads may land layer by layer at once."""


UNCOUNTED = ("ticks", "ticks_us")
"""Counters of the turns themselves."""


class MiniRequest:
    """What the shim sees of a request in the queue, and what came of it."""

    def __init__(self, rid: str, tokens: bytes, key: NamespaceKey = KEY) -> None:
        self.rid = rid
        self.tokens = tokens
        self.key = key
        self.hit_pages = -1  # pages that were not computed; -1: it was not admitted yet
        self.restored = 0
        self.steps_left = 0

    def __repr__(self) -> str:
        return f"<MiniRequest {self.rid}, {len(self.tokens)} bytes, {self.hit_pages} hit>"


class MiniDial:
    """Registers the engine's pool with the daemon again, if there is one."""

    def __init__(self, engine: MiniEngine) -> None:
        self._engine = engine

    def begin(self, mode: Mode) -> MiniDial:
        assert mode == self._engine.settings.mode
        if self._engine.daemon.absent:
            raise DaemonAbsent("nobody is there")
        return self

    def step(self) -> DaemonClient | None:
        if self._engine.daemon.absent:
            raise DaemonAbsent("it died in the midst of the registration")
        if self._engine.daemon.mapped_still(self._engine.instance):
            return None
        return self._engine.connect()

    def close(self) -> None:
        """Nothing stays open here."""

    def deserted(self) -> bool:
        return False

    def now_us(self) -> int:
        return self._engine.daemon.clock_us


class MiniEngine:
    """One engine. `steps`: how many steps a request runs, its row locked meanwhile."""

    def __init__(
        self,
        daemon: FakeDaemon,
        instance: str,
        mode: Mode = "mirrored",
        *,
        page_count: int = 16,
        renamed: bool = False,
        steps: int = 0,
        **settings: object,
    ) -> None:
        self.daemon = daemon
        self.instance = instance
        self.steps = steps
        self.closed = False
        """Nobody is admitted, as with every place in SGLang's batch taken."""
        self.crowd = False
        """Something else runs, for all that the shim is told."""
        self.doubts = False
        """A turn that may be left out is had all the same, and must find nothing to do."""
        waits = {"idle_wait_us": 0, "busy_wait_us": 0}
        self.settings = Settings.model_validate({"mode": mode, **waits, **settings})
        given = {"page_size": PAGE_SIZE, "bytes_per_token": BYTES_PER_TOKEN}
        self.pool = (
            RenamedPool(page_count=page_count, **given)
            if renamed
            else SharedPool(page_count=page_count, landings=LANDINGS, **given)
        )
        self.link: FakeLink
        self.epochs: dict[int, Compute] = {}
        self.kept_out = b""
        self.shim = Shim(
            self.pool,
            self.pool.make_allocator(),
            self.connect() if not daemon.absent else None,
            self.settings,
            dial=MiniDial(self),
            start_over=self._start_over,
            layers=self._layers(),
        )
        self.queue: list[MiniRequest] = []
        self.running: dict[str, tuple[MiniRequest, Request]] = {}
        self.done: dict[str, MiniRequest] = {}
        self.shim.rows = lambda: [row for _, row in self.running.values()]
        self.shim.key_of = self._key_of

    def connect(self) -> DaemonClient:
        """Register with the daemon."""
        client, self.link = self.daemon.connect(
            self.pool,
            instance=self.instance,
            mode=self.settings.mode,
            deadlines=self.settings.deadlines,
        )
        return client

    # What a user does.

    def submit(self, rid: str, tokens: bytes) -> MiniRequest:
        """Append to the queue."""
        request = MiniRequest(rid, tokens)
        self.queue.append(request)
        return request

    def abort(self, rid: str) -> None:
        """Take a request out of the queue, as SGLang does: nobody tells the shim."""
        self.queue = [request for request in self.queue if request.rid != rid]

    def serve(self, rid: str, tokens: bytes) -> MiniRequest:
        """Run one request to its end."""
        request = self.submit(rid, tokens)
        self.settle()
        return request

    def settle(self, limit: int = 2_000) -> None:
        """Step until nothing waits, nothing runs and nothing is left to be said."""
        for _ in range(limit):
            self.step()
            client = self.shim.client
            if not self.queue and not self.running and (client is None or not client.open_count):
                return
            self.daemon.run()
            self.daemon.clock_us += 1_000
        raise AssertionError(f"{self.shim!r} does not come to rest: {self.queue}")

    # The loop.

    def step(self) -> None:
        """One loop of the scheduler: the shim's turn, then everything that can be admitted."""
        self.turn(busy=bool(self.running) or self.crowd)
        for request, row in list(self.running.values()):
            request.steps_left -= 1
            if request.steps_left <= 0:
                self._finish(request, row)
        for request in list(self.queue):
            if self.closed:
                break
            if self.shim.held(request.rid):
                continue
            if not self._admit(request):
                break
        self.check()

    def turn(self, *, busy: bool) -> None:
        """The shim's turn, which is left out where SGLang's loop may leave it out (hooks.tick)."""
        rests = (busy or not self.queue) and self.shim.rests(self.queue, lambda: busy)
        if rests and not self.doubts:
            return
        before = self._done_so_far()
        self.shim.tick(self.queue, busy=busy)
        after = self._done_so_far()
        assert not rests or after == before, f"{before} -> {after}"

    def _done_so_far(self) -> object:
        """What a turn changes if it finds anything to do."""
        shim = self.shim
        counters = {name: n for name, n in shim.counters.items() if name not in UNCOUNTED}
        stages = {rid: entry.stage for rid, entry in shim._held._entries.items()}
        client = (shim.client.open_count, shim.client.leases_out) if shim.client else ()
        return counters, stages, client, shim.mode, shim.tree.pages, shim.outside_pages

    def _admit(self, request: MiniRequest) -> bool:
        shim, key = self.shim, self._key_of(request)[0]
        row = shim.request(key, request.tokens)
        found = shim.tree.find(key, row.match_tokens)
        row.row = unpack_pages(found.pages)
        row.tree_pages = row.hit_pages = len(row.row)
        self.running[request.rid] = request, row
        held = shim.tree.hold(row, found)
        shim.look_for_loss()
        new = shim.room.allocate(row.all_pages - len(row.row)) if held else None
        if new is None:
            shim.tree.release(row)
            del self.running[request.rid]
            return False
        row.row.extend(new)
        compute = self._compute(key)
        request.hit_pages, request.restored = row.hit_pages, shim.restored_tokens(request.rid)[0]
        shim.gone(request.rid)
        self.queue.remove(request)
        assert compute.check(row) == 0, f"{request}: a page of its prefix is wrong"
        written = compute.write(row, row.hit_pages, row.all_pages)
        self._publish(row, written)
        request.steps_left = self.steps
        if not self.steps:
            self._finish(request, row)
        return True

    def _publish(self, row: Request, written: tuple[int, int]) -> None:
        done = self.shim.publish(row, row.full_pages, written, keep=bool(self.steps))
        if done is not None:
            self.shim.room.free(done.duplicates)
            self.shim.look_for_loss()

    def _finish(self, request: MiniRequest, row: Request) -> None:
        self.shim.tree.release(row)
        self.shim.room.free(row.row[row.tree_pages :])
        del self.running[request.rid]
        self.done[request.rid] = request

    # Looking.

    def check(self) -> None:
        """Every invariant, here and at the daemon."""
        assert self.shim.check() == []
        assert self.daemon.check() == []

    @property
    def counters(self) -> dict[str, int]:
        """The shim's."""
        return self.shim.counters

    @property
    def left_out(self) -> int:
        """Turns that were left out, or were to be."""
        turns = self.shim.stats()["turns_left_out"]
        assert isinstance(turns, int)
        return turns

    def holds(self, tokens: bytes) -> int:
        """Pages of a path that the own tree has."""
        return len(self.shim.tree.find(self._key_of_tokens(), tokens).pages) // 4

    def close(self) -> None:
        """End the session and give the memory back."""
        self.shim.close()
        self.daemon.run_copies()
        self.pool.close()

    def _key_of(self, request: Waiting) -> tuple[NamespaceKey, bytes]:
        assert isinstance(request, MiniRequest)
        return self._key_of_tokens(), request.tokens

    def _key_of_tokens(self) -> NamespaceKey:
        return NamespaceKey(weight_epoch=self.shim.key_epoch)

    def _compute(self, key: NamespaceKey) -> Compute:
        if key.weight_epoch not in self.epochs:
            self.epochs[key.weight_epoch] = Compute(self.pool, key, lambda _name, _amount: None)
        return self.epochs[key.weight_epoch]

    def _layers(self) -> Layers | None:
        """What loads need that land layer by layer; this engine has none."""
        return None

    def _start_over(self, names: bytes) -> None:
        self.kept_out = names


def prompt(*ids: int, tail: int = 1) -> bytes:
    """A page of equal tokens for each id, and `tail` tokens of a last, partial page."""
    units = [i for i in ids for _ in range(PAGE_SIZE)] + [99] * tail
    return array("I", units).tobytes()


def leases(daemon: FakeDaemon) -> int:
    """Leases that the daemon has granted and that nobody has released."""
    return len(daemon.directory.leases)
