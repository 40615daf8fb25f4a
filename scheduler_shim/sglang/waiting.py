"""Waiting requests as the shim sees them: what is read of SGLang's, and where a look-up stands.

Owns the record of one waiting request. It must never hold on to an object of SGLang's: a request
is known by its name, which says too whether it is still in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, Protocol

from directory.core.errors import TreecoredError
from directory.core.namespace import NamespaceKey
from scheduler_shim.client import DaemonClient
from scheduler_shim.own_tree import Published
from scheduler_shim.pools import Pool
from scheduler_shim.request import Request
from scheduler_shim.room import Room

NEVER_US: Final = 1 << 62
LOSSES_MAX: Final = 2
"""After so many lost landings a request is admitted without."""
FILLS_MAX: Final = 4
"""Restores that one request waits for: a path may come in pieces, but not for ever."""


class Waiting(Protocol):
    """What is read of a request in SGLang's waiting queue."""

    @property
    def rid(self) -> str:
        """Its name, unique among those that are alive."""
        ...


KeyOf = Callable[..., tuple[NamespaceKey, bytes]]
"""Namespace and packed tokens of a waiting request, cheap when asked again."""


class Stage(Enum):
    """Where a waiting request's look-up stands. The first four are held back (`HELD`)."""

    NEW = "new"  # it is to be looked up
    ASKING = "asking"  # what lies beyond the own pool is asked for
    FILLING = "filling"  # a mover writes pages of its path
    RECALLED = "recalled"  # its offer is taken back, and it is to be restored in its turn
    OFFERED = "offered"  # what lies beyond is loaded when SGLang admits it
    PASSED = "passed"  # nothing is to be waited for


HELD: Final = frozenset({Stage.NEW, Stage.ASKING, Stage.FILLING, Stage.RECALLED})
"""Stages in which a request stays in the queue."""


class Entry:
    """One request near the head of the queue."""

    __slots__ = (
        *(
            "asked_us",
            "changes",
            "fills",
            "peers",
            "request",
            "restored",
            "rid",
            "seen",
            "since_us",
        ),
        "stage",
    )

    def __init__(self, rid: str, request: Request, now_us: int) -> None:
        self.rid = rid
        self.request = request
        self.stage = Stage.NEW
        self.since_us = now_us
        self.asked_us = now_us
        self.changes = 0  # thin: of the pool's part of the tree, when it was asked for
        self.fills = 0  # restores that it has waited for
        self.seen = 0
        self.restored = 0  # tokens that were restored for it
        self.peers = 0  # pages of its fills that came out of others' pools

    def worth_asking(self, now_us: int, after_us: int) -> bool:
        """It has passed, and waits so long that others may have published what it wants."""
        under_way = self.stage is not Stage.PASSED or self.request.seq
        return not under_way and now_us - self.asked_us >= after_us

    @property
    def waits_again(self) -> bool:
        """Whether it may be held back for one more restore."""
        return self.fills < FILLS_MAX

    @property
    def tries_again(self) -> bool:
        """Whether it is looked up once more after a lost landing."""
        return self.request.losses < LOSSES_MAX

    def due_us(self, reask_ms: int) -> int:
        """When the clock alone has something done for it, if no answer is awaited: at once where it
        is held back, never where it has an offer."""
        if self.stage is Stage.PASSED:
            return self.asked_us + 1_000 * reask_ms
        return 0 if self.stage in HELD else NEVER_US

    def told(self, page_size: int) -> tuple[int, int]:
        """Tokens that were restored for it, and how many of them out of others' pools."""
        return self.restored, min(self.restored, self.peers * page_size)

    def __repr__(self) -> str:
        return f"<Entry {self.rid} {self.stage.value}, {self.request!r}>"


def due_us(entries: Iterable[Entry], reask_ms: int) -> int:
    """When the clock alone has something done for any of them."""
    return min((entry.due_us(reask_ms) for entry in entries), default=NEVER_US)


class Around(Protocol):
    """What held-back restores need of the shim around them."""

    room: Room

    @property
    def pool(self) -> Pool:
        """The engine's own."""
        ...

    @property
    def client(self) -> DaemonClient | None:
        """The daemon's, while there is one."""
        ...

    def now_us(self) -> int:
        """The clock of the client."""
        ...

    def request(self, key: NamespaceKey, tokens: bytes) -> Request:
        """A request with a name of its own."""
        ...

    def publish(
        self, request: Request, pages: int, written: tuple[int, int], *, keep: bool
    ) -> Published | None:
        """Put the row's first pages into the tree; the row is swapped, duplicates are returned."""
        ...

    def reserved_pages(self) -> int:
        """Pages that requests which run or are computed in chunks have yet to take."""
        ...

    def look_for_loss(self) -> bool:
        """Go on without the daemon if it is lost; says whether it was lost just now."""
        ...

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter."""
        ...


def nothing_to_look_up(req: Waiting) -> tuple[NamespaceKey, bytes]:
    """A shim's `KeyOf` as long as it has no cache."""
    raise TreecoredError(f"nobody says what request {req.rid} is made of")
