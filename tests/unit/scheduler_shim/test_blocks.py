"""Tokens made of block ids."""

import pytest

from directory.core.errors import BadMessage
from directory.core.tokens import pack_pages, unpack_pages
from scheduler_shim.blocks import STRIDE, TOKEN_IDS, block_tokens, prompt_tokens


def test_a_block_is_the_ids_that_no_other_block_has() -> None:
    assert list(unpack_pages(block_tokens(3, 4, 0))) == [12, 13, 14, 15]


def test_a_prompt_is_its_blocks_up_to_its_length() -> None:
    prompt = prompt_tokens(pack_pages([7, 0]), 4, 6)
    assert list(unpack_pages(prompt)) == [28, 29, 30, 31, 0, 1]


def test_a_seed_moves_all_ids_and_keeps_blocks_apart() -> None:
    plain = {block: block_tokens(block, 1 << 20, 0) for block in range(3)}
    moved = {block: block_tokens(block, 1 << 20, 5) for block in range(3)}
    assert all(plain[block] != moved[block] for block in plain)
    ids = [set(unpack_pages(packed)) for packed in moved.values()]
    assert ids[0].isdisjoint(ids[1])
    assert all(len(of_block) == 1 << 20 for of_block in ids)


def test_a_block_that_crosses_the_end_of_the_ring_goes_on_at_its_start() -> None:
    size = 1 << 10
    # The seed that moves block 0 to half a block before the end of the ring.
    seed = (TOKEN_IDS - size // 2) * pow(STRIDE, -1, TOKEN_IDS) % TOKEN_IDS
    ids = unpack_pages(block_tokens(0, size, seed))
    assert list(ids) == [*range(TOKEN_IDS - size // 2, TOKEN_IDS), *range(size // 2)]


@pytest.mark.parametrize(("blocks", "size", "length"), [([1], 4, 5), ([1, 2], 4, 4), ([1], 0, 0)])
def test_blocks_that_do_not_make_the_length_are_refused(
    blocks: list[int], size: int, length: int
) -> None:
    with pytest.raises(BadMessage, match="do not make"):
        prompt_tokens(pack_pages(blocks), size, length)


def test_a_block_beyond_the_ids_is_refused() -> None:
    with pytest.raises(BadMessage, match="beyond"):
        block_tokens(TOKEN_IDS // 512, 512, 0)
