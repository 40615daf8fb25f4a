"""Wire messages: what travels on the session socket and on ZeroMQ.

Owns the envelopes and the session's own messages (what people ask stands in admin.py); the bodies
of client messages and answers are the core's events and actions as they are, and `Ended`. New
fields have defaults and stand last, unions are tagged, a tag is never reused. docs/protocol.md has
the tables, a test holds it to this file.
"""

from __future__ import annotations

from typing import Final

import msgspec

from directory.core.actions import (
    Counters,
    Done,
    GaveUp,
    Inserted,
    Locked,
    Matched,
    Refused,
    Restored,
)
from directory.core.events import (
    Evict,
    Evicted,
    Flush,
    Insert,
    Live,
    Lock,
    Match,
    Mode,
    Restore,
    Stats,
    Unlock,
)
from directory.core.ids import PoolId
from directory.protocol.admin import (
    AdminCheck,
    AdminExplain,
    AdminReport,
    AdminStats,
    AdminTree,
    ExplainReport,
    StatsReport,
    TreeReport,
)
from directory.protocol.ended import Ended, Wanted

# Session socket: one tagged map a frame, file descriptors beside it.


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a session. `software` is free text for logs."""

    version_min: int
    version_max: int
    software: str = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The version both speak and the daemon's boot epoch. `staging_below`: pools whose smallest
    chunk has fewer bytes may register with a staging slab (0: none may)."""

    version: int
    epoch: int
    staging_below: int = 0


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Hand a pool over. `layout`: msgpack of transfer.layout.PoolLayout; `handles`: msgpack of a
    tuple of transfer.ipc.memory.MemoryHandle, one an allocation.

    File descriptors of the frame, in order: one memfd an allocation of the layout, the timelines,
    the span words; all sealed against shrinking. `sync`: msgpack of transfer.ipc.sync.SyncHandle,
    how the timelines are to be read (empty: they say it all). Each rank of an instance registers
    on a session of its own, with the fingerprint of the group and the memory of the rank.
    `page_table`: page lists of this pool are names in 0..page_count-1, and one more memfd follows,
    with a u32 a name: the number of the page that it stands for. `staging`: the layout's last
    allocation is a staging slab, and at the end come a memfd with the stage ring
    (transfer/ipc/stage_ring.py) and an event descriptor that wakes whoever serves it.
    """

    instance: str
    fingerprint: bytes
    mode: Mode
    layout: bytes
    handles: bytes
    world_size: int = 1
    rank: int = 0
    sync: bytes = b""
    page_table: bool = False
    staging: bool = False


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The pool is imported. `secret` proves the ZeroMQ identity; `endpoint` is where to connect;
    `ended`: what the daemon wants to hear of requests that have ended; `lane`: it takes an
    `OpenLane`."""

    pool: PoolId
    generation: int
    secret: bytes
    endpoint: str
    ended: Wanted = ""
    lane: bool = False


class OpenLane(msgspec.Struct, frozen=True, tag="open_lane"):
    """After a Registered with `lane`: a faster way for the frames of the numbered stream.

    Two descriptors come with it: one end of a pair of stream sockets, and a memfd of `arena_bytes`
    bytes that is sealed against shrinking, the token arena. There is no answer. What comes by the
    lane needs no Attach, for the session has brought it.
    """

    arena_bytes: int


class SessionRefused(msgspec.Struct, frozen=True, tag="error"):
    """A typed error; the daemon closes the session after it."""

    code: str
    message: str


SessionRequest = Hello | Register | OpenLane | AdminCheck | AdminStats | AdminTree | AdminExplain
SessionReply = (
    Welcome | Registered | AdminReport | StatsReport | TreeReport | ExplainReport | SessionRefused
)


# ZeroMQ: one frame of array-like msgpack a message.


class Attach(msgspec.Struct, array_like=True, frozen=True, tag="attach"):
    """First message of a ZeroMQ identity: proves which session it belongs to."""

    pool: PoolId
    secret: bytes


class Attached(msgspec.Struct, array_like=True, frozen=True, tag="attached"):
    """The identity is known now."""


class Acked(msgspec.Struct, array_like=True, frozen=True, tag="acked"):
    """Nothing but the cumulative acknowledgement of its envelope."""


ClientBody = (
    Attach
    | Match
    | Lock
    | Unlock
    | Insert
    | Evict
    | Evicted
    | Restore
    | Flush
    | Live
    | Stats
    | Ended
)
DaemonBody = (
    Attached | Acked | Done | Refused | Matched | Locked | Inserted | GaveUp | Restored | Counters
)


Extent = tuple[int, int, int]
"""(offset, length, number): bytes of an arena, and the client's number for what lies there. Whoever
has read the number before knows it; a number is never used for anything else."""
NOWHERE: Final[Extent] = (0, 0, 0)


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Client to daemon. `seq`: from 1 up, one a message of this registration (Attach: 0).

    `answered`: every answer up to this seq has been received and need not be kept. `tokens` and
    `pages`: where in the client's arena lies what the body's fields of these names are to hold;
    length 0 where they hold it themselves. Until `seq` is acknowledged the client leaves it there.
    """

    epoch: int
    seq: int
    answered: int
    body: ClientBody
    tokens: Extent = NOWHERE
    pages: Extent = NOWHERE


class ReplyEnvelope(msgspec.Struct, array_like=True, frozen=True):
    """Daemon to client. `acked`: every message up to this seq has been carried out.

    `seq`: the message that is answered, 0 for none.
    """

    epoch: int
    acked: int
    seq: int
    body: DaemonBody
