"""Whether copies within a GPU have it to themselves: only where it was seen, and only lately."""

import pytest

from transfer.alone import (
    DOUBT_US_MAX,
    DOUBT_US_MIN,
    LAUNCH_US,
    TRUSTED_US,
    UNSEEN_MAX,
    Alone,
)

RATE = 1_000  # bytes a microsecond
NBYTES = 100_000
DUE_US = LAUNCH_US + NBYTES // RATE


def one_slice(alone: Alone, took_us: int, *, ticket: int = 1, at: int = 0) -> int:
    """A slice that took so long; returns when it was over."""
    alone.submitted(ticket, NBYTES, at)
    alone.looked(at + took_us)
    alone.ended(ticket, at + took_us)
    return at + took_us


def test_nobody_is_alone_before_a_slice_has_shown_it() -> None:
    alone = Alone(RATE)
    assert not alone.holds(0)
    alone.submitted(1, NBYTES, 0)
    assert not alone.holds(1)


@pytest.mark.parametrize(("took_us", "holds"), [(1, True), (DUE_US, True), (DUE_US + 1, False)])
def test_a_slice_that_took_no_longer_than_its_bytes_had_the_gpu_to_itself(
    took_us: int, holds: bool
) -> None:
    alone = Alone(RATE)
    assert alone.holds(one_slice(alone, took_us)) is holds


def test_where_nobody_knows_how_fast_memory_is_no_slice_shows_anything() -> None:
    alone = Alone(0)
    assert not alone.holds(one_slice(alone, 0))


def test_what_was_seen_is_forgotten_after_a_while() -> None:
    alone = Alone(RATE)
    over = one_slice(alone, 1)
    assert alone.holds(over + TRUSTED_US)
    assert not alone.holds(over + TRUSTED_US + 1)


def test_once_it_was_believed_and_wrong_nothing_is_concluded_for_a_while() -> None:
    alone = Alone(RATE)
    over = one_slice(alone, 1)
    wrong = over = one_slice(alone, DUE_US + 1, ticket=2, at=over)
    assert not alone.holds(over)
    over = one_slice(alone, 1, ticket=3, at=wrong + DOUBT_US_MIN - 2)
    assert not alone.holds(over)
    over = one_slice(alone, 1, ticket=4, at=wrong + DOUBT_US_MIN)
    assert alone.holds(over)


def test_the_oftener_it_was_wrong_the_longer_it_is_doubted_and_being_right_ends_that() -> None:
    alone, doubts = Alone(RATE), list[int]()
    now = one_slice(alone, 1)
    for _ in range(12):
        wrong = now = one_slice(alone, DUE_US + 1, at=now)
        while not alone.holds(now):
            now = one_slice(alone, 1, at=now + 99)
        doubts.append(now - wrong)
    for doubled, doubt in enumerate(doubts[:6]):
        assert DOUBT_US_MIN << doubled <= doubt <= (DOUBT_US_MIN << doubled) + 100
    assert DOUBT_US_MAX <= doubts[-1] <= DOUBT_US_MAX + 100
    now = one_slice(alone, 1, at=one_slice(alone, 1, at=now))
    wrong = now = one_slice(alone, DUE_US + 1, at=now)
    assert alone.holds(one_slice(alone, 1, at=wrong + DOUBT_US_MIN))


def test_what_was_forgotten_was_not_wrong_and_raises_no_doubt() -> None:
    alone = Alone(RATE)
    over = one_slice(alone, 1)
    over = one_slice(alone, DUE_US + 1, ticket=2, at=over + TRUSTED_US + 1)
    assert alone.holds(one_slice(alone, 1, ticket=3, at=over))


def test_one_in_time_that_was_not_believed_ends_no_doubt() -> None:
    alone = Alone(RATE)
    wrong = one_slice(alone, DUE_US + 1, at=one_slice(alone, 1))
    over = one_slice(alone, 1, at=wrong + DOUBT_US_MIN)
    over = one_slice(alone, 1, at=over + TRUSTED_US + 1)
    wrong = one_slice(alone, DUE_US + 1, at=over)
    assert not alone.holds(one_slice(alone, 1, at=wrong + DOUBT_US_MIN))
    assert alone.holds(one_slice(alone, 1, at=wrong + 2 * DOUBT_US_MIN))


def test_a_slow_slice_that_was_never_believed_raises_no_doubt() -> None:
    alone = Alone(RATE)
    over = one_slice(alone, DUE_US + 1)
    assert alone.holds(one_slice(alone, 1, ticket=2, at=over))


