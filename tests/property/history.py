"""A random history of one directory, told beside a plain dictionary of paths.

Owns the model (which path is in which pool at which page, which paths are at the host) and the
steps: computing, splits, duplicates, evictions, leases, restores, copies that end in any order and
way, deaths, flushes. Each step chooses through `pick(n)`, so hypothesis or a seed can drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from directory.core import limits
from directory.core.actions import Done, Matched, SubmitCopy
from directory.core.events import Flush, Mode, MoverLost, Outcome
from directory.core.ids import HOST
from directory.core.namespace import NamespaceKey
from directory.core.node import Node
from directory.core.tokens import pack_pages, unpack_pages
from tests.unit.directory.core.copying import Content
from tests.unit.directory.core.world import Scheduler, World

KEYS = (NamespaceKey(), NamespaceKey(), NamespaceKey(cache_salt=""), NamespaceKey(bigram=True))
POOL_PAGES = 16
PATH_PAGES_MAX = 9
OUTCOMES: tuple[Outcome, ...] = ("ok", "ok", "ok", "ok", "ok", "void", "failed")

Pick = Callable[[int], int]
"""Choose a number from 0 up to but without n."""

T = TypeVar("T")


class Held:
    """A request that looked and holds leases: the receipt, and the mirror's lock."""

    def __init__(
        self, who: Scheduler, key: NamespaceKey, tokens: list[int], got: Matched, node: Node | None
    ) -> None:
        self.who = who
        self.key = key
        self.tokens = tokens
        self.got = got
        self.node = node
        self.restored = not got.receipt
        self.host_only = got.peer_pages == 0


