"""Span slots and words."""

from collections.abc import Iterator

import pytest

from directory.core.errors import InternalError
from scheduler_shim.spans import SpanTable
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import WordTable


@pytest.fixture
def words() -> Iterator[WordTable]:
    table = WordTable.create(SharedMemoryIPC(), "words", 4)
    yield table
    table.close()


def test_a_slot_comes_with_its_word_as_it_is(words: WordTable) -> None:
    words.bump(1)
    assert SpanTable(words, 3).allocate() == (1, 1)


def test_a_slot_is_not_used_again_while_pages_of_it_are_in_the_tree(words: WordTable) -> None:
    spans = SpanTable(words, 3)
    slot, value = spans.allocate()
    spans.publish(slot, 2)
    spans.give_up(slot, value + 1, 1)
    assert spans.allocate()[0] == 2
    assert (spans.live(slot), spans.live_pages) == (1, 1)
    spans.give_up(slot, value + 2, 1)
    assert spans.allocate() == (slot, 2)


def test_a_report_without_new_pages_gives_its_slot_back(words: WordTable) -> None:
    spans = SpanTable(words, 3)
    slot, _ = spans.allocate()
    spans.publish(slot, 0)
    assert spans.allocate()[0] == slot


def test_a_word_is_never_lowered(words: WordTable) -> None:
    spans = SpanTable(words, 3)
    slot, _ = spans.allocate()
    spans.publish(slot, 3)
    spans.give_up(slot, 9, 1)
    spans.give_up(slot, 4, 1)
    assert words.read(slot) == 9


def test_more_pages_than_a_span_has_are_refused_before_anything_changes(words: WordTable) -> None:
    spans = SpanTable(words, 3)
    slot, _ = spans.allocate()
    spans.publish(slot, 1)
    with pytest.raises(InternalError, match="2 pages of span 1"):
        spans.give_up(slot, 1, 2)
    assert (words.read(slot), spans.live(slot)) == (0, 1)


def test_the_pool_word_frees_all_slots_at_once(words: WordTable) -> None:
    spans = SpanTable(words, 3)
    for _ in range(3):
        slot, _ = spans.allocate()
        spans.publish(slot, 1)
    assert spans.give_up_all() == words.read(0) == 1
    assert (spans.live_pages, spans.check()) == (0, [])
    assert spans.allocate() == (1, 0)


def test_with_every_slot_live_a_report_can_bring_nothing_new(words: WordTable) -> None:
    spans = SpanTable(words, 3)
    for _ in range(3):
        slot, _ = spans.allocate()
        spans.publish(slot, 1)
    assert spans.allocate() == (0, 0)
    spans.publish(0, 0)
    assert spans.check() == []
    with pytest.raises(InternalError, match="all 3 slots are live"):
        spans.publish(0, 1)


def test_a_table_that_is_too_short_is_refused(words: WordTable) -> None:
    with pytest.raises(InternalError, match="4 words"):
        SpanTable(words, 4)
