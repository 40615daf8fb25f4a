"""Contract of page allocators, run over the plain one, the renaming one and SGLang's by name."""

import importlib.util
import random
from array import array
from collections.abc import Callable, Iterator

import pytest

from directory.core.errors import InternalError
from scheduler_shim.pools import Allocator, SharedPool
from scheduler_shim.renamed import RenamedPool

PAGES = 16

Make = Callable[[], tuple[Allocator, Callable[[], None]]]


def plain() -> tuple[Allocator, Callable[[], None]]:
    """Page numbers."""
    pool = SharedPool(page_size=4, page_count=PAGES, bytes_per_token=8)
    return pool.make_allocator(), pool.close


def renamed() -> tuple[Allocator, Callable[[], None]]:
    """Names over a permutation."""
    pool = RenamedPool(page_size=4, page_count=PAGES, bytes_per_token=8)
    return pool.make_allocator(), pool.close


def sglang() -> tuple[Allocator, Callable[[], None]]:
    """Names over SGLang's own allocator, where that is installed; it has one page for itself."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed in this environment")
    from scheduler_shim.sglang.allocator import NamedAllocator
    from scheduler_shim.sglang.names import PageNames
    from tests.sglang.pools.support import allocator_of, mha

    slots = allocator_of(mha(4 * (PAGES - 1), 4))
    return NamedAllocator(PageNames(PAGES, 4, "cpu"), slots), lambda: None


@pytest.fixture(
    params=[plain, renamed, pytest.param(sglang, marks=pytest.mark.sglang)],
    ids=["plain", "renamed", "sglang"],
)
def allocator(request: pytest.FixtureRequest) -> Iterator[Allocator]:
    """An allocator of PAGES pages, all that can be allocated free."""
    made, close = request.param()
    yield made
    close()


def test_pages_are_taken_all_or_none(allocator: Allocator) -> None:
    most = allocator.free_count
    assert allocator.page_count == PAGES
    assert allocator.allocate(most + 1) is None
    assert (allocator.free_count, len(allocator.used())) == (most, 0)
    taken = allocator.allocate(most)
    assert taken is not None
    assert len(set(taken)) == most
    assert max(taken) < PAGES
    assert allocator.used() == array("I", sorted(taken))
    assert allocator.allocate(1) is None
    assert allocator.free_count == 0


def test_nothing_can_be_taken_and_given_back(allocator: Allocator) -> None:
    most = allocator.free_count
    assert allocator.allocate(0) == array("I")
    allocator.free(b"")
    allocator.free(array("I"))
    assert allocator.free_count == most


def test_the_last_pages_given_back_are_the_first_taken_in_their_order(
    allocator: Allocator,
) -> None:
    taken = allocator.allocate(6)
    assert taken is not None
    back = array("I", [taken[4], taken[1], taken[3]])
    allocator.free(back.tobytes())
    assert allocator.allocate(3) == back


def test_what_is_free_is_not_freed_again_and_a_refusal_changes_nothing(
    allocator: Allocator,
) -> None:
    taken = allocator.allocate(4)
    assert taken is not None
    allocator.free(taken[:1])
    free, used = allocator.free_count, allocator.used()
    for wrong in (taken[:1], array("I", [PAGES]), array("I", [PAGES + 1000])):
        with pytest.raises(InternalError):
            allocator.free(wrong)
        assert (allocator.free_count, allocator.used()) == (free, used)


def test_to_expect_pages_changes_nothing(allocator: Allocator) -> None:
    taken = allocator.allocate(4)
    assert taken is not None
    free, used = allocator.free_count, allocator.used()
    allocator.expect(taken.tobytes())
    allocator.expect(b"")
    assert (allocator.free_count, allocator.used()) == (free, used)


@pytest.mark.parametrize("seed", range(3))
def test_pages_are_conserved_in_random_use(allocator: Allocator, seed: int) -> None:
    chance = random.Random(seed)
    most = allocator.free_count
    held: set[int] = set()
    for _ in range(300):
        if chance.random() < 0.5:
            wanted = chance.randint(0, 6)
            taken = allocator.allocate(wanted)
            assert (taken is None) == (wanted > most - len(held))
            assert not held & set(taken or ())
            held |= set(taken or ())
        elif held:
            back = chance.sample(sorted(held), chance.randint(1, len(held)))
            allocator.free(array("I", back))
            held -= set(back)
        assert allocator.free_count + len(held) == most
        assert set(allocator.used()) == held
