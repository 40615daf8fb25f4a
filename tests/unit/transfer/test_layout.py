"""Layouts: page arithmetic, validation, digests, and tensors that are refused."""

import msgspec
import pytest

from directory.core.errors import LayoutError
from transfer.layout import (
    BufferLayout,
    PoolLayout,
    buffer_from_tensor,
    mha_layer_first,
    mla,
    page_first,
)

MHA = {"layers": 3, "page_size": 4, "page_count": 5, "heads": 2, "head_dim": 8, "itemsize": 2}


def layout_of(
    *buffers: BufferLayout, sizes: tuple[int, ...] = (1000,), pages: int = 4
) -> PoolLayout:
    return PoolLayout(1, pages, buffers, sizes)


def test_a_layer_first_pool_has_a_k_and_a_v_allocation_for_every_layer() -> None:
    layout = mha_layer_first(**MHA, separate=True)
    layout.check()
    chunk = 4 * 2 * 8 * 2
    assert [(b.role, b.layer, b.allocation) for b in layout.buffers] == [
        ("k", 0, 0), ("v", 0, 1), ("k", 1, 2), ("v", 1, 3), ("k", 2, 4), ("v", 2, 5),
    ]  # fmt: skip
    assert layout.allocation_bytes == (chunk * 5,) * 6
    assert layout.page_bytes == 6 * chunk


def test_buffers_of_one_allocation_lie_one_behind_the_other() -> None:
    layout = mha_layer_first(**MHA, separate=False)
    layout.check()
    assert [b.offset for b in layout.buffers] == [n * 128 * 5 for n in range(6)]
    assert layout.allocation_bytes == (6 * 128 * 5,)


def test_an_mla_pool_may_have_an_index_buffer_beside_each_latent_buffer() -> None:
    layout = mla(
        layers=2, page_size=64, page_count=3, latent_dim=576, itemsize=2, index_bytes_per_token=132
    )
    layout.check()
    assert [b.role for b in layout.buffers] == ["kv", "index", "kv", "index"]
    assert layout.page_bytes == 2 * 64 * (576 * 2 + 132)


def test_layer_first_and_page_first_pools_of_one_model_have_the_same_digest() -> None:
    assert page_first(**MHA).canonical() == mha_layer_first(**MHA, separate=True).canonical()


@pytest.mark.parametrize(
    "change", [{"layers": 2}, {"page_size": 8}, {"heads": 4, "head_dim": 4}, {"itemsize": 1}]
)
def test_pools_with_other_pages_have_another_digest(change: dict[str, int]) -> None:
    assert (
        mha_layer_first(**{**MHA, **change}, separate=True).canonical()
        != mha_layer_first(**MHA, separate=True).canonical()
    )


def test_page_count_and_strides_do_not_change_the_digest() -> None:
    more = mha_layer_first(**{**MHA, "page_count": 77}, separate=False)
    assert more.canonical() == mha_layer_first(**MHA, separate=True).canonical()


