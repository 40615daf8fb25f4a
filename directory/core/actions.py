"""Actions: everything a Directory can ask its shell to do, as plain data.

Answers are the wire's own reply bodies. `SubmitCopy` is handed to a mover as it is. An action
never names an address, a file or a process.
"""

from typing import Literal

import msgspec

from directory.core.ids import LeaseId, NodeId, OpId, Place, PoolId

CopyKind = Literal["backup", "load_back", "peer_copy", "mixed"]


class Reply(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of the bodies that answer a client."""


class Totals(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Pages of the asking pool in the tree: not leased, and leased."""

    evictable: int = 0
    protected: int = 0


class Done(Reply, frozen=True, tag="done"):
    """The request was carried out; there is nothing more to say."""

    totals: Totals = Totals()


class Refused(Reply, frozen=True, tag="error"):
    """A typed error; `code` is one of errors.py, `message` says what to do."""

    code: str
    message: str


class Matched(Reply, frozen=True, tag="matched"):
    """Answer to Match. Page counts are from the root for `own_pages`, beyond it for the others.

    `own`: packed pages of the own pool (thin only). `host_pages` + `peer_pages` =
    `restorable_pages`: by the source that would be used now. `node`: the deepest own node (thin).
    `host_reach`: so far from the root, at most to the restorable end, the host tier has the path
    too, whatever pools have of it; the receipt keeps it there. 0: not beyond `own_pages`.
    """

    own_pages: int
    own: bytes
    restorable_pages: int
    host_pages: int
    peer_pages: int
    node: NodeId
    receipt: LeaseId
    totals: Totals
    host_reach: int = 0


class Locked(Reply, frozen=True, tag="locked"):
    """Answer to Lock."""

    receipt: LeaseId
    totals: Totals


class Inserted(Reply, frozen=True, tag="inserted"):
    """Answer to a thin pool's Insert.

    `canonical`: packed pages now in the tree for the accepted path; `duplicates`: packed pages of
    the request that the tree did not take and the scheduler frees after swapping its row.
    `fresh_pages`: pages under the span of this insert (0: the span was not used).
    """

    accepted_pages: int
    canonical: bytes
    duplicates: bytes
    fresh_pages: int
    node: NodeId
    totals: Totals


class GaveUp(Reply, frozen=True, tag="gave_up"):
    """Answer to Evict and to a thin pool's Flush: packed pages to free after every (span, new
    value, pages given up) of `words` has been written to the pool's word table. With evictable
    pages left in `totals` the client may ask again."""

    pages: bytes
    words: tuple[tuple[int, int, int], ...]
    totals: Totals


class Restored(Reply, frozen=True, tag="restored"):
    """Answer to Restore: all target pages landed, or none counts."""

    landed: bool
    host_pages: int
    peer_pages: int
    nbytes: int
    duration_us: int
    detail: str = ""


class Counters(Reply, frozen=True, tag="stats"):
    """Answer to Stats."""

    counters: dict[str, int]
    violations: tuple[str, ...] = ()


AnyReply = Done | Refused | Matched | Locked | Inserted | GaveUp | Restored | Counters


class Answer(msgspec.Struct, frozen=True):
    """Send a reply to a client, that is to one rank."""

    pool: PoolId
    seq: int
    body: AnyReply


class Registered(msgspec.Struct, frozen=True):
    """A pool was taken in; the shell imports its memory and tells the client. `pool`: the number
    that this rank goes by; a group of one has no other."""

    token: int
    pool: PoolId
    generation: int


class RegistrationRefused(msgspec.Struct, frozen=True):
    """A pool was not taken in."""

    token: int
    code: str
    message: str


class ReleasePool(msgspec.Struct, frozen=True):
    """Close the pool's mappings once no running copy touches them."""

    pool: PoolId


class MoreToClose(msgspec.Struct, frozen=True):
    """Hand in one `CloseMore` when there is time for it: a pool that has ended is in nobody's way,
    but is not yet out of the tree."""


class Fence(msgspec.Struct, array_like=True, frozen=True):
    """Passed when the pool's timeline has reached the value."""

    pool: PoolId
    timeline: int
    value: int


class Word(msgspec.Struct, array_like=True, frozen=True):
    """The value a span's word was reported with; the copy is void unless it still has it."""

    pool: PoolId
    slot: int
    value: int


class Landing(msgspec.Struct, array_like=True, frozen=True):
    """Where a mover tells how far a load is: the pool's counter reads `first` + n once its first n
    layers have landed. It stands at `first` before, or the copy is lost."""

    pool: PoolId
    counter: int
    first: int


class CopyPart(msgspec.Struct, array_like=True, frozen=True):
    """Pages of one place copied to as many pages of another; packed page numbers or slots."""

    source: Place
    source_pages: bytes
    target: Place
    target_pages: bytes


class SubmitCopy(msgspec.Struct, array_like=True, frozen=True, tag="submit_copy"):
    """Copy all parts after all fences; answer `CopyDone` exactly once.

    `slot_bytes` (0: a page of the pool): size of a host slot that holds the shards of several
    ranks; the pool's page is what begins at `shard_offset` bytes of it. `landing`: only where all
    parts come from the host tier, for what has landed must count at once.
    """

    op: OpId
    kind: CopyKind
    parts: tuple[CopyPart, ...]
    fences: tuple[Fence, ...]
    words: tuple[Word, ...]
    slot_bytes: int = 0
    shard_offset: int = 0
    landing: Landing | None = None


class Journal(msgspec.Struct, frozen=True):
    """Write down what a successor must know of the host tier, before the actions that follow.

    Append `record` to the log (unless it is empty), then let the words of `slots` (packed) be
    `stamp`; 0: these slots are not valid.
    """

    record: bytes
    slots: bytes
    stamp: int


class JournalBegin(msgspec.Struct, frozen=True):
    """Begin a new log; the older ones count on until `JournalEnd`."""


class JournalEnd(msgspec.Struct, frozen=True):
    """Drop all logs but the one that was begun last: it says everything that they say."""


Action = (
    Answer
    | Registered
    | RegistrationRefused
    | ReleasePool
    | MoreToClose
    | SubmitCopy
    | Journal
    | JournalBegin
    | JournalEnd
)
