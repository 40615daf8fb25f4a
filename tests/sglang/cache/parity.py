"""Two caches, one of SGLang's own and ours or two of ours, driven with the same random operations.

Owns the operations and the comparison after each of them: hit lengths, evicted and freed tokens,
what is free, evictable and protected. Two differences are decisions (docs/sglang.md), and the
course of events goes around them, so that everything else is exactly the same:

- SGLang evicts whole leaves, ours is exact to the page: ours is asked for as many tokens as
  SGLang's has given up, and which ones went shows in every later hit.
- Where a path ends inside a node, SGLang marks the rest of that node as used too, ours does not,
  because what is evicted must not depend on where nodes happen to be split. So before such a path
  is asked for, both are asked for all that follows it up to the next fork.
"""

from __future__ import annotations

import random
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from directory.core.tokens import pack_tokens, unpack_pages
from tests.sglang.cache.rig import Engine, Pools, Req, our_cache, stock_cache

RUNNING_MAX = 6
PAGES = 96


def beside_stock(core: str, page_size: int, seed: int) -> Parity:
    """Two caches, one of SGLang's own and ours or two of ours, mirrored."""
    theirs, mine = (Pools(PAGES, page_size, rows=RUNNING_MAX) for _ in range(2))
    return Parity(
        Engine(stock_cache(theirs, core), theirs),
        Engine(our_cache(mine), mine),
        seed,
        softened=True,
    )


def beside_mirror(thin: Engine, seed: int) -> Parity:
    """Ours, mirrored and without a daemon, and ours, thin."""
    pools = Pools(PAGES, thin.page, rows=RUNNING_MAX)
    return Parity(Engine(our_cache(pools), pools), thin, seed, softened=False)


class Pair:
    """The same request in either engine."""

    def __init__(self, rid: str, tokens: list[int], extra_key: str | None) -> None:
        self.both = tuple(Req(rid, tokens, extra_key=extra_key) for _ in range(2))

    @property
    def ours(self) -> Req:
        """The one in our engine; both have the same lengths at all times."""
        return self.both[1]


