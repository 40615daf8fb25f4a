"""Pages under leases, counted path by path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.core.errors import InternalError
from directory.core.tokens import pack_pages
from scheduler_shim.protected import ProtectedPaths, common_pages


def path_of(turns: list[int]) -> bytes:
    """A path of a tree: a page's number says all turns that lead to it."""
    pages, at = [], 0
    for turn in turns:
        at = 3 * at + turn + 1
        pages.append(at)
    return pack_pages(pages)


TURNS = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(st.tuples(st.booleans(), TURNS), max_size=40))
def test_the_sum_is_that_of_the_union(steps: list[tuple[bool, list[int]]]) -> None:
    paths, held = ProtectedPaths(), list[bytes]()
    for adds, turns in steps:
        if adds or not held:
            held.append(path_of(turns))
            paths.add(held[-1])
        else:
            paths.remove(held.pop(len(turns) % len(held)))
        union = {one[at : at + 4] for one in held for at in range(0, len(one), 4)}
        assert paths.pages == len(union)
    for one in held:
        paths.remove(one)
    assert paths.pages == 0


@given(TURNS, TURNS)
def test_what_two_paths_have_in_common_is_what_they_begin_with(
    one: list[int], other: list[int]
) -> None:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert common_pages(path_of(one), path_of(other)) == count


def test_a_path_is_not_let_go_more_often_than_it_was_protected() -> None:
    paths = ProtectedPaths()
    paths.add(path_of([0, 1]))
    with pytest.raises(InternalError, match="was not protected"):
        paths.remove(path_of([0, 2]))
    paths.remove(path_of([0, 1]))
    with pytest.raises(InternalError, match="was not protected"):
        paths.remove(path_of([0, 1]))
    assert repr(paths) == "<ProtectedPaths 0 of 0 pages>"
