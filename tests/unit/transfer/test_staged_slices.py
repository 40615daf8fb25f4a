"""Slices of pages that go through a slab: none lost, none exchanged, in the order of their slots.

Strategy of the property: any pages and slots either way (a load may name a slot twice), parts
of any size, and so few pages in order at a time that the borders are met.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transfer.staged import Scene
from tests.unit.transfer.support import HOST
from transfer.ipc.stage_ring import ENTRIES, PAGES_MAX, PART_ALIGNMENT
from transfer.pages import PageBatch, Pattern
from transfer.plan import Chunk
from transfer.staged_slices import FIRST_SHARE, capped, staged_slices


@given(st.data())
def test_slices_go_in_the_order_of_their_slots_behind_a_small_one(data: st.DataObject) -> None:
    out = data.draw(st.booleans(), label="from the host")
    slot_numbers = st.integers(0, 40)
    slots = data.draw(st.lists(slot_numbers, min_size=1, max_size=40, unique=not out))
    pages = list(range(100, 100 + len(slots)))
    pattern = Pattern([Chunk(0, 0, 64, 0, 0, 64, 64)])
    batch = PageBatch(1, HOST, None, pattern, pages, slots)
    if out:
        batch = PageBatch(HOST, 1, None, pattern, slots, pages)
    a_part, at_once = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 50))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transfer.staged_slices.SORTED_MAX", at_once)
        found = list(staged_slices([batch], a_part * 64 + 63))
    moved = [pair for batches in found for batch in batches for pair in pairs(batch)]
    given_pairs = list(zip(slots, pages, strict=True))
    assert sorted(moved) == sorted(given_pairs), "each slot with its own page"
    first = max(1, a_part // FIRST_SHARE)
    heads = first + a_part
    if len(slots) <= heads:  # then the last of them is put in order, too
        heads = first if len(slots) > first else 0
    assert moved[:heads] == given_pairs[:heads], "the first two are not waited for"
    for start in range(heads, len(slots), at_once):
        ordered = [slot for slot, _ in moved[start : start + at_once]]
        assert ordered == sorted(ordered)
    sizes = [sum(len(batch.source_pages) for batch in batches) for batches in found]
    assert max(sizes) <= a_part
    assert sizes[0] == first or len(slots) <= first


def pairs(batch: PageBatch) -> list[tuple[int, int]]:
    """(slot, page) of each."""
    ends = batch.source_pages, batch.target_pages
    slots, pages = ends if batch.source == HOST else reversed(ends)
    return list(zip(slots, pages, strict=True))


@pytest.mark.parametrize("at_once", [2, 3, 10_000])
@pytest.mark.parametrize("a_part", [3, 200])
def test_pages_between_pools_stay_in_their_order_and_go_once(at_once: int, a_part: int) -> None:
    pattern = Pattern([Chunk(0, 0, 64, 0, 0, 64, 64)])
    batch = PageBatch(1, 2, None, pattern, [5, 3, 9, 1, 8], [7, 6, 2, 4, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transfer.staged_slices.SORTED_MAX", at_once)
        slices = list(staged_slices([batch], a_part * 64))
    moved = [pair for s in slices for b in s for pair in pairs(b)]
    assert moved == [(7, 5), (6, 3), (2, 9), (4, 1), (0, 8)]


@pytest.mark.parametrize(
    ("slab_parts", "count", "halves"), [(32, 16, 1), (8, 8, 1), (4, 8, 2), (2, 4, 2), (1, 2, 2)]
)
def test_a_slab_of_few_parts_is_cut_into_halves(slab_parts: int, count: int, halves: int) -> None:
    wanted = 64 * PART_ALIGNMENT
    scene = Scene(slab=slab_parts * wanted, stage_bytes=wanted)
    slab = scene.engine._pools[1].slab
    assert slab is not None
    assert slab._count == count
    assert slab.part_bytes == max(wanted, slab.nbytes // ENTRIES) // halves
    scene.close()


@pytest.mark.parametrize("count", [1, PAGES_MAX, PAGES_MAX + 1, 3 * PAGES_MAX])
def test_no_slice_names_more_pages_than_a_request_holds(count: int) -> None:
    pattern = Pattern([Chunk(0, 0, 64, 0, 0, 64, 64)])
    batch = PageBatch(1, HOST, None, pattern, range(count), range(count))
    sizes = [sum(len(b.source_pages) for b in batches) for batches in capped([[batch]])]
    assert sum(sizes) == count
    assert max(sizes) == min(count, PAGES_MAX)
