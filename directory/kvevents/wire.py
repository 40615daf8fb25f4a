"""The wire: batches of events as SGLang encodes them, and the frames around them.

Owns the bytes and no state. Source: SGLang 0.5.23 and 0.5.16 `disaggregation/kv_events.py`; tests
decode with both. Since 0.5.20 an event is a map with the key `type`; up to 0.5.18 it was an array
that began with it, and neither decoder reads the other's form. The batch is an array in both:
[time in seconds, events, rank]. A replay answers in three frames of its own in the array form and
in four, with the topic, in the map form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from directory.kvevents.blocks import Stored

Form = Literal["map", "array"]
Event = Stored | tuple[str | None, list[int]] | None
"""What is stored; (medium, hashes) of what is removed; None: all is cleared."""
RANK: Final = 0
"""Each scheduler has addresses of its own, so that each is rank 0 of 1."""
SEQUENCE_BYTES: Final = 8
END: Final = b"\xff" * SEQUENCE_BYTES
"""The sequence number that ends a replay."""
TOPIC: Final = b""

_encoder: Final = msgspec.msgpack.Encoder()


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """In the map form; the parent and lora_id must be there even where they are null."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """In the map form."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """In the map form."""


def encode_batch(events: Sequence[Event], form: Form, now_s: float) -> bytes:
    """Return the payload of one batch; without events it is a sign of life."""
    to_wire = _as_map if form == "map" else _as_array
    return _encoder.encode([now_s, [to_wire(event) for event in events], RANK])


def live_frames(sequence: int, payload: bytes) -> list[bytes]:
    """Return the frames of a batch on the PUB socket."""
    return [TOPIC, sequence_frame(sequence), payload]


def replay_frames(sequence: bytes, payload: bytes, form: Form) -> list[bytes]:
    """Return the frames of one batch of a replay, after the asker's identity."""
    return [b"", *([TOPIC] if form == "map" else []), sequence, payload]


def sequence_frame(sequence: int) -> bytes:
    """Return a sequence number as it is sent."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def asked_from(frames: Sequence[bytes]) -> int | None:
    """Return the first sequence that a replay's asker wants, None where it cannot be read.

    `frames`: without the identity: an empty one (a REQ socket's too) and 8 bytes.
    """
    if len(frames) == 2 and not frames[0] and len(frames[1]) == SEQUENCE_BYTES:
        return int.from_bytes(frames[1], "big")
    return None


def _as_map(event: Event) -> msgspec.Struct:
    if event is None:
        return AllBlocksCleared()
    if not isinstance(event, Stored):
        medium, blocks = event
        return BlockRemoved(blocks, medium)
    return BlockStored(
        event.blocks,
        event.parent,
        event.tokens,
        event.page_size,
        None,
        event.medium,
        event.cache_salt,
        event.lora_name,
    )


def _as_array(event: Event) -> list[object]:
    if event is None:
        return ["AllBlocksCleared"]
    if not isinstance(event, Stored):
        medium, blocks = event
        return ["BlockRemoved", blocks, medium]
    return [
        "BlockStored",
        event.blocks,
        event.parent,
        event.tokens,
        event.page_size,
        None,
        event.medium,
    ]
