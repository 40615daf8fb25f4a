"""How much of the time a queue gets that is never left alone."""

from hypothesis import given
from hypothesis import strategies as st

from directory.daemon.pacing import (
    AGAIN_US,
    BATCH_FILL,
    BURST_US_MAX,
    BURST_US_MIN,
    FULL,
    LATE_US,
    PRESSED_FILL,
    SHARE_MAX,
    SHARE_MIN,
    again_us,
    burst_us,
    is_late,
    share_of,
)


def test_a_queue_with_room_gets_nothing_and_a_full_one_half_of_the_time() -> None:
    assert share_of(0) == share_of(PRESSED_FILL - 0.001) == 0
    assert share_of(PRESSED_FILL) == SHARE_MIN
    assert share_of(FULL) == share_of(1) == SHARE_MAX


@given(st.floats(0, 1.2), st.floats(0, 1.2))
def test_a_fuller_queue_never_gets_less(one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert share_of(less) <= share_of(more)


@given(st.integers(0, 10**9), st.floats(0, 1.2))
def test_what_it_works_is_a_share_of_the_time_not_too_little_and_not_too_much(
    others_us: int, fill: float
) -> None:
    allowed_us = burst_us(others_us, fill)
    assert allowed_us == 0 or BURST_US_MIN <= allowed_us <= BURST_US_MAX
    assert allowed_us <= others_us  # half of the time at most, whatever came before
    if fill < PRESSED_FILL:
        assert allowed_us == 0
    if fill >= FULL and others_us >= BURST_US_MIN:
        assert allowed_us > 0


def test_what_has_waited_for_long_gets_the_smallest_share_however_little_it_is() -> None:
    earned_us = int(BURST_US_MIN / SHARE_MIN)
    assert burst_us(earned_us, 0.0) == 0
    assert burst_us(earned_us, 0.0, late=True) >= BURST_US_MIN
    assert burst_us(BURST_US_MIN, 0.0, late=True) == 0
    assert burst_us(1_000, 1.0, late=True) == burst_us(1_000, 1.0)


def test_late_is_what_was_worth_doing_two_seconds_ago() -> None:
    assert not is_late(None, LATE_US)
    assert not is_late(1, LATE_US)
    assert is_late(1, LATE_US + 1)


@given(st.floats(0, 1.2), st.floats(0, 1.2))
def test_what_was_broken_off_waits_the_less_the_fuller_the_queue_is(
    one: float, other: float
) -> None:
    less, more = sorted((one, other))
    assert AGAIN_US >= again_us(less) >= again_us(more) >= 0
    assert (again_us(more) == 0) == (more >= BATCH_FILL)
