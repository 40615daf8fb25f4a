"""Identities: the small integers and keys by which the parts of treecored name things.

Owns nothing and decides nothing. Every number here is handed out by exactly one place, is
monotonic, and is never used twice within an epoch of the daemon.
"""

from typing import Final, TypeAlias

import msgspec

PoolId: TypeAlias = int
"""One registration of one scheduler's KV pool (instance + generation), from 1 up."""

Place: TypeAlias = int
"""Where pages can live: a `PoolId`, or `HOST`, or `STORE`."""

NodeId: TypeAlias = int
"""A tree node, from 1 up; a stale one is a typed error, never another node."""

OpId: TypeAlias = int
"""One transfer, from 1 up."""

LeaseId: TypeAlias = int
"""One lease, from 1 up. A receipt carries it; 0 means no lease."""

HOST: Final[Place] = -1
STORE: Final[Place] = -2
NO_LEASE: Final[LeaseId] = 0
POOL_WORD: Final[int] = 0
"""Slot of a pool's span word table whose bump voids every read of that pool."""

FORWARD: Final[int] = 0
CURRENT: Final[int] = 1
"""Timelines of a pool: the stream of the forward pass and the scheduler's current stream."""
LANDINGS: Final[int] = 3
"""First landing counter of a pool's timelines table: a mover writes there how many layers of a
load have landed. (What lies between is the sync backend's.)"""


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """Who holds a lease: a request's attempt on one pool (instance and generation)."""

    pool: PoolId
    request: str
    attempt: int


def is_pool(place: Place) -> bool:
    """Say whether a place is a scheduler's pool (and not the host tier or the store)."""
    return place > 0
