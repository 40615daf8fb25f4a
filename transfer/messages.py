"""Messages between the daemon and a mover, over their FdChannel.

Owns their shapes, nothing else. Copies and damage are the Directory's own action and events,
unchanged. Every request but a copy is answered in order; what cannot be understood is answered
`Rejected`.
"""

from typing import Annotated

import msgspec

from directory.core.actions import SubmitCopy
from directory.core.events import CopyDone, PagesDamaged
from directory.core.ids import PoolId
from directory.core.limits import BUFFERS_PER_POOL_MAX
from transfer.host_tier import TierShape
from transfer.ipc.memory import MemoryHandle
from transfer.ipc.sync import SyncHandle
from transfer.layout import PoolLayout


class OpenHostTier(msgspec.Struct, frozen=True, array_like=True, tag="open_tier"):
    """Open the next segments of the tier; one descriptor a segment, in order, from `first` on."""

    shape: TierShape
    first: int = 0


class OpenChecksums(msgspec.Struct, frozen=True, array_like=True, tag="open_checksums"):
    """Keep checksums of the tier in the table that comes along; sent before the tier, and answered
    `TierOpened`. `verify`: compare every load. `scrub_bytes_s`: read so much of the tier a second
    and compare it (0: nothing)."""

    shape: TierShape
    verify: bool
    scrub_bytes_s: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0


class ImportPool(msgspec.Struct, frozen=True, array_like=True, tag="import_pool"):
    """Import a pool; descriptors: one an allocation whose kind has one, timelines, words, and with
    `page_table` the table that says where named pages lie, and with `staging` the stage ring and
    an event descriptor (the last allocation is the staging slab then)."""

    pool: PoolId
    layout: PoolLayout
    handles: Annotated[tuple[MemoryHandle, ...], msgspec.Meta(max_length=BUFFERS_PER_POOL_MAX)]
    sync: SyncHandle = SyncHandle()
    page_table: bool = False
    staging: bool = False


class ReleasePool(msgspec.Struct, frozen=True, array_like=True, tag="release_pool"):
    """Close a pool once no copy touches it; its copies are void."""

    pool: PoolId


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Ask whether the mover's loop still turns."""

    token: int = 0


class Expect(msgspec.Struct, frozen=True, array_like=True, tag="expect"):
    """A copy is likely to be asked for in a moment: look for it for a while instead of sleeping."""


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the mover once nothing is in flight; fenced copies are dropped."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The mover is up."""

    pid: int
    device: str


class TierOpened(msgspec.Struct, frozen=True, array_like=True, tag="tier_opened"):
    """Answer to `OpenHostTier` and `OpenChecksums`: segments open now; `detail` says why, where it
    is not ok."""

    ok: bool
    segments: int
    detail: str = ""


class Imported(msgspec.Struct, frozen=True, array_like=True, tag="imported"):
    """Answer to `ImportPool`; `code` is that of the error (errors.py)."""

    pool: PoolId
    ok: bool
    detail: str = ""
    code: str = ""


class Released(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """Answer to `ReleasePool`: nothing of the mover touches the pool any more."""

    pool: PoolId
    detail: str = ""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Answer to `Ping`."""

    token: int = 0


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """A message that was not understood, or a request that cannot be taken at all."""

    code: str
    detail: str


Request = (
    OpenHostTier | OpenChecksums | ImportPool | ReleasePool | SubmitCopy | Expect | Ping | Shutdown
)
Reply = Ready | TierOpened | Imported | Released | CopyDone | PagesDamaged | Pong | Rejected

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Pack a message."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """Unpack what the daemon sent; raises `msgspec.DecodeError` (also for a wrong field)."""
    return _request_decoder.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    """Unpack what a mover sent; raises `msgspec.DecodeError` (also for a wrong field)."""
    return _reply_decoder.decode(payload)
