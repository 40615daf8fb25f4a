"""State tables: every life cycle of the core as one `(state, event) -> state` table.

Owns the tables and the one function that steps through them; docs/state-machines.md is rendered
from here and a test holds the two equal. An absent step is a defect and raises
`InvalidTransition`.
"""

from enum import StrEnum
from typing import Final, TypeAlias, TypeVar, cast

from directory.core.errors import InvalidTransition


class ResidencyState(StrEnum):
    """State of one node's pages at one place."""

    ABSENT = "absent"
    FILLING = "filling"
    RESIDENT = "resident"
    DRAINING = "draining"


class ResidencyEvent(StrEnum):
    """What happens to a residency."""

    PUBLISH = "publish"
    BEGIN_FILL = "begin_fill"
    LAND = "land"
    LOSE = "lose"
    DROP = "drop"
    RETIRE = "retire"
    RELEASE = "release"


class TransferState(StrEnum):
    """State of one transfer, as the directory sees it."""

    IDLE = "idle"
    COPYING = "copying"
    DOOMED = "doomed"
    ENDED = "ended"


class TransferEvent(StrEnum):
    """What happens to a transfer."""

    SUBMIT = "submit"
    DOOM = "doom"
    FINISH = "finish"


class LeaseState(StrEnum):
    """State of one lease."""

    FREE = "free"
    HELD = "held"
    RELEASED = "released"


class LeaseEvent(StrEnum):
    """What happens to a lease."""

    GRANT = "grant"
    MOVE = "move"
    RELEASE = "release"
    UNLIST = "unlist"
    OWNER_GONE = "owner_gone"


class PoolPhase(StrEnum):
    """Phase of one pool registration."""

    UNKNOWN = "unknown"
    LIVE = "live"
    CLOSING = "closing"
    CLOSED = "closed"


class PoolEvent(StrEnum):
    """What happens to a pool registration."""

    REGISTER = "register"
    JOIN = "join"
    SESSION_END = "session_end"
    NOTHING_LEFT = "nothing_left"


Table: TypeAlias = dict[tuple[StrEnum, StrEnum], StrEnum]

_R, _RE = ResidencyState, ResidencyEvent
RESIDENCY: Final[Table] = {
    (_R.ABSENT, _RE.PUBLISH): _R.RESIDENT,
    (_R.ABSENT, _RE.BEGIN_FILL): _R.FILLING,
    (_R.FILLING, _RE.LAND): _R.RESIDENT,
    (_R.FILLING, _RE.LOSE): _R.ABSENT,
    (_R.FILLING, _RE.RETIRE): _R.DRAINING,
    (_R.RESIDENT, _RE.DROP): _R.ABSENT,
    (_R.RESIDENT, _RE.RETIRE): _R.DRAINING,
    (_R.DRAINING, _RE.RELEASE): _R.ABSENT,
}

_T, _TE = TransferState, TransferEvent
TRANSFER: Final[Table] = {
    (_T.IDLE, _TE.SUBMIT): _T.COPYING,
    (_T.COPYING, _TE.DOOM): _T.DOOMED,
    (_T.DOOMED, _TE.DOOM): _T.DOOMED,
    (_T.COPYING, _TE.FINISH): _T.ENDED,
    (_T.DOOMED, _TE.FINISH): _T.ENDED,
}

_L, _LE = LeaseState, LeaseEvent
LEASE: Final[Table] = {
    (_L.FREE, _LE.GRANT): _L.HELD,
    (_L.HELD, _LE.MOVE): _L.HELD,
    (_L.HELD, _LE.RELEASE): _L.RELEASED,
    (_L.HELD, _LE.UNLIST): _L.RELEASED,
    (_L.HELD, _LE.OWNER_GONE): _L.RELEASED,
}

_P, _PE = PoolPhase, PoolEvent
POOL: Final[Table] = {
    (_P.UNKNOWN, _PE.REGISTER): _P.LIVE,
    (_P.LIVE, _PE.JOIN): _P.LIVE,
    (_P.LIVE, _PE.SESSION_END): _P.CLOSING,
    (_P.CLOSING, _PE.NOTHING_LEFT): _P.CLOSED,
}

TABLES: Final = {"residency": RESIDENCY, "transfer": TRANSFER, "lease": LEASE, "pool": POOL}


State = TypeVar("State", bound=StrEnum)


def step(table: Table, state: State, event: StrEnum, what: object) -> State:
    """Return the next state, or raise `InvalidTransition` naming the object `what`."""
    try:
        return cast(State, table[state, event])
    except KeyError:
        raise InvalidTransition(f"{what}: no step from {state} by {event}") from None
