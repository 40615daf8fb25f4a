"""Wire messages: what travels on the session socket and on ZeroMQ.

Owns the envelopes and the session's own messages; the bodies of client messages and answers are
the core's events and actions as they are. Evolution: new fields have defaults and stand last,
unions are tagged, a tag is never reused. docs/protocol.md has the tables, a test holds it to
this file.
"""

from __future__ import annotations

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

# Session socket: one tagged map a frame, file descriptors beside it.


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a session. `software` is free text for logs."""

    version_min: int
    version_max: int
    software: str = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The version both speak and the daemon's boot epoch."""

    version: int
    epoch: int


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Hand a pool over. `layout`: msgpack of transfer.layout.PoolLayout; `handles`: msgpack of a
    tuple of transfer.ipc.memory.MemoryHandle, one an allocation.

    File descriptors of the frame, in order: one memfd an allocation of the layout, the timelines,
    the span words; all sealed against shrinking. `sync`: msgpack of transfer.ipc.sync.SyncHandle,
    how the timelines are to be read (empty: they say it all). Each rank of an instance registers
    on a session of its own, with the fingerprint of the group and the memory of the rank.
    `page_table`: page lists of this pool are names in 0..page_count-1, and one more memfd follows,
    with a u32 a name: the number of the page that it stands for.
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


class AdminCheck(msgspec.Struct, frozen=True, tag="admin_check"):
    """After Hello: ask for the state of the daemon, without registering anything. Repeatable."""


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The pool is imported. `secret` proves the ZeroMQ identity; `endpoint` is where to connect."""

    pool: PoolId
    generation: int
    secret: bytes
    endpoint: str


class PoolReport(msgspec.Struct, frozen=True):
    """One registration in an `AdminReport`. `ranks`: registered ones; pages are of the tree."""

    pool: PoolId
    instance: str
    generation: int
    mode: str
    phase: str
    ranks: int
    world_size: int
    page_count: int
    pages: int
    protected_pages: int
    leases: int
    copies: int


class AdminReport(msgspec.Struct, frozen=True, tag="admin_report"):
    """Answer to AdminCheck: the daemon has walked its state. `violations_left_out`: how many more
    there are than are listed."""

    epoch: int
    counters: dict[str, int]
    violations: tuple[str, ...]
    pools: tuple[PoolReport, ...]
    violations_left_out: int = 0


class SessionRefused(msgspec.Struct, frozen=True, tag="error"):
    """A typed error; the daemon closes the session after it."""

    code: str
    message: str


SessionRequest = Hello | Register | AdminCheck
SessionReply = Welcome | Registered | AdminReport | SessionRefused


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
    Attach | Match | Lock | Unlock | Insert | Evict | Evicted | Restore | Flush | Live | Stats
)
DaemonBody = (
    Attached | Acked | Done | Refused | Matched | Locked | Inserted | GaveUp | Restored | Counters
)


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Client to daemon. `seq`: from 1 up, one a message of this registration (Attach: 0).

    `answered`: every answer up to this seq has been received and need not be kept.
    """

    epoch: int
    seq: int
    answered: int
    body: ClientBody


class ReplyEnvelope(msgspec.Struct, array_like=True, frozen=True):
    """Daemon to client. `acked`: every message up to this seq has been carried out.

    `seq`: the message that is answered, 0 for none.
    """

    epoch: int
    acked: int
    seq: int
    body: DaemonBody
