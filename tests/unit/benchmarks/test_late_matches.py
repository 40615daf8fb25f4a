"""What a late match waited for, by the marks of its client and of the daemon."""

from __future__ import annotations

from benchmarks.late_matches import (
    ANSWERED,
    BEHIND,
    CLIENT,
    QUESTIONS,
    TAKEN,
    WAITED,
    WOKEN,
    Causes,
    Late,
    Marks,
    long_pieces,
    report,
)

MS = 1_000_000


def late(due: float, free: float, begun: float, ended: float) -> Late:
    return Late(*(int(at * MS) for at in (due, free, begun, ended)))


def span(*at: float) -> tuple[int, ...]:
    return tuple(int(one * MS) for one in at)


def marks(
    *, pauses: list[tuple[float, ...]] | None = None, **others: list[tuple[object, ...]]
) -> Marks:
    return Marks(
        pauses=[span(*(*one, 0)[:3]) for one in pauses or []],  # type: ignore[misc]
        turns=[span(*one) for one in others.get("turns", [])],  # type: ignore[arg-type, misc]
        pieces=[(name, *span(*at)) for name, *at in others.get("pieces", [])],  # type: ignore[misc, arg-type]
    )


def test_a_client_that_was_not_on_time_is_its_own_cause() -> None:
    cause, parts = Causes(marks()).cause(late(10, 5, 13, 13.1))
    assert (cause, parts[CLIENT]) == (CLIENT, 3 * MS)


def test_one_that_was_still_busy_waited_for_what_the_daemon_did_meanwhile() -> None:
    said = marks(turns=[(9, 13, 4)], pieces=[("log", 9, 12.9)])
    cause, parts = Causes(said).cause(late(10, 13, 13, 13.1))
    assert (cause, parts["log"], parts[CLIENT]) == ("log", int(2.9 * MS), 0)


def test_a_pause_before_the_answer_is_the_daemons_and_the_one_after_it_the_clients() -> None:
    said = marks(pauses=[(5, 12), (12.1, 20)])
    cause, parts = Causes(said).cause(late(10, 9, 10, 13))
    assert (cause, parts[WOKEN], parts[ANSWERED]) == (WOKEN, 2 * MS, int(0.9 * MS))
    cause, parts = Causes(said).cause(late(11.9, 9, 11.9, 15))
    assert (cause, parts[ANSWERED]) == (ANSWERED, int(2.9 * MS))


def test_at_the_end_of_a_pause_the_daemon_may_have_waited_for_a_core() -> None:
    cause, parts = Causes(marks(pauses=[(5, 12, 1.5)])).cause(late(10, 9, 10, 12.2))
    assert (cause, parts[WAITED], parts[WOKEN]) == (WAITED, int(1.5 * MS), int(0.5 * MS))
    parts = Causes(marks(pauses=[(5, 12, 1.5)])).parts(late(11, 9, 11, 12.2))
    assert (parts[WAITED], parts[WOKEN]) == (1 * MS, 0), "of what was known before it began"


def test_a_turn_without_the_processor_is_the_kernels_whatever_was_inside() -> None:
    said = marks(turns=[(10, 14, 0.5)], pieces=[("Match", 10.1, 13.9)])
    cause, parts = Causes(said).cause(late(10, 9, 10, 14.1))
    assert (cause, parts[TAKEN], parts.get("Match")) == (TAKEN, 4 * MS, None)


def test_a_piece_inside_another_takes_its_time_from_that() -> None:
    said = marks(
        turns=[(10, 16, 6)],
        pieces=[("disk", 12, 14), ("begun", 11, 14.5), ("other", 15, 15.5), ("log", 10, 16)],
    )
    parts = Causes(said).parts(late(10, 9, 10, 16))
    named = {name: parts[name] / MS for name in ("disk", "begun", "other", "log")}
    assert named == {"disk": 2, "begun": 1.5, "other": 0.5, "log": 2}
    assert parts[QUESTIONS] == 0
    half = Causes(said).parts(late(13, 9, 13, 15))
    assert [half[name] / MS for name in ("disk", "begun", "log")] == [1, 0.5, 0.5]


def test_who_stands_in_a_queue_is_told_what_made_it_since_the_daemon_had_nothing_to_do() -> None:
    before = ("events", 1, 3)
    made = ("log", 5, 8)
    said = marks(pauses=[(0, 1), (4, 5)], turns=[(1, 4, 3), (5, 8, 3)], pieces=[before, made])
    cause, parts = Causes(said).cause(late(9, 8, 9, 12))
    assert (cause, parts[QUESTIONS]) == (BEHIND + "log", 3 * MS)
    alone = Causes(marks(pauses=[(4, 5)])).cause(late(9, 8, 9, 12))
    assert alone[0] == QUESTIONS


def test_all_of_a_match_belongs_to_something() -> None:
    said = marks(
        pauses=[(0, 10.5), (13, 14)],
        turns=[(10.5, 12, 1.5), (14, 16, 0.1)],
        pieces=[("log", 10.6, 11.5)],
    )
    one = late(9, 9.5, 10, 16.5)
    assert sum(Causes(said).parts(one).values()) == one.ended - one.due


def test_a_report_counts_by_cause_and_says_the_slowest() -> None:
    said = marks(turns=[(10, 16, 6)], pieces=[("log", 10, 16)])
    lates = [late(10, 9, 10, 13), late(10, 9, 10, 15), late(20, 19, 23, 23.1)]
    told = report(said, lates)
    assert {cause: (one.matches, one.slowest_ms) for cause, one in told.items()} == {
        "log": (2, 5.0),
        CLIENT: (1, 3.1),
    }
    assert next(iter(told)) == "log"
    assert told["log"].parts_ms[0]["log"] == 5


def test_long_pieces_are_summed_by_name_and_what_the_kernel_took_is_one() -> None:
    said = marks(turns=[(10, 14, 0.5)], pieces=[("log", 0, 1), ("log", 3, 5), ("events", 6, 7)])
    told = long_pieces(said)
    assert list(told) == [TAKEN, "log", "events"]
    assert (told["log"].times, told["log"].all_ms, told["log"].longest_ms) == (2, 3, 2)
