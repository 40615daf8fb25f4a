"""The checker of ends: what a client's end takes, and that it comes to an end itself.

Owns no claim of others: order, answers and queues are looked at in `checkers`. It changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from directory.core.actions import Action, MoreToClose, Registered, ReleasePool
from directory.core.closing import LOOKS_A_NODE
from directory.core.events import Asked, CloseMore, Event, Live, MoverLost, PoolClosed
from directory.core.place import PoolState
from tests.simulation.checkers import Violation

if TYPE_CHECKING:
    from tests.simulation.daemon import SimDaemon


class Deaths:
    """Invariant 11: a client's end takes its own things and nothing of anybody else."""

    name = "deaths"

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[int, int, tuple[int, ...]]] = {}
        self._groups: dict[tuple[int, int], PoolState] = {}
        self._steps: dict[int, int] = {}
        """By boot: steps of ends that are asked for and have not been made."""
        self._left: dict[int, tuple[int, int]] = {}
        """By boot: leases and nodes left of pools that have ended, and steps in a row that took
        none."""

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Compare the others' pages and leases with those before."""
        pools = daemon.directory.pools
        self._steps[daemon.number] = (
            self._steps.get(daemon.number, 0)
            + actions.count(MoreToClose())
            - isinstance(event, CloseMore)
        )
        if isinstance(event, PoolClosed):
            gone = self._closed(daemon, event.pool)
            if gone & pools.keys():
                at = pools[min(gone & pools.keys())]
                if at.live or at.owned:
                    raise Violation(self.name, f"{at} is closed and still owns something")
            released = [a.pool for a in actions if isinstance(a, ReleasePool)]
            if set(released) != gone or len(released) != len(gone):
                raise Violation(self.name, f"closing {event.pool} of {gone} released {released}")
        if isinstance(event, PoolClosed | CloseMore):
            for place, pool in pools.items():
                known = self._before.get((daemon.number, place))
                now = (pool.pages, pool.locked_pages, tuple(pool.leases))
                if pool.live and known is not None and known != now:
                    raise Violation(self.name, f"the end of others changed {pool}: {known}")
        self._on_the_way(daemon)
        self._comes_to_an_end(daemon, event)
        asker = (
            daemon.directory.registry.members.get(event.pool) if isinstance(event, Asked) else None
        )
        if asker is not None and isinstance(event, Asked) and isinstance(event.body, Live):
            # The stream loses no release: reconciliation must find nothing to do, but for leases
            # whose receipts went with answers that a limit dropped.
            known = self._before.get((daemon.number, asker.place))
            fallen = set(known[2] if known is not None else ()).difference(
                asker.leases, daemon.gone_receipts
            )
            if fallen:
                raise Violation(self.name, f"{event} let leases {fallen} fall")
        if isinstance(event, Asked | PoolClosed | CloseMore | MoverLost):
            for place, pool in pools.items():
                self._before[daemon.number, place] = (
                    pool.pages,
                    pool.locked_pages,
                    tuple(pool.leases),
                )
        for action in actions:
            if isinstance(action, Registered):
                self._groups[daemon.number, action.pool] = daemon.directory.registry.members[
                    action.pool
                ]

    def _on_the_way(self, daemon: SimDaemon) -> None:
        """Whoever has ended and has something left goes on to end: one step is asked for."""
        asked = self._steps[daemon.number]
        left = [p for p in daemon.directory.pools.values() if not p.live and (p.leases or p.spans)]
        if asked != bool(left):
            raise Violation(self.name, f"{asked} steps are asked for, to end {left}")

    def _comes_to_an_end(self, daemon: SimDaemon, event: Event) -> None:
        """No step is in vain, but for those that pass over numbers of which there is no span."""
        ending = [pool for pool in daemon.directory.pools.values() if not pool.live]
        left = sum(len(pool.leases) + len(pool.nodes) for pool in ending)
        before, in_vain = self._left.get(daemon.number, (0, 0))
        if isinstance(event, CloseMore):
            in_vain = in_vain + 1 if before and left >= before else 0
            round_steps = max((pool.page_count for pool in ending), default=0) // LOOKS_A_NODE + 1
            if in_vain > round_steps:
                raise Violation(self.name, f"{in_vain} steps took nothing of {ending}")
        self._left[daemon.number] = (left, in_vain)

    def _closed(self, daemon: SimDaemon, member: int) -> set[int]:
        """The ranks that go with one; nobody if its group has gone before."""
        pool = self._groups.pop((daemon.number, member), None)
        gone = {rank for rank in pool.members if rank} if pool is not None else set()
        for rank in gone:
            self._groups.pop((daemon.number, rank), None)
        return gone
