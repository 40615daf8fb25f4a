"""Block hashes as SGLang publishes them: one chain of SHA-256 a path, cut to 64 bits.

Owns the arithmetic. Source: SGLang 0.5.23 `mem_cache/utils.py` (get_hash_str, hash_str_to_int64,
compute_node_event_hash_values), held equal to it by a test. A page's digest is that of its parent's
whole digest followed by its tokens as unsigned 32-bit little-endian, which is how a namespace packs
them. An extra key is no part of it, so prompts that differ only in that have equal hashes.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

SALT_TAG: Final = b"sglang-cache-salt-v1\0"
ADAPTER_TAG: Final = b"treecored-adapter-v1\0"


def seed(cache_salt: str | None, adapter: tuple[str, int] | None = None) -> bytes:
    """Return what stands for the parent's digest at the first page; nothing for most prompts.

    The salt's is SGLang's own. It has none for adapters (a LoRA id is part of its extra key); pages
    of an adapter must not pass for those of the model itself, so they get one here.
    """
    salt = b"" if cache_salt is None else sha256(SALT_TAG + cache_salt.encode()).digest()
    if adapter is None:
        return salt
    name, version = adapter
    return sha256(ADAPTER_TAG + salt + f"{version}:{name}".encode()).digest()


def chain(parent: bytes, packed: bytes, page_key: int) -> list[bytes]:
    """Return the digest of every page of `packed`, which has `page_key` bytes a page."""
    digests: list[bytes] = []
    for at in range(0, len(packed), page_key):
        parent = sha256(parent + packed[at : at + page_key]).digest()
        digests.append(parent)
    return digests


def published(digest: bytes) -> int:
    """Return the 64 bits that go on the wire: signed, from the digest's first bytes."""
    return int.from_bytes(digest[:8], "big", signed=True)
