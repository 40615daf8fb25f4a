"""Marks of slots: a set whose memory comes in blocks."""

import random

from scheduler_shim.slot_marks import BLOCK_SLOTS, SlotMarks


def test_marks_are_those_of_a_set_whatever_came_before() -> None:
    draw, marks, known = random.Random(3), SlotMarks(), set[int]()
    for _ in range(20_000):
        slot = draw.choice((draw.randrange(50), draw.randrange(5 * BLOCK_SLOTS)))
        if draw.random() < 0.6:
            marks.add(slot)
            known.add(slot)
        else:
            marks.discard(slot)
            known.discard(slot)
        assert (slot in marks, len(marks)) == (slot in known, len(known))
    assert all((slot in marks) == (slot in known) for slot in range(6 * BLOCK_SLOTS))
    marks.clear()
    assert len(marks) == 0
    assert not any(slot in marks for slot in known)
