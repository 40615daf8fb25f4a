"""The reference pool whose pages have names: each allocation another page, never one twice."""

import random
from array import array
from collections.abc import Iterator

import pytest

from directory.core.errors import InternalError
from scheduler_shim.pools import SharedPool
from scheduler_shim.renamed import RenamedPool
from scheduler_shim.session import register_message
from tests.unit.transfer.support import packed
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.page_table import PageTable

PAGES = 13


@pytest.fixture
def pool() -> Iterator[RenamedPool]:
    """A pool of PAGES pages."""
    pool = RenamedPool(page_size=4, page_count=PAGES, bytes_per_token=8)
    yield pool
    pool.close()
    pool.close()


def test_a_name_gets_another_page_at_every_allocation(pool: RenamedPool) -> None:
    allocator = pool.make_allocator()
    seen = []
    for _ in range(4):
        names = allocator.allocate(1)
        assert names is not None
        assert list(names) == [0], "the name itself is the last one freed"
        seen.append(pool.page_of(names[0]))
        allocator.free(names)
    assert len(set(seen)) == 4


def test_a_name_is_no_page_before_its_first_allocation(pool: RenamedPool) -> None:
    assert pool.page_of(5) == PAGES


@pytest.mark.parametrize("seed", range(4))
def test_no_two_names_ever_have_one_page(pool: RenamedPool, seed: int) -> None:
    chance = random.Random(seed)
    allocator = pool.make_allocator()
    held: list[int] = []
    for _ in range(300):
        if chance.random() < 0.5:
            held += allocator.allocate(chance.randint(1, 5)) or ()
        elif held:
            chance.shuffle(held)
            cut = chance.randint(1, len(held))
            allocator.free(packed(held[:cut]))
            del held[:cut]
        pages = [pool.page_of(name) for name in held]
        assert len(set(pages)) == len(pages)
        assert all(0 <= page < PAGES for page in pages)
        assert allocator.free_count == PAGES - len(held)
        assert list(allocator.used()) == sorted(held)


def test_freeing_twice_changes_nothing(pool: RenamedPool) -> None:
    allocator = pool.make_allocator()
    names = allocator.allocate(2)
    assert names is not None
    allocator.free(names)
    with pytest.raises(InternalError):
        allocator.free(array("I", [names[0]]))
    everything = allocator.allocate(PAGES)
    assert everything is not None
    assert sorted(pool.page_of(name) for name in everything) == list(range(PAGES))


def test_the_table_is_handed_over_as_the_last_descriptor(pool: RenamedPool) -> None:
    plain = SharedPool(page_size=4, page_count=PAGES, bytes_per_token=8)
    assert len(pool.fds) == len(plain.fds) + 1
    names = pool.make_allocator().allocate(3)
    assert names is not None
    table = PageTable.open(SharedMemoryIPC(), pool.fds[-1], PAGES)
    assert table.translate(names.tobytes()) == packed(pool.page_of(name) for name in names)
    table.close()
    plain.close()


def test_a_registration_says_whether_pages_are_named(pool: RenamedPool) -> None:
    plain = SharedPool(page_size=4, page_count=PAGES, bytes_per_token=8)
    said = [register_message(p, instance="a", mode="thin").page_table for p in (pool, plain)]
    assert said == [True, False]
    assert pool.fingerprint == plain.fingerprint, "names say nothing of what is in a page"
    plain.close()
