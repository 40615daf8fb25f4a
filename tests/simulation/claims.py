"""Further checkers of single events: claims that no other checker makes by itself.

Owns three claims: only the registered have an effect, host pages are matched only after their
copy has ended, and the host spares what no pool holds as its rule says. They change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from directory.core.actions import Action
from directory.core.events import Asked, Event
from directory.core.eviction import ONLY_COPY_SPARED
from directory.core.ids import HOST, is_pool
from tests.simulation.checkers import Checker, Violation

if TYPE_CHECKING:
    from tests.simulation.daemon import SimDaemon


class Registrations:
    """Invariant 8: a message has an effect only while its registration's session is open."""

    name = "registrations"

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Compare the event's pool with the open sessions."""
        if isinstance(event, Asked) and event.pool not in daemon.sessions:
            raise Violation(self.name, f"{event} is of a generation that has ended")


class Fills:
    """Invariant 2: nothing is matched at the host while a copy still writes into it."""

    name = "fills"

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Look at the targets of every backup in flight."""
        for op, nodes in daemon.directory.tree.fills.items():
            for node in nodes:
                if node.resident(HOST) is not None:
                    raise Violation(self.name, f"copy {op} still writes, and {node!r} is resident")


class HostOrder:
    """Invariant 6: of the coldest page that a pool holds as well and the coldest one that is
    nowhere else the first goes, unless the second is `ONLY_COPY_SPARED` times as old and more."""

    name = "host order"

    def __init__(self, every: int = 16) -> None:
        self._every = every
        self._events = 0

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Look at what would be evicted next, every few events."""
        self._events += 1
        if self._events % self._every:
            return
        nodes, now = daemon.directory.tree.nodes, daemon.directory.host.tick + 1
        for order in daemon.directory.host.orders.values():
            leaves = order.leaves(nodes, now)
            left = {at: now - nodes[at].there(HOST).tick for at in leaves}
            mirrors = {at for at in leaves if any(is_pool(place) for place in nodes[at].places)}
            for at in leaves:
                mirror = max((left[n] for n in left if n in mirrors), default=-1)
                only = max((left[n] for n in left if n not in mirrors), default=-1)
                spares = mirror >= 0 and ONLY_COPY_SPARED * mirror >= only
                if left.pop(at) != (mirror if spares else only) or (at in mirrors) != spares:
                    ages = [now - nodes[n].there(HOST).tick for n in leaves]
                    raise Violation(
                        self.name, f"{leaves} of ages {ages}, mirrors are {sorted(mirrors)}"
                    )


def further_checkers() -> list[Checker]:
    """One of each."""
    return [Registrations(), Fills(), HostOrder()]
