"""Our trees as contestants: the core by itself, and a mirror. The same cases as in `stock.py`.

Owns the state that the cases start from: a path of so many tokens that was published in eight
steps, all of it in the pool and, at the core, in the host tier too.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from random import Random
from typing import Protocol

from directory.core.actions import Answer, Inserted, Matched, Registered, SubmitCopy
from directory.core.again import Again
from directory.core.directory import Directory
from directory.core.events import (
    Asked,
    Body,
    CopyDone,
    Evict,
    Insert,
    Match,
    PoolRegistered,
    Unlock,
)
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_tokens
from scheduler_shim.mirror import Mirror
from scheduler_shim.spans import SpanTable
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import WordTable

CHAIN = 8
KEY = NamespaceKey()
PAGE_BYTES = 64
Note = Callable[[float], None]
clock = time.perf_counter_ns


class Contest(Protocol):
    """One tree with its cases."""

    def run(self, case: str, times: int) -> list[float]:
        """Microseconds of each of so many times."""
        ...


def random_tokens(count: int, seed: int) -> bytes:
    """Packed token ids."""
    return pack_tokens(Random(seed).choices(range(128_000), k=count))


class Pages:
    """Free pages of a pool, last in, first out."""

    def __init__(self, count: int) -> None:
        self._free = array("I", range(count - 1, -1, -1))

    def take(self, count: int) -> bytes:
        """Packed page numbers."""
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken.tobytes()

    def give(self, pages: bytes) -> None:
        """Give some back."""
        self._free.frombytes(pages)


class CoreTree:
    """`Directory.handle` with one thin pool. Copies to the host tier are done at once."""

    def __init__(self, page: int, tokens: int, *, host: bool = True, spare_pages: int = 64) -> None:
        pages = tokens // page
        count = 2 * pages + spare_pages
        host_bytes = 4 * count * PAGE_BYTES if host else 0
        self.directory = Directory(host_bytes=host_bytes, segment_bytes=max(host_bytes, 1))
        (registered,) = self.directory.handle(
            PoolRegistered(1, 0, "bench", b"f", page, count, PAGE_BYTES, "thin")
        )
        assert isinstance(registered, Registered)
        self.pool = registered.pool
        # What was found before is not remembered: each match compares all tokens, as SGLang's do.
        self.directory.pools[self.pool].again = Again(0)
        self.pages = Pages(count)
        self.page, self.page_count = page, pages
        self.tokens = random_tokens(tokens, 0)
        self.row = b""
        self._seq = self.span = 0
        for part in range(1, CHAIN + 1):
            end = pages * part // CHAIN
            self.row += self.pages.take(end - len(self.row) // 4)
            self.insert(self.tokens[: end * page * 4], self.row)

    def run(self, case: str, times: int) -> list[float]:
        """Run a case."""
        taken: list[float] = []
        getattr(self, f"_{case}")(times, taken.append)
        return taken

    def ask(self, body: Body) -> tuple[object, float]:
        """Hand a message in; its answer and the microseconds. Copies are done at once."""
        self._seq += 1
        event = Asked(self.pool, self._seq, 0, body)
        begin = clock()
        actions = self.directory.handle(event)
        taken = (clock() - begin) / 1e3
        answer: object = None
        copies = []
        for action in actions:
            if isinstance(action, Answer):
                answer = action.body
            elif isinstance(action, SubmitCopy):
                copies.append(action.op)
        for op in copies:
            more = self.directory.handle(CopyDone(op, "ok"))
            copies += [action.op for action in more if isinstance(action, SubmitCopy)]
        return answer, taken

    def insert(self, tokens: bytes, row: bytes) -> float:
        """Publish a row."""
        live = self.directory.pools[self.pool].spans
        self.span = next(at for at in range(1, len(live) + 2) if at not in live)
        body = Insert("r", 1, KEY, tokens, row, self.span, 0, (1, 1))
        answer, taken = self.ask(body)
        assert isinstance(answer, Inserted), answer
        assert not answer.duplicates
        return taken

    def evict(self, count: int) -> float:
        """Give pages up."""
        answer, taken = self.ask(Evict(count))
        given: bytes = answer.pages  # type: ignore[attr-defined]
        assert len(given) == 4 * count
        self.pages.give(given)
        return taken

    def _match(self, times: int, note: Note) -> None:
        """Look the path up and lease it; releasing it is not counted."""
        for _ in range(times):
            answer, taken = self.ask(Match("r", 1, KEY, self.tokens))
            assert isinstance(answer, Matched)
            assert answer.own_pages == self.page_count
            note(taken)
            self.ask(Unlock(answer.receipt))

    def _look(self, times: int, note: Note) -> None:
        """Look the path up, without a lease."""
        for _ in range(times):
            _, taken = self.ask(Match("r", 1, KEY, self.tokens, acquire=False))
            note(taken)

    def _release(self, times: int, note: Note) -> None:
        """Release the lease of a match."""
        for _ in range(times):
            answer, _ = self.ask(Match("r", 1, KEY, self.tokens))
            assert isinstance(answer, Matched)
            note(self.ask(Unlock(answer.receipt))[1])

    def _reinsert(self, times: int, note: Note) -> None:
        for _ in range(times):
            note(self.insert(self.tokens, self.row))

    def _leaf(self, times: int, note: Note) -> None:
        self._added(times, note, evict=False)

    def _evict_leaf(self, times: int, note: Note) -> None:
        self._added(times, note, evict=True)

    def _added(self, times: int, note: Note, *, evict: bool) -> None:
        for number in range(times):
            tokens = self.tokens + random_tokens(4 * self.page, 1_000 + number)
            inserted = self.insert(tokens, self.row + self.pages.take(4))
            evicted = self.evict(4)
            note(evicted if evict else inserted)

    def _new(self, times: int, note: Note) -> None:
        for number in range(times):
            tokens = random_tokens(self.page_count * self.page, 5_000 + number)
            row = self.pages.take(self.page_count)
            note(self.insert(tokens, row))
            self.ask(Match("keep", 1, KEY, self.tokens, acquire=False))  # the other is colder
            self.evict(self.page_count)


class MirrorTree:
    """A mirrored scheduler's own tree, without a daemon."""

    def __init__(self, page: int, tokens: int) -> None:
        pages = tokens // page
        count = 2 * pages + 64
        self._ipc = SharedMemoryIPC()
        self.words = WordTable.create(self._ipc, "treecored-bench-words", count + 1)
        self.mirror = Mirror(
            SpanTable(self.words, count),
            fingerprint=b"f",
            page_size=page,
            page_count=count,
            page_bytes=PAGE_BYTES,
        )
        self.pages = Pages(count)
        self.page, self.page_count = page, pages
        self.tokens = random_tokens(tokens, 0)
        self.row = b""
        for part in range(1, CHAIN + 1):
            end = pages * part // CHAIN
            self.row += self.pages.take(end - len(self.row) // 4)
            self.insert(self.tokens[: end * page * 4], self.row)

    def run(self, case: str, times: int) -> list[float]:
        """Run a case."""
        taken: list[float] = []
        getattr(self, f"_{case}")(times, taken.append)
        return taken

    def insert(self, tokens: bytes, row: bytes) -> float:
        """Publish a row."""
        begin = clock()
        change = self.mirror.insert("r", 1, KEY, tokens, row, (1, 1))
        taken = (clock() - begin) / 1e3
        assert not change.outcome.duplicates
        return taken

    def _look(self, times: int, note: Note) -> None:
        """Look the path up: its pages and its node."""
        for _ in range(times):
            begin = clock()
            hit = self.mirror.match(KEY, self.tokens)
            note((clock() - begin) / 1e3)
            assert hit.page_count == self.page_count

    def _match(self, times: int, note: Note) -> None:
        """Look the path up and lock it; unlocking is not counted."""
        for _ in range(times):
            begin = clock()
            hit = self.mirror.match(KEY, self.tokens)
            assert hit.node is not None
            self.mirror.lock(hit.node)
            note((clock() - begin) / 1e3)
            self.mirror.unlock(hit.node)

    def _reinsert(self, times: int, note: Note) -> None:
        for _ in range(times):
            note(self.insert(self.tokens, self.row))

    def _leaf(self, times: int, note: Note) -> None:
        self._added(times, note, evict=False)

    def _evict_leaf(self, times: int, note: Note) -> None:
        self._added(times, note, evict=True)

    def _added(self, times: int, note: Note, *, evict: bool) -> None:
        for number in range(times):
            tokens = self.tokens + random_tokens(4 * self.page, 1_000 + number)
            inserted = self.insert(tokens, self.row + self.pages.take(4))
            note(self._evict(4) if evict else inserted)
            if not evict:
                self._evict(4)

    def _new(self, times: int, note: Note) -> None:
        for number in range(times):
            tokens = random_tokens(self.page_count * self.page, 5_000 + number)
            note(self.insert(tokens, self.pages.take(self.page_count)))
            self.mirror.match(KEY, self.tokens)
            self._evict(self.page_count)

    def _evict(self, count: int) -> float:
        begin = clock()
        given = self.mirror.evict(count)
        taken = (clock() - begin) / 1e3
        assert len(given.pages) == 4 * count
        self.pages.give(given.pages)
        return taken
