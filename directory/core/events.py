"""Events: everything that can happen to a Directory, as plain data.

A client's request is `Asked(pool, seq, now_us, body)`, where body is one of the message structs
below: they are the wire's own message bodies, so nothing is translated on the hot path. The
other events come from the daemon's shell (sessions) and from the movers. No event carries a
clock other than `now_us`, a handle, or an address.
"""

from typing import Annotated, Literal

import msgspec

from directory.core import limits
from directory.core.ids import LeaseId, NodeId, OpId, PoolId
from directory.core.namespace import NamespaceKey

Mode = Literal["mirrored", "thin"]
Outcome = Literal["ok", "void", "failed"]
FlushScope = Literal["pool", "host"]

# A decoder refuses what is longer; the core looks again, for not every caller decodes.
_UpToGaveUp = msgspec.Meta(max_length=limits.GAVE_UP_PAGES_MAX)
Runs = Annotated[tuple[tuple[int, int, int], ...], _UpToGaveUp]
Words = Annotated[tuple[tuple[int, int], ...], _UpToGaveUp]
RequestName = Annotated[str, msgspec.Meta(max_length=limits.REQUEST_CHARS_MAX)]
LiveRequests = Annotated[
    tuple[tuple[RequestName, int], ...], msgspec.Meta(max_length=limits.LIVE_REQUESTS_MAX)
]


