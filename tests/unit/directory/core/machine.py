"""One directory and its mover: events in, invariants after each of them, bytes moved.

Owns what is outside of the core but for schedulers (`world`): the bytes of pages (here: the path
that a page was computed for), word tables, the copies in flight, and the step of the ends of pools
that is asked for.
"""

from __future__ import annotations

from directory.core import limits
from directory.core.actions import (
    Action,
    Answer,
    AnyReply,
    MoreToClose,
    Registered,
    RegistrationRefused,
    SubmitCopy,
)
from directory.core.directory import Directory
from directory.core.events import (
    CloseMore,
    CopyDone,
    Event,
    Mode,
    Outcome,
    PoolClosed,
    PoolRegistered,
)
from directory.core.ids import HOST
from directory.core.namespace import NamespaceKey
from tests.unit.directory.core.copying import Memory, move
from tests.unit.directory.core.mirror import PAGE_BYTES

KEY = NamespaceKey()


class World:
    """One directory, its host tier's memory, and every copy in flight."""

    def __init__(
        self,
        *,
        host_pages: int = 64,
        segment_pages: int = 8,
        checked: bool = True,
        closed_a_step: int = limits.CLOSED_A_STEP_MAX,
    ) -> None:
        self.directory = Directory(
            host_bytes=host_pages * PAGE_BYTES,
            segment_bytes=segment_pages * PAGE_BYTES,
            closed_a_step=closed_a_step,
        )
        self.checked = checked
        self.copies: dict[int, SubmitCopy] = {}
        self.carried: dict[int, Outcome] = {}
        self.answers: dict[tuple[int, int], AnyReply] = {}
        self.memory: Memory = {HOST: {}}
        self.words: dict[int, dict[int, int]] = {}
        self.timelines: dict[int, int] = {}
        """How far a rank has come; who is not listed has passed every fence."""
        self.log: list[bytes] = []
        self.ending = False
        """A step of the ends of pools is asked for."""

    def send(self, event: Event) -> list[Action]:
        """Hand an event to the directory and take in its actions."""
        actions = self.directory.handle(event)
        self.log.append(repr((event, actions)).encode())
        for action in actions:
            if isinstance(action, SubmitCopy):
                assert action.op not in self.copies
                for word in () if action.slot_bytes else action.words:
                    # Of a group the ranks that lag have not bumped yet: fences wait for that.
                    assert self.words[word.pool].get(word.slot, 0) == word.value, "void from birth"
                self.copies[action.op] = action
            elif isinstance(action, MoreToClose):
                assert not self.ending, "one step is asked for at a time"
                self.ending = True
            elif isinstance(action, Answer):
                assert (action.pool, action.seq) not in self.answers, "answered twice"
                self.answers[action.pool, action.seq] = action.body
        if self.checked:
            found = self.directory.check()
            assert not found, found
        return actions

    def register(
        self,
        name: str,
        mode: Mode = "thin",
        *,
        pages: int = 32,
        page_size: int = 1,
        fingerprint: bytes = b"f",
        page_bytes: int = PAGE_BYTES,
        world_size: int = 1,
        rank: int = 0,
    ) -> Registered | RegistrationRefused:
        """Register a pool and return what the directory said."""
        event = PoolRegistered(
            1, 0, name, fingerprint, page_size, pages, page_bytes, mode, world_size, rank
        )
        (action,) = self.send(event)
        assert isinstance(action, Registered | RegistrationRefused)
        if isinstance(action, Registered):
            self.memory[action.pool] = {}
            self.words[action.pool] = {}
        return action

    def ready(self, op: int) -> bool:
        """Whether a copy's fences have passed."""
        fences = self.copies[op].fences
        return all(fence.value <= self.timelines.get(fence.pool, fence.value) for fence in fences)

    def carry_out(self, op: int, outcome: Outcome = "ok") -> Outcome:
        """Be the mover: copy the bytes and validate the words now; the report comes later."""
        copy = self.copies[op]
        if op in self.carried:
            return self.carried[op]
        assert self.ready(op)
        current = all(
            word.pool in self.words and self.words[word.pool].get(word.slot, 0) == word.value
            for word in copy.words
        )
        if outcome == "ok" and not current:
            outcome = "void"
        move(copy, self.memory, copied=outcome == "ok")
        self.carried[op] = outcome
        return outcome

    def finish(self, op: int, outcome: Outcome = "ok") -> list[Action]:
        """Carry a copy out, unless that was done before, and report it."""
        outcome = self.carry_out(op, outcome)
        copy = self.copies.pop(op)
        nbytes = sum(len(part.source_pages) // 4 for part in copy.parts) * PAGE_BYTES
        detail = "" if outcome == "ok" else "told so"
        self.last_done = CopyDone(op, outcome, detail, nbytes, 1)
        return self.send(self.last_done)

    def finish_all(self) -> None:
        """Let every copy land, and those that follow from it."""
        while self.copies:
            self.finish(next(iter(self.copies)))

    def close(self, pool: int) -> list[Action]:
        """End a pool's session: its memory and words are gone at once."""
        self.memory.pop(pool, None)
        self.words.pop(pool, None)
        return self.send(PoolClosed(pool, 0))

    def close_more(self) -> list[Action]:
        """Go on with the ends of pools, as was asked for."""
        assert self.ending
        self.ending = False
        return self.send(CloseMore())
