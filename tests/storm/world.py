"""One directory, the copies it has asked for, and what every page and slot holds.

Owns the directory and stands for movers and sessions. A page's content is a number that follows
from the token path up to it; a copy moves numbers when it ends, so that copies overtake one
another and everything else. It validates as a mover does: words as reported, or the copy is void,
and a copy that is not ok leaves garbage in its targets.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

import msgspec

from directory.core.actions import (
    Action,
    Answer,
    AnyReply,
    MoreToClose,
    Refused,
    Registered,
    RegistrationRefused,
    ReleasePool,
    SubmitCopy,
)
from directory.core.directory import Directory
from directory.core.events import (
    Asked,
    Body,
    CloseMore,
    CopyDone,
    Event,
    MoverLost,
    Outcome,
    PoolClosed,
    PoolRegistered,
)
from directory.core.ids import HOST, PoolId, is_pool
from directory.core.tokens import unpack_pages
from scheduler_shim.session import raise_refusal
from scheduler_shim.spans import SpanTable

GARBAGE = -1
PAGE_BYTES = 64


class Violation(AssertionError):
    """Something that must never happen did."""


class Memory(Protocol):
    """One registration's pool: what a mover can see of it."""

    contents: list[int]
    spans: SpanTable
    dead: bool

    def close(self) -> None:
        """Give the words back."""
        ...


class World:
    """`now` is the number of operations so far; the directory sees it as its clock."""

    def __init__(self, host_pages: int) -> None:
        self.directory = Directory(
            host_bytes=host_pages * PAGE_BYTES, segment_bytes=max(16, host_pages // 8) * PAGE_BYTES
        )
        self.now = 0
        self.copies: dict[int, SubmitCopy] = {}
        self.host: dict[int, int] = {}
        self.memories: dict[PoolId, Memory] = {}
        self.log = 0
        """A checksum of every answer in order: equal runs have equal ones."""
        self.on_answer: Callable[[PoolId, int, AnyReply], None] = lambda *_: None
        self.on_copy_ended: Callable[[SubmitCopy], None] = lambda _: None
        self.copies_ended: dict[str, int] = {"ok": 0, "void": 0, "failed": 0, "lost": 0}
        self._replies: dict[tuple[PoolId, int], AnyReply] = {}
        self._waiting: tuple[PoolId, int] = (0, 0)
        self._tokens = 0
        self._ending = False
        """A step of the ends of pools is asked for."""

    # Sessions.

    def register(self, instance: str, memory: Memory, event: PoolRegistered) -> PoolId:
        """Take a pool in; returns its number."""
        self._tokens += 1
        event = msgspec.structs.replace(event, token=self._tokens, now_us=self.now)
        actions = self.directory.handle(event)
        if len(actions) != 1 or not isinstance(actions[0], Registered):
            raise Violation(f"{instance} was not registered: {actions}")
        self.memories[actions[0].pool] = memory
        return actions[0].pool

    def close(self, pool: PoolId) -> None:
        """A pool's session has ended."""
        self.tell(PoolClosed(pool, self.now))

    # Clients.

    def ask(self, pool: PoolId, seq: int, body: Body) -> AnyReply | None:
        """Carry a message out; its answer, or None where that comes later or never."""
        self._waiting = (pool, seq)
        self.tell(Asked(pool, seq, self.now, body))
        self._waiting = (0, 0)
        reply = self._replies.pop((pool, seq), None)
        if isinstance(reply, Refused):
            raise_refusal(reply.code, reply.message)
        return reply

    def tell(self, event: Event) -> None:
        """Hand an event to the directory and do what it says."""
        for action in self.directory.handle(event):
            self._do(action)
        if self._ending and not isinstance(event, CloseMore) and self.now % 3 == 0:
            self._close_more()  # bit by bit, between what others ask

    def let_end(self) -> None:
        """Whoever has ended is taken out to the end."""
        while self._ending:
            self._close_more()

    def _close_more(self) -> None:
        self._ending = False
        self.tell(CloseMore())

    def _do(self, action: Action) -> None:
        if isinstance(action, SubmitCopy):
            self.copies[action.op] = action
            return
        if isinstance(action, MoreToClose):
            self._ending = True
            return
        if isinstance(action, Answer):
            self.log = zlib.crc32(msgspec.msgpack.encode(action.body), self.log)
            if (action.pool, action.seq) == self._waiting:
                self._replies[action.pool, action.seq] = action.body
            else:
                self.on_answer(action.pool, action.seq, action.body)
            return
        if isinstance(action, Registered | RegistrationRefused):
            raise Violation(f"nobody has registered: {action}")
        assert isinstance(action, ReleasePool)

    # Copies.

    def end_copy(self, op: int, wanted: Outcome) -> None:
        """A copy ends now: as wanted, or void where a word has moved on."""
        copy = self.copies.pop(op)
        outcome = wanted
        if outcome == "ok" and not self._words_hold(copy):
            outcome = "void"
        self._move(copy, garbage=outcome != "ok")
        self.copies_ended[outcome] += 1
        pages = sum(len(part.target_pages) // 4 for part in copy.parts)
        self.tell(CopyDone(op, outcome, "", pages * PAGE_BYTES if outcome == "ok" else 0, 1))
        self.on_copy_ended(copy)

    def lose_mover(self) -> None:
        """The mover dies with all its copies, each of which may have written in part."""
        lost, self.copies = list(self.copies.values()), {}
        for copy in lost:
            self._move(copy, garbage=True)
        self.copies_ended["lost"] += len(lost)
        self.tell(MoverLost(self.now, "the storm"))
        for copy in lost:
            self.on_copy_ended(copy)

    def writes_into(self, pool: PoolId) -> bool:
        """Whether a copy that has not ended has targets in a pool's memory."""
        return any(part.target == pool for copy in self.copies.values() for part in copy.parts)

    def _words_hold(self, copy: SubmitCopy) -> bool:
        memories = self.memories
        return all(memories[w.pool].spans.word(w.slot) == w.value for w in copy.words)

    def _move(self, copy: SubmitCopy, *, garbage: bool) -> None:
        for part in copy.parts:
            sources, targets = unpack_pages(part.source_pages), unpack_pages(part.target_pages)
            for source, target in zip(sources, targets, strict=True):
                value = GARBAGE
                if not garbage and is_pool(part.source):
                    value = self.memories[part.source].contents[source]
                elif not garbage:
                    value = self.host[source]
                if part.target == HOST:
                    self.host[target] = value
                else:
                    self.memories[part.target].contents[target] = value

    def forget_memories(self) -> None:
        """Drop what no copy can reach any more."""
        touched = {
            place
            for copy in self.copies.values()
            for p in copy.parts
            for place in (p.source, p.target)
        }
        for pool in list(self.memories):
            if pool not in self.directory.pools and pool not in touched:
                memory = self.memories.pop(pool)
                if memory.dead and memory not in self.memories.values():
                    memory.close()
