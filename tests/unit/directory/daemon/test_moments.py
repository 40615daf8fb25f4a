"""When pages were given up of late: counts between two moments, the oldest forgotten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.daemon import moments
from directory.daemon.moments import Moments

STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=30)


@given(STEPS, st.integers(0, 60), st.integers(0, 60))
def test_both_ends_count(steps: list[tuple[int, int]], one: int, other: int) -> None:
    since_us, until_us = sorted((one, other))
    kept, at_us, expected = Moments(), 0, 0
    for later_us, pages in steps:
        at_us += later_us
        kept.add(at_us, pages)
        expected += pages if since_us <= at_us <= until_us else 0
    assert kept.between(since_us, until_us) == expected


def test_the_oldest_half_goes_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "MOMENTS_MAX", 4)
    kept = Moments()
    for at_us in range(5):
        kept.add(at_us, 10)
    assert kept.between(0, 9) == 30
    assert kept.between(3, 4) == 20
