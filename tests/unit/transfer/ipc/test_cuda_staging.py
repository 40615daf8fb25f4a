"""Staging slabs: rows are whole host pages, and nothing outside of pool and slab is named."""

import struct

import pytest

from directory.core.errors import LayoutError
from tests.unit.transfer.device.test_cuda_pages import SeeingDriver
from transfer.ipc.cuda_staging import Slab, SlabStaging, slab_layout
from transfer.layout import PoolLayout, mha_layer_first, mla, page_first

POOL = mha_layer_first(layers=2, page_size=1, page_count=8, heads=2, head_dim=128, itemsize=2)
ADDRESSES = [(n + 1) << 20 for n in range(4)]
SLAB = 9 << 20


def staging(rows: int = 4) -> tuple[SlabStaging, SeeingDriver]:
    driver = SeeingDriver()
    return SlabStaging(driver, POOL, ADDRESSES, Slab(SLAB, rows)), driver


@pytest.mark.parametrize(
    "pool",
    [
        POOL,
        page_first(layers=3, page_size=2, page_count=4, heads=1, head_dim=8, itemsize=2),
        mla(layers=3, page_size=2, page_count=4, latent_dim=16, itemsize=2,
            index_bytes_per_token=4),
    ],
)  # fmt: skip
def test_a_slab_is_a_pool_of_the_same_page_form_with_a_page_a_row(pool: PoolLayout) -> None:
    slab = slab_layout(pool, 5 * pool.page_bytes + 3)
    slab.check()
    assert slab.page_form() == pool.page_form()
    assert slab.page_count == 5
    assert {b.page_stride for b in slab.buffers} == {pool.page_bytes}
    with pytest.raises(LayoutError, match="no room for a page"):
        slab_layout(pool, pool.page_bytes - 1)


def test_packing_goes_from_every_buffer_into_consecutive_rows_and_unpacking_back() -> None:
    stage, driver = staging()
    stage.pack([7, 2], 1, 5)
    stage.unpack([7, 2], 1, 5)
    out, back = driver.tables
    chunks = [(ADDRESSES[n], 512, SLAB + n * 512, POOL.page_bytes) for n in range(len(ADDRESSES))]
    assert [struct.unpack_from("<4Q", out, 32 * n) for n in range(4)] == chunks
    assert struct.unpack("<4I", out[128:]) == (7, 1, 2, 2)
    turned = [(c[2], c[3], c[0], c[1]) for c in chunks]
    assert [struct.unpack_from("<4Q", back, 32 * n) for n in range(4)] == turned
    assert struct.unpack("<4I", back[128:]) == (1, 7, 2, 2)


@pytest.mark.parametrize(("pages", "row"), [([0, 1], 3), ([0], -1), ([8], 0), ([-1], 0)])
def test_rows_and_pages_that_do_not_exist_are_refused(pages: list[int], row: int) -> None:
    stage, driver = staging()
    with pytest.raises(LayoutError):
        stage.pack(pages, row, 5)
    assert driver.named("cuLaunchKernel") == []


def test_a_pool_whose_chunks_cannot_be_moved_by_a_warp_is_refused_with_the_cure() -> None:
    odd = mha_layer_first(layers=1, page_size=1, page_count=4, heads=1, head_dim=4, itemsize=2)
    with pytest.raises(LayoutError, match="register it without a slab"):
        SlabStaging(SeeingDriver(), odd, ADDRESSES, Slab(SLAB, 4))
