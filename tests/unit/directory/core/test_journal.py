"""The journal as it is written: in which order, in what pieces, and what it costs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from directory.core import limits
from directory.core.actions import Action, Journal, JournalBegin, JournalEnd, SubmitCopy
from directory.core.directory import Directory
from directory.core.events import Event, Flush, Outcome
from directory.core.ids import HOST
from directory.core.records import PagesRecord, read_log
from directory.core.tokens import unpack_pages
from tests.unit.directory.core.keeper import Keeper, holdings, recovered
from tests.unit.directory.core.mirror import PAGE_BYTES
from tests.unit.directory.core.world import Scheduler, World

SALT = 4_711


class KeptWorld(World):
    """A world whose journal is kept, action by action."""

    def __init__(self, *, host_pages: int = 64, segment_pages: int = 8) -> None:
        super().__init__()
        self.directory = Directory(
            host_bytes=host_pages * PAGE_BYTES,
            segment_bytes=segment_pages * PAGE_BYTES,
            journal=SALT,
        )
        self.keeper = Keeper()
        self.seen: list[Action] = []

    def send(self, event: Event) -> list[Action]:
        """Hand an event on; copies must find their slots invalid."""
        actions = super().send(event)
        self.seen += actions
        ours = [isinstance(action, Journal | JournalBegin | JournalEnd) for action in actions]
        assert ours == sorted(ours, reverse=True), "the journal comes before all else"
        self.keeper.take_in(actions)
        for action in actions:
            if isinstance(action, SubmitCopy):
                for part in action.parts:
                    if part.target == HOST:
                        slots = set(unpack_pages(part.target_pages))
                        assert not slots & self.keeper.valid()
        return actions

    def same(self) -> None:
        """A successor would take up exactly what is resident now."""
        host = self.directory.slots
        successor, _ = recovered(self.keeper, host.total_bytes, host.segment_bytes)
        assert holdings(successor) == holdings(self.directory)
        assert self.keeper.valid() == holdings(self.directory).keys()


def test_slots_are_invalid_before_their_copy_and_valid_after_it() -> None:
    world = KeptWorld()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3])
    (op,) = world.copies
    assert isinstance(world.seen[-3], Journal)
    assert world.seen[-3].stamp == 0
    assert isinstance(world.seen[-2], SubmitCopy)
    assert world.keeper.valid() == set()
    world.finish(op)
    assert len(world.keeper.valid()) == 3
    world.same()


@pytest.mark.parametrize("outcome", ["void", "failed"])
def test_a_copy_that_did_not_count_is_not_written_down(outcome: Outcome) -> None:
    world = KeptWorld()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3])
    (op,) = world.copies
    world.finish(op, outcome)
    assert world.keeper.valid() == set()
    world.same()


def test_pages_that_the_host_evicts_are_invalid_at_once() -> None:
    world = KeptWorld(host_pages=4, segment_pages=4)
    a = Scheduler(world, "a")
    a.publish([1, 2, 3, 4])
    world.finish_all()
    a.publish([9, 8])
    assert len(world.keeper.valid()) == 2
    world.same()
    world.finish_all()
    world.same()
    assert len(world.keeper.valid()) == 4


def test_a_flush_invalidates_what_leases_still_hold_as_well() -> None:
    world = KeptWorld()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2, 3])
    world.finish_all()
    matched = b.match([1, 2, 3])
    a.ask(Flush("host"))
    assert world.directory.host.nodes, "the lease holds it"
    assert world.keeper.valid() == set()
    world.same()
    b.unlock(matched.receipt)
    world.same()


def test_splits_and_merges_need_no_record() -> None:
    world = KeptWorld()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3, 4])
    world.finish_all()
    before = len(world.keeper.logs[-1])
    a.match([1, 2], acquire=False)
    assert len(world.keeper.logs[-1]) == before
    a.publish([1, 2, 7])
    world.finish_all()
    world.same()


def test_a_long_node_is_written_in_records_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_TOKENS_BYTES_MAX", 12)
    world = KeptWorld()
    a = Scheduler(world, "a")
    a.publish(range(20))
    world.finish_all()
    found = [n.record for n in read_log(world.keeper.logs[-1])]
    pages = [record for record in found if isinstance(record, PagesRecord)]
    assert [len(record.tokens) for record in pages] == [12] * 6 + [8]
    assert len({record.stamp for record in pages}) == 1
    for above, below in pairwise(pages):
        assert below.parent_slot == unpack_pages(above.slots)[-1]
        assert below.parent_stamp == above.stamp
    world.same()


def test_a_namespace_is_named_again_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_SPACE_AGAIN_BYTES", 300)
    world = KeptWorld()
    a = Scheduler(world, "a")
    for first in range(30):
        a.publish([first * 10 + 1])
        world.finish_all()
    records = [n.record for n in read_log(world.keeper.logs[-1])]
    named = sum(not isinstance(record, PagesRecord) for record in records)
    assert 3 <= named < len(records) / 2
    assert len({r.number for r in records if not isinstance(r, PagesRecord)}) == 1


def test_a_compaction_goes_on_in_bounded_steps_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "JOURNAL_COMPACT_BYTES_MIN", 4_000)
    monkeypatch.setattr(limits, "JOURNAL_COMPACT_NODES_A_STEP", 2)
    world = KeptWorld(host_pages=24)
    a = Scheduler(world, "a")
    ends = 0
    for turn in range(300):
        a.publish([turn % 7, turn % 3, turn % 11, turn])
        while world.copies:
            world.finish(next(iter(world.copies)))
            world.same()
        ends = sum(isinstance(action, JournalEnd) for action in world.seen)
    begins = sum(isinstance(action, JournalBegin) for action in world.seen)
    assert ends >= 3
    assert begins - ends in (0, 1)
    assert max(world.keeper.steps) < 1_500, "two nodes and what the event itself brought"
    assert sum(map(len, world.keeper.logs)) < 15_000
    assert world.directory.journal.log_bytes == sum(map(len, world.keeper.logs))


def test_a_compaction_does_not_go_on_while_somebody_waits_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = KeptWorld(host_pages=24)
    a = Scheduler(world, "a", mode="thin")
    for turn in range(8):
        a.publish([turn, turn])
        while world.copies:
            world.finish(next(iter(world.copies)))
    monkeypatch.setattr(limits, "JOURNAL_COMPACT_BYTES_MIN", 1)
    monkeypatch.setattr(limits, "JOURNAL_COMPACT_NODES_A_STEP", 1)
    a.publish([9, 9])
    unwritten = world.directory.host.unwritten
    left = len(unwritten)
    assert left > 2
    found = a.match([1, 1])
    a.unlock(found.receipt)
    assert len(unwritten) == left, "a match and its release do nothing of it"
    while world.copies:
        world.finish(next(iter(world.copies)))
    assert len(world.directory.host.unwritten) < left
    world.same()


def test_a_log_of_nothing_is_compacted_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOURNAL_COMPACT_BYTES_MIN", 100)
    world = KeptWorld()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3])
    (op,) = world.copies
    world.finish(op)
    a.ask(Flush("host"))
    assert world.keeper.logs == [b""]
    world.same()


def test_without_a_journal_nothing_is_written() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3])
    (op,) = world.copies
    assert world.finish(op) == []
    assert world.directory.journal.log_bytes == 0
    assert all(not node.places[HOST].runs for node in world.directory.host.nodes.values())
