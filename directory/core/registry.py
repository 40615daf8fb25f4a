"""Registrations: which scheduler's pool is which number, in which generation, and in what phase.

Owns the pool states by id and by instance. Liveness is told to it (a session's end); it never
guesses it from silence.
"""

from __future__ import annotations

from directory.core import limits
from directory.core.errors import BadMessage, InstanceLive, TooMany
from directory.core.events import PoolRegistered
from directory.core.ids import PoolId
from directory.core.place import PoolState
from directory.core.states import POOL, PoolEvent, PoolPhase, step
from directory.core.tree import Tree


class Registry:
    """Pools by id. A pool that closes stays until its last copy has ended."""

    def __init__(self, tree: Tree) -> None:
        self.pools: dict[PoolId, PoolState] = {}
        self._tree = tree
        self._closing: dict[PoolId, PoolState] = {}
        self._live: dict[str, PoolId] = {}
        self._generations: dict[str, int] = {}
        self._shapes: dict[bytes, tuple[int, int]] = {}
        self._last: PoolId = 0

    def register(self, event: PoolRegistered) -> PoolState:
        """Take a pool in under the next generation of its instance, or raise why not."""
        self._check(event)
        self._last += 1
        generation = self._generations.get(event.instance, 0) + 1
        self._generations[event.instance] = generation
        self._shapes[event.fingerprint] = (event.page_size, event.page_bytes)
        pool = PoolState(
            self._last,
            instance=event.instance,
            generation=generation,
            fingerprint=event.fingerprint,
            page_size=event.page_size,
            page_count=event.page_count,
            page_bytes=event.page_bytes,
            mode=event.mode,
        )
        pool.phase = step(POOL, PoolPhase.UNKNOWN, PoolEvent.REGISTER, pool)
        self.pools[pool.place] = pool
        self._tree.places[pool.place] = pool
        self._live[event.instance] = pool.place
        return pool

    def begin_close(self, pool: PoolState) -> None:
        """Live -> closing: the instance id is free for its next generation at once."""
        pool.phase = step(POOL, pool.phase, PoolEvent.SESSION_END, pool)
        del self._live[pool.instance]
        self._closing[pool.place] = pool

    def forget_closed(self) -> None:
        """Closing -> closed for every pool that no copy touches any more."""
        for pool in list(self._closing.values()):
            if not pool.copies:
                pool.phase = step(POOL, pool.phase, PoolEvent.LAST_COPY_END, pool)
                del self._closing[pool.place]
                del self.pools[pool.place]
                del self._tree.places[pool.place]

    def _check(self, event: PoolRegistered) -> None:
        if not 0 < len(event.instance) <= limits.INSTANCE_CHARS_MAX:
            raise BadMessage(f"an instance id has 1 to {limits.INSTANCE_CHARS_MAX} characters")
        if event.instance in self._live:
            raise InstanceLive(
                f"instance {event.instance!r} is registered by a process that is alive; "
                "give this scheduler another instance id or end that process"
            )
        if len(self.pools) >= limits.POOLS_MAX:
            raise TooMany(f"{limits.POOLS_MAX} pools are registered; end some schedulers first")
        if not 0 < event.page_size <= limits.PAGE_SIZE_MAX:
            raise BadMessage(f"page_size must be 1 to {limits.PAGE_SIZE_MAX}")
        if not 0 < event.page_count <= limits.POOL_PAGES_MAX or event.page_bytes <= 0:
            raise BadMessage(
                f"a pool has 1 to {limits.POOL_PAGES_MAX} pages of at least one byte, "
                f"got {event.page_count} of {event.page_bytes}"
            )
        shape = (event.page_size, event.page_bytes)
        known = self._shapes.get(event.fingerprint, shape)
        if known != shape:
            raise BadMessage(
                f"pools with this fingerprint have (page_size, page_bytes) = {known}, this one "
                f"{shape}: put the layout into the fingerprint"
            )
