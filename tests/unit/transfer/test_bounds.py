"""Limits of packed lists: what is said to be below one is, and the usual lists are known to be.

Strategy of the property: numbers of all sizes around limits of all sizes, with one that is not
below in any place.
"""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.bounds import surely_below

numbers = st.one_of(st.integers(0, 1 << 10), st.integers(0, (1 << 32) - 1))


def packed(values: list[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


@given(st.lists(numbers, max_size=20), st.one_of(numbers, st.integers(0, 70_000)), st.data())
def test_what_is_said_to_be_below_a_limit_is(
    values: list[int], limit: int, data: st.DataObject
) -> None:
    if surely_below(packed(values), limit):
        assert all(value < limit for value in values)
    above = data.draw(st.integers(limit, (1 << 32) - 1), label="not below")
    at = data.draw(st.integers(0, len(values)), label="at")
    assert not surely_below(packed([*values[:at], above, *values[at:]]), limit)


@given(st.lists(numbers, min_size=1, max_size=20), st.integers(0, 1 << 16))
def test_of_the_lower_halves_the_same(values: list[int], limit: int) -> None:
    if surely_below(packed(values), limit, 2):
        assert max(value & 0xFFFF for value in values) < limit


@pytest.mark.parametrize("limit", [512, 32_768, 65_536, 1 << 20, 1 << 31])
def test_usual_lists_are_known_to_be_below(limit: int) -> None:
    assert surely_below(array("I", [0, 1, limit // 2, limit - 1]).tobytes(), limit)
    assert not surely_below(array("I", [0, limit, 1]).tobytes(), limit)


def test_indices_of_any_segments_are_known_to_be_below() -> None:
    slots = [63 << 16 | 511, 5 << 16 | 3, 0]
    assert surely_below(packed(slots), 512, 2)
    assert not surely_below(packed([*slots, 1 << 16 | 512]), 512, 2)
