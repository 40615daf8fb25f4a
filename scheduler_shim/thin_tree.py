"""A thin scheduler's tree: the daemon keeps it, and whatever must be known is asked.

Owns what the scheduler itself can say of it: how many pages are in it (by the words that guard
them) and how many of those its leases protect, because nobody else puts pages in, gives them up or
protects them. It must never go on as if a question had been answered: where it is not known whose
pages are, or what is protected, the daemon is given up, and what the caller's rows say counts.

What has been found stays found until something is published or given up: only its use is told, at
the latest before the daemon decides anything by it. A lock is asked for and not waited for: its
answer is taken before anything depends on it, which is the next eviction at the latest.
"""

from __future__ import annotations

from array import array
from itertools import count
from typing import Final

from directory.core.actions import AnyReply, GaveUp, Inserted, Locked, Matched, Refused, Totals
from directory.core.errors import TreecoredError
from directory.core.events import Evict, Flush, Insert, Lock, Match, Mode, Unlock
from directory.core.ids import NO_LEASE
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages
from scheduler_shim.client import DaemonClient
from scheduler_shim.own_tree import Found, Published, held_bytes, question
from scheduler_shim.paths import TokenPath
from scheduler_shim.protected import ProtectedPaths
from scheduler_shim.request import Request
from scheduler_shim.spans import SpanTable

KNOWN_MAX: Final = 256
"""So many paths are remembered, and uses not told, at most."""
LOCK_CALLS: Final = 20
"""A lock that nothing depends on yet has the time of so many calls."""
TREE_BITS: Final = 40
_trees = count(1)
"""Changes are counted from another number for every tree, so that nothing that was found in one
passes for found in another: the daemon may have been lost in between."""


