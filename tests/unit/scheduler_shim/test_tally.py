"""The tally: what is counted, and what must never happen."""

from scheduler_shim.tally import PROBLEMS_KEPT_MAX, Tally


def test_nothing_is_entered_for_nothing() -> None:
    tally = Tally()
    tally.count("pages", 0)
    tally.count("pages", 2)
    tally.count("pages")
    assert tally.counters == {"pages": 3}


def test_the_first_problems_are_kept_and_all_are_counted() -> None:
    tally = Tally()
    for number in range(PROBLEMS_KEPT_MAX + 3):
        tally.problem(str(number))
    assert tally.problems == [str(number) for number in range(PROBLEMS_KEPT_MAX)]
    assert tally.counters == {"problems": PROBLEMS_KEPT_MAX + 3}