def test_a_layout_travels_as_a_message() -> None:
    layout = page_first(**MHA)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=PoolLayout) == layout


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (layout_of(), "buffers"),
        (layout_of(BufferLayout("k", 0, 1, 0, 10, 10)), "allocation 1 is not one of the 1"),
        (layout_of(BufferLayout("k", 0, 0, 0, 10, 0)), "must not be empty"),
        (layout_of(BufferLayout("k", 0, 0, -1, 10, 10)), "must not be negative"),
        (layout_of(BufferLayout("k", 0, 0, 0, 9, 10)), "pages overlap"),
        (layout_of(BufferLayout("k", 0, 0, 961, 10, 10)), "ends at byte 1001"),
        (layout_of(BufferLayout("k", 0, 0, 0, 10, 10), pages=0), "page count 0"),
        (layout_of(BufferLayout("k", 0, 0, 0, 10, 10), sizes=(0,)), "its real size"),
        (PoolLayout(0, 1, (BufferLayout("k", 0, 0, 0, 10, 10),), (10,)), "page size 0"),
    ],
)
def test_a_layout_that_cannot_be_addressed_is_refused(layout: PoolLayout, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        layout.check()


def test_a_buffer_may_end_exactly_where_its_allocation_ends() -> None:
    layout_of(BufferLayout("k", 0, 0, 960, 10, 10)).check()


@pytest.mark.parametrize(
    "second",
    [
        BufferLayout("v", 0, 0, 39, 10, 10),  # begins in the last page of the first
        BufferLayout("v", 0, 0, 5, 10, 5),  # interleaved, in the first one's chunk
        BufferLayout("v", 0, 0, 10, 20, 10),  # between the pages, at another stride
    ],
)
def test_buffers_that_share_bytes_are_refused(second: BufferLayout) -> None:
    first = BufferLayout("k", 0, 0, 0, 10, 10)
    with pytest.raises(LayoutError):
        layout_of(first, second).check()
    with pytest.raises(LayoutError):
        layout_of(second, first).check()


def test_an_interleaved_chunk_may_not_reach_into_the_next_page() -> None:
    first = BufferLayout("k", 0, 0, 2, 20, 10)
    layout_of(first, BufferLayout("v", 0, 0, 12, 20, 10)).check()
    with pytest.raises(LayoutError, match="overlap"):
        layout_of(first, BufferLayout("v", 0, 0, 12, 20, 11)).check()


def describe(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[str, ...], page_size: int = 4
) -> BufferLayout:
    return buffer_from_tensor(
        role="k",
        layer=0,
        allocation=0,
        offset=64,
        page_size=page_size,
        shape=shape,
        strides=strides,
        itemsize=2,
        axes=axes,
    )


def test_a_contiguous_slot_tensor_is_described_as_the_builder_would() -> None:
    buffer = describe((20, 2, 8), (16, 8, 1), ("slot", "head", "dim"))
    built = mha_layer_first(**MHA, separate=True).buffers[0]
    assert (buffer.offset, buffer.page_stride) == (64, built.page_stride)
    assert (buffer.chunk_bytes, buffer.form) == (built.chunk_bytes, built.form)


def test_a_page_tensor_with_tokens_inside_equals_a_slot_tensor() -> None:
    by_page = describe((5, 4, 2, 8), (64, 16, 8, 1), ("page", "token", "head", "dim"))
    assert by_page == describe((20, 2, 8), (16, 8, 1), ("slot", "head", "dim"))


def test_a_permuted_page_is_exact_but_has_another_form() -> None:
    usual = describe((5, 4, 2, 8), (64, 16, 8, 1), ("page", "token", "head", "dim"))
    heads_first = describe((5, 4, 2, 8), (64, 8, 32, 1), ("page", "token", "head", "dim"))
    assert heads_first.chunk_bytes == usual.chunk_bytes
    assert heads_first.form != usual.form


def test_pages_of_a_larger_tensor_keep_its_stride() -> None:
    assert describe((5, 16), (48, 1), ("page", "dim")).page_stride == 96


@pytest.mark.parametrize(
    ("shape", "strides", "axes"),
    [
        ((20, 2, 8), (32, 8, 1), ("slot", "head", "dim")),  # every other slot
        ((20, 2, 8), (16, 8, 2), ("slot", "head", "dim")),  # a slice of the last axis
        ((20, 2, 8), (8, 0, 1), ("slot", "head", "dim")),  # an expanded axis
        ((20, 2, 8), (-16, 8, 1), ("slot", "head", "dim")),  # backwards
        ((20, 2, 8), (1, 160, 20), ("slot", "head", "dim")),  # slots innermost
        ((5, 4, 8), (8, 8, 1), ("page", "token", "dim")),  # overlapping windows
        ((19, 2, 8), (16, 8, 1), ("slot", "head", "dim")),  # not whole pages
        ((20, 2, 8), (16, 8, 1), ("token", "head", "dim")),  # no paged axis
        ((20, 2), (16, 8, 1), ("slot", "head", "dim")),  # ranks differ
        ((0, 2, 8), (16, 8, 1), ("slot", "head", "dim")),  # nothing in it
    ],
)
def test_a_tensor_that_is_not_dense_is_refused_with_shape_and_strides_f44(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    with pytest.raises(LayoutError) as caught:
        describe(shape, strides, axes)
    assert str(shape) in str(caught.value)
    assert str(strides) in str(caught.value)
