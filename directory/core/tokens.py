"""Packing of token ids and page numbers: the only place that knows their byte order.

Tokens are unsigned little-endian integers of 32 bits (64 where an id does not fit); page
numbers and host slots are unsigned 32-bit little-endian. Owns no state.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from directory.core.errors import BadMessage

assert sys.byteorder == "little", "treecored packs ids in host order and needs little endian"

TOKEN_MAX = (1 << 32) - 1


def pack_tokens(tokens: Sequence[int], *, bigram: bool = False, wide: bool = False) -> bytes:
    """Pack token ids for a namespace's `bigram` and `wide` flags.

    A bigram key of n ids has n - 1 units (none for n < 2). Raises `BadMessage` for an id that
    is negative or does not fit: ask for a `wide` namespace then.
    """
    units: Iterable[int] = tokens
    if bigram:
        units = [part for pair in pairwise(tokens) for part in pair]
    try:
        return array("Q" if wide else "I", units).tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise BadMessage(
            f"a token id does not fit {64 if wide else 32} unsigned bits: {error}; "
            "use a wide namespace for larger ids"
        ) from error


def pack_pages(pages: Iterable[int]) -> bytes:
    """Pack page numbers (or host slots) as 32-bit little-endian."""
    return array("I", pages).tobytes()


def unpack_pages(packed: bytes) -> array[int]:
    """Unpack page numbers; raises `BadMessage` when the length is no multiple of 4."""
    if len(packed) % 4:
        raise BadMessage(f"a page list has {len(packed)} bytes, no multiple of 4")
    pages = array("I")
    pages.frombytes(packed)
    return pages


def common_pages(edge: bytes, tokens: bytes, position: int, end: int, page: int) -> int:
    """Return how many whole pages of `edge` agree with `tokens` at `position`; at least 1 does."""
    low, high = 1, min(len(edge), end - position) // page
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(edge[low * page : middle * page], position + low * page):
            low = middle
        else:
            high = middle - 1
    return low
