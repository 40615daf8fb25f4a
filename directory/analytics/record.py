"""Records: what the access log says of each request, and of the memory it met.

Owns the record types, their binary form and the chained page digests. Analytics of a live log and
of a public trace work on the same types. It must never hold a token: a digest stands for the
path of tokens from the first to the end of a page, so equal digests mean equal prefixes and
nothing more can be read from them (with a key, not even a guess can be confirmed).

Evolution: new fields have defaults and stand last, tags are never reused.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, Literal, TypeAlias

import msgspec

DIGEST_BYTES: Final = 8
NO_NAMESPACE: Final = b""
PAGES_MAX: Final = 1 << 20
"""Pages of one record: as many as the longest prompt that the wire takes has at page size 1."""

_MASK: Final = (1 << 64) - 1
# Odd numbers with bits all over; the steps between them are those of well-known 64-bit finalisers.
_MIX_PREVIOUS: Final = 0x9E3779B97F4A7C15
_MIX_BLOCK: Final = 0xD6E8FEB86659FD93
_MIX_FIRST: Final = 0xFF51AFD7ED558CCD
_MIX_SECOND: Final = 0xC4CEB9FE1A85EC53

Kind = Literal["request", "retry", "recompute", "probe"]
"""`request`: counts. `retry`: the same request again, before it was admitted. `recompute`: the
same request again after it was preempted. `probe`: a health probe. Only a request ever counts as
a query or as reuse."""

Tier = Literal["device", "host", "store"]
Reason = Literal["capacity", "flush", "pool_gone", "void"]
Digests: TypeAlias = "array[int]"
"""Chained digests, one a page, first page first: `array('Q')`."""


class Hit(msgspec.Struct, array_like=True, frozen=True):
    """Prompt tokens that were not computed, by where their pages came from.

    own: the scheduler's own pool; host: the host tier; peer: another scheduler's pool; store: the
    external store.
    """

    own: int = 0
    host: int = 0
    peer: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.own + self.host + self.peer + self.store


NO_HIT: Final = Hit()


class Access(msgspec.Struct, array_like=True, frozen=True, tag=1, kw_only=True):
    """One request, written when it has left the scheduler (or was given up).

    at_us: microseconds since 1970 of its first look-up (of a trace: since its beginning).
    namespace: digest of the namespace key, 8 bytes; empty: the only one. tenant: what the report
    groups by. page_tokens: tokens that one digest covers. tokens: prompt tokens. hit: tokens not
    computed. found: tokens that the last look-up promised (hit and lost ones). restored: tokens
    copied into the own pool. inserted: tokens published beyond the hit. evicted_device,
    evicted_host: pages given up between its first look-up and its end. latency_us: from the first
    look-up's question to its answer; restore_us: from the restore's question to the landing.
    lookups: raw look-ups, 1 and more for a request that waited. digests: packed u64, of the whole
    pages of the path that it left in the tree: the prompt, and the output where that was
    published too.
    """

    at_us: int
    tokens: int
    page_tokens: int
    digests: bytes
    instance: str = ""
    request: str = ""
    attempt: int = 0
    kind: Kind = "request"
    namespace: bytes = NO_NAMESPACE
    tenant: str = ""
    hit: Hit = NO_HIT
    found: int = 0
    restored: int = 0
    inserted: int = 0
    evicted_device: int = 0
    evicted_host: int = 0
    latency_us: int = 0
    restore_us: int = 0
    lookups: int = 1
    output_tokens: int = 0

    @property
    def path(self) -> Digests:
        """The digests as integers."""
        return unpack(self.digests)

    @property
    def blocks(self) -> int:
        """Pages of the prompt, a partial last one included."""
        return -(-self.tokens // self.page_tokens)

    @property
    def hittable(self) -> int:
        """Pages that could be hit: whole ones, and at least one token is always computed."""
        return max(0, self.tokens - 1) // self.page_tokens


class Eviction(msgspec.Struct, array_like=True, frozen=True, tag=2, kw_only=True):
    """Pages given up at one place. digest: of the first page given up; pages: how many, from it on
    along one path; instance: whose pool (device only)."""

    at_us: int
    tier: Tier
    digest: int
    pages: int
    namespace: bytes = NO_NAMESPACE
    instance: str = ""
    reason: Reason = "capacity"
    policy: str = ""


class Room(msgspec.Struct, array_like=True, frozen=True, tag=3, kw_only=True):
    """Memory that is there from now on: of a pool (device, with its instance) or of a tier.

    pages: 0 when it is gone. page_bytes: over all layers and ranks.
    """

    at_us: int
    tier: Tier
    pages: int
    page_tokens: int
    page_bytes: int
    instance: str = ""


class Named(msgspec.Struct, array_like=True, frozen=True, tag=4, kw_only=True):
    """What a namespace digest stands for, field by field; secret parts as digests of their own."""

    namespace: bytes
    fields: dict[str, str]


class Dropped(msgspec.Struct, array_like=True, frozen=True, tag=5, kw_only=True):
    """Records that were not written, because the queue was full or the disk refused them."""

    at_us: int
    records: int


class Began(msgspec.Struct, array_like=True, frozen=True, tag=6, kw_only=True):
    """First frame of every file. keyed: page digests were made with a key that is not here."""

    at_us: int
    version: int
    epoch: int = 0
    keyed: bool = False
    software: str = ""


Frame = Access | Eviction | Room | Named | Dropped | Began


def pack(digests: Iterable[int]) -> bytes:
    """Pack digests as unsigned 64-bit little-endian."""
    return array("Q", digests).tobytes()


def unpack(packed: bytes) -> Digests:
    """Unpack digests; raises `ValueError` when the length is no multiple of 8."""
    digests = array("Q")
    digests.frombytes(packed)
    return digests


def chain(tokens: bytes, page_bytes: int, *, key: bytes = b"", previous: int = 0) -> Digests:
    """Digests of the whole pages of packed `tokens`, each of the path up to the page's end.

    page_bytes: bytes of one page's tokens. previous: digest of the page before (0: none). key: up
    to 64 bytes. Not salted by the namespace, so that another namespace that has the same prefix
    can be told.
    """
    digests: Digests = array("Q")
    last = previous.to_bytes(DIGEST_BYTES, "little")
    view = memoryview(tokens)
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        state = blake2b(last, digest_size=DIGEST_BYTES, key=key)
        state.update(view[start : start + page_bytes])
        last = state.digest()
        digests.append(int.from_bytes(last, "little"))
    return digests


def chain_ids(ids: Iterable[int], *, previous: int = 0) -> Digests:
    """Like `chain`, of a public trace's block ids, which are no secret: mixed, not hashed."""
    digests: Digests = array("Q")
    append = digests.append
    for block in ids:
        mixed = (previous * _MIX_PREVIOUS + (block + 1) * _MIX_BLOCK) & _MASK
        mixed = ((mixed ^ (mixed >> 33)) * _MIX_FIRST) & _MASK
        mixed = ((mixed ^ (mixed >> 29)) * _MIX_SECOND) & _MASK
        previous = mixed ^ (mixed >> 32)
        append(previous)
    return digests


def namespace_digest(canonical: bytes) -> bytes:
    """The digest by which the log names a namespace, of its canonical encoding; 8 bytes."""
    return blake2b(canonical, digest_size=DIGEST_BYTES).digest()