class Body(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of the message bodies a client may send."""


class Match(Body, frozen=True, tag="match"):
    """Ask for the longest usable prefix of `tokens` (packed; whole pages are considered).

    Mirrored: `start_pages` is what the own pool already holds; only what lies beyond is
    answered. Thin: `start_pages` is ignored, the daemon answers the own pages too. With
    `acquire` the answer carries a lease on the path (host slots, and own pages for a thin pool).
    """

    request: str
    attempt: int
    namespace: NamespaceKey
    tokens: bytes
    start_pages: int = 0
    acquire: bool = True


class Lock(Body, frozen=True, tag="lock"):
    """Thin: lease the own pool's pages of a node and its ancestors."""

    request: str
    attempt: int
    node: NodeId


class Unlock(Body, frozen=True, tag="unlock"):
    """Release a lease by its receipt, once."""

    receipt: LeaseId


class Insert(Body, frozen=True, tag="insert"):
    """Publish computed (or restored) pages for the whole path of `tokens` in the own pool.

    `pages`: one packed page number a page of tokens, from the root on. `span`, `span_value`: the
    word that guards the pages which are new in the tree. `written`: timeline values (forward,
    current) after which the new pages may be read by others. `receipt` (thin): a lease whose
    claim on the own pool moves to the inserted path. `fresh_pages` (mirrored): how many pages are
    new in the tree as the mirror sees it (-1: not said); where the daemon counts others, the two
    differ about what came before, and nothing is published.
    """

    request: str
    attempt: int
    namespace: NamespaceKey
    tokens: bytes
    pages: bytes
    span: int
    span_value: int
    written: tuple[int, int]
    receipt: LeaseId = 0
    fresh_pages: int = -1


class Evict(Body, frozen=True, tag="evict"):
    """Thin: ask for `pages` pages of the own pool to be given up, coldest leaves first.

    The answer names fewer where not so many are evictable, and never more than one message can
    carry (GAVE_UP_PAGES_MAX); `totals` tell whether to ask again.
    """

    pages: int


class Evicted(Body, frozen=True, tag="evicted"):
    """Mirrored: report pages given up. Runs are (span, first page in span, page count), children
    before parents; words are (span, new value) as bumped before the pages were freed.

    At most GAVE_UP_PAGES_MAX of each: who gives up more says it in several reports. Each report
    has a new word for every span of its runs; a span of two reports has moved on twice.
    """

    runs: Runs
    words: Words


class Restore(Body, frozen=True, tag="restore"):
    """Copy the leased path's pages from `start_page` on into the own pool's `pages` (packed).

    `quiet`: timeline values (forward, current) after which the target pages are quiet. The answer
    comes when the pages have landed or are lost; until then the pages are the mover's.
    `landing` (counter, value), (0, 0) for none: a counter of the timelines table, from LANDINGS
    on, that stands at the value now. It reads value + n once the first n layers have landed, and
    until the answer nobody else writes it; with a counter nothing is read out of other pools, and
    the restore is lost where the host tier does not have all of it.
    """

    request: str
    attempt: int
    receipt: LeaseId
    start_page: int
    pages: bytes
    quiet: tuple[int, int]
    landing: tuple[int, int] = (0, 0)


class Flush(Body, frozen=True, tag="flush"):
    """Give up everything unleased: of the own pool or of the host tier.

    `pool_word`: the own pool's word as bumped (a lower value than before is ignored). A mirrored
    pool's pages are all forgotten: what its mirror keeps under its own locks it publishes anew,
    or it reports `Evicted` instead. A thin pool's pages are named in the answer, as many as one
    message can carry (GAVE_UP_PAGES_MAX): it asks again until `totals` has nothing evictable.
    """

    scope: FlushScope
    pool_word: int = 0


class Live(Body, frozen=True, tag="live"):
    """Report every (request, attempt) that is alive at this position of the stream.

    Leases granted before it for others fall, so that no lost release can leak. A request whose
    question is unanswered is alive. A list of more than LIVE_REQUESTS_MAX comes in parts, one
    after the other: `first` begins it, and its position counts; with `last` the leases fall.
    """

    requests: LiveRequests
    first: bool = True
    last: bool = True


class Stats(Body, frozen=True, tag="stats"):
    """Ask for counters; with `check` the daemon walks its state and reports every violation."""

    check: bool = False


class Asked(msgspec.Struct, frozen=True):
    """A client's numbered message. `pool`: as in `Registered`, the rank's own number."""

    pool: PoolId
    seq: int
    now_us: int
    body: Body


class PoolRegistered(msgspec.Struct, frozen=True):
    """A scheduler's session asks for its pool to be taken in.

    `token` comes back in `Registered`. `page_bytes`: one page of this rank's memory.
    `world_size` ranks of one instance make a group; each registers its own memory, as `rank`.
    """

    token: int
    now_us: int
    instance: str
    fingerprint: bytes
    page_size: int
    page_count: int
    page_bytes: int
    mode: Mode
    world_size: int = 1
    rank: int = 0


class PoolClosed(msgspec.Struct, frozen=True):
    """The session of a pool ended (a kernel object said so), or its import failed."""

    pool: PoolId
    now_us: int


class CloseMore(msgspec.Struct, frozen=True):
    """Go on with the ends of pools, as `MoreToClose` asked for. Without anything left: nothing."""


class CopyDone(msgspec.Struct, frozen=True, array_like=True, tag="copy_done"):
    """A mover finished a copy. "void": a word differed or an owner was gone; nothing counts.

    `broken`: it failed because the device did, so that others are likely to fail as well."""

    op: OpId
    outcome: Outcome
    detail: str = ""
    nbytes: int = 0
    duration_us: int = 0
    broken: bool = False


class PagesDamaged(msgspec.Struct, frozen=True, array_like=True, tag="pages_damaged"):
    """A mover found pages of the host tier that differ from their checksums: `slots` (packed).

    `found_by`: the kind of copy that was to read them, or "scrub". It comes before the end of that
    copy, and no copy into these slots had begun when they were read.
    """

    slots: bytes
    found_by: str


class MoverLost(msgspec.Struct, frozen=True):
    """The mover process is dead (its pidfd fired): every copy it had will never land."""

    now_us: int
    detail: str = ""


Event = Asked | PoolRegistered | PoolClosed | CloseMore | CopyDone | PagesDamaged | MoverLost
Request = Match | Lock | Unlock | Insert | Evict | Evicted | Restore | Flush | Live | Stats