def test_a_slice_that_is_late_takes_it_back_before_it_is_done() -> None:
    alone = Alone(RATE)
    over = one_slice(alone, 1)
    alone.submitted(2, NBYTES, over)
    assert alone.holds(over + DUE_US)
    assert not alone.holds(over + DUE_US + 1)


def test_slices_that_share_the_memory_have_the_time_of_all_of_them() -> None:
    alone, both_us = Alone(RATE), LAUNCH_US + 2 * NBYTES // RATE
    for ticket, at in ((1, 0), (2, 50)):
        alone.submitted(ticket, NBYTES, at)
    alone.ended(1, both_us)
    assert alone.holds(both_us)
    alone.ended(2, 50 + both_us)
    assert alone.holds(50 + both_us)


@pytest.mark.parametrize("first", [1, 2])
def test_two_slow_slices_that_are_seen_at_once_are_both_slow(first: int) -> None:
    alone, late_us = Alone(RATE), LAUNCH_US + 2 * NBYTES // RATE + 1
    for ticket in (1, 2):
        alone.submitted(ticket, NBYTES, 0)
    alone.ended(first, late_us)
    alone.ended(3 - first, late_us + 1)
    assert not alone.holds(late_us + 1), "that the second one ended at once says nothing"


def test_slices_of_other_copies_say_nothing() -> None:
    alone = Alone(RATE)
    over = one_slice(alone, 1)
    alone.ended(99, over + TRUSTED_US * 10)
    assert not alone.holds(over + TRUSTED_US * 10)


def test_a_try_that_is_late_is_doubted_like_what_was_believed_and_one_in_time_ends_that() -> None:
    alone = Alone(RATE)
    assert alone.may_try(0)
    alone.submitted(1, NBYTES, 0, tried=True)
    assert not alone.may_try(0), "one at a time"
    assert alone.trying(DUE_US)
    assert not alone.trying(DUE_US + 1), "it is late, so it is known"
    alone.looked(DUE_US + 1)
    alone.ended(1, DUE_US + 1)
    assert not alone.holds(DUE_US + 1)
    over = DUE_US + 1 + DOUBT_US_MIN
    assert not alone.may_try(over - 1)
    assert alone.may_try(over)
    alone.submitted(2, NBYTES, over, tried=True)
    alone.ended(2, over + 1)
    assert alone.holds(over + 1)
    assert alone.may_try(over + 1)


def test_nothing_is_tried_where_nobody_knows_how_fast_it_would_be() -> None:
    assert not Alone(0).may_try(0)


def test_it_is_known_soon_while_something_is_in_flight_that_is_not_late() -> None:
    alone = Alone(RATE)
    assert not alone.trying(0)
    alone.submitted(1, 1_000 * NBYTES, 0)
    alone.submitted(2, NBYTES, 0, tried=True)
    assert alone.trying(DUE_US)
    assert not alone.trying(1_001 * DUE_US)
    alone.ended(2, 1)
    assert alone.trying(1)
    alone.ended(1, 2)
    assert not alone.trying(2)


def test_what_ended_while_nobody_looked_says_nothing_either_way() -> None:
    alone = Alone(RATE)
    over = one_slice(alone, 1)
    alone.looked(over)
    late = over + 10 * DUE_US
    alone.submitted(2, NBYTES, over)
    alone.ended(2, late)
    assert alone.may_try(late), "no doubt"
    assert alone.holds(late), "nor is it forgotten before its time"
    alone.submitted(3, NBYTES, late)
    alone.looked(late + DUE_US + 1)
    alone.ended(3, late + 2 * DUE_US)
    assert not alone.holds(late + 2 * DUE_US)
    assert not alone.may_try(late + 2 * DUE_US), "it was looked at when it was late"


def test_after_a_few_tries_that_nobody_saw_in_time_there_is_a_pause() -> None:
    alone, now = Alone(RATE), 0
    for ticket in range(UNSEEN_MAX):
        assert alone.may_try(now)
        alone.looked(now)
        alone.submitted(ticket, NBYTES, now, tried=True)
        now += 2 * DUE_US
        alone.ended(ticket, now)
    assert not alone.may_try(now + DOUBT_US_MIN - 1)
    now += DOUBT_US_MIN
    assert alone.may_try(now)
    alone.submitted(9, NBYTES, now, tried=True)
    alone.ended(9, now + 1)
    assert alone.holds(now + 1), "and the next one counts as ever"
