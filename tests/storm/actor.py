"""One scheduler of the storm: real mirror or thin tree, real spans and allocator, no sockets.

Owns its pool's contents, its requests and the targets of its restores. What it asks is carried out
at once, in this process; restores are answered when their copies end. Each request is read back
against its token path before it is used.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, cast

from directory.core.actions import AnyReply, Matched, Restored
from directory.core.errors import TreecoredError
from directory.core.events import Body, Flush, Mode, PoolRegistered, Restore
from directory.core.ids import NO_LEASE, PoolId
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.mirror import Mirror
from scheduler_shim.own_tree import MirroredTree, question
from scheduler_shim.pools import PageAllocator
from scheduler_shim.republish import Republisher
from scheduler_shim.request import Phase, Request
from scheduler_shim.spans import SpanTable
from scheduler_shim.thin_tree import ThinTree
from tests.storm.world import GARBAGE, PAGE_BYTES, Violation, World
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import WordTable

TOKENS_PER_PAGE = 2
PAGE_KEY = 4 * TOKENS_PER_PAGE


class Prompt(NamedTuple):
    """A request to come: its namespace, packed tokens, and what each page must hold."""

    key: NamespaceKey
    tokens: bytes
    contents: tuple[int, ...]


class DirectClient:
    """What trees need of a client, carried out at once."""

    def __init__(self, world: World, pool: PoolId) -> None:
        self.world = world
        self.pool = pool
        self.lost = ""
        self.open_count = 0
        self.deadlines = Deadlines()
        self._seq = 0
        self._answers: dict[int, AnyReply | TreecoredError | None] = {}

    def call(self, body: Body) -> AnyReply | None:
        """Ask; raises the typed error of a refusal."""
        self._seq += 1
        return self.world.ask(self.pool, self._seq, body)

    def ask(self, body: Body, deadline_ms: int = 0, *, hold: bool = False) -> int:
        """Ask; `answer` gives what came, or raises the refusal."""
        try:
            reply: AnyReply | TreecoredError | None = self.call(body)
        except TreecoredError as error:
            reply = error
        self._answers[self._seq] = reply
        return self._seq

    def answer(self, seq: int, wait_ms: int = 0) -> AnyReply | None:
        """The answer of something asked; raises the typed error of a refusal."""
        reply = self._answers.pop(seq)
        if isinstance(reply, TreecoredError):
            raise reply
        return reply

    def may_lease(self, seq: int, body: Body) -> bool:
        """Whether a question without an answer may bring a lease yet: here all are answered."""
        return False

    def report(self, body: Body, *, hold: bool = False) -> None:
        """Tell."""
        self.call(body)

    def send_held(self) -> None:
        """Nothing is held."""

    def poll(self) -> list[tuple[int, AnyReply | None]]:
        """What was asked has been answered by `call`."""
        return []

    def now_us(self) -> int:
        """This storm has no time: nothing takes any."""
        return 0

    def lose(self, reason: str) -> None:
        """In this storm no question stays without its answer."""
        raise Violation(f"pool {self.pool} gives its daemon up: {reason}")


class Fill(NamedTuple):
    """A restore under way: for whom (None once aborted), into what."""

    request: Request | None
    targets: array[int]


class Actor:
    """One process of one instance, over one or more registrations."""

    def __init__(
        self, world: World, instance: str, mode: Mode, fingerprint: bytes, page_count: int
    ) -> None:
        self.world = world
        self.instance = instance
        self.mode = mode
        self.fingerprint = fingerprint
        self.page_count = page_count
        self.contents = [GARBAGE] * page_count
        self.allocator = PageAllocator(page_count)
        self._words = WordTable.create(SharedMemoryIPC(), "storm", page_count + 1)
        self.spans = SpanTable(self._words, page_count)
        self.requests: dict[int, Request] = {}
        self.expected: dict[int, tuple[int, ...]] = {}
        self.fills: dict[int, Fill] = {}
        self.quarantined: list[tuple[PoolId, array[int]]] = []
        self._numbers = 0
        self.dead = False
        self.restored = 0
        self.verified = 0
        self.pool: PoolId = 0
        self.tree: MirroredTree | ThinTree
        self._register()

    def _register(self) -> None:
        event = PoolRegistered(
            0,
            0,
            self.instance,
            self.fingerprint,
            TOKENS_PER_PAGE,
            self.page_count,
            PAGE_BYTES,
            self.mode,
        )
        self.pool = self.world.register(self.instance, self, event)
        self.direct = DirectClient(self.world, self.pool)
        self.client = cast(DaemonClient, self.direct)
        if self.mode == "thin":
            self.tree = ThinTree(self.spans, self.client)
            return
        mirror = Mirror(
            self.spans,
            fingerprint=self.fingerprint,
            page_size=TOKENS_PER_PAGE,
            page_count=self.page_count,
            page_bytes=PAGE_BYTES,
        )
        self.tree = MirroredTree(mirror, self.client)

    # A request's life.

    def begin(self, prompt: Prompt) -> Request:
        """Match, and acquire what lies beyond."""
        self._numbers += 1
        request = Request(
            self._numbers,
            f"{self.instance}-{self._numbers}",
            prompt.key,
            prompt.tokens,
            b"",
            PAGE_KEY,
        )
        self.requests[request.number] = request
        self.expected[request.number] = prompt.contents
        if isinstance(self.tree, ThinTree):
            request.reach = self.tree.match(request)
        else:
            self.tree.match(request)
            request.reach = len(request.row)
            if len(request.row) < request.match_pages:
                reply = self.direct.call(question(request))
                assert isinstance(reply, Matched)
                request.receipt = reply.receipt
                request.reach += reply.restorable_pages
        self._read_back(request, len(request.row))
        request.phase = Phase.ADMITTED
        return request

    def restore(self, request: Request) -> None:
        """Have what can be had brought, as far as there is room."""
        start = len(request.row)
        want = request.reach - start if request.receipt != NO_LEASE else 0
        targets = self._allocate(want, all_or_none=False) if want > 0 else None
        if not targets:
            return
        body = Restore(
            request.name, request.attempt, request.receipt, start, pack_pages(targets), (0, 0)
        )
        for page in targets:
            self.contents[page] = GARBAGE
        request.phase = Phase.RESTORING
        seq = self.direct._seq + 1
        self.fills[seq] = Fill(request, targets)
        reply = self.direct.call(body)
        if reply is not None:
            self.on_answer(seq, reply)

    def on_answer(self, seq: int, reply: AnyReply) -> None:
        """A restore has landed or is lost."""
        request, targets = self.fills.pop(seq)
        landed = isinstance(reply, Restored) and reply.landed
        if request is None or not landed:
            self.allocator.free(targets)
            if request is not None:
                request.phase = Phase.ADMITTED
            return
        request.phase = Phase.ADMITTED
        request.row.extend(targets)
        self._read_back(request, len(request.row))
        self.restored += len(targets)
        self._publish(request, len(request.row))

    def compute(self, request: Request, pages: int) -> bool:
        """Compute at most so many pages and publish them; whether there was room."""
        first = len(request.row)
        last = min(first + pages, request.prompt_pages)
        if last > first:
            new = self._allocate(last - first, all_or_none=True)
            if new is None:
                return False
            request.row.extend(new)
            contents = self.expected[request.number]
            for at in range(first, last):
                self.contents[request.row[at]] = contents[at]
        self._publish(request, last)
        return True

    def end(self, request: Request) -> None:
        """Finish or abort: release everything; a restore under way goes on for nobody."""
        for seq, fill in self.fills.items():
            if fill.request is request:
                self.fills[seq] = Fill(None, fill.targets)
        self._read_back(request, len(request.row))
        self.tree.release(request)
        self.allocator.free(request.row[request.tree_pages :])
        del self.requests[request.number], self.expected[request.number]

    # The pool's life.

    def evict(self, pages: int) -> None:
        """Give pages up."""
        self.allocator.free(self.tree.evict(pages))

    def flush(self) -> None:
        """Give up all that is not in use."""
        self.allocator.free(self.tree.flush())

    def die(self) -> None:
        """The process is gone, in the middle of everything."""
        self.dead = True
        self.world.close(self.pool)

    def close(self) -> None:
        """No copy looks at the words any more."""
        self._words.close()

    def reconnect(self) -> None:
        """The session is lost and made anew: another registration of the same memory. A mirror
        stays and is republished; a thin one has lost what it had."""
        old = self.pool
        self.world.close(old)
        for fill in self.fills.values():
            self.quarantined.append((old, fill.targets))
            if fill.request is not None:
                fill.request.phase = Phase.ADMITTED
        self.fills.clear()
        if isinstance(self.tree, ThinTree):
            self.spans.give_up_all()
            for request in list(self.requests.values()):
                request.receipt = NO_LEASE
                del self.requests[request.number], self.expected[request.number]
            held = {page for _, pages in self.quarantined for page in pages}
            self.allocator.free(array("I", (p for p in self.allocator.used() if p not in held)))
            self._register()
            self.direct.report(Flush("pool", self.spans.word(0)))
        else:
            tree = self.tree
            for request in self.requests.values():
                request.receipt = NO_LEASE
                request.reach = 0
            self._register()
            self.tree = tree
            tree.client = self.client
            if not Republisher(tree.mirror, self.client, thin=False).finish():
                raise Violation("republication lost its daemon")
        self.free_quarantined()

    def free_quarantined(self) -> None:
        """Free targets of a closed registration's restores once no copy writes into them."""
        left = []
        for pool, pages in self.quarantined:
            if self.world.writes_into(pool):
                left.append((pool, pages))
            else:
                self.allocator.free(pages)
        self.quarantined = left

    # Checks.

    def check_pages(self) -> None:
        """Every page is free, in the tree, a request's own, a target, or quarantined; by count."""
        own = sum(len(r.row) - r.tree_pages for r in self.requests.values())
        landing = sum(len(fill.targets) for fill in self.fills.values())
        waiting = sum(len(pages) for _, pages in self.quarantined)
        counts = (self.allocator.free_count, self.tree.pages, own, landing, waiting)
        if sum(counts) != self.page_count:
            raise Violation(f"{self.instance}: {counts} do not add up to {self.page_count}")
        known = self.world.directory.pools[self.pool].pages
        if known != self.tree.pages:
            raise Violation(f"{self.instance}: {self.tree.pages} in the tree, {known} are known")

    def check(self) -> list[str]:
        """Walk the tree."""
        return self.tree.check()

    # Private.

    def _publish(self, request: Request, pages: int) -> None:
        if not pages:
            return
        done = self.tree.publish(request, pages, (0, 0), keep=True)
        if done is None:
            raise Violation(f"{self.instance}: an insert was refused")
        request.row[:pages] = array("I", done.canonical)
        request.tree_pages = pages
        self.allocator.free(done.duplicates)

    def _allocate(self, count: int, *, all_or_none: bool) -> array[int] | None:
        short = count - self.allocator.free_count
        if isinstance(self.tree, MirroredTree):
            room = self.tree.mirror.totals.evictable
            short = short if all_or_none else min(short, room)
        if short > 0:
            self.evict(short)
        if not all_or_none:
            count = min(count, self.allocator.free_count)
        return self.allocator.allocate(count)

    def _read_back(self, request: Request, pages: int) -> None:
        contents = self.expected[request.number]
        for at in range(pages):
            if self.contents[request.row[at]] != contents[at]:
                raise Violation(f"{request!r} of {self.instance}: page {at} of its path is wrong")
        self.verified += pages

    def __repr__(self) -> str:
        return (
            f"<Actor {self.instance} {self.mode}, pool {self.pool}, {len(self.requests)} requests>"
        )
