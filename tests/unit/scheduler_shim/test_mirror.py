"""The mirror: its reports, applied by a directory, keep the directory equal to it."""

from collections.abc import Iterator

import pytest
from msgspec import structs

from directory.core import limits
from directory.core.actions import Totals
from directory.core.errors import BadMessage, InternalError
from directory.core.events import Evicted, Flush
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages, unpack_pages
from scheduler_shim.mirror import Change, Mirror, OwnHit
from scheduler_shim.spans import SpanTable
from tests.unit.scheduler_shim.support import PAGE_SIZE, tokens
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import WordTable

KEY = NamespaceKey()
PAGES = 8


@pytest.fixture
def words() -> Iterator[WordTable]:
    table = WordTable.create(SharedMemoryIPC(), "words", PAGES + 1)
    yield table
    table.close()


@pytest.fixture
def mirror(words: WordTable) -> Mirror:
    return Mirror(
        SpanTable(words, PAGES),
        fingerprint=b"f",
        page_size=PAGE_SIZE,
        page_count=PAGES,
        page_bytes=64,
    )


def insert(mirror: Mirror, path: bytes, *pages: int) -> Change:
    change = mirror.insert("r", 0, KEY, path, pack_pages(pages), (1, 1))
    assert mirror.check() == []
    return change


def test_an_empty_mirror_matches_nothing(mirror: Mirror) -> None:
    assert mirror.match(KEY, tokens(1)) == OwnHit(None, b"", 0)


def test_what_was_inserted_is_matched(mirror: Mirror) -> None:
    insert(mirror, tokens(1, 2, 3), 5, 6, 7)
    hit = mirror.match(KEY, tokens(1, 2, 9))
    assert (list(unpack_pages(hit.pages)), hit.page_count) == ([5, 6], 2)
    assert mirror.match(NamespaceKey(cache_salt=""), tokens(1)).page_count == 0


def test_what_was_found_whole_is_not_looked_up_again_as_long_as_its_end_is_there(
    mirror: Mirror,
) -> None:
    insert(mirror, tokens(1, 2, 3), 5, 6, 7)
    whole, part = mirror.match(KEY, tokens(1, 2, 3)), mirror.match(KEY, tokens(1, 2, 3, 4))
    insert(mirror, tokens(1, 2, 3, 4), 5, 6, 7, 4)
    assert mirror.match(KEY, tokens(1, 2, 3), whole) is whole
    assert mirror.match(KEY, tokens(1, 2, 3, 4), part).page_count == 4
    mirror.evict(2)
    assert mirror.match(KEY, tokens(1, 2, 3), whole).page_count == 2


def test_a_report_names_the_canonical_pages_and_no_span_without_new_ones(mirror: Mirror) -> None:
    first = insert(mirror, tokens(1, 2), 5, 6)
    assert (first.report.span, first.report.pages) == (1, pack_pages([5, 6]))
    assert first.report.fresh_pages == 2
    again = insert(mirror, tokens(1, 2), 3, 4)
    assert list(unpack_pages(again.outcome.duplicates)) == [3, 4]
    assert (again.report.pages, again.report.span) == (pack_pages([5, 6]), 0)
    assert again.report.fresh_pages == 0


def test_a_path_that_is_there_whole_is_told_of_again_as_an_insert_of_its_pages_would_be(
    mirror: Mirror, words: WordTable
) -> None:
    insert(mirror, tokens(1, 2), 5, 6)
    inserted = insert(mirror, tokens(1, 2), 5, 6).report
    assert mirror.again("r", 0, KEY, tokens(1, 2)) == structs.replace(inserted, written=(0, 0))
    assert mirror.again("r", 0, KEY, tokens(1)) is not None
    assert mirror.again("r", 0, KEY, tokens(1, 2, 3)) is None
    assert mirror.again("r", 0, KEY, tokens(9)) is None
    assert mirror.again("r", 0, NamespaceKey(cache_salt=""), tokens(1, 2)) is None
    assert mirror.check() == []


