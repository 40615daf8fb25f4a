"""Records: what the daemon tells the publisher of KV events, as plain data.

Owns the shapes and their codec and nothing of what they mean for a stream. A record says what is
true now (a node is at a place, or it is not), never by how much something changed: one that is
told twice changes nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec

from directory.core import limits
from directory.core.ids import NodeId, Place, PoolId


class Record(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all records."""


class Begin(Record, frozen=True, tag="begin"):
    """Everything that was told before is void; what is there now follows, up to `Whole`."""


class Whole(Record, frozen=True, tag="whole"):
    """All that was there at `Begin` has been told, and all changes since."""


class Opened(Record, frozen=True, tag="open"):
    """A scheduler's pool can be used. `family`: number of its fingerprint; pools of one family can
    load the same host pages."""

    pool: PoolId
    instance: str
    family: int
    page_size: int


class Closed(Record, frozen=True, tag="close"):
    """A scheduler's pool is gone; that its nodes are no longer there is told, too."""

    pool: PoolId


class SpaceNamed(Record, frozen=True, tag="space"):
    """A namespace and the number it goes by. `unit_bytes`: one key unit as packed; `bigram`: a unit
    is two token ids."""

    number: int
    family: int
    page_size: int
    unit_bytes: int
    bigram: bool
    cache_salt: str | None
    adapter: tuple[str, int] | None


class Changed(Record, frozen=True, tag="node"):
    """A node is resident at a place, or no longer.

    `above`: its ancestors, (id, edge) each, from below `base` down; `base`: an ancestor that was
    told before, 0: the root. Whatever splits and merges do, the path that ends at a node of one id
    stays the same.
    """

    space: int
    place: Place
    here: bool
    node: NodeId
    base: NodeId
    above: tuple[tuple[NodeId, bytes], ...]
    edge: bytes


class Forget(Record, frozen=True, tag="forget"):
    """These nodes and namespaces are gone and will not be named again."""

    nodes: tuple[NodeId, ...]
    spaces: tuple[int, ...]


AnyRecord = Begin | Whole | Opened | Closed | SpaceNamed | Changed | Forget

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(tuple[AnyRecord, ...])


def encode(records: list[AnyRecord]) -> bytes:
    """Return one message."""
    return _encoder.encode(records)


def decode(message: bytes) -> tuple[AnyRecord, ...]:
    """Return the records of one message; raises `msgspec.DecodeError`."""
    return _decoder.decode(message)


def portion(records: list[AnyRecord]) -> int:
    """Return how many of the first records make one message."""
    nbytes = 0
    for at, record in enumerate(records[: limits.KV_EVENTS_RECORDS_A_MESSAGE], 1):
        nbytes += size_of(record)
        if nbytes >= limits.KV_EVENTS_MESSAGE_BYTES:
            return at
    return min(len(records), limits.KV_EVENTS_RECORDS_A_MESSAGE)


def size_of(record: AnyRecord) -> int:
    """Return about how many bytes of tokens a record holds."""
    if isinstance(record, Changed):
        return len(record.edge) + sum(len(edge) for _, edge in record.above)
    return 0
