"""Host slots: all or nothing, by page size."""

import pytest

from directory.core import limits
from directory.core.errors import InternalError
from directory.core.host import HostSlots
from directory.core.tokens import pack_pages, unpack_pages


def test_a_slot_names_its_segment_and_its_place_in_it() -> None:
    slots = HostSlots(total_bytes=300, segment_bytes=100)
    taken = slots.reserve(50, 5)
    assert taken is not None
    assert sorted(unpack_pages(taken)) == [0, 1, 1 << 16, (1 << 16) + 1, 2 << 16]


def test_a_reservation_that_is_short_takes_nothing() -> None:
    slots = HostSlots(total_bytes=100, segment_bytes=100)
    first = slots.reserve(25, 3)
    assert first is not None
    assert slots.reserve(25, 2) is None
    assert slots.free_count(25) == 1
    slots.release(25, first)
    assert slots.free_count(25) == slots.capacity(25) == 4


def test_segments_are_given_to_page_sizes_on_first_need() -> None:
    slots = HostSlots(total_bytes=200, segment_bytes=100)
    assert slots.reserve(100, 1) is not None
    assert slots.reserve(10, 10) is not None
    assert slots.page_sizes == [10, 100]
    assert slots.page_bytes_of == {0: 100, 1: 10}
    assert slots.reserve(100, 1) is None
    assert not slots.could_hold(100, 2)
    assert slots.could_hold(10, 10)


def test_slots_that_are_given_back_twice_are_a_defect() -> None:
    slots = HostSlots(total_bytes=100, segment_bytes=100)
    assert slots.reserve(100, 1) is not None
    slots.release(100, pack_pages([0]))
    with pytest.raises(InternalError, match="more host slots"):
        slots.release(100, pack_pages([0]))


def test_a_tier_without_memory_holds_nothing() -> None:
    slots = HostSlots(total_bytes=0, segment_bytes=100)
    assert slots.reserve(10, 1) is None
    assert slots.reserve(10, 0) == b""
    assert slots.free_slots(10) == []


@pytest.mark.parametrize(("total", "segment"), [(100, 0), (-1, 100)])
def test_sizes_that_make_no_tier_are_refused(total: int, segment: int) -> None:
    with pytest.raises(ValueError, match="host tier needs"):
        HostSlots(total, segment)


def test_too_many_segments_are_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match="choose larger segments"):
        HostSlots(limits.SEGMENTS_MAX + 1, 1)


def test_adopted_segments_keep_their_page_size_and_have_the_rest_free() -> None:
    slots = HostSlots(total_bytes=250, segment_bytes=100)
    slots.adopt(1, 25, [(1 << 16) + 1, (1 << 16) + 3])
    assert slots.page_bytes_of == {1: 25}
    assert slots.free_slots(25) == [(1 << 16) + 2, 1 << 16]
    assert slots.could_hold(25, 10)
    assert not slots.could_hold(25, 11)
    assert slots.could_hold(100, 1)
    assert not slots.could_hold(100, 2)
    assert slots.reserve(25, 8) is not None
    assert slots.page_bytes_of == {1: 25, 0: 25, 2: 25}


def test_a_short_last_segment_that_is_adopted_is_no_spare_one() -> None:
    slots = HostSlots(total_bytes=250, segment_bytes=100)
    slots.adopt(2, 25, [])
    assert slots.capacity(25) == 2
    assert slots.could_hold(100, 2)
    assert not slots.could_hold(100, 3)
