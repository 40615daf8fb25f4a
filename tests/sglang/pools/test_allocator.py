"""The room's allocator over SGLang's own, both of its classes."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

import torch

from directory.core.errors import InternalError
from scheduler_shim.sglang.allocator import NamedAllocator, give_back
from scheduler_shim.sglang.names import PageNames
from tests.sglang.pools.support import allocator_of, mha

pytestmark = pytest.mark.sglang

PAGES = 12


@pytest.fixture(params=[1, 4], ids=["page 1", "page 4"])
def slots_allocator(request: pytest.FixtureRequest) -> Any:
    """SGLang's allocator of PAGES pages."""
    return allocator_of(mha(PAGES * request.param, request.param))


@pytest.fixture
def allocator(slots_allocator: Any) -> NamedAllocator:
    """Ours over it."""
    names = PageNames(PAGES + 1, slots_allocator.page_size, "cpu")
    return NamedAllocator(names, slots_allocator)


def test_pages_are_allocated_all_or_none(allocator: NamedAllocator) -> None:
    assert (allocator.free_count, allocator.page_count) == (PAGES, PAGES + 1)
    assert allocator.allocate(PAGES + 1) is None
    given = allocator.allocate(PAGES)
    assert given is not None
    assert sorted(given) == list(allocator.used())
    assert sorted(allocator.names.pages(given).tolist()) == list(range(1, PAGES + 1)), (
        "never page 0"
    )
    assert allocator.allocate(1) is None
    assert list(allocator.allocate(0) or ()) == []


def test_freeing_by_name_frees_exactly_those_slots(
    allocator: NamedAllocator, slots_allocator: Any
) -> None:
    given = allocator.allocate(5)
    assert given is not None
    pages = allocator.names.pages(given[1:3]).tolist()
    allocator.free(given[1:3].tobytes())
    assert allocator.free_count == PAGES - 3
    assert set(pages) <= set(slots_allocator.free_pages.tolist())
    assert list(allocator.used()) == sorted([given[0], *given[3:]])
    assert allocator.check() == []


def test_a_page_is_never_freed_twice(allocator: NamedAllocator) -> None:
    given = allocator.allocate(3)
    assert given is not None
    allocator.free(given[:1])
    for wrong in (given[:1], given[:2], array("I", [given[1], given[1]])):
        with pytest.raises(InternalError, match="given up twice"):
            allocator.free(wrong)
    assert allocator.free_count == PAGES - 2
    allocator.free(given[1:])
    assert (allocator.free_count, allocator.unnamed_count) == (PAGES, 1)


def test_pages_of_running_rows_are_sglangs_until_they_are_named(
    allocator: NamedAllocator, slots_allocator: Any
) -> None:
    row = slots_allocator.alloc(3 * slots_allocator.page_size)
    assert (allocator.unnamed_count, list(allocator.used())) == (1 + 3, [])
    given = allocator.names.name(row)
    assert (allocator.unnamed_count, len(allocator.used())) == (1, 3)
    assert torch.equal(allocator.names.slots(given), row)
    allocator.free(given)
    assert slots_allocator.available_size() == PAGES * slots_allocator.page_size


def test_frees_within_a_group_count_at_its_end(
    allocator: NamedAllocator, slots_allocator: Any
) -> None:
    given = allocator.allocate(4)
    assert given is not None
    slots_allocator.free_group_begin()
    allocator.free(given[:2])
    allocator.free(given[2:3])
    assert allocator.free_count == PAGES - 4
    slots_allocator.free_group_end()
    assert allocator.free_count == PAGES - 1
    assert allocator.check() == []


def test_after_a_flush_only_kept_targets_are_out_of_sglangs_free_pages(
    allocator: NamedAllocator, slots_allocator: Any
) -> None:
    given = allocator.allocate(6)
    assert given is not None
    targets = given[2:4]
    pages = allocator.names.pages(targets).tolist()
    slots_allocator.clear()
    allocator.start_over(keep=targets.tobytes())
    assert list(allocator.used()) == sorted(targets)
    assert allocator.names.pages(targets).tolist() == pages, "a mover may still write into them"
    assert allocator.free_count == PAGES - 2
    rest = allocator.allocate(PAGES - 2)
    assert rest is not None
    assert not set(allocator.names.pages(rest).tolist()) & set(pages)
    allocator.free(targets)
    allocator.free(rest)
    slots_allocator.clear()
    allocator.start_over()
    assert (allocator.free_count, allocator.names.used_count) == (PAGES, 0)


def test_a_page_that_sglang_freed_behind_our_back_is_found(
    allocator: NamedAllocator, slots_allocator: Any
) -> None:
    given = allocator.allocate(2)
    assert given is not None
    slots_allocator.free(allocator.names.slots(given[:1]))
    assert allocator.check() == ["names: a page is free and has a name"]


def test_pages_of_another_size_are_refused() -> None:
    with pytest.raises(InternalError, match="pages of 4 tokens, named are pages of 2"):
        NamedAllocator(PageNames(4, 2, "cpu"), allocator_of(mha(16, 4)))


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_go_back_where_sglangs_own_search_would_put_them(
    page_size: int, grouped: bool, need_sort: bool
) -> None:
    one, other = (allocator_of(mha(PAGES * page_size, page_size)) for _ in range(2))
    for each in (one, other):
        each.need_sort = need_sort
        slots = each.alloc(5 * page_size)
        if grouped:
            each.free_group_begin()
        if each is one:
            give_back(each, (slots // page_size)[::page_size])
        else:
            each.free(slots)
        if grouped:
            each.free_group_end()
    assert one.available_size() == other.available_size() == PAGES * page_size
    for name in ("free_pages", "release_pages"):
        mine, theirs = (getattr(each, name, None) for each in (one, other))
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert sorted(mine.tolist()) == sorted(theirs.tolist())