class Parity:
    """Two engines and one course of events. `step` raises `AssertionError` where they part.

    `stock`: the one that leads; where it is SGLang's, `softened` goes around the second difference.
    """

    def __init__(self, stock: Engine, ours: Engine, seed: int, *, softened: bool) -> None:
        self.random = random.Random(seed)  # draws a course of events, guards nothing
        self.page = ours.page
        self.stock = stock
        self.ours = ours
        self.softened = softened
        self.running: list[Pair] = []
        self.families = [self._tokens(40) for _ in range(6)]
        self.counts: dict[str, int] = {}
        self.number = 0

    def step(self) -> str:
        """One operation, and the comparison."""
        name = self.random.choices(
            ("start", "extend", "decode", "finish", "abort", "look", "evict"),
            (6, 6, 6, 4, 2, 4, 1),
        )[0]
        done = getattr(self, "_" + name)()
        if done:
            self.counts[name] = self.counts.get(name, 0) + 1
        theirs, mine = self.stock.accounts(), self.ours.accounts()
        assert theirs == mine, f"{name}: (free, evictable, protected) {theirs} and {mine}"
        return name

    # Operations; each says whether it did anything.

    def _start(self) -> bool:
        if len(self.running) >= RUNNING_MAX:
            return False
        pair = self._new()
        self._soften(pair.ours, len(pair.ours.origin_input_ids) - 1)
        hit = self._same("hit", [e.match(r) for e, r in self._with(pair)])
        total = len(pair.ours.full_untruncated_fill_ids)
        chunk = self.random.choice((total, self.random.randint(hit + 1, total)))
        if self._room(chunk - hit + self.page, pair):
            self._soften(pair.ours, chunk)
            for engine, req in self._with(pair):
                assert engine.admit(req, chunk)
                engine.checkpoint(req, chunked=chunk < total)
            self.running.append(pair)
        return True

    def _extend(self) -> bool:
        """The next chunk of a prompt."""
        pair = self._pick(lambda req: req.prefix_len < len(req.origin_input_ids))
        if pair is None:
            return False
        total, have = len(pair.ours.origin_input_ids), pair.ours.prefix_len
        end = min(total, have + self.random.randint(1, 6 * self.page))
        if not self._room(end - have + self.page):
            return self._drop(pair, insert=False)
        self._soften(pair.ours, end)
        for engine, req in self._with(pair):
            assert engine.compute(req, end)
            engine.checkpoint(req, chunked=end < total)
        self._same("protected", [req.holder.cache_protected_len for req in pair.both])
        return True

    def _decode(self) -> bool:
        pair = self._pick(lambda req: req.prefix_len >= len(req.origin_input_ids))
        if pair is None:
            return False
        tokens = [self.random.randint(0, 3) for _ in range(self.random.randint(1, 2 * self.page))]
        if not self._room(len(tokens) + self.page):
            return self._drop(pair, insert=False)
        for engine, req in self._with(pair):
            assert engine.decode(req, tokens)
        return True

    def _finish(self) -> bool:
        pair = self._pick(lambda req: req.prefix_len >= len(req.origin_input_ids))
        return pair is not None and self._drop(pair, insert=True)

    def _abort(self) -> bool:
        """An abort, or a retraction: SGLang stores nothing of either."""
        pair = self._pick(lambda _: True)
        return pair is not None and self._drop(pair, insert=False)

    def _look(self) -> bool:
        """A waiting request is matched and stays where it is; nodes are split by it."""
        pair = self._new()
        self._soften(pair.ours, len(pair.ours.origin_input_ids) - 1)
        self._same("look", [e.match(r) for e, r in self._with(pair)])
        return True

    def _evict(self) -> bool:
        return self._give_up(self.random.randint(1, 12 * self.page)) > 0

    # Pieces.

    def _soften(self, req: Req, count: int) -> None:
        """Have all used that follows a request's first tokens up to the next fork."""
        if not self.softened:
            return
        mirror, key = self.ours.cache.shim.tree.mirror, self.ours.cache.key_of(req)[0]
        tokens = (req.origin_input_ids + req.output_ids)[: count // self.page * self.page]
        space = mirror._tree.find_space(mirror.pool.fingerprint, key)
        steps = mirror._tree.walk(space, pack_tokens(tokens)) if space is not None else []
        if not steps:
            return
        node, matched = steps[-1]
        more = b"" if matched == node.page_count else node.edge[4 * matched * self.page :]
        while len(node.children) == 1:
            (node,) = node.children.values()
            more += node.edge
        if more:
            at = sum(pages for _, pages in steps) * self.page
            path = Req("soft", [*tokens[:at], *unpack_pages(more), 0])
            path.extra_key = req.extra_key
            self._same("softened", [engine.match(path) for engine in self._engines()])

    def _room(self, tokens: int, waiting: Pair | None = None) -> bool:
        """Room for so many tokens in both. A match that is not locked yet goes with the evicted."""
        free = self.stock.pools.allocator.available_size()
        pages = -(-tokens // self.page) * self.page
        if free < pages:
            locks = []
            if waiting is not None:
                for engine, req in self._with(waiting):
                    receipt = engine.cache.inc_lock_ref(req.last_node).to_dec_params()
                    locks.append((engine, req, receipt))
            self._give_up(pages - free)
            for engine, req, receipt in locks:
                engine.cache.dec_lock_ref(req.last_node, receipt)
        free = self._same("free", [e.pools.allocator.available_size() for e in self._engines()])
        return free >= pages

    def _give_up(self, tokens: int) -> int:
        theirs = self.stock.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted
        mine = self.ours.cache.evict(EvictParams(num_tokens=theirs)).num_tokens_evicted
        return self._same("evicted", [theirs, mine])

    def _drop(self, pair: Pair, *, insert: bool) -> bool:
        self.running.remove(pair)
        if insert:
            self._soften(pair.ours, pair.ours.extend_end)
        for engine, req in self._with(pair):
            engine.end(req, insert=insert)
        return True

    def _new(self) -> Pair:
        """A prompt that begins like another one, in one of a few namespaces."""
        family = self.random.choice(self.families)
        shared = family[: self.random.randint(0, len(family))]
        tail = self._tokens(0.2) if self.random.random() < 0.7 else self._tokens(8)
        self.number += 1
        key = self.random.choice((None, None, "other"))
        return Pair(f"r{self.number}", shared + tail, key)

    def _tokens(self, pages: float) -> list[int]:
        """Of few kinds, so that paths part anywhere."""
        count = self.random.randint(1, max(int(pages * self.page), 1))
        return [self.random.randint(0, 3) for _ in range(count)]

    def _pick(self, fits: Any) -> Pair | None:
        pairs = [pair for pair in self.running if fits(pair.ours)]
        return self.random.choice(pairs) if pairs else None

    def _engines(self) -> tuple[Engine, Engine]:
        return self.stock, self.ours

    def _with(self, pair: Pair) -> list[tuple[Engine, Req]]:
        return list(zip(self._engines(), pair.both, strict=True))

    def _same(self, what: str, pair: list[int]) -> int:
        assert pair[0] == pair[1], f"{what}: {pair[0]} at SGLang's, {pair[1]} at ours"
        return pair[0]