class ThinTree:
    """The tree is the daemon's. Mutated by its scheduler's thread alone."""

    mode: Mode = "thin"

    def __init__(self, spans: SpanTable, client: DaemonClient) -> None:
        self._spans = spans
        self._client = client
        self.gathers = False  # what is published is asked here, so nothing waits
        self.changes = next(_trees) << TREE_BITS
        """How often the pool's part of the tree has changed, by the messages sent so far."""
        self._gave_up = self.changes  # the same when something was given up last
        self._known: dict[TokenPath, Found] = {}  # as of now
        self._uses: dict[TokenPath, None] = {}  # not told yet, the last one last
        self._told: dict[TokenPath, None] = {}  # uses that the daemon knows last
        self._locking: dict[int, tuple[Request, Found]] = {}  # asked locks, by their questions
        self._protected = ProtectedPaths()
        self._paths: dict[int, bytes] = {}  # what each request's lease protects, by its number
        self._doubtful: dict[int, tuple[Match, int]] = {}
        """Questions for leases that had no answer, and how many pages each may protect at most."""

    def find(self, key: NamespaceKey, tokens: bytes, before: Found | None = None) -> Found:
        """As it was found last, where nothing has changed since; else ask, without a lease."""
        if not tokens:
            return Found(b"")
        path = TokenPath(key, tokens)
        if before is not None and before.changes == self.changes:
            self._use(path)
            return before
        known = self._known.get(path)
        if known is not None:
            self._use(path)
            return known
        changes = self.asks(key, tokens)
        reply = self._call(Match("find", 0, key, tokens, acquire=False))
        if not isinstance(reply, Matched):
            return Found(b"")
        return self.remember(key, tokens, reply, changes)

    def asks(self, key: NamespaceKey, tokens: bytes) -> int:
        """A path is asked for next, which is a use of it; returns the changes so far."""
        self._tell_uses()
        self._tells(TokenPath(key, tokens))
        return self.changes

    def remember(self, key: NamespaceKey, tokens: bytes, reply: Matched, changes: int) -> Found:
        """An answer says what the pool has of a path; `changes`: those when it was asked."""
        found = Found(reply.own, node_id=reply.node, changes=changes)
        if changes == self.changes:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[TokenPath(key, tokens)] = found
        return found

    def touch(self, key: NamespaceKey, tokens: bytes) -> None:
        """Told, not asked."""
        self._use(TokenPath(key, tokens))

    def use_again(self, request: Request, tokens: bytes) -> bool:  # noqa: ARG002 - see below
        """The daemon alone knows, and an insert asks it that."""
        return False

    def hold(self, request: Request, found: Found) -> bool:
        """Ask for a lease of the node. What was given up meanwhile is looked at first.

        Without an answer the daemon is given up: the caller's row counts then, as every row does,
        unless something was given up meanwhile; then it is empty, and nothing is held.
        """
        if not found.pages:
            return True
        if found.changes < self._gave_up:
            return self._lease_path(request, found)
        self._tell_uses()
        lock = Lock(request.name, request.attempt, found.node_id)
        # A forward pass may be longer than anybody would wait for an answer.
        seq = self._client.ask(lock, LOCK_CALLS * self._client.deadlines.call_ms)
        if not seq:
            return False
        self._locking[seq] = request, found
        self._protect(request, found.pages)
        return True

    def take(self, seq: int, reply: AnyReply | None) -> bool:
        """The answer to a lock: the lease, or, where the node is another one now, the path's."""
        asked = self._locking.pop(seq, None)
        if asked is None:
            return False
        request, found = asked
        if isinstance(reply, Locked):
            request.lease(reply.receipt)
        elif not isinstance(reply, Refused) or not self._lease_path(request, found):
            self._client.lose("no answer to Lock: what was found would not be protected")
        return True

    def _lease_path(self, request: Request, found: Found) -> bool:
        """Lease what was found by its tokens; False where it is not all there, or nobody knows."""
        tokens = request.tokens[: held_bytes(request, found)]
        self.asks(request.key, tokens)
        reply = self._call(Match(request.name, request.attempt, request.key, tokens))
        if not isinstance(reply, Matched):
            if found.changes < self._gave_up:
                # Its pages may be another row's by now: whatever comes next must not take them.
                request.row, request.tree_pages = array("I"), 0
            self._client.lose("no answer to Match: what was found would not be protected")
            return False
        request.lease(reply.receipt)
        self._protect(request, reply.own)
        if reply.own == found.pages:
            return True
        self.release(request)
        return False

    def _settle(self) -> None:
        """Take the answers of all locks that were asked for."""
        for seq in list(self._locking):
            if seq in self._locking and not self._client.lost:
                try:
                    reply = self._client.answer(seq, self._client.deadlines.call_ms)
                except TreecoredError as error:
                    reply = Refused(error.code, str(error))
                self.take(seq, reply)

    def match(self, request: Request) -> int:
        """Put what the pool holds of the path into the row, protected by a lease.

        Returns up to which page the path can be had; a refusal or no answer is a miss.
        """
        self._tell_uses()
        asked = question(request) if request.match_pages else None
        seq = self._client.ask(asked) if asked is not None else 0
        # It is a use of the path, which is noted while the answer is on its way.
        self._tells(TokenPath(request.key, request.match_tokens))
        if asked is None:
            return len(request.row)
        try:
            reply = self._client.answer(seq)
        except TreecoredError:
            return len(request.row)
        if not isinstance(reply, Matched):
            # More may be there by now than when the row was found.
            self._doubtful[seq] = asked, request.match_pages
            return len(request.row)
        # The new lease is there before that of an earlier attempt goes.
        self.release(request)
        request.lease(reply.receipt)
        request.row = array("I")
        request.row.frombytes(reply.own)
        if reply.receipt != NO_LEASE:
            self._protect(request, reply.own)
        request.tree_pages = request.hit_pages = reply.own_pages
        return reply.own_pages + reply.restorable_pages

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Published | None:
        """Ask the daemon to insert. Without an answer nobody here knows whose the pages are, so
        the daemon is given up: its claim on the pool ends with the session."""
        self._settle()
        slot, value = self._spans.allocate()
        message = Insert(
            request.name,
            request.attempt,
            request.key,
            request.tokens[: pages * request.page_key],
            pack_pages(request.row[:pages]),
            slot,
            value,
            written,
            request.receipt,
        )
        self._changed()
        reply = self._call(message)
        if isinstance(reply, TreecoredError):
            self._spans.publish(slot, 0)
            return None
        if not isinstance(reply, Inserted):
            self._spans.publish(slot, 0)
            self._client.lose("no answer to Insert: whose the pages are is not known")
            return None
        self._spans.publish(slot, reply.fresh_pages)
        if request.receipt != NO_LEASE:
            self._protect(request, reply.canonical)
        elif keep and reply.accepted_pages:
            self._lock(request, reply)
        return Published(reply.canonical, reply.duplicates)

    def protect(self, request: Request, written: tuple[int, int]) -> bool:
        """Have the row's part of the tree, which the daemon has, leased; whether it is."""
        done = self.publish(request, request.tree_pages, written, keep=True)
        return done is not None and not done.duplicates and request.receipt != NO_LEASE

    def _lock(self, request: Request, inserted: Inserted) -> None:
        reply = self._call(Lock(request.name, request.attempt, inserted.node))
        if isinstance(reply, Locked):
            request.lease(reply.receipt)
            self._protect(request, inserted.canonical)
        else:
            self._client.lose("no answer to Lock: the row would not be protected")

    def evict(self, pages: int) -> bytes:
        """Ask the daemon to choose; words first, then the pages are the caller's."""
        self._settle()
        given, more = b"", True
        while more and len(given) < 4 * pages:
            some, more = self._give_up(Evict(pages - len(given) // 4))
            given += some
        return given

    def flush(self) -> bytes:
        """Have everything that no lease protects given up."""
        self._settle()
        given, more = b"", True
        while more:
            some, more = self._give_up(Flush("pool"))
            given += some
        return given

    def _give_up(self, body: Evict | Flush) -> tuple[bytes, bool]:
        """What went, and whether to ask again: one answer names only so many pages."""
        self._changed()
        self._gave_up = self.changes
        reply = self._call(body)
        if not isinstance(reply, GaveUp):
            self._client.lose("no answer to Evict or Flush: which pages went is not known")
            return b"", False
        for slot, value, pages in reply.words:
            self._spans.give_up(slot, value, pages)
        return reply.pages, bool(reply.pages) and reply.totals.evictable > 0

    def _changed(self) -> None:
        """The next message changes the pool's part of the tree."""
        self._tell_uses()
        self.changes += 1
        self._known.clear()
        self._told.clear()

    def _use(self, path: TokenPath) -> None:
        """A path is used: of the same one only the last use counts."""
        self._uses.pop(path, None)
        self._uses[path] = None
        if len(self._uses) >= KNOWN_MAX:
            self._tell_uses()

    def _tell_uses(self) -> None:
        """Tell in which order paths were used, unless the daemon knows it by what it was told last;
        whatever it answers is thrown away."""
        if self._uses:
            uses = list(self._uses)
            self._uses.clear()
            if list(self._told)[-len(uses) :] != uses:
                for path in uses:
                    use = Match("touch", 0, path.key, path.tokens, acquire=False)
                    self._client.report(use, hold=True)
                    self._tells(path)

    def _tells(self, path: TokenPath) -> None:
        """The next message is a use of a path."""
        self._told.pop(path, None)
        self._told[path] = None
        if len(self._told) > KNOWN_MAX:
            del self._told[next(iter(self._told))]

    def _call(self, body: Match | Lock | Insert | Evict | Flush) -> object:
        try:
            return self._client.call(body)
        except TreecoredError as error:
            return error

    def release(self, request: Request) -> None:
        """Have the lease released; nobody waits for it."""
        if self._locking and any(waits is request for waits, _ in self._locking.values()):
            self._settle()
        if request.receipt != NO_LEASE:
            self._tell_uses()
            self._client.report(Unlock(request.receipt))
        request.receipt = NO_LEASE
        self._protect(request, b"")

    def _protect(self, request: Request, path: bytes) -> None:
        """The request's lease protects this path now, and no other one."""
        if path:
            self._protected.add(path)
        if before := self._paths.pop(request.number, b""):
            self._protected.remove(before)
        if path:
            self._paths[request.number] = path

    @property
    def pages(self) -> int:
        """Pages in the tree, by the words that guard them."""
        return self._spans.live_pages

    @property
    def totals(self) -> Totals:
        """Counted here: nobody else protects pages of this pool. What a lease may protect whose
        answer has not come counts as protected until it has, and was released."""
        protected = self._protected.pages
        if self.doubts:
            protected += sum(most for _, most in self._doubtful.values())
        protected = min(protected, self.pages)
        return Totals(self.pages - protected, protected)

    @property
    def doubts(self) -> bool:
        """Whether leases may be out that nobody here has. One ends with its own question: its late
        answer has come and the lease was released, or a list of live requests has made it fall."""
        may, doubtful = self._client.may_lease, self._doubtful
        if doubtful:
            self._doubtful = {seq: it for seq, it in doubtful.items() if may(seq, it[0])}
        return bool(self._doubtful)

    def check(self) -> list[str]:
        """What is counted here: spans and leases."""
        held = sum(len(path) // 4 for path in self._paths.values())
        if not min(held, 1) <= self._protected.pages <= held:
            return [*self._spans.check(), f"sums: {self._protected!r} of {len(self._paths)} leases"]
        return self._spans.check()

    def recount(self) -> list[str]:
        """Ask whether the daemon's sums are those that are counted here."""
        found: list[str] = []
        self._settle()
        reply = self._call(Match("totals", 0, NamespaceKey(), b"", acquire=False))
        if isinstance(reply, Matched) and reply.totals != self.totals and not self._doubtful:
            found.append(f"sums: the daemon counts {reply.totals}, here are {self.totals}")
        return found