def test_a_path_that_is_told_of_again_is_given_up_after_those_that_are_not(mirror: Mirror) -> None:
    insert(mirror, tokens(1), 5)
    insert(mirror, tokens(2), 6)
    mirror.again("r", 0, KEY, tokens(1))
    assert list(unpack_pages(mirror.evict(1).pages)) == [6]


def test_the_words_have_moved_on_when_pages_are_given_up(mirror: Mirror, words: WordTable) -> None:
    insert(mirror, tokens(1, 2, 3), 5, 6, 7)
    given = mirror.evict(2)
    assert sorted(unpack_pages(given.pages)) == [6, 7]
    assert given.reports == (Evicted(((1, 1, 2),), ((1, 1),)),)
    assert words.read(1) == 1
    assert mirror.check() == []
    assert mirror.match(KEY, tokens(1, 2, 3)).page_count == 1


def test_a_locked_path_is_not_given_up(mirror: Mirror) -> None:
    insert(mirror, tokens(1, 2), 5, 6)
    node = mirror.match(KEY, tokens(1)).node
    assert node is not None
    mirror.lock(node)
    mirror.lock(node)
    assert mirror.totals == Totals(1, 1)
    assert list(unpack_pages(mirror.evict(2).pages)) == [6]
    mirror.unlock(node)
    assert mirror.evict(1) == (b"", ())
    mirror.unlock(node)
    assert list(unpack_pages(mirror.evict(1).pages)) == [5]
    with pytest.raises(InternalError, match="not locked"):
        mirror.unlock(node)


def test_a_lock_survives_the_split_of_its_node(mirror: Mirror) -> None:
    insert(mirror, tokens(1, 2, 3), 5, 6, 7)
    node = mirror.match(KEY, tokens(1, 2, 3)).node
    assert node is not None
    mirror.lock(node)
    insert(mirror, tokens(1, 9), 5, 4)
    assert mirror.totals == Totals(1, 3)
    mirror.unlock(node)
    assert mirror.totals == Totals(4, 0)
    assert mirror.check() == []


def test_a_flush_without_locks_moves_the_pool_word_on(mirror: Mirror, words: WordTable) -> None:
    insert(mirror, tokens(1, 2), 5, 6)
    given = mirror.flush()
    assert sorted(unpack_pages(given.pages)) == [5, 6]
    assert given.reports == (Flush("pool", 1),)
    assert words.read(0) == 1
    assert mirror.check() == []


def test_a_flush_beside_locks_names_what_it_gives_up(mirror: Mirror, words: WordTable) -> None:
    insert(mirror, tokens(1, 2), 5, 6)
    node = mirror.match(KEY, tokens(1)).node
    assert node is not None
    mirror.lock(node)
    assert mirror.flush().reports == (Evicted(((1, 1, 1),), ((1, 1),)),)
    assert words.read(0) == 0


def test_a_refused_insert_changes_nothing(mirror: Mirror) -> None:
    insert(mirror, tokens(1), 5)
    with pytest.raises(BadMessage, match="belong to other paths"):
        mirror.insert("r", 0, KEY, tokens(2), pack_pages([5]), (1, 1))
    with pytest.raises(BadMessage):
        mirror.insert("r", 0, NamespaceKey(cache_salt="x"), tokens(2), pack_pages([99]), (1, 1))
    assert mirror.check() == []
    assert mirror.totals == Totals(1, 0)


def test_more_than_a_report_may_name_goes_in_portions_with_new_words_each(
    mirror: Mirror, words: WordTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GAVE_UP_PAGES_MAX", 2)
    insert(mirror, tokens(1, 2, 3), 5, 6, 7)
    insert(mirror, tokens(1, 2, 3, 4), 5, 6, 7, 0)
    given = mirror.evict(4)
    assert list(unpack_pages(given.pages)) == [0, 7, 6, 5]
    assert given.reports == (
        Evicted(((2, 0, 1), (1, 2, 1)), ((2, 1), (1, 1))),
        Evicted(((1, 0, 2),), ((1, 2),)),
    )
    assert (words.read(1), words.read(2)) == (2, 1)
    assert mirror.check() == []
