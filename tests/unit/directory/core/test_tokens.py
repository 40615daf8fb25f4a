"""Packing of ids and page numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.core.errors import BadMessage
from directory.core.tokens import TOKEN_MAX, pack_pages, pack_tokens, unpack_pages


def test_tokens_are_32_bit_little_endian_and_64_where_wide() -> None:
    assert pack_tokens([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert pack_tokens([TOKEN_MAX + 1], wide=True) == bytes([0, 0, 0, 0, 1, 0, 0, 0])


@pytest.mark.parametrize(("tokens", "wide"), [([-1], False), ([1 << 32], False), ([1 << 64], True)])
def test_an_id_that_does_not_fit_is_refused_with_the_cure(tokens: list[int], wide: bool) -> None:
    with pytest.raises(BadMessage, match="wide namespace"):
        pack_tokens(tokens, wide=wide)


def test_bigrams_pair_neighbours_and_one_id_makes_none() -> None:
    assert pack_tokens([1, 2, 3], bigram=True) == pack_tokens([1, 2, 2, 3])
    assert pack_tokens([1], bigram=True) == b""
    assert pack_tokens([], bigram=True) == b""


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_pages_come_back_as_they_were_packed(pages: list[int]) -> None:
    assert unpack_pages(pack_pages(pages)).tolist() == pages


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_page_list_of_a_broken_length_is_refused(length: int) -> None:
    with pytest.raises(BadMessage, match="no multiple of 4"):
        unpack_pages(bytes(length))
