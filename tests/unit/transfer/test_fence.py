"""Fences and words as pure questions."""

from directory.core.actions import Fence, Word
from transfer.fence import describe_fence, describe_word, mismatched, passed, pending

VALUES = {(1, 0): 5, (1, 1): 7, (2, 0): 0}


def read(pool: int, index: int) -> int:
    return VALUES[pool, index]


def test_a_fence_has_passed_when_its_timeline_has_reached_the_value() -> None:
    assert passed([Fence(1, 0, 5), Fence(1, 1, 3)], read)
    assert not passed([Fence(1, 0, 6)], read)
    assert passed([], read)


def test_pending_names_exactly_the_fences_that_have_not_passed() -> None:
    late = Fence(2, 0, 1)
    assert pending([Fence(1, 0, 5), late], read) == (late,)


def test_a_word_mismatches_in_either_direction() -> None:
    high, low = Word(1, 0, 6), Word(1, 1, 6)
    assert mismatched([high, low, Word(2, 0, 0)], read) == (high, low)


def test_descriptions_name_the_pool_and_both_values() -> None:
    assert describe_fence(Fence(3, 1, 9), 4) == "pool 3 current timeline at 4, needs 9"
    assert describe_word(Word(3, 0, 1), 2) == "pool 3 pool word is 2, was reported as 1"
    assert describe_word(Word(3, 8, 1), 2) == "pool 3 span word 8 is 2, was reported as 1"
