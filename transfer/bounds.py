"""Whether all numbers of a packed list are below a limit, without looking at each of them.

Pure. A mover checks thousands of page numbers before the first byte of a copy moves, and looking
for the highest one takes ten times as long. It must never say of a list that it is below a limit
when it is not; that it does not know it may say of any.
"""

from typing import Final

SMALL: Final = bytes(range(256))
NUMBER_BYTES: Final = 4


def surely_below(packed: bytes, limit: int, width: int = NUMBER_BYTES) -> bool:
    """Whether the numbers of a packed list (little endian, 4 bytes each), or their lower `width`
    bytes, are below a limit, as far as one byte of each says. False: it is not known."""
    high = max(1, (limit.bit_length() - 1) // 8)  # below the limit is what is less in this byte
    if high >= width:
        return False
    above = any(packed[n::NUMBER_BYTES].strip(SMALL[:1]) for n in range(high + 1, width))
    return not above and not packed[high::NUMBER_BYTES].translate(None, SMALL[: limit >> 8 * high])
