"""Page content that can be recomputed: every byte follows from the token path up to the page.

Owns the rule and nothing else. A page that was copied from the wrong place, in part, shifted,
between buffers or between namespaces differs from what `verify` expects. It must stay cheap (some
microseconds for 32 KiB), because every restored page of every run is checked with it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from directory.core.namespace import NamespaceKey

DIGEST_BYTES = 16
OFFSETS = 1 << 16
"""Distinct places of the noise table at which a chunk's filling may begin."""
_SPREAD = 0x9E3779B97F4A7C15F39CC0605CEDC835  # odd; its multiples differ in many bits


class ChunkView(NamedTuple):
    """One buffer of a pool: chunk of page p is `view[offset + p * stride:][:nbytes]`."""

    view: memoryview
    offset: int
    stride: int
    nbytes: int


def namespace_seed(fingerprint: bytes, key: NamespaceKey) -> bytes:
    """Start of a namespace's chain: equal tokens of two namespaces have unequal content."""
    return blake2b(fingerprint + msgspec.json.encode(key), digest_size=DIGEST_BYTES).digest()


def page_digests(seed: bytes, tokens: bytes, page_key: int) -> list[bytes]:
    """Chained digests, one a page of `page_key` token bytes; a partial last page counts, too."""
    digests: list[bytes] = []
    digest = seed
    for start in range(0, len(tokens), page_key):
        chain = blake2b(digest, digest_size=DIGEST_BYTES)
        chain.update(tokens[start : start + page_key])
        digest = chain.digest()
        digests.append(digest)
    return digests


@lru_cache(maxsize=4)
def _noise(nbytes: int) -> bytes:
    # The same bytes in every process: Random(seed) is specified, and no secret is made of it.
    return random.Random(0x7EEC08ED).randbytes(nbytes)


class PageContent:
    """Writes and checks pages of one pool, buffer by buffer.

    A chunk begins with the page's digest, changed by the buffer's number; the rest is a stretch
    of a fixed noise table that begins where digest and buffer say.
    """

    def __init__(self, chunks: Sequence[ChunkView]) -> None:
        self._noise = _noise(OFFSETS + max(chunk.nbytes for chunk in chunks))
        self._chunks = [
            (chunk, (number + 1) * _SPREAD & (1 << 128) - 1) for number, chunk in enumerate(chunks)
        ]

    def write(self, page: int, digest: bytes) -> None:
        """Fill a page with what its digest demands."""
        value = int.from_bytes(digest, "little")
        noise = self._noise
        for (view, offset, stride, nbytes), mask in self._chunks:
            mixed = value ^ mask
            at = offset + page * stride
            head = min(DIGEST_BYTES, nbytes)
            view[at : at + head] = mixed.to_bytes(DIGEST_BYTES, "little")[:head]
            if nbytes > head:
                start = mixed % OFFSETS
                view[at + head : at + nbytes] = noise[start : start + nbytes - head]

    def verify(self, page: int, digest: bytes) -> bool:
        """Say whether a page holds exactly what its digest demands."""
        value = int.from_bytes(digest, "little")
        noise = self._noise
        for (view, offset, stride, nbytes), mask in self._chunks:
            mixed = value ^ mask
            at = offset + page * stride
            head = min(DIGEST_BYTES, nbytes)
            if view[at : at + head] != mixed.to_bytes(DIGEST_BYTES, "little")[:head]:
                return False
            # `startswith` compares in place; comparing memoryviews goes element by element.
            if nbytes > head and not noise.startswith(
                view[at + head : at + nbytes], mixed % OFFSETS
            ):
                return False
        return True
