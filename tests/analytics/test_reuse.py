"""Reuse distances are those of a brute-force LRU, at every capacity."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.analytics.paths import PathTree
from directory.analytics.record import Kind
from directory.analytics.reuse import Curve, Fenwick, ReuseDistances
from tests.analytics.support import access, path_of

words = st.text(alphabet="AB", min_size=1, max_size=7)
histories = st.lists(
    st.tuples(words, st.booleans(), st.sampled_from([b"", b"n"])), min_size=1, max_size=40
)


class BruteForce:
    """An LRU cache of pages kept as a list, most recent first; a page is its namespace and path."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: list[tuple[bytes, str]] = []

    def serve(self, space: bytes, word: str) -> int:
        pages = [(space, word[: end + 1]) for end in range(len(word))]
        hits = 0
        for page in pages:
            if page not in self.held:
                break
            hits += 1
        # The whole path is used now; its deepest page goes first when there is no room.
        others = [page for page in self.held if page not in pages]
        self.held = (pages + others)[: self.capacity]
        return hits


@given(histories, st.integers(1, 30))
def test_hits_are_those_of_a_brute_force_lru_at_every_request(
    history: list[tuple[str, bool, bytes]], capacity: int
) -> None:
    reuse, cache = ReuseDistances(), BruteForce(capacity)
    hits = 0
    for word, counts, space in history:
        touched = reuse.add(path_of(word), namespace=space, counts=counts)
        expected = cache.serve(space, word)
        assert touched.hits(capacity) == expected
        hits += expected if counts else 0
    assert reuse.curve().hits(capacity) == hits
    assert reuse.blocks == sum(len(word) for word, counts, _ in history if counts)


@given(histories)
def test_the_stack_counts_every_different_page_once(
    history: list[tuple[str, bool, bytes]],
) -> None:
    reuse, ever = ReuseDistances(), set()
    for word, _, space in history:
        reuse.add(path_of(word), namespace=space)
        ever |= {(space, word[: end + 1]) for end in range(len(word))}
    assert reuse.pages == reuse.touched_since(0) == len(ever)


@given(histories, st.data())
def test_a_working_set_is_the_pages_of_the_last_requests(
    history: list[tuple[str, bool, bytes]], data: st.DataObject
) -> None:
    reuse = ReuseDistances()
    for word, _, space in history:
        reuse.add(path_of(word), namespace=space)
    since = data.draw(st.integers(0, len(history)))
    last = {
        (space, word[: end + 1]) for word, _, space in history[since:] for end in range(len(word))
    }
    assert reuse.touched_since(since) == len(last)


@given(histories)
def test_a_curve_never_falls_and_its_histogram_holds_all_reuse(
    history: list[tuple[str, bool, bytes]],
) -> None:
    reuse = ReuseDistances()
    for word, counts, space in history:
        reuse.add(path_of(word), namespace=space, counts=counts)
    curve = reuse.curve()
    hits = [curve.hits(capacity) for capacity in range(curve.distance_max + 2)]
    assert all(low <= high for low, high in pairwise(hits))
    assert hits[0] == 0
    assert hits[-1] == curve.hits_max == reuse.known_pages
    assert sum(curve.histogram([1, 2, 4, 8, 16, 1000])) == curve.hits_max
    assert 0 <= curve.ratio_max <= 1
    for share in (0.25, 0.5, 1.0):
        enough = curve.capacity_for(share)
        assert curve.hits(enough) >= share * curve.hits_max
        assert enough == 0 or curve.hits(enough - 1) < share * curve.hits_max


@pytest.mark.parametrize("kind", ["retry", "recompute", "probe"])
def test_what_is_no_query_counts_neither_as_block_nor_as_hit_f114(kind: Kind) -> None:
    reuse = ReuseDistances()
    reuse.add(path_of("AB"))
    again = access("AB", kind=kind)
    reuse.add(again.path, counts=again.kind == "request")
    assert (reuse.blocks, reuse.curve().hits_max) == (2, 0)


def test_what_is_no_query_still_keeps_its_pages_warm() -> None:
    reuse = ReuseDistances()
    reuse.add(path_of("AB"))
    reuse.add(path_of("XYZ"))
    reuse.add(path_of("AB"), counts=False)
    assert [(r.first, r.pages) for r in reuse.add(path_of("AB")).reaches] == [(1, 2)]


def test_pages_beyond_the_extent_are_not_published() -> None:
    reuse = ReuseDistances()
    reuse.add(path_of("ABCD"), extent=2)
    assert reuse.add(path_of("ABCD")).walk.known == 2
    assert reuse.pages == 4


def test_a_page_that_cannot_be_hit_is_not_counted_as_reuse() -> None:
    reuse = ReuseDistances()
    for _ in range(2):
        reuse.add(path_of("AB"), hittable=1)
    assert (reuse.blocks, reuse.curve().hits_max) == (4, 1)


def test_an_empty_curve_is_all_zero() -> None:
    curve = Curve.of({}, 0)
    assert (curve.hits(10), curve.ratio(10), curve.ratio_max, curve.distance_max) == (0, 0, 0, 0)
    assert curve.capacity_for(0.5) == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-5, 5)), max_size=60))
def test_sums_of_a_growing_row_are_right(steps: list[tuple[int, int]]) -> None:
    row, sums = [], Fenwick()
    for index, value in steps:
        row.append(value)
        sums.append(value)
        row[index % len(row)] += 3
        sums.add(index % len(row), 3)
        assert sums.total == sum(row)
        assert [sums.after(at) for at in range(-1, len(row))] == [
            sum(row[at + 1 :]) for at in range(-1, len(row))
        ]


@given(st.lists(words, max_size=30))
def test_the_tree_knows_exactly_the_prefixes_it_was_shown(paths: list[str]) -> None:
    tree, ever = PathTree(), {""}
    for tick, word in enumerate(paths):
        known = max(end for end in range(len(word) + 1) if word[:end] in ever)
        walk = tree.touch(path_of(word), tick)
        assert walk.known == known
        assert sum(stretch.pages for stretch in walk.stretches) == known
        on = known < len(word) and any(
            other.startswith(word[:known]) and len(other) > known for other in ever
        )
        assert walk.forked is (on and known > 0)
        ever |= {word[:end] for end in range(len(word) + 1)}
    assert tree.pages == len(ever) - 1
