"""Page tables: names are looked up exactly, and nothing beyond the pool comes out."""

import os
from array import array
from collections.abc import Iterator

import pytest

from directory.core.errors import ImportFailed, LayoutError
from tests.descriptors import open_descriptors
from tests.unit.transfer.support import packed
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.page_table import PageTable


@pytest.fixture
def table() -> Iterator[PageTable]:
    """Four names; name n stands for page 3 - n."""
    table = PageTable.create(SharedMemoryIPC(), "pages", 4)
    for name in range(4):
        table.write(name, 3 - name)
    yield table
    table.close()


@pytest.mark.parametrize("names", [[], [2], [0, 1, 2, 3], [3, 3, 0]])
def test_names_are_looked_up_in_order(table: PageTable, names: list[int]) -> None:
    assert table.translate(packed(names)) == packed(3 - name for name in names)


def test_what_the_owner_writes_is_read_by_who_mapped_it(table: PageTable) -> None:
    before = open_descriptors()
    other = PageTable.open(SharedMemoryIPC(), table.fd, 4)
    table.write(2, 0)
    assert (len(other), other.read(2)) == (4, 0)
    assert other.translate(packed([2, 3])) == packed([0, 0])
    other.close()
    other.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("page", [4, 5, (1 << 32) - 1])
def test_an_entry_that_is_no_page_of_the_pool_is_refused(table: PageTable, page: int) -> None:
    table.write(1, page)
    with pytest.raises(LayoutError, match=f"name 1 stands for page {page}, beyond the 4"):
        table.translate(packed([0, 1, 2]))
    assert table.translate(packed([0, 2])) == packed([3, 1]), "the others are as good as before"


def test_the_first_wrong_entry_is_the_one_that_is_told(table: PageTable) -> None:
    table.write(0, 9)
    table.write(3, 77)
    with pytest.raises(LayoutError, match="name 3 stands for page 77"):
        table.translate(packed([1, 3, 0]))


@pytest.mark.parametrize("name", [4, (1 << 32) - 1])
def test_a_name_beyond_the_table_is_refused(table: PageTable, name: int) -> None:
    with pytest.raises(LayoutError, match=f"name {name} is beyond the 4 entries"):
        table.translate(packed([0, name]))


def test_a_list_that_is_cut_off_is_refused(table: PageTable) -> None:
    with pytest.raises(LayoutError, match="5 bytes"):
        table.translate(b"\0" * 5)


def test_the_table_ends_where_the_pool_does_though_its_memory_is_longer() -> None:
    ipc = SharedMemoryIPC()
    mapping = ipc.create("pages", 4096)
    table = PageTable.open(SharedMemoryIPC(), mapping.fd, 3)
    with pytest.raises(LayoutError, match="name 3 is beyond the 3 entries"):
        table.translate(packed([3]))
    table.close()
    ipc.close(mapping)


def test_a_table_that_is_too_short_or_not_sealed_is_not_mapped(table: PageTable) -> None:
    with pytest.raises(ImportFailed, match=r"page table: .* were announced"):
        PageTable.open(SharedMemoryIPC(), table.fd, 4097)
    unsealed = os.memfd_create("pages")
    os.ftruncate(unsealed, 4096)
    with pytest.raises(ImportFailed, match=r"page table: .* seal"):
        PageTable.open(SharedMemoryIPC(), unsealed, 4)
    os.close(unsealed)


def test_long_lists_keep_their_order() -> None:
    count = 5_000
    table = PageTable.create(SharedMemoryIPC(), "pages", count)
    for name in range(count):
        table.write(name, (name * 7919) % count)
    found = array("I")
    found.frombytes(table.translate(packed(range(count))))
    assert list(found) == [(name * 7919) % count for name in range(count)]
    table.close()
