"""Pools in shared memory, their layouts, and the page allocator."""

import pytest

from directory.core.errors import InternalError, LayoutError
from directory.core.limits import FDS_PER_FRAME_MAX
from directory.core.tokens import pack_pages
from scheduler_shim.pools import TABLE_FDS, PageAllocator, SharedPool, choose_layout
from transfer.ipc.memory import SharedMemoryIPC


@pytest.mark.parametrize(
    ("bytes_per_token", "layers", "buffers"),
    [(64, 2, 4), (64, 3, 4), (6, 2, 2), (2, 8, 2), (7, 2, 1), (48, 3, 6)],
)
def test_a_page_has_exactly_the_bytes_that_were_asked_for(
    bytes_per_token: int, layers: int, buffers: int
) -> None:
    layout = choose_layout(
        page_size=16, page_count=3, bytes_per_token=bytes_per_token, layers=layers
    )
    assert layout.page_bytes == 16 * bytes_per_token
    assert len(layout.buffers) == buffers


def test_many_layers_share_one_allocation_so_that_their_descriptors_fit_a_frame() -> None:
    most = (FDS_PER_FRAME_MAX - TABLE_FDS) // 2
    for layers, allocations in ((most, 2 * most), (most + 1, 1)):
        layout = choose_layout(page_size=1, page_count=2, bytes_per_token=2 * layers, layers=layers)
        assert (len(layout.buffers), len(layout.allocation_bytes)) == (2 * layers, allocations)


@pytest.mark.parametrize("wrong", ["page_size", "page_count", "bytes_per_token", "layers"])
def test_a_size_of_nothing_is_refused(wrong: str) -> None:
    sizes = {"page_size": 1, "page_count": 1, "bytes_per_token": 4, "layers": 1, wrong: 0}
    with pytest.raises(LayoutError, match="at least 1"):
        choose_layout(**sizes)


def test_a_pool_hands_over_one_descriptor_an_allocation_and_two_tables() -> None:
    pool = SharedPool(page_size=4, page_count=3, bytes_per_token=8)
    assert len(pool.fds) == 4 + 2
    ipc = SharedMemoryIPC()
    mapping = ipc.import_fd(pool.fds[1], 3 * 8)
    pool.chunks()[1].view[5] = 9
    assert mapping.view[5] == 9
    ipc.close(mapping)
    pool.close()
    pool.close()


def test_equal_pools_may_read_one_another_and_others_not() -> None:
    pools = [
        SharedPool(page_size=4, page_count=count, bytes_per_token=nbytes, layers=layers)
        for count, nbytes, layers in ((3, 8, 2), (9, 8, 2), (3, 8, 1), (3, 16, 2))
    ]
    prints = [pool.fingerprint for pool in pools]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    for pool in pools:
        pool.close()


def test_timelines_pass_one_after_the_other() -> None:
    pool = SharedPool(page_size=4, page_count=1, bytes_per_token=8)
    assert (pool.now(), pool.advance(), pool.now()) == ((0, 0), (1, 1), (1, 1))
    pool.close()


def test_pages_are_allocated_all_or_none() -> None:
    pages = PageAllocator(3)
    assert pages.allocate(4) is None
    assert pages.free_count == 3
    assert list(pages.allocate(2) or ()) == [0, 1]
    assert list(pages.used()) == [0, 1]


def test_the_last_freed_page_is_the_first_reused() -> None:
    pages = PageAllocator(4)
    pages.allocate(4)
    pages.free(pack_pages([2, 0]))
    assert list(pages.allocate(2) or ()) == [2, 0]


@pytest.mark.parametrize("page", [1, 4])
def test_a_page_that_is_free_or_none_of_the_pool_cannot_be_freed(page: int) -> None:
    pages = PageAllocator(4)
    pages.allocate(1)
    with pytest.raises(InternalError, match=f"page {page} "):
        pages.free(pack_pages([page]))
