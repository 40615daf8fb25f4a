"""A small world around a real Directory: schedulers with pools, word tables, and a mover.

Owns the schedulers: page allocators, what they hold and say; the rest is `machine`. They behave as
real ones do, so a test that drives them can check bytes, not only answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from directory.core.actions import (
    AnyReply,
    GaveUp,
    Inserted,
    Matched,
    Registered,
    Restored,
)
from directory.core.events import (
    Asked,
    Body,
    Evict,
    Evicted,
    Flush,
    Insert,
    Match,
    Mode,
    Restore,
    Unlock,
)
from directory.core.ids import POOL_WORD
from directory.core.namespace import NamespaceKey
from directory.core.place import PoolState
from directory.core.pool import evict_pages, insert_pages
from directory.core.tokens import pack_pages, pack_tokens, unpack_pages
from tests.unit.directory.core.machine import KEY, World
from tests.unit.directory.core.mirror import PAGE_BYTES, Mirror

__all__ = ["KEY", "Scheduler", "World"]


class Scheduler:
    """A scheduler with its page allocator; thin, or mirrored with a mirror of its own."""

    def __init__(
        self,
        world: World,
        name: str,
        mode: Mode = "thin",
        *,
        pages: int = 32,
        page_size: int = 1,
        fingerprint: bytes = b"f",
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        self.world = world
        self.name = name
        self.tag = b"" if world_size == 1 else b"rank %d of " % rank
        self.written, self.quiet = (1, 2), (3, 4)
        self.mode = mode
        self.page_size = page_size
        self.page_count = pages
        said = world.register(
            name,
            mode,
            pages=pages,
            page_size=page_size,
            fingerprint=fingerprint,
            world_size=world_size,
            rank=rank,
        )
        assert isinstance(said, Registered), said
        self.pool = said.pool
        self.generation = said.generation
        self.seq = 0
        self.free = list(range(pages - 1, -1, -1))
        self.live: dict[int, int] = {}
        self.mirror = Mirror(page_size, pages) if mode == "mirrored" else None
        self.filling: dict[int, tuple[NamespaceKey, bytes, int, list[int]]] = {}

    # Plain messages.

    def ask(self, body: Body) -> AnyReply | None:
        """Send one message; return its answer, or None while there is none."""
        self.seq += 1
        self.world.send(Asked(self.pool, self.seq, 0, body))
        return self.world.answers.get((self.pool, self.seq))

    def match(
        self, tokens: Sequence[int], *, key: NamespaceKey = KEY, acquire: bool = True, own: int = 0
    ) -> Matched:
        """Ask the directory; `own`: pages a mirrored scheduler holds already."""
        answer = self.ask(Match("r", 1, key, self.pack(tokens, key), own, acquire))
        assert isinstance(answer, Matched), answer
        return answer

    def pack(self, tokens: Sequence[int], key: NamespaceKey = KEY) -> bytes:
        """Pack tokens for a namespace."""
        return pack_tokens(tokens, bigram=key.bigram, wide=key.wide)

    def unlock(self, receipt: int) -> AnyReply | None:
        """Release a receipt."""
        return self.ask(Unlock(receipt))

    # What a request does.

    def publish(
        self,
        tokens: Sequence[int],
        *,
        key: NamespaceKey = KEY,
        receipt: int = 0,
        fresh_all: bool = False,
    ) -> tuple[list[int], list[int]] | None:
        """Compute and insert a path; (canonical, duplicate) pages, or None for want of room.

        `fresh_all`: the request did not look first, so what is there already comes out as
        duplicates. Evicts when short of pages.
        """
        packed = self.pack(tokens, key)
        count = len(packed) // (self.page_size * key.unit_bytes)
        held = b"" if fresh_all else self.own(tokens, key=key)
        pages = self.allocate(count - len(held) // 4)
        if pages is None:
            return None
        # Making room may have taken a part of the very prefix: an unlocked match is a hint.
        still = b"" if fresh_all else self.own(tokens, key=key)
        if still != held:
            self.free.extend(reversed(pages))
            return self.publish(tokens, key=key, receipt=receipt, fresh_all=True)
        step = self.page_size * key.unit_bytes
        memory = self.world.memory[self.pool]
        for at, page in enumerate(pages, start=len(held) // 4):
            memory[page] = (key, self.tag + packed[: (at + 1) * step])
        return self.insert(packed, held + pack_pages(pages), key=key, receipt=receipt)

    def insert(
        self,
        packed: bytes,
        pages: bytes,
        *,
        key: NamespaceKey = KEY,
        receipt: int = 0,
    ) -> tuple[list[int], list[int]]:
        """Insert; frees the duplicates; (canonical, duplicates)."""
        span = self.free_span()
        words = self.world.words[self.pool]
        body = Insert("r", 1, key, packed, pages, span, words.get(span, 0), self.written, receipt)
        if self.mirror is None:
            answer = self.ask(body)
            assert isinstance(answer, Inserted), answer
            canonical, extra, fresh = answer.canonical, answer.duplicates, answer.fresh_pages
        else:
            mirror = self.mirror
            space = mirror.tree.space(b"", key, self.page_size, PAGE_BYTES)
            outcome = insert_pages(
                mirror.tree, mirror.pool, space, packed, pages, span, body.span_value, self.written
            )
            if not space.root.children:
                mirror.tree.prune(space.root)
            canonical, extra, fresh = outcome.canonical, outcome.duplicates, outcome.fresh_pages
            refused = self.ask(msgspec.structs.replace(body, pages=canonical))
            assert refused is None, refused
            mirror.check()
        if fresh:
            self.live[span] = fresh
        duplicates = unpack_pages(extra).tolist()
        self.free.extend(duplicates)
        return unpack_pages(canonical).tolist(), duplicates

    def own(self, tokens: Sequence[int], *, key: NamespaceKey = KEY) -> bytes:
        """The own pool's pages of a path, without a lease."""
        return self._own_packed(self.pack(tokens, key), key)

    def _own_packed(self, packed: bytes, key: NamespaceKey) -> bytes:
        if self.mirror is not None:
            return self.mirror.match(key, packed).pages
        answer = self.ask(Match("r", 1, key, packed, 0, False))
        assert isinstance(answer, Matched), answer
        return answer.own

    def allocate(self, count: int) -> list[int] | None:
        """Take pages, evicting when short; None (and nothing taken) when even that is too few."""
        if count > len(self.free):
            self.evict(count - len(self.free))
        if count > len(self.free):
            return None
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return taken[::-1]

    def evict(self, count: int) -> list[int]:
        """Give pages up: words are bumped, then the pages are free. Returns them in order."""
        if self.mirror is None:
            answer = self.ask(Evict(count))
            assert isinstance(answer, GaveUp), answer
            return self._bump_and_free(answer.pages, answer.words)
        given = evict_pages(self.mirror.tree, self.mirror.pool, count)
        freed = self._bump_and_free(given.pages, given.words)
        words = tuple((span, value) for span, value, _ in given.words)
        refused = self.ask(
            Evicted(tuple((run.span, run.first, run.length) for run in given.runs), words)
        )
        assert refused is None, refused
        self.mirror.check()
        return freed

    def flush(self) -> list[int]:
        """Give up everything that is not leased."""
        if self.mirror is not None:
            return self.evict(self.mirror.pool.evictable_pages)
        answer = self.ask(Flush("pool"))
        assert isinstance(answer, GaveUp), answer
        return self._bump_and_free(answer.pages, answer.words)

    def restore(self, tokens: Sequence[int], matched: Matched, *, key: NamespaceKey = KEY) -> int:
        """Ask for what lies beyond the own pages; returns the message's number (0: no room)."""
        targets = self.allocate(matched.restorable_pages)
        if targets is None:
            return 0
        packed = self.pack(tokens, key)
        body = Restore("r", 1, matched.receipt, matched.own_pages, pack_pages(targets), self.quiet)
        self.filling[self.seq + 1] = (key, packed, matched.own_pages, targets)
        refused = self.ask(body)
        assert refused is None or isinstance(refused, Restored), refused
        return self.seq

    def landed(self, seq: int) -> Restored | None:
        """Take in a restore's answer, if it came: verify bytes, insert or free the pages."""
        answer = self.world.answers.get((self.pool, seq))
        if answer is None or seq not in self.filling:
            return None
        assert isinstance(answer, Restored), answer
        key, packed, start, targets = self.filling.pop(seq)
        step = self.page_size * key.unit_bytes
        if answer.landed:
            for at, page in enumerate(targets, start=start):
                content = (key, self.tag + packed[: (at + 1) * step])
                assert self.world.memory[self.pool][page] == content
            whole = packed[: (start + len(targets)) * step]
            held = self._own_packed(whole, key)
            if len(held) == 4 * start:
                self.insert(whole, held + pack_pages(targets), key=key)
                return answer
        self.free.extend(targets)
        return answer

    def totals(self) -> tuple[int, int]:
        """Evictable and protected pages of the own pool."""
        pool = self.mirror.pool if self.mirror else self.state
        return pool.evictable_pages, pool.locked_pages

    @property
    def state(self) -> PoolState:
        """The directory's state of the pool."""
        return self.world.directory.registry.members[self.pool]

    def check(self) -> None:
        """Free, tree-owned and in-flight pages are all pages, each once."""
        owned = self.state.owned
        if self.mirror is not None:
            assert self.mirror.pool.owned == owned
        targets = [page for _, _, _, pages in self.filling.values() for page in pages]
        assert sorted([*self.free, *owned, *targets]) == list(range(self.page_count))

    def free_span(self) -> int:
        """A span number that guards no live page."""
        return next(slot for slot in range(1, self.page_count + 2) if slot not in self.live)

    def _bump_and_free(self, pages: bytes, words: tuple[tuple[int, int, int], ...]) -> list[int]:
        table = self.world.words[self.pool]
        for span, value, count in words:
            assert span != POOL_WORD
            assert value > table.get(span, 0)
            table[span] = value
            self.live[span] -= count
            if not self.live[span]:
                del self.live[span]
        freed = unpack_pages(pages).tolist()
        self.free.extend(freed)
        return freed
