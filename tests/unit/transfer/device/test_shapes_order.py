"""Lists of any slots: the same ranges whether they come in order or not, and none beyond a segment.

Strategy of the property: slots of segments of different addresses, the last of which is shorter, in
any order; what is expected is made page by page.
"""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.core.ids import HOST
from transfer.device.cuda import Attached
from transfer.device.protocol import UnknownMemory
from transfer.device.shapes import Shapes, in_groups
from transfer.device.work import Work
from transfer.pages import PageBatch, Pattern
from transfer.plan import Chunk, MemoryKey
from transfer.tiles import ASSUMED

PAGE, EACH, LAST, SEGMENTS, ROWS = 512, 10, 7, 6, 4_000
ROWS_AT = 1 << 40
SLAB = 3


def memory(key: MemoryKey) -> Attached:
    place, number = key
    if place == SLAB:
        return Attached(ROWS_AT, ROWS * PAGE, 0, None, "GPU")
    pages = LAST if number == SEGMENTS - 1 else EACH
    return Attached((number * 7 % SEGMENTS + 1) << 32, pages * PAGE, 0, None)


def address(slot: int) -> int:
    return memory((HOST, slot >> 16)).address + (slot & 0xFFFF) * PAGE


def added(slots: list[int], first: int, *, out: bool) -> Work:
    shapes = Shapes(memory, "GPU", ASSUMED, can_tile=True)
    rows, work = range(first, first + len(slots)), Work()
    pattern = Pattern([Chunk(0, 0, PAGE, 0, 0, PAGE, PAGE)])
    if out:
        shapes.add(PageBatch(HOST, SLAB, None, pattern, slots, rows), work)
    else:
        shapes.add(PageBatch(SLAB, HOST, None, pattern, rows, slots), work)
    return work


slot_numbers = st.integers(0, EACH * (SEGMENTS - 1) + LAST - 1)


def slot(number: int) -> int:
    return number // EACH << 16 | number % EACH


@given(
    st.lists(slot_numbers, min_size=1, max_size=40, unique=True), st.booleans(), st.booleans(),
    st.integers(0, 100),
)  # fmt: skip
def test_every_row_goes_to_its_slot_in_whatever_order_they_come(
    numbers: list[int], out: bool, ordered: bool, first: int
) -> None:
    slots = [slot(n) for n in (sorted(numbers) if ordered else numbers)]
    work = added(slots, first, out=out)
    host, rows = (work.sources, work.targets) if out else (work.targets, work.sources)
    found = {
        (row + byte, at + byte)
        for row, at, nbytes in zip(rows, host, work.sizes, strict=True)
        for byte in range(0, nbytes, PAGE)
    }
    expected = {(ROWS_AT + (first + n) * PAGE, address(s)) for n, s in enumerate(slots)}
    assert found == expected
    assert sum(work.sizes) == len(slots) * PAGE
    assert not work.rectangles
    keys = {(HOST, s >> 16) for s in slots} | {(SLAB, 0)}
    assert work.keys == keys


@pytest.mark.parametrize("others", [[], [0, 1 << 16, 2 << 16 | 9]])
@pytest.mark.parametrize("beyond", [5 << 16 | LAST, 2 << 16 | EACH])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_slot_behind_its_segments_end_is_refused_and_nothing_is_added(
    others: list[int], beyond: int, ordered: bool
) -> None:
    slots = sorted([*others, beyond], reverse=not ordered)
    with pytest.raises(UnknownMemory):
        added(slots, 0, out=False)


def test_a_row_behind_the_slabs_end_is_refused() -> None:
    slots = [slot(n) for n in (0, 11, 23, 35)]
    added(slots, ROWS - len(slots), out=False)
    with pytest.raises(UnknownMemory):
        added(slots, ROWS - len(slots) + 1, out=False)


@given(st.lists(slot_numbers, max_size=40))
def test_groups_are_of_one_segment_each_and_hold_all(numbers: list[int]) -> None:
    slots = [slot(n) for n in numbers]
    ordered = sorted(slots)
    groups = in_groups(ordered)
    assert [s for _, at, stop in groups for s in ordered[at:stop]] == ordered
    for number, at, stop in groups:
        assert {s >> 16 for s in ordered[at:stop]} == {number}
    assert len({number for number, _, _ in groups}) == len(groups)
    if slots != ordered:
        assert in_groups(slots) == [], "what is in no order is looked at slot by slot"


def test_an_array_of_slots_is_no_list_and_goes_slot_by_slot() -> None:
    assert in_groups(array("I", [1, 2, 3])) == []
