"""Tokens from block ids: how a trace's hashed blocks become prompts, the same in every process.

Owns the rule. Block i of `size` tokens is the ids [i * size, (i + 1) * size), moved along the
32-bit ring by a seed: equal blocks have equal tokens and unequal ones have none in common.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from typing import Final

from directory.core.errors import BadMessage
from directory.core.tokens import unpack_pages

TOKEN_IDS: Final = 1 << 32
CACHED_BLOCKS: Final = 8_192
STRIDE: Final = 0x9E3779B1
"""How far a seed moves all ids. It is odd, so every seed gives another place on the ring."""


@lru_cache(maxsize=CACHED_BLOCKS)
def block_tokens(block: int, size: int, seed: int) -> bytes:
    """Packed ids of one block; raises `BadMessage` where blocks would share ids."""
    if size < 1 or (block + 1) * size > TOKEN_IDS:
        raise BadMessage(f"block {block} of {size} tokens is beyond the {TOKEN_IDS} token ids")
    start = (block * size + seed * STRIDE) % TOKEN_IDS
    end = start + size
    ids = array("I", range(start, min(end, TOKEN_IDS)))
    if end > TOKEN_IDS:
        ids.extend(range(end - TOKEN_IDS))
    return ids.tobytes()


def prompt_tokens(blocks: bytes, size: int, length: int, seed: int = 0) -> bytes:
    """Packed tokens of a prompt of `length` tokens given as packed block ids.

    Raises `BadMessage` when the blocks are too few or too many for the length.
    """
    ids = unpack_pages(blocks)
    if size < 1 or not (len(ids) - 1) * size < length <= len(ids) * size:
        raise BadMessage(f"{len(ids)} blocks of {size} tokens do not make {length} tokens")
    return b"".join([block_tokens(block, size, seed) for block in ids])[: 4 * length]
