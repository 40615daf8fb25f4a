"""Records of the host tier's journal: their shapes, and how they lie in a log.

Owns the bytes of a log and nothing of what they mean for the tree. A log is a row of frames, each
with its own checksum; whatever is damaged, cut or foreign between two whole frames is passed over,
and every whole frame counts, wherever it stands. It never decides whether a slot is valid: that is
the slot's word's to say (`recovery`).

A frame: magic, payload length, sequence number, 8 bytes of BLAKE2b over all else, payload.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from directory.core import limits
from directory.core.namespace import NamespaceKey

MAGIC: Final = b"\xf5\xcaT\x01"
"""Begins every frame; its last byte is the version of the format."""
_HEAD: Final = struct.Struct("<4sIQ")
DIGEST_BYTES: Final = 8
FRAME_BYTES: Final = _HEAD.size + DIGEST_BYTES

SlotWord = Callable[[int], int]
"""Reads the word of a host slot; 0: the slot is not valid."""


class SpaceRecord(msgspec.Struct, array_like=True, frozen=True, tag="space"):
    """A namespace, whole, and the number that the pages of this log call it by."""

    number: int
    fingerprint: bytes
    key: NamespaceKey
    page_size: int
    page_bytes: int
    ranks: int


class PagesRecord(msgspec.Struct, array_like=True, frozen=True, tag="pages"):
    """Consecutive pages of one path: each page's slot and tokens (both packed).

    Each is valid while the word of its slot is `stamp`. The first one's parent is the page in
    `parent_slot` under `parent_stamp` (0: the namespace's root), that of each other the one before
    it. No two pages ever have the same slot and stamp.
    """

    space: int
    stamp: int
    parent_slot: int
    parent_stamp: int
    slots: bytes
    tokens: bytes


Record = SpaceRecord | PagesRecord


class Numbered(NamedTuple):
    """A record as it was found, with its sequence number and the end of its frame."""

    seq: int
    end: int
    record: Record


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def frame(seq: int, record: Record) -> bytes:
    """Return the bytes of one record."""
    payload = _encoder.encode(record)
    head = _HEAD.pack(MAGIC, len(payload), seq)
    return b"".join((head, _digest(head, payload), payload))


def read_log(log: bytes) -> Iterator[Numbered]:
    """Yield every whole record of a log in the order they stand in; raises nothing.

    After a damaged frame it goes on with the next place that a whole one begins at, so that a
    wrong length costs its own frame only.
    """
    at = log.find(MAGIC)
    view = memoryview(log)
    while at >= 0:
        found = _frame_at(view, at)
        if found is None:
            at = log.find(MAGIC, at + 1)
            continue
        yield found
        at = found.end
        if log[at : at + len(MAGIC)] != MAGIC:
            at = log.find(MAGIC, at)


def stamp_of(salt: int, seq: int) -> int:
    """Return a stamp, never 0: 64 bits that look random, so that damage makes none of another.

    `salt` is of this boot alone. No client learns it, so none can write a record into its tokens
    that a damaged log would be read as. (The mixing is that of splitmix64.)
    """
    mixed = (salt + seq * 0x9E3779B97F4A7C15) & _U64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _U64
    return (mixed ^ (mixed >> 31)) or 1


_U64: Final = (1 << 64) - 1


def _frame_at(log: memoryview, at: int) -> Numbered | None:
    body = at + FRAME_BYTES
    if body > len(log):
        return None
    _, length, seq = _HEAD.unpack_from(log, at)
    end = body + length
    if length > limits.JOURNAL_RECORD_BYTES_MAX or end > len(log):
        return None
    payload = log[body:end]
    head = log[at : at + _HEAD.size]
    if log[at + _HEAD.size : body] != _digest(head, payload):
        return None
    try:
        return Numbered(seq, end, _decoder.decode(payload))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None  # whole, but of another program


def _digest(head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    digest = blake2b(head, digest_size=DIGEST_BYTES)
    digest.update(payload)
    return digest.digest()
