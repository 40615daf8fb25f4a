"""Checkers that look at every event of the directory: separate objects, one claim each.

Owns the claims about single events: order and identity of messages, effects of the dead, locks of
others, queues within limits. Each raises `Violation` with what disagrees. They change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from directory.core import limits
from directory.core.actions import (
    Action,
    Answer,
    AnyReply,
    Matched,
    Refused,
    ReleasePool,
    SubmitCopy,
)
from directory.core.events import (
    Asked,
    Body,
    CopyDone,
    Event,
    Match,
    MoverLost,
    PoolClosed,
)
from directory.core.ids import HOST
from directory.core.node import Node
from directory.core.place import PoolState
from directory.core.tokens import unpack_pages

if TYPE_CHECKING:
    from tests.simulation.daemon import SimDaemon


class Violation(AssertionError):
    """An invariant does not hold. `checker`: which object saw it."""

    def __init__(self, checker: str, message: str) -> None:
        super().__init__(f"{checker}: {message}")
        self.checker = checker


class Checker(Protocol):
    """Looks at one event after it was carried out."""

    name: str

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Raise `Violation` if something is wrong."""
        ...


class OwnInvariants:
    """Invariants 1, 3 to 6: the directory's own recount, every so many events."""

    name = "recount"

    def __init__(self, every: int) -> None:
        self._every = every
        self._left = 1

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Recount."""
        self._left -= 1
        if self._left <= 0:
            self._left = self._every
            self.check(daemon)

    def check(self, daemon: SimDaemon) -> None:
        """Recount now."""
        found = daemon.directory.check()
        if found:
            raise Violation(self.name, "; ".join(found))


class Epochs:
    """Invariant 8: nothing of an earlier boot, registration or mover has an effect."""

    name = "epochs"

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """The event must come from the living."""
        if not daemon.alive:
            raise Violation(self.name, f"{event} reached a dead daemon")
        if isinstance(event, Asked):
            link = daemon.asking
            if link is None or link.host is not daemon or link.pool != event.pool:
                raise Violation(self.name, f"{event} came over a connection of {link}")
        for action in actions:
            if isinstance(action, SubmitCopy):
                for part in action.parts:
                    for place in (part.source, part.target):
                        pool = daemon.directory.registry.members.get(place)
                        if place != HOST and (pool is None or not pool.live):
                            raise Violation(self.name, f"{action} touches pool {place}")


class Once:
    """Invariant 9: every message takes effect once, in order, as its client meant it."""

    name = "once"

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        self._answered: set[tuple[int, int, int]] = set()
        self._ops: set[tuple[int, int]] = set()
        self.said: dict[tuple[int, int, int], Body] = {}

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Numbers follow one another; no message is answered twice; no copy begins twice."""
        if isinstance(event, Asked):
            pool = (daemon.number, event.pool)
            if event.seq != self._last.get(pool, 0) + 1:
                raise Violation(self.name, f"{event} follows message {self._last.get(pool, 0)}")
            self._last[pool] = event.seq
        for action in actions:
            if isinstance(action, Answer):
                answer = (daemon.number, action.pool, action.seq)
                if answer in self._answered:
                    raise Violation(self.name, f"{action} is a second answer")
                self._answered.add(answer)
            elif isinstance(action, SubmitCopy):
                op = (daemon.number, action.op)
                if op in self._ops:
                    raise Violation(self.name, f"{action} begins a second time")
                self._ops.add(op)


class Ranks:
    """Every rank of a group is told the same, whenever it asks; once it has ended, nothing more.

    Ranks that ask after the end are refused, also what another rank was told before it: an answer
    counts only once every rank has it, and a rank that is refused gives the daemon up for all.
    """

    name = "ranks"

    def __init__(self) -> None:
        self._told: dict[tuple[int, int, int], AnyReply] = {}

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Compare a rank's answer with that of the first one."""
        members = daemon.directory.registry.members
        for action in actions:
            pool = members.get(action.pool) if isinstance(action, Answer) else None
            if pool is None or pool.log is None or not isinstance(action, Answer):
                continue
            if not pool.live and isinstance(action.body, Refused):
                continue
            first = self._told.setdefault((daemon.number, pool.place, action.seq), action.body)
            if first != action.body:
                raise Violation(self.name, f"{action}, where another rank was told {first}")


