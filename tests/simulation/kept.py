"""What outlives a boot of the simulated daemon: the host tier's memory and its journal.

Owns the cells, the slots' words and the logs, as files that nobody but the daemon writes, and the
damage that is done to them while no daemon runs. Checks what must hold of the journal at every
moment, because the daemon may die at every moment: a slot that is written into, or that holds
nothing, is not valid, and every page that is matched is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from directory.core import limits
from directory.core.actions import Action, Journal, JournalBegin, JournalEnd, SubmitCopy
from directory.core.directory import Directory
from directory.core.ids import HOST
from directory.core.tokens import unpack_pages
from tests.simulation.checkers import Violation
from tests.simulation.memory import SimTier
from transfer.host_tier import TierShape

NAME = "journal"


class Kept:
    """One host tier with its journal."""

    def __init__(self, cells: int, segment: int) -> None:
        self.tier = SimTier(TierShape(cells, segment))
        self.words: dict[int, int] = {}
        self.logs: list[bytearray] = []
        self._checked = 0
        self._damaged = False
        self._orphans: dict[int, int] = {}

    def recover(self, directory: Directory) -> None:
        """Have a new boot take the tier up."""
        for action in directory.recover(map(bytes, self.logs), self.word, self.sizes()):
            self.apply(action)
        # A valid slot whose record was lost is valid for ever, and for nobody: no record will
        # ever have its stamp again.
        held = {
            slot
            for node in directory.host.nodes.values()
            for slot in unpack_pages(node.places[HOST].pages)
        }
        self._orphans = {slot: w for slot, w in self.words.items() if w and slot not in held}
        self._must_be_taken_up()
        self._damaged = self._damaged and bool(self._orphans)
        self.check(directory, 1)

    def word(self, slot: int) -> int:
        """The word of a slot."""
        return self.words.get(slot, 0)

    def sizes(self) -> list[int]:
        """Cells of every segment."""
        return [self.tier.shape.bytes_of(at) for at in range(self.tier.shape.segment_count)]

    def apply(self, action: Action) -> None:
        """Write down what the directory says; look at copies before they begin."""
        match action:
            case Journal():
                if action.record:
                    if not self.logs:
                        self.logs.append(bytearray())
                    self.logs[-1] += action.record
                for slot in unpack_pages(action.slots):
                    self.words[slot] = action.stamp
            case JournalBegin():
                self.logs.append(bytearray())
            case JournalEnd():
                del self.logs[:-1]
            case SubmitCopy():
                for part in action.parts:
                    if part.target == HOST:
                        self._must_be_invalid(part.target_pages, f"{action.kind} {action.op}")

    def check(self, directory: Directory, every: int) -> None:
        """Compare the words with the tree, every few calls."""
        self._checked += 1
        if self._checked % every:
            return
        for node in directory.host.nodes.values():
            residency = node.places[HOST]
            if node.resident(HOST) is None:
                self._must_be_invalid(residency.pages, repr(node))
                continue
            stamps = [run.span for run in residency.runs for _ in range(run.length)]
            words = [self.word(slot) for slot in unpack_pages(residency.pages)]
            if stamps != words:
                raise Violation(NAME, f"{node!r} has the stamps {stamps}, its slots {words}")
        for size in directory.slots.page_sizes:
            for slot in directory.slots.free_slots(size):
                if self.word(slot) not in (0, self._orphans.get(slot)):
                    raise Violation(NAME, f"slot {slot} is free and valid")

    def damage(self, rng: random.Random) -> None:
        """Lose the end of a log, or flip some bits in it or in a slot's word."""
        self._damaged = True
        log = rng.choice(self.logs) if self.logs else bytearray()
        how = rng.choice(("cut", "flip", "word"))
        if how == "cut":
            del log[rng.randrange(len(log) + 1) :]
        elif how == "flip":
            for _ in range(rng.choice((1, 1, 5)) if log else 0):
                log[rng.randrange(len(log))] ^= 1 << rng.randrange(8)
        elif self.words:
            self.words[rng.choice(list(self.words))] ^= 1 << rng.randrange(64)

    def _must_be_taken_up(self) -> None:
        if self._orphans and not self._damaged:
            raise Violation(NAME, f"of an undamaged journal {self._orphans} were not taken up")

    def _must_be_invalid(self, slots: bytes, who: str) -> None:
        for slot in unpack_pages(slots):
            if self.word(slot):
                raise Violation(NAME, f"slot {slot} is valid, and {who} has it")

    def __repr__(self) -> str:
        return f"<Kept {sum(map(bool, self.words.values()))} pages, {len(self.logs)} logs>"


@contextmanager
def small_logs(nbytes: int) -> Iterator[None]:
    """Logs that are compacted from so many bytes on, in small steps (0: as the product does)."""
    small = {
        "JOURNAL_COMPACT_BYTES_MIN": nbytes,
        "JOURNAL_COMPACT_NODES_A_STEP": 1,
        "JOURNAL_SPACE_AGAIN_BYTES": nbytes // 4,
        "JOURNAL_TOKENS_BYTES_MAX": 64,
    }
    before = {name: getattr(limits, name) for name in (small if nbytes else ())}
    try:
        for name in before:
            setattr(limits, name, small[name])
        yield
    finally:
        for name, value in before.items():
            setattr(limits, name, value)
