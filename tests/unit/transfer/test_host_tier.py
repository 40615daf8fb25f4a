"""The host tier: slot addresses, creation, opening in parts."""

import os

import pytest

from directory.core.errors import ImportFailed, LayoutError
from tests.descriptors import open_descriptors
from transfer.host_tier import HostTierMemory, TierShape
from transfer.ipc.memory import MappingBusy, SharedMemoryIPC


def test_a_slot_id_is_a_segment_and_an_index_in_it() -> None:
    shape = TierShape(total_bytes=1000, segment_bytes=400)
    assert shape.segment_count == 3
    assert [shape.bytes_of(s) for s in range(3)] == [400, 400, 200]
    assert shape.locate(2 << 16 | 1, 100) == (2, 100)
    assert shape.slot_count(100) == 4 + 4 + 2
    assert shape.slot_count(150) == 2 + 2 + 1


def test_a_segment_has_no_more_slots_than_an_index_can_name() -> None:
    shape = TierShape(total_bytes=1 << 20, segment_bytes=1 << 20)
    assert shape.slot_count(1) == 1 << 16


@pytest.mark.parametrize("slot", [3 << 16, 2 << 16 | 2, 4, 1 << 40, -1])
def test_a_slot_beyond_the_tier_is_refused(slot: int) -> None:
    with pytest.raises(LayoutError, match="not in the tier"):
        TierShape(total_bytes=1000, segment_bytes=400).locate(slot, 100)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), ((1 << 16) + 1, 1)])
def test_a_tier_of_impossible_sizes_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(LayoutError):
        TierShape(*sizes).check()


def test_two_processes_views_of_a_tier_are_the_same_bytes() -> None:
    made = HostTierMemory.create(1000, 400)
    opened = HostTierMemory(SharedMemoryIPC(), made.shape)
    completeness = []
    for first, fds in ((0, made.fds[:2]), (2, made.fds[2:])):
        opened.open_segments(first, fds)
        completeness.append(opened.complete)
    assert completeness == [False, True]
    page = made.page(2 << 16 | 1, 100)
    page[:] = b"x" * 100
    seen = opened.page(2 << 16 | 1, 100)
    assert bytes(seen) == b"x" * 100
    page.release()
    seen.release()
    made.close()
    opened.close()


def test_untouched_memory_is_not_allocated() -> None:
    tier = HostTierMemory.create(1 << 30, 1 << 28)
    assert sum(os.fstat(fd).st_blocks for fd in tier.fds) == 0
    tier.segments[3].view[5] = 1
    assert 0 < os.fstat(tier.fds[3]).st_blocks * 512 <= 2 << 20
    tier.close()


def test_segments_out_of_turn_or_too_small_are_refused_and_leave_nothing_open() -> None:
    made = HostTierMemory.create(1000, 400)
    ipc = SharedMemoryIPC()
    opened = HostTierMemory(ipc, made.shape)
    before = open_descriptors()
    with pytest.raises(ImportFailed, match="do not follow"):
        opened.open_segments(1, made.fds[1:])
    with pytest.raises(ImportFailed, match="200 bytes, 400 were announced"):
        opened.open_segments(0, [made.fds[0], made.fds[2]])
    assert ipc.open_count == 0
    assert open_descriptors() == before
    made.close()


def test_a_tier_in_use_is_not_unmapped() -> None:
    tier = HostTierMemory.create(1000, 400)
    page = tier.page(2 << 16, 100)
    with pytest.raises(MappingBusy):
        tier.close()
    assert tier.segments[2].view[0] == 0
    page.release()
    tier.close()
    assert tier.segments == []