class History:
    """One world and its model. `check` compares the two. `keys`: the namespaces that are used.

    `closed_a_step`: so much of pools that have ended one event takes out."""

    keys: Sequence[NamespaceKey] = KEYS

    def __init__(
        self,
        page_size: int,
        host_pages: int,
        modes: Sequence[Mode],
        closed_a_step: int = limits.CLOSED_A_STEP_MAX,
    ) -> None:
        self.page_size = page_size
        self.world = World(host_pages=host_pages, segment_pages=5, closed_a_step=closed_a_step)
        self.pools = [self.join(f"s{at}", mode) for at, mode in enumerate(modes)]
        self.model: dict[Content, dict[int, int]] = {}
        self.host: set[Content] = set()
        self.stale_ops: set[int] = set()
        self.host_evicted = 0
        self.held: list[Held] = []
        self.waiting: list[tuple[Scheduler, int]] = []

    def join(self, name: str, mode: Mode) -> Scheduler:
        """Register a scheduler."""
        return Scheduler(self.world, name, mode, pages=POOL_PAGES, page_size=self.page_size)

    def contents(self, key: NamespaceKey, packed: bytes) -> list[Content]:
        """The contents of the pages along a path."""
        step = self.page_size * key.unit_bytes
        return [(key, packed[:end]) for end in range(step, len(packed) + 1, step)]

    # What schedulers do.

    def compute(self, pick: Pick) -> None:
        """Publish a path; making room may evict."""
        who, key = self._pick(pick, self.pools), self._pick(pick, self.keys)
        tokens = self._tokens(pick)
        before = {
            page: c for c, at in self.model.items() for p, page in at.items() if p == who.pool
        }
        out = who.publish(tokens, key=key, fresh_all=pick(4) == 0)
        owned = self.world.directory.pools[who.pool].owned
        lost = [page for page in before if page not in owned]
        canonical = out[0] if out is not None else []
        contents = self.contents(key, who.pack(tokens, key))
        # A page may have been evicted and used again within this very step.
        lost += [p for c, p in zip(contents, canonical, strict=False) if before.get(p, c) != c]
        self._forget(who, lost)
        if out is not None:
            for content, page in zip(contents, canonical, strict=True):
                kept = self.model.setdefault(content, {}).setdefault(who.pool, page)
                assert kept == page, "a canonical page moved"

    def evict(self, pick: Pick) -> None:
        """Give up exactly as many pages as asked for and evictable."""
        who, count = self._pick(pick, self.pools), 1 + pick(POOL_PAGES)
        evictable, protected = who.totals()
        freed = who.evict(count)
        assert len(freed) == min(count, evictable)
        self._forget(who, freed)
        assert who.totals() == (evictable - len(freed), protected)

    def look(self, pick: Pick) -> None:
        """Match with acquire, and compare the answer with the model."""
        who, key = self._pick(pick, self.pools), self._pick(pick, self.keys)
        tokens = self._tokens(pick)
        packed = who.pack(tokens, key)
        contents = self.contents(key, packed)
        at = [self.model.get(content, {}) for content in contents]
        own = 0
        while own < len(at) and who.pool in at[own]:
            own += 1
        end, peers = own, 0
        while end < len(at):
            peer = any(pool != who.pool for pool in at[end])
            if not peer and contents[end] not in self.host:
                break
            peers += peer
            end += 1
        expected = [at[page][who.pool] for page in range(own)]
        node, mine = None, b""
        if who.mirror is not None:
            found = who.mirror.match(key, packed)
            node, mine = found.node, found.pages
            who.mirror.lock(node)
            who.mirror.check()
        got = who.match(tokens, key=key, own=own)
        assert unpack_pages(got.own if who.mirror is None else mine).tolist() == expected
        assert (got.own_pages, got.restorable_pages) == (own, end - own)
        assert (got.host_pages, got.peer_pages) == (end - own - peers, peers)
        self.held.append(Held(who, key, tokens, got, node))

    def release(self, pick: Pick) -> None:
        """End a request: its receipt works once, its lock falls."""
        if not self.held:
            return
        held = self.held.pop(pick(len(self.held)))
        if held.got.receipt:
            held.who.unlock(held.got.receipt)
        if held.node is not None and held.who.mirror is not None:
            held.who.mirror.unlock(held.node)
            held.who.mirror.check()

    def grow(self, pick: Pick) -> None:
        """A thin request computes further, and its lease moves along."""
        able = [held for held in self.held if held.got.receipt and held.who.mode == "thin"]
        if not able:
            return
        held = self._pick(pick, able)
        who, key = held.who, held.key
        tokens = [*held.tokens, *self._tokens(pick)]
        own = unpack_pages(who.own(tokens, key=key)).tolist()
        packed = who.pack(tokens, key)
        contents = self.contents(key, packed)
        need = len(contents) - len(own)
        if need > len(who.free):
            return
        fresh = who.allocate(need) or []
        for content, page in zip(contents[len(own) :], fresh, strict=True):
            self.world.memory[who.pool][page] = content
            self.model.setdefault(content, {})[who.pool] = page
        who.insert(packed, pack_pages([*own, *fresh]), key=key, receipt=held.got.receipt)
        held.tokens, held.restored = tokens, True

    def restore(self, pick: Pick) -> None:
        """Ask for what lies beyond the own pages of a held request."""
        able = [held for held in self.held if not held.restored]
        if not able:
            return
        held = self._pick(pick, able)
        held.restored = True
        if 0 < held.got.restorable_pages <= len(held.who.free):
            seq = held.who.restore(held.tokens, held.got, key=held.key)
            at_once = (held.who.pool, seq) in self.world.answers
            assert not (held.host_only and at_once), "leased host slots are a promise"
            self.waiting.append((held.who, seq))
            self._collect()

    # What movers and the machine do.

    def carry_out(self, pick: Pick) -> None:
        """Copy and validate; the report is still under way."""
        if self.world.copies:
            self.world.carry_out(self._pick(pick, sorted(self.world.copies)))

    def finish(self, pick: Pick) -> None:
        """A copy ends, in any order."""
        if self.world.copies:
            self._finish(self._pick(pick, sorted(self.world.copies)), self._pick(pick, OUTCOMES))

    def finish_all(self, pick: Pick) -> None:
        """Let all copies land, and those that follow."""
        while self.world.copies:
            self._finish(next(iter(self.world.copies)), "ok")

    def mishap(self, pick: Pick) -> None:
        """Something that does not happen every day."""
        who = self._pick(pick, self.pools)
        kind = pick(12)
        if kind == 0:
            self._die(who)
        elif kind == 1:
            self.world.copies.clear()
            self.world.send(MoverLost(0))
            self._collect()
        elif kind == 2:
            assert isinstance(who.ask(Flush("host")), Done)
            self.stale_ops |= {op for op, c in self.world.copies.items() if c.kind == "backup"}
            self.host.clear()
            for held in self.held:
                held.host_only = False
            self.host_evicted = self.world.directory.counters.get("host_pages_evicted", 0)
        elif kind == 3 and who.totals()[0]:
            self._forget(who, who.flush())

    def close_more(self, pick: Pick) -> None:
        """The ends of those that died go on, a step or several."""
        for _ in range(1 + pick(4)):
            if self.world.ending:
                left = self.at_closing_pools
                self.world.close_more()
                assert self.at_closing_pools < left or not left

    # What must hold.

    @property
    def at_closing_pools(self) -> int:
        """Leases and nodes that are left of those that died."""
        pools = self.world.directory.pools.values()
        return sum(len(pool.leases) + len(pool.nodes) for pool in pools if not pool.live)

    def check(self) -> None:
        """Every page of every place is where the model says and nowhere else; none is missing. Of
        who died there may be something in the tree, which the model has forgotten."""
        pools = self.world.directory.pools
        found: dict[Content, dict[int, int]] = {}
        at_host: set[Content] = set()
        for node in self.world.directory.tree.nodes.values():
            path = b"".join(above.edge for above in node.path())
            contents = self.contents(node.space.key, path)[-node.page_count :]
            for place, residency in node.places.items():
                if place != HOST and pools[place].live:
                    for content, page in zip(contents, unpack_pages(residency.pages), strict=True):
                        found.setdefault(content, {})[place] = page
                elif place == HOST and node.resident(HOST):
                    at_host.update(contents)
        assert found == self.model
        evicted = self.world.directory.counters.get("host_pages_evicted", 0)
        if evicted != self.host_evicted:
            # Which pages the host gives up is its own choice: less than before, never more.
            assert at_host <= self.host
            self.host, self.host_evicted = at_host, evicted
        assert at_host == self.host
        for who in self.pools:
            who.check()

    def end(self) -> None:
        """Release, land and close everything; nothing is left behind."""
        while self.held:
            self.release(lambda _: 0)
        self.finish_all(lambda _: 0)
        self.check()
        for who in self.pools:
            self.world.close(who.pool)
        while self.world.ending:
            self.world.close_more()
        directory = self.world.directory
        assert not directory.pools
        assert not directory.transfers.copies
        assert not len(directory.leases)
        assert directory.host.locked_pages == 0
        assert all(node.places.keys() == {HOST} for node in directory.tree.nodes.values())

    # Private.

    def _pick(self, pick: Pick, choices: Sequence[T]) -> T:
        return choices[pick(len(choices))]

    def _tokens(self, pick: Pick) -> list[int]:
        """Tokens of a path whose pages differ in their last token only, and a partial page."""
        pages = [max(0, pick(4) - 1) for _ in range(pick(PATH_PAGES_MAX + 1))]
        found = [token for page in pages for token in [7] * (self.page_size - 1) + [page]]
        return found + [9] * pick(self.page_size)

    def _forget(self, who: Scheduler, pages: list[int]) -> None:
        gone = set(pages)
        for content, at in list(self.model.items()):
            if at.get(who.pool) in gone:
                del at[who.pool]
                if not at:
                    del self.model[content]

    def _finish(self, op: int, outcome: Outcome) -> None:
        copy = self.world.copies[op]
        before = self.world.directory.counters.get("backup_ok", 0)
        self.world.finish(op, outcome)
        if self.world.directory.counters.get("backup_ok", 0) > before:
            self._backed_up(copy)
        self._collect()

    def _backed_up(self, copy: SubmitCopy) -> None:
        """A backup landed: its paths are at the host, unless the host was flushed since."""
        if copy.op in self.stale_ops:
            return
        for part in copy.parts:
            for slot in unpack_pages(part.target_pages):
                self.host.add(self.world.memory[HOST][slot])

    def _collect(self) -> None:
        """Take in answered restores; what landed was inserted by its scheduler."""
        for who, seq in list(self.waiting):
            key, packed, start, targets = who.filling[seq]
            before = set(self.world.directory.pools[who.pool].owned)
            if who.landed(seq) is None:
                continue
            self.waiting.remove((who, seq))
            if self.world.directory.pools[who.pool].owned - before:
                for content, page in zip(self.contents(key, packed)[start:], targets, strict=False):
                    self.model.setdefault(content, {})[who.pool] = page

    def _die(self, who: Scheduler) -> None:
        """A scheduler dies and comes back under the same name."""
        self.world.close(who.pool)
        self.held = [held for held in self.held if held.who is not who]
        self.waiting = [(other, seq) for other, seq in self.waiting if other is not who]
        self._forget(who, list(range(POOL_PAGES)))
        again = self.join(who.name, who.mode)
        assert again.generation == who.generation + 1
        self.pools[self.pools.index(who)] = again