class Answers:
    """Invariants 7 and 10: an answer says exactly what a plain walk over all paths says."""

    name = "answers"

    def __init__(self) -> None:
        self._decided: dict[tuple[int, int], int] = {}

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Compare a Match's answer with a search that knows no tree order."""
        if not isinstance(event, Asked) or not isinstance(event.body, Match):
            return
        pool = daemon.directory.registry.members.get(event.pool)
        if pool is None or not self._is_first(daemon, pool, event):
            return
        for action in actions:
            if isinstance(action, Answer) and isinstance(action.body, Matched):
                self._compare(daemon, event, event.body, action.body)

    def _is_first(self, daemon: SimDaemon, pool: PoolState, event: Asked) -> bool:
        """Whether this rank decides: the others are told what was true then."""
        last = self._decided.get((daemon.number, pool.place), 0)
        self._decided[daemon.number, pool.place] = max(last, event.seq)
        return event.seq > last

    def _compare(self, daemon: SimDaemon, event: Asked, body: Match, said: Matched) -> None:
        pool = daemon.directory.registry.members[event.pool]
        page_key = pool.page_size * body.namespace.unit_bytes
        holders: list[set[int]] = []
        for node in daemon.directory.tree.nodes.values():
            space = node.space
            if space.fingerprint != pool.fingerprint or space.key != body.namespace:
                continue
            self._enter(node, body.tokens, page_key, holders)
        own = 0
        if pool.mode == "thin":
            while own < len(holders) and pool.place in holders[own]:
                own += 1
        else:
            own = body.start_pages
        end = own
        pools = daemon.directory.pools
        while end < len(holders) and any(
            place == HOST or (place != pool.place and place in pools and pools[place].live)
            for place in holders[end]
        ):
            end += 1
        truth = (own, max(0, end - own))
        if own > len(holders):
            truth = (own, 0)
        if (said.own_pages, said.restorable_pages) != truth:
            raise Violation(self.name, f"{said} where a search finds (own, beyond) {truth}")

    @staticmethod
    def _enter(node: Node, tokens: bytes, page_key: int, holders: list[set[int]]) -> None:
        path = b"".join(above.edge for above in node.path())
        first = (len(path) - len(node.edge)) // page_key
        places = {place for place in node.places if node.resident(place) is not None}
        for at in range(first, len(path) // page_key):
            if tokens[: (at + 1) * page_key] != path[: (at + 1) * page_key]:
                return
            while len(holders) <= at:
                holders.append(set())
            holders[at] |= places


class Bounds:
    """Invariant 12: queues, stories and kept answers stay within their limits."""

    name = "bounds"

    def __init__(self) -> None:
        self._events = 0

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Look at every queue, every few events."""
        self._events += 1
        if self._events % 16:
            return
        directory = daemon.directory
        sizes = {
            "story": (len(directory.story), limits.STORY_LINES_MAX),
            "backups waiting": (len(directory.transfers.wished), limits.BACKUPS_PENDING_MAX),
            "backups": (len(directory.tree.fills), limits.BACKUPS_IN_FLIGHT_MAX),
            "spaces": (len(directory.tree.spaces), limits.NAMESPACES_MAX),
        }
        for pool in directory.pools.values():
            sizes[f"restores of {pool.place}"] = (pool.restores, limits.RESTORES_PER_POOL_MAX)
            sizes[f"leases of {pool.place}"] = (len(pool.leases), limits.LEASES_PER_POOL_MAX)
            sizes[f"spans of {pool.place}"] = (len(pool.spans), pool.page_count)
        for client in daemon.endpoint.clients.values():
            sizes["kept answers"] = (client.stream.kept_count, limits.KEPT_ANSWERS_MAX)
        for what, (size, most) in sizes.items():
            if size > most:
                raise Violation(self.name, f"{size} {what}, at most {most}")


class Copies:
    """Invariants 3 and 8 for copies: what is read stays, what is written is nobody's, and a copy
    of the dead brings nothing."""

    name = "copies"

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], SubmitCopy] = {}
        self._doomed: set[tuple[int, int]] = set()

    def after(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Follow the copies in flight."""
        if isinstance(event, CopyDone):
            ended = (daemon.number, event.op)
            copy = self._open.pop(ended, None)
            if copy is None:
                raise Violation(self.name, f"{event} ends a copy that is not in flight")
            if ended in self._doomed:
                self._check_doomed(daemon, copy, actions)
        elif isinstance(event, MoverLost):
            for op in [op for op in self._open if op[0] == daemon.number]:
                del self._open[op]
        elif isinstance(event, PoolClosed):
            released = {action.pool for action in actions if isinstance(action, ReleasePool)}
            self._doomed |= {
                op
                for op, copy in self._open.items()
                if op[0] == daemon.number and not released.isdisjoint(_places(copy))
            }
        for action in actions:
            if isinstance(action, SubmitCopy):
                self._open[daemon.number, action.op] = action
        self._check_slots(daemon)

    def _check_slots(self, daemon: SimDaemon) -> None:
        """Host slots of copies in flight are not free; those written into hold nothing yet."""
        mine = [copy for op, copy in self._open.items() if op[0] == daemon.number]
        if not any(HOST in _places(copy) for copy in mine):
            return
        slots = daemon.directory.slots
        free = {size: set(slots.free_slots(size)) for size in slots.page_sizes}
        owners = slots.page_bytes_of
        for copy in mine:
            for part in copy.parts:
                for place, packed in (
                    (part.source, part.source_pages),
                    (part.target, part.target_pages),
                ):
                    if place != HOST:
                        continue
                    taken = unpack_pages(packed)
                    if any(slot in free[owners[slot >> 16]] for slot in taken):
                        raise Violation(self.name, f"a slot of {copy} is free")

    def _check_doomed(self, daemon: SimDaemon, copy: SubmitCopy, actions: list[Action]) -> None:
        written = {
            slot
            for part in copy.parts
            if part.target == HOST
            for slot in unpack_pages(part.target_pages)
        }
        for node in daemon.directory.host.nodes.values():
            residency = node.resident(HOST)
            if residency is not None and written.intersection(unpack_pages(residency.pages)):
                raise Violation(self.name, f"{copy} of a closed pool was published: {node!r}")
        for action in actions:
            if isinstance(action, Answer) and getattr(action.body, "landed", False):
                raise Violation(self.name, f"{copy} of a closed pool has landed: {action}")


def _places(copy: SubmitCopy) -> set[int]:
    places = {place for part in copy.parts for place in (part.source, part.target)}
    return places | {word.pool for word in copy.words} | {fence.pool for fence in copy.fences}
