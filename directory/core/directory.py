"""The Directory: one deterministic state machine over everything the daemon knows.

`handle(event) -> list[Action]` is its only entry. Owns the tree, pools, leases, the host tier's
slots and the transfers; decides matches, leases, evictions and copies. It must never read a
clock, block, touch bytes of a page, or depend on anything but the events so far.
"""

from __future__ import annotations

from directory.core import limits
from directory.core.actions import (
    Action,
    Answer,
    Counters,
    Refused,
    Registered,
    RegistrationRefused,
    ReleasePool,
)
from directory.core.errors import (
    Diverged,
    InternalError,
    TreecoredError,
    UnknownPool,
)
from directory.core.events import (
    Asked,
    Body,
    CopyDone,
    Event,
    MoverLost,
    PoolClosed,
    PoolRegistered,
    Stats,
)
from directory.core.host import HostSlots
from directory.core.ids import HOST, PoolId
from directory.core.invariants import violations
from directory.core.lease import LeaseTable
from directory.core.place import HostState, PoolState
from directory.core.pool import (
    flush_pages,
)
from directory.core.registry import Registry
from directory.core.requests import Handler, Requests
from directory.core.states import LeaseEvent
from directory.core.story import Story
from directory.core.transfers import Transfers
from directory.core.tree import Tree


class Directory:
    """The authoritative state of one node. `host_bytes`: memory of the host tier."""

    def __init__(self, *, host_bytes: int = 0, segment_bytes: int = 64 * limits.MIB) -> None:
        self.tree = Tree()
        self.host = HostState()
        self.tree.places[HOST] = self.host
        self.slots = HostSlots(host_bytes, segment_bytes)
        self.leases = LeaseTable(self.tree, self.slots)
        self.registry = Registry(self.tree)
        self.pools = self.registry.pools
        self.counters: dict[str, int] = {}
        self.story = Story()
        self.transfers = Transfers(self.tree, self.host, self.slots, self.pools, self._count)
        requests = Requests(self.tree, self.host, self.leases, self.transfers, self._count)
        self._handlers: dict[type[Body], Handler] = {**requests.handlers, Stats: self._stats}

    def handle(self, event: Event) -> list[Action]:
        """Take in one event and return what is to be done about it.

        A client's mistake is answered with `Refused`; only a defect of treecored itself raises,
        as `InternalError` with the story of what led to it.
        """
        try:
            if isinstance(event, Asked):
                return self._asked(event)
            actions = self._told(event)
            self.registry.forget_closed()
            return actions
        except InternalError as error:
            raise InternalError(f"{error}\nstory:\n{self.story.tell()}") from error

    def _told(self, event: Event) -> list[Action]:
        if isinstance(event, CopyDone):
            self.story.add("copy_done", event.op, event.outcome, event.detail)
            return self.transfers.finish(event)
        if isinstance(event, PoolRegistered):
            return self._register(event)
        if isinstance(event, PoolClosed):
            return self._close(event.pool)
        assert isinstance(event, MoverLost)
        self.story.add("mover_lost", event.detail)
        return self.transfers.lose_all(event.detail or "mover lost")

    def check(self) -> list[str]:
        """Walk the whole state and return every invariant that does not hold, with numbers."""
        return violations(self)

    # Sessions.

    def _register(self, event: PoolRegistered) -> list[Action]:
        try:
            pool = self.registry.register(event)
        except TreecoredError as error:
            return [RegistrationRefused(event.token, error.code, str(error))]
        self.story.add("registered", repr(pool))
        return [Registered(event.token, pool.place, pool.generation)]

    def _close(self, pool_id: PoolId) -> list[Action]:
        pool = self.pools.get(pool_id)
        if pool is None or not pool.live:
            return []
        self.story.add("closed", repr(pool))
        self.registry.begin_close(pool)
        for receipt in list(pool.leases):
            lease = self.leases.get(receipt, pool_id)
            self.leases.release(pool, lease, LeaseEvent.OWNER_GONE)
        self.transfers.doom(pool)
        flush_pages(self.tree, pool)
        return [ReleasePool(pool_id), *self.transfers.pump()]

    # Clients.

    def _asked(self, event: Asked) -> list[Action]:
        pool = self.pools.get(event.pool)
        body = event.body
        name = type(body).__name__
        self.story.add(name, event.pool, event.seq)
        try:
            if pool is None or not pool.live:
                raise UnknownPool(f"pool {event.pool} is not registered; register again")
            self._count(f"asked_{name.lower()}", 1)
            return self._handlers[type(body)](pool, event.seq, body)
        except InternalError:
            raise
        except TreecoredError as error:
            self._count(f"refused_{error.code}", 1)
            actions: list[Action] = [Answer(event.pool, event.seq, Refused(error.code, str(error)))]
            if isinstance(error, Diverged) and pool is not None:
                # What it reported before can no longer be told from what is true: a miss is
                # correct, a wrong page is not. The owner republishes.
                flush_pages(self.tree, pool)
            return actions

    def _stats(self, pool: PoolState, seq: int, body: Stats) -> list[Action]:
        facts = dict(sorted(self.counters.items()))
        facts["nodes"] = len(self.tree.nodes)
        facts["namespaces"] = len(self.tree.spaces)
        facts["pools"] = len(self.pools)
        facts["leases"] = len(self.leases)
        facts["copies_in_flight"] = len(self.transfers.copies)
        facts["backups_waiting"] = len(self.transfers.wished)
        facts["host_pages"] = self.host.pages
        facts["host_pages_leased"] = self.host.locked_pages
        found = tuple(self.check()) if body.check else ()
        return [Answer(pool.place, seq, Counters(facts, found))]

    # Small things.

    def _count(self, name: str, amount: int) -> None:
        if amount:
            self.counters[name] = self.counters.get(name, 0) + amount
