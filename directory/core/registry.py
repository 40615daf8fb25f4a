"""Registrations: which scheduler's pool is which number, in which generation, and in what phase.

Owns the pool states by id and by instance, and which rank goes by which number. Liveness is told
to it (a session's end); it never guesses it from silence.
"""

from __future__ import annotations

from directory.core import limits
from directory.core.errors import BadMessage, GroupMismatch, InstanceLive, TooMany
from directory.core.events import PoolRegistered
from directory.core.ids import PoolId
from directory.core.place import PoolState
from directory.core.states import POOL, PoolEvent, PoolPhase, step
from directory.core.tree import Tree


class Registry:
    """Pools by id. A pool that closes stays until nothing of it is left.

    `members`: the pool of every rank's own number; a group of one has its pool's number.
    `groups`: how many of the pools have more than one rank.
    """

    def __init__(self, tree: Tree) -> None:
        self.pools: dict[PoolId, PoolState] = {}
        self.members: dict[PoolId, PoolState] = {}
        self.groups = 0
        self._tree = tree
        self._closing: dict[PoolId, PoolState] = {}
        self._live: dict[str, PoolId] = {}
        self._generations: dict[str, int] = {}
        self._last: PoolId = 0

    def register(self, event: PoolRegistered) -> tuple[PoolState, PoolId]:
        """Take a rank's pool in under the next generation of its instance, or raise why not.

        Returns the pool and the rank's own number. The first rank opens the generation, the others
        join it.
        """
        self._check(event)
        live = self._live.get(event.instance)
        if live is not None:
            pool = self.pools[live]
            pool.phase = step(POOL, pool.phase, PoolEvent.JOIN, pool)
        else:
            pool = self._open(event)
        self._last += 1
        pool.join(self._last, event.rank)
        self.members[self._last] = pool
        return pool, self._last

    def begin_close(self, pool: PoolState) -> None:
        """Live -> closing, for all ranks: the instance id is free for its next generation."""
        pool.phase = step(POOL, pool.phase, PoolEvent.SESSION_END, pool)
        del self._live[pool.instance]
        self._closing[pool.place] = pool

    def forget_closed(self) -> None:
        """Closing -> closed for every pool that no copy touches any more, and that has neither
        leases nor nodes."""
        for pool in list(self._closing.values()):
            if not (pool.copies or pool.leases or pool.spans):
                pool.phase = step(POOL, pool.phase, PoolEvent.NOTHING_LEFT, pool)
                del self._closing[pool.place]
                del self.pools[pool.place]
                del self._tree.places[pool.place]
                self.groups -= pool.log is not None
                for member in pool.members:
                    self.members.pop(member, None)

    def _open(self, event: PoolRegistered) -> PoolState:
        pool = PoolState(
            self._last + 1,
            instance=event.instance,
            generation=self._next_generation(event.instance),
            fingerprint=event.fingerprint,
            page_size=event.page_size,
            page_count=event.page_count,
            page_bytes=event.page_bytes * event.world_size,
            mode=event.mode,
            world_size=event.world_size,
        )
        pool.phase = step(POOL, PoolPhase.UNKNOWN, PoolEvent.REGISTER, pool)
        self.pools[pool.place] = pool
        self._tree.places[pool.place] = pool
        self._live[event.instance] = pool.place
        self.groups += pool.log is not None
        return pool

    def _check_rank(self, pool: PoolState, event: PoolRegistered) -> None:
        """A further rank: it must be as the others are, for they share numbers and host pages."""
        if event.world_size == len(pool.members) and pool.members[event.rank]:
            what = "" if pool.log is None else f"rank {event.rank} of "
            raise InstanceLive(
                f"{what}instance {event.instance!r} is registered by a process that is alive; "
                "give this scheduler another instance id or end that process"
            )
        ours = {
            "world_size": len(pool.members),
            "fingerprint": pool.fingerprint,
            "mode": pool.mode,
            "page_size": pool.page_size,
            "page_count": pool.page_count,
            "page_bytes": pool.shard_bytes,
        }
        for name, known in ours.items():
            got = getattr(event, name)
            if got != known:
                raise GroupMismatch(
                    f"rank {event.rank} of instance {event.instance!r} has {name} "
                    f"{_short(got)}, the ranks before it {_short(known)}; all ranks of an "
                    "instance must agree"
                )

    def _next_generation(self, instance: str) -> int:
        """Count an instance's generations; those that ended longest ago are forgotten in time."""
        generation = self._generations.pop(instance, 0) + 1
        self._generations[instance] = generation
        if len(self._generations) > limits.GENERATIONS_KEPT_MAX:
            oldest = next(
                name for name in self._generations if name not in self._live and name != instance
            )
            del self._generations[oldest]
        return generation

    def _check(self, event: PoolRegistered) -> None:
        if not 0 < len(event.instance) <= limits.INSTANCE_CHARS_MAX:
            raise BadMessage(f"an instance id has 1 to {limits.INSTANCE_CHARS_MAX} characters")
        if not 0 <= event.rank < event.world_size <= limits.RANKS_PER_GROUP_MAX:
            raise BadMessage(
                f"rank {event.rank} of {event.world_size}: a group has 1 to "
                f"{limits.RANKS_PER_GROUP_MAX} ranks, numbered from 0"
            )
        live = self._live.get(event.instance)
        if live is None:
            self._check_shape(event)
        else:
            self._check_rank(self.pools[live], event)
        if len(self.members) >= limits.POOLS_MAX:
            raise TooMany(f"{limits.POOLS_MAX} pools are registered; end some schedulers first")

    def _check_shape(self, event: PoolRegistered) -> None:
        if not 0 < event.page_size <= limits.PAGE_SIZE_MAX:
            raise BadMessage(f"page_size must be 1 to {limits.PAGE_SIZE_MAX}")
        if not 0 < event.page_count <= limits.POOL_PAGES_MAX or event.page_bytes <= 0:
            raise BadMessage(
                f"a pool has 1 to {limits.POOL_PAGES_MAX} pages of at least one byte, "
                f"got {event.page_count} of {event.page_bytes}"
            )
        shape = (event.page_size, event.page_bytes, event.world_size)
        known = self._shape(event.fingerprint) or shape
        if known != shape:
            raise BadMessage(
                "pools with this fingerprint have (page_size, page_bytes, world_size) = "
                f"{known}, this one {shape}: put the layout into the fingerprint"
            )

    def _shape(self, fingerprint: bytes) -> tuple[int, int, int] | None:
        """What a fingerprint means while anything is held under it: a pool, or pages anywhere."""
        for pool in self.pools.values():
            if pool.fingerprint == fingerprint:
                return pool.page_size, pool.shard_bytes, len(pool.members)
        for space in self._tree.spaces.values():
            if space.fingerprint == fingerprint:
                return space.page_size, space.page_bytes // space.ranks, space.ranks
        return None


def _short(value: object) -> str:
    """A value for a sentence; a fingerprint can be long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
