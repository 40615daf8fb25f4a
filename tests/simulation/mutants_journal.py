"""Deliberate bugs of the host tier's journal and of taking a tier up again.

Owns the wrong functions. Each wraps the real one and spoils a single thing, so that it stays the
same bug when the code around it changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from directory.core import directory as core_directory
from directory.core.actions import Action
from directory.core.ids import HOST, PoolId
from directory.core.journal import HostJournal
from directory.core.node import Node, Residency
from directory.core.records import PagesRecord, SlotWord, read_log
from directory.core.recovery import Builder, Chain
from directory.core.tokens import unpack_pages
from directory.core.transfers import Transfers
from tests.simulation.kept import Kept
from tests.simulation.mutants_seams import Call, Mutant, seam

# Writing.


@seam(Transfers, "_begin_backup")
def begin_backup_validated(original: Call) -> Call:
    def _begin_backup(self: Transfers, node: Node, not_pool: PoolId) -> list[Action]:
        before = set(self._tree.fills)
        begun: list[Action] = original(self, node, not_pool)
        for op in self._tree.fills.keys() - before:
            filling = self._tree.fills[op]
            self.journal.validate(filling)
            for part in filling:
                part.places[HOST].runs = ()
        return begun

    return _begin_backup


@seam(Kept, "_must_be_invalid")
def must_be_invalid_unlooked(original: Call) -> Call:
    def _must_be_invalid(self: Kept, slots: bytes, who: str) -> None:
        """Nobody looks at the journal, so that only wrong bytes give the bug away."""

    return _must_be_invalid


@seam(Kept, "_must_be_taken_up")
def must_be_taken_up_unlooked(original: Call) -> Call:
    def _must_be_taken_up(self: Kept) -> None:
        """Nobody looks at the journal, so that only wrong bytes give the bug away."""

    return _must_be_taken_up


@seam(HostJournal, "invalidate")
def invalidate_nothing(original: Call) -> Call:
    def invalidate(self: HostJournal, slots: bytes) -> None:
        """The slots stay valid."""

    return invalidate


@seam(Kept, "check")
def check_nothing(original: Call) -> Call:
    def check(self: Kept, directory: core_directory.Directory, every: int) -> None:
        """Nobody looks at the journal, so that only wrong bytes give the bug away."""

    return check


@seam(HostJournal, "give_up")
def give_up_unwritten(original: Call) -> Call:
    def give_up(self: HostJournal, residency: Residency) -> None:
        residency.runs = ()

    return give_up


@seam(HostJournal, "_step")
def step_without_what_was_split(original: Call) -> Call:
    def _step(self: HostJournal) -> None:
        """Only nodes that were there when the compaction began are written."""
        latest = max(self._host.unwritten)
        if len(self._host.unwritten) > 1:
            del self._host.unwritten[latest]
        original(self)

    return _step


# Reading.


@seam(core_directory, "find")
def find_by_the_log_alone(original: Call) -> Call:
    def find(logs: Iterable[bytes], word: SlotWord) -> Any:
        kept = list(logs)
        latest: dict[int, int] = {}
        for log in kept:
            for numbered in read_log(log):
                if isinstance(numbered.record, PagesRecord):
                    stamp = numbered.record.stamp
                    latest.update(dict.fromkeys(unpack_pages(numbered.record.slots), stamp))
        return original(kept, lambda slot: latest.get(slot, 0))

    return find


@seam(Builder, "_parent")
def parent_at_the_root(original: Call) -> Call:
    def _parent(self: Builder, above: Node | None, chain: Chain) -> Node | None:
        return original(self, None, chain)  # type: ignore[no-any-return]

    return _parent


_UNLOOKED: Final = (must_be_invalid_unlooked, check_nothing, must_be_taken_up_unlooked)
_WARM: Final = {"warm": 1.0, "damage": 0.0}
_RESTARTS: Final = {"daemon_restart": 5.0, "copy_slow": 0.3}

JOURNAL: Final = (
    Mutant(
        "journal-validated-before-the-copy",
        "a slot is valid in the journal from the moment its copy begins",
        (begin_backup_validated,),
        pins=_WARM,
    ),
    Mutant(
        "journal-validated-before-the-copy-unlooked",
        "the same, and nobody looks at the journal: it must show in what is matched",
        (begin_backup_validated,),
        pins=_WARM,
        rates=_RESTARTS,
        world=_UNLOOKED,
    ),
    Mutant(
        "journal-never-invalidated",
        "slots stay valid in the journal when they are written into again",
        (invalidate_nothing, give_up_unwritten),
        pins=_WARM,
        rates=_RESTARTS,
        world=_UNLOOKED,
    ),
    Mutant(
        "journal-keeps-what-was-given-up",
        "pages that the host gives up are invalid only when their slots are written into",
        (give_up_unwritten,),
        pins=_WARM,
    ),
    Mutant(
        "journal-compacted-without-some",
        "a compaction passes over a node",
        (step_without_what_was_split,),
        pins={**_WARM, "log_bytes": 600},
        rates=_RESTARTS,
    ),
    Mutant(
        "log-believed-without-the-words",
        "the log's last word on a slot counts, also where the log has lost its end",
        (find_by_the_log_alone,),
        pins={"warm": 1.0, "damage": 0.8},
        rates=_RESTARTS,
        world=(check_nothing,),
    ),
    Mutant(
        "recovered-without-ancestors",
        "recovered pages hang on the root, whatever their record says",
        (parent_at_the_root,),
        pins=_WARM,
        rates=_RESTARTS,
    ),
)
