"""The hottest prefixes: bounded, and without prefixes of one another that say the same."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from directory.analytics.hot import HotPrefixes
from tests.analytics.support import path_of


def test_a_prefix_that_many_hit_comes_before_one_that_few_hit() -> None:
    hot = HotPrefixes()
    for _ in range(10):
        hot.add(b"n", path_of("ABCDX"), 4)
    for _ in range(3):
        hot.add(b"n", path_of("QRST"), 4)
    found = hot.hottest(5)
    assert [(each.digest, each.pages, each.hits) for each in found] == [
        (path_of("ABCD")[-1], 4, 10),
        (path_of("QRST")[-1], 4, 3),
    ]


def test_a_shorter_prefix_is_named_where_it_has_many_more_hits() -> None:
    hot = HotPrefixes()
    for letter in "EFGH":
        for _ in range(2):
            hot.add(b"n", path_of("ABCD" + letter * 4), 8)
    found = hot.hottest(9)
    assert (found[0].pages, found[0].hits) == (4, 8)
    assert {each.pages for each in found[1:]} == {8}


def test_a_hit_once_is_not_hot_and_namespaces_are_apart() -> None:
    hot = HotPrefixes()
    hot.add(b"n", path_of("AB"), 2)
    hot.add(b"m", path_of("AB"), 2)
    assert hot.hottest(5) == []
    hot.add(b"m", path_of("AB"), 2)
    assert [each.namespace for each in hot.hottest(5)] == [b"m"]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9)), max_size=300))
def test_it_never_grows_beyond_its_bound(hits: list[tuple[int, int]]) -> None:
    hot = HotPrefixes(kept_max=32)
    for start, pages in hits:
        hot.add(b"", array("Q", range(start * 100, start * 100 + pages)), pages)
        assert len(hot.hottest(1_000)) <= 32 + 5
