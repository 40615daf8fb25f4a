"""Importing a pool: all of it or none, and nothing on trust."""

import os
from collections.abc import Iterator

import msgspec
import pytest

from directory.core.errors import ImportFailed, LayoutError, TransferError
from tests.descriptors import open_descriptors
from tests.unit.transfer.support import OwnedPool, small_layout
from transfer.imports import ImportedPool
from transfer.ipc.memory import MemoryHandle, SharedMemoryIPC
from transfer.layout import PoolLayout


@pytest.fixture
def owned() -> Iterator[OwnedPool]:
    """A scheduler's pool."""
    pool = OwnedPool(small_layout())
    yield pool
    pool.close()


def open_pool(
    owned: OwnedPool,
    *,
    layout: PoolLayout | None = None,
    handles: tuple[MemoryHandle, ...] | None = None,
    fds: list[int] | None = None,
    pool: int = 1,
    page_table: bool = False,
) -> ImportedPool:
    """Open it with something changed; a refusal must leave nothing mapped and nothing open."""
    ipc = SharedMemoryIPC()
    before = open_descriptors()
    try:
        return ImportedPool.open(
            pool,
            layout or owned.layout,
            owned.handles if handles is None else handles,
            owned.fds if fds is None else fds,
            memory=ipc,
            tables=ipc,
            page_table=page_table,
        )
    except TransferError:
        assert ipc.open_count == 0
        assert open_descriptors() == before
        raise


def test_an_imported_pool_sees_the_owners_memory_timelines_and_words(owned: OwnedPool) -> None:
    before = open_descriptors()
    imported = open_pool(owned)
    owned.allocations[2].view[5] = 9
    owned.timelines.write(1, 6)
    owned.words.bump(3)
    assert [key for key, _ in imported.memories()] == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert imported.timelines.read(1) == 6
    assert imported.words.read(3) == 1
    assert imported.close() == ""
    assert open_descriptors() == before


def test_what_cannot_be_closed_is_named(owned: OwnedPool) -> None:
    imported = open_pool(owned)
    mapping = imported.mappings[1]
    piece = mapping.view[:4]  # type: ignore[attr-defined]
    assert imported.close().startswith("allocation 1: ")
    piece.release()
    mapping.unmap()  # type: ignore[attr-defined]


def test_a_forged_layout_is_refused(owned: OwnedPool) -> None:
    doubled = msgspec.structs.replace(owned.layout, page_count=owned.layout.page_count * 2)
    with pytest.raises(LayoutError, match="ends at byte"):
        open_pool(owned, layout=doubled)


def test_a_layout_that_announces_more_than_the_real_allocation_is_refused(
    owned: OwnedPool,
) -> None:
    sizes = tuple(2 * n for n in owned.layout.allocation_bytes)
    layout = msgspec.structs.replace(owned.layout, allocation_bytes=sizes)
    with pytest.raises(ImportFailed, match="the layout needs"):
        open_pool(owned, layout=layout)
    handles = tuple(MemoryHandle("memfd", n) for n in sizes)
    with pytest.raises(ImportFailed, match=r"allocation 0: .* were announced"):
        open_pool(owned, layout=layout, handles=handles)


def test_handles_and_descriptors_have_to_match_the_allocations(owned: OwnedPool) -> None:
    with pytest.raises(ImportFailed, match="3 handles for 4"):
        open_pool(owned, handles=owned.handles[:3])
    with pytest.raises(ImportFailed, match="5 descriptors for 4"):
        open_pool(owned, fds=owned.fds[1:])
    with pytest.raises(ImportFailed, match="0 descriptors"):
        open_pool(owned, fds=[])
    with pytest.raises(ImportFailed, match="with 0 descriptors"):
        open_pool(owned, fds=owned.fds[-2:])


def test_a_failure_at_the_last_table_undoes_all_before_it(owned: OwnedPool) -> None:
    unsealed = os.memfd_create("words")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(ImportFailed, match="word table"):
        open_pool(owned, fds=[*owned.fds[:-1], unsealed])
    os.close(unsealed)


def test_only_pools_can_be_imported(owned: OwnedPool) -> None:
    with pytest.raises(ImportFailed, match="-1 is not the id of a pool"):
        open_pool(owned, pool=-1)


def test_a_page_table_is_the_last_descriptor_and_closes_with_its_pool() -> None:
    owned = OwnedPool(small_layout(), page_table=True)
    owned.name(3, 7)
    before = open_descriptors()
    imported = open_pool(owned, page_table=True)
    assert imported.page_table is not None
    assert (len(imported.page_table), imported.page_table.read(3)) == (owned.layout.page_count, 7)
    owned.words.bump(3)
    owned.timelines.write(1, 6)
    assert (imported.words.read(3), imported.timelines.read(1)) == (1, 6), "not taken for it"
    assert imported.close() == ""
    assert open_descriptors() == before
    owned.close()


def test_a_page_table_that_was_announced_has_to_come_and_none_else(owned: OwnedPool) -> None:
    with pytest.raises(ImportFailed, match="6 descriptors for 4 allocations and 3 tables"):
        open_pool(owned, page_table=True)
    named = OwnedPool(small_layout(), page_table=True)
    with pytest.raises(ImportFailed, match="7 descriptors for 4 allocations and 2 tables"):
        open_pool(named)
    named.close()


def test_a_page_table_without_an_entry_for_each_page_undoes_the_import(owned: OwnedPool) -> None:
    ipc = SharedMemoryIPC()
    short = ipc.create("pages", 4 * (owned.layout.page_count - 1))
    with pytest.raises(ImportFailed, match=r"page table: .* were announced"):
        open_pool(owned, fds=[*owned.fds, short.fd], page_table=True)
    ipc.close(short)
