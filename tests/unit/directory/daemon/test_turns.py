"""Whose turn it is: restores before reports before backups, nobody for ever, and a share of time.

Strategy of the property: a made-up thread with a clock of its own does what the loop does (all
questions that are there, then one piece if it is due) while questions come at any times and work is
put off at any rank; what each waits for is counted.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.daemon.turns import (
    OWED_NS_MAX,
    PASSED_MAX,
    SAVED_NS_MAX,
    SHARE,
    Rank,
    Turns,
)


class Named:
    """Turns whose pieces say who they are."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.done: list[str] = []

    def put(self, name: str, rank: Rank) -> None:
        self.turns.put(name, rank, lambda: self.done.append(name))

    def do(self, times: int = 1) -> list[str]:
        before = len(self.done)
        for _ in range(times):
            self.turns.take()()
        return self.done[before:]


def test_a_restore_comes_before_reports_and_these_before_the_ends_of_backups() -> None:
    named = Named()
    named.put("backup", Rank.BACKUPS)
    named.put("report", Rank.REPORTS)
    named.put("restore", Rank.RESTORES)
    assert named.do(3) == ["restore", "report", "backup"]
    assert not named.turns


def test_those_of_one_rank_take_turns_and_nobody_is_there_twice() -> None:
    named = Named()
    for _ in range(3):
        named.put("a", Rank.REPORTS)
    named.put("b", Rank.REPORTS)
    assert len(named.turns) == 2
    assert named.do() == ["a"]
    named.put("a", Rank.REPORTS)
    assert named.do(2) == ["b", "a"]


def test_what_was_passed_over_often_enough_comes_first() -> None:
    named = Named()
    named.put("backup", Rank.BACKUPS)
    done: list[str] = []
    while "backup" not in done:
        named.put("report", Rank.REPORTS)
        done += named.do()
    assert done == ["report"] * PASSED_MAX + ["backup"]


def test_who_is_gone_has_no_turn() -> None:
    named = Named()
    named.put("a", Rank.REPORTS)
    named.put("a", Rank.BACKUPS)
    named.put("b", Rank.BACKUPS)
    named.turns.drop("a")
    named.turns.drop("a")
    assert named.do() == ["b"]


def test_questions_earn_a_share_of_the_time_and_pieces_spend_it() -> None:
    turns = Turns()
    steps = [
        (0, 0, False),
        (7_000, 0, True),
        (0, 1_000, False),  # an eighth of 8,000
        (1 << 40, SAVED_NS_MAX, False),  # no more can be saved up
        (0, 1 << 40, False),
        (int(OWED_NS_MAX * (1 - SHARE) / SHARE) + 10, 0, True),  # no more can be owed
    ]
    for asked_ns, spent_ns, earned in steps:
        turns.asked(asked_ns)
        turns.spent(spent_ns)
        assert turns.earned is earned


PIECE_NS = st.integers(1_000, 400_000)
QUESTION_NS = 40_000


class Thread:
    """Does what the loop does, with a clock of its own, and has work of these kinds without end:
    each piece puts the next one off."""

    def __init__(self, kinds: list[tuple[Rank, int]]) -> None:
        self.now_ns = 0
        self.turns = Turns()
        self.ended: list[tuple[int, int]] = []
        """Whose pieces ended, and when."""
        for who, (rank, took_ns) in enumerate(kinds):
            self._put(who, rank, took_ns)

    def _put(self, who: int, rank: Rank, took_ns: int) -> None:
        def piece() -> None:
            self.now_ns += took_ns
            self.ended.append((who, self.now_ns))
            self._put(who, rank, took_ns)

        self.turns.put(who, rank, piece)

    def turn(self, questions: int) -> None:
        """Answer so many questions, then do a piece if it is time for one."""
        self.now_ns += questions * QUESTION_NS
        begun = self.now_ns
        if not questions:
            self.turns.take()()
            return
        self.turns.asked(questions * QUESTION_NS)
        if self.turns.earned:
            self.turns.take()()
            self.turns.spent(self.now_ns - begun)


@given(
    gaps_ns=st.lists(st.integers(0, 300_000), min_size=1, max_size=50),
    kinds=st.lists(st.tuples(st.sampled_from(Rank), PIECE_NS), min_size=1, max_size=8),
)
def test_a_question_waits_for_one_piece_at_most_whatever_there_is(
    gaps_ns: list[int], kinds: list[tuple[Rank, int]]
) -> None:
    thread = Thread(kinds)
    due_ns, came_ns = [], 0
    for gap_ns in gaps_ns:
        came_ns += gap_ns
        due_ns.append(came_ns)
    while due_ns:
        here = [came_ns for came_ns in due_ns if came_ns <= thread.now_ns]
        del due_ns[: len(here)]
        for came_ns in here:
            assert sum(ended_ns > came_ns for _, ended_ns in thread.ended) <= 1
        thread.turn(len(here))


@given(kinds=st.lists(st.tuples(st.sampled_from(Rank), PIECE_NS), min_size=1, max_size=6))
def test_questions_without_a_pause_leave_everybody_some_time(kinds: list[tuple[Rank, int]]) -> None:
    thread = Thread(kinds)
    most = 3 * len(kinds) * (PASSED_MAX + len(Rank))
    # A piece is owed for as long as it took, and no longer.
    longest_ns = max(took_ns for _, took_ns in kinds) * (1 - SHARE) / SHARE
    while len(thread.ended) < most:
        before, begun_ns = len(thread.ended), thread.now_ns
        while len(thread.ended) == before:
            assert thread.now_ns - begun_ns <= longest_ns + QUESTION_NS
            thread.turn(1)
    for who in range(len(kinds)):
        at = [number for number, (other, _) in enumerate(thread.ended) if other == who]
        gaps = [later - earlier for earlier, later in pairwise([-1, *at, most])]
        assert max(gaps) <= len(kinds) * (PASSED_MAX + len(Rank))


@pytest.mark.parametrize("took_us", [10, 100, 1_000, 20_000])
def test_questions_without_a_pause_have_all_of_the_time_but_a_share(took_us: int) -> None:
    """Whatever a piece takes, as long as it is not more than what can be owed."""
    thread, asked_ns = Thread([(Rank.REPORTS, took_us * 1000)]), 0
    for _ in range(20_000):
        thread.turn(1)
        asked_ns += QUESTION_NS
    share = (thread.now_ns - asked_ns) / thread.now_ns
    if took_us * 1000 <= OWED_NS_MAX:
        assert share == pytest.approx(SHARE, rel=0.05)
    else:
        assert share > SHARE, "a piece that long counts as less"
