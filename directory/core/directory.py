"""The Directory: one deterministic state machine over everything the daemon knows.

`handle(event) -> list[Action]` is its only entry. Owns the tree, pools, leases, the host tier's
slots and the transfers; decides matches, leases, evictions and copies. It must never read a
clock, block, touch bytes of a page, or depend on anything but the events so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from directory.core import limits
from directory.core.actions import (
    Action,
    Answer,
    Counters,
    MoreToClose,
    Refused,
    Registered,
    RegistrationRefused,
    ReleasePool,
)
from directory.core.closing import Closing
from directory.core.damage import Damage
from directory.core.errors import (
    Diverged,
    GroupIncomplete,
    InternalError,
    TooMany,
    TreecoredError,
    UnknownPool,
)
from directory.core.events import (
    Asked,
    Body,
    CloseMore,
    CopyDone,
    Event,
    Lock,
    Match,
    MoverLost,
    PagesDamaged,
    PoolClosed,
    PoolRegistered,
    Restore,
    Stats,
    Unlock,
)
from directory.core.group import GroupLog, Turn
from directory.core.host import HostSlots
from directory.core.ids import HOST, PoolId
from directory.core.invariants import violations
from directory.core.journal import HostJournal
from directory.core.lease import LeaseTable
from directory.core.place import HostState, PoolState
from directory.core.pool import flush_pages
from directory.core.records import SlotWord
from directory.core.recovery import Builder, find
from directory.core.registry import Registry
from directory.core.requests import Handler, Requests
from directory.core.states import PoolPhase
from directory.core.story import Story
from directory.core.transfers import Transfers
from directory.core.tree import Tree

LOOKS: Final = frozenset({Match, Lock, Unlock})
"""Somebody waits for these, one after the other: none of the journal's own work is done then."""


class Directory:
    """The authoritative state of one node. `host_bytes`: memory of the host tier.

    `journal`: a random number of this boot, not 0, where the tier is to outlive it; then the
    actions include what is to be written down. `closed_a_step`: leases and nodes of
    pools that have ended which one event takes out.
    """

    def __init__(
        self,
        *,
        host_bytes: int = 0,
        segment_bytes: int = 64 * limits.MIB,
        journal: int = 0,
        closed_a_step: int = limits.CLOSED_A_STEP_MAX,
    ) -> None:
        self.tree = Tree()
        self.host = HostState()
        self.tree.places[HOST] = self.host
        self.slots = HostSlots(host_bytes, segment_bytes)
        self.leases = LeaseTable(self.tree, self.slots)
        self.registry = Registry(self.tree)
        self.pools = self.registry.pools
        self.closing = Closing(self.tree, self.leases, closed_a_step)
        self.counters: dict[str, int] = {}
        self.story = Story()
        self.journal = HostJournal(self.host, self.tree.nodes, journal)
        self.transfers = Transfers(
            self.tree,
            self.host,
            self.slots,
            self.pools,
            self.journal,
            self._count,
            ending=lambda: self.closing.busy,
        )
        self.damage = Damage(self.tree, self.host, self.slots, self.journal, self._count)
        requests = Requests(self.tree, self.host, self.leases, self.transfers, self._count)
        handlers: dict[type[Body], Handler] = {**requests.handlers, Stats: self._stats}
        self._handlers = {
            kind: (handler, f"asked_{kind.__name__.lower()}") for kind, handler in handlers.items()
        }

    def handle(self, event: Event) -> list[Action]:
        """Take in one event and return what is to be done about it.

        A client's mistake is answered with `Refused`; only a defect of treecored itself raises,
        as `InternalError` with the story of what led to it.
        """
        try:
            go_on = True
            if type(event) is Asked:
                actions = self._asked(event)
                go_on = type(event.body) not in LOOKS
            else:
                actions = self._spread(self._told(event))
                self.registry.forget_closed()
            return [*self.journal.take(go_on=go_on), *actions] if self.journal.on else actions
        except InternalError as error:
            raise InternalError(f"{error}\nstory:\n{self.story.tell()}") from error

    def _told(self, event: Event) -> list[Action]:
        if isinstance(event, CopyDone):
            self.story.add("copy_done", event.op, event.outcome, event.detail)
            return self.transfers.finish(event)
        if isinstance(event, PoolRegistered):
            return self._register(event)
        if isinstance(event, PoolClosed):
            return self._end_session(event.pool)
        if isinstance(event, CloseMore):
            return self._close_more()
        if isinstance(event, PagesDamaged):
            self.story.add("pages_damaged", len(event.slots) // 4, event.found_by)
            self.transfers.wish(self.damage.take(event, self.transfers.copies.values()))
            return self.transfers.pump()
        assert isinstance(event, MoverLost)
        self.story.add("mover_lost", event.detail)
        return self.transfers.lose_all(event.detail or "mover lost")

    def recover(self, logs: Iterable[bytes], word: SlotWord, sizes: Sequence[int]) -> list[Action]:
        """Take up what an earlier boot's journal says of the host tier, before any event.

        `logs`: older first. `word`: reads a slot's word. `sizes`: bytes of memory that there are
        of each segment. Returns the journal's actions: what could not be taken up is invalid, and
        one new log says the rest. Damage costs pages; nothing that it does raises.
        """
        found = find(logs, word)
        outcome = Builder(self.tree, self.host, self.slots, sizes).build(found)
        self.journal.seq = found.seq
        self.journal.invalidate(outcome.dropped)
        self._count("host_pages_recovered", outcome.pages)
        self._count("host_pages_not_recovered", len(outcome.dropped) // 4)
        self._count("journal_records_lost", found.lost)
        return self.journal.rewrite()

    def check(self) -> list[str]:
        """Walk the whole state and return every invariant that does not hold, with numbers."""
        return violations(self)

    def figures(self) -> dict[str, int]:
        """Return the counters since the start and the present totals, by name."""
        facts = dict(sorted(self.counters.items()))
        facts["nodes"] = len(self.tree.nodes)
        facts["namespaces"] = len(self.tree.spaces)
        facts["pools"] = len(self.pools)
        facts["leases"] = len(self.leases)
        facts["copies_in_flight"] = len(self.transfers.copies)
        facts["backups_waiting"] = len(self.transfers.wished)
        facts["host_pages"] = self.host.pages
        facts["host_pages_leased"] = self.host.locked_pages
        facts["host_pages_quarantined"] = len(self.slots.damaged)
        facts["journal_bytes"] = self.journal.log_bytes
        return facts

    # Sessions.

    def _register(self, event: PoolRegistered) -> list[Action]:
        try:
            pool, member = self.registry.register(event)
        except TreecoredError as error:
            return [RegistrationRefused(event.token, error.code, str(error))]
        self.story.add("registered", member, repr(pool))
        return [Registered(event.token, member, pool.generation)]

    def _end_session(self, member: PoolId) -> list[Action]:
        """A rank's session is over, and with it its whole group."""
        pool = self.registry.members.get(member)
        if pool is None:
            return []
        if pool.log is not None:
            pool.log.leave(member)
        return self._close(pool) if pool.live else []

    def _close(self, pool: PoolState) -> list[Action]:
        self.story.add("closed", repr(pool))
        self.registry.begin_close(pool)
        self.transfers.doom(pool)
        going_on = self.closing.busy  # then a step has been asked for that will see to it
        self.closing.begin(pool)
        return [
            *(ReleasePool(member) for member in pool.members if member),
            *(() if going_on else self._close_more()),
        ]

    def _close_more(self) -> list[Action]:
        self.closing.step()
        more = [MoreToClose()] if self.closing.busy else []
        return [*self.transfers.pump(), *more]

    # Clients.

    def _asked(self, event: Asked) -> list[Action]:
        self.story.add(type(event.body), event.pool, event.seq)
        pool = self.registry.members.get(event.pool)
        if pool is None or pool.phase is not PoolPhase.LIVE:
            return self._refuse(
                event.pool,
                event.seq,
                UnknownPool(f"pool {event.pool} is not registered; register again"),
            )
        if pool.log is None:
            return self._carry_out(pool, event.seq, event.body)
        return self._asked_by_rank(pool, pool.log, event)

    def _asked_by_rank(self, pool: PoolState, log: GroupLog, event: Asked) -> list[Action]:
        """The first rank decides, the others are told what came of it."""
        try:
            turn = log.arrive(event.pool, event.seq, event.body)
        except (Diverged, TooMany) as error:
            # The ranks can never agree again on what their pages hold: their generation ends.
            actions = [*self._refuse(event.pool, event.seq, error), *self._close(pool)]
            self.registry.forget_closed()
            return actions
        if turn is Turn.FIRST:
            actions = self._spread(self._carry_out(pool, event.seq, event.body))
            if not isinstance(event.body, Restore):
                log.settle(event.seq)  # a restore's answer may be still to come
            return actions
        reply = log.again(event.pool, event.seq) if turn is Turn.LATER else None
        return [] if reply is None else [Answer(event.pool, event.seq, reply)]

    def _carry_out(self, pool: PoolState, seq: int, body: Body) -> list[Action]:
        """Have the effect of one message; answers are the pool's, whichever ranks it has."""
        try:
            if not pool.complete:
                raise GroupIncomplete(
                    f"instance {pool.instance!r} has {len(pool.members)} ranks and not all are "
                    "registered; wait for them"
                )
            handler, counter = self._handlers[type(body)]
            self._count(counter, 1)
            return handler(pool, seq, body)
        except InternalError:
            raise
        except TreecoredError as error:
            if isinstance(error, Diverged):
                # What it reported before can no longer be told from what is true: a miss is
                # correct, a wrong page is not. The owner republishes.
                self.transfers.doom_reads(pool)
                flush_pages(self.tree, pool)
            return self._refuse(pool.place, seq, error)

    def _refuse(self, pool: PoolId, seq: int, error: TreecoredError) -> list[Action]:
        self._count(f"refused_{error.code}", 1)
        return [Answer(pool, seq, Refused(error.code, str(error)))]

    def _spread(self, actions: list[Action]) -> list[Action]:
        """Turn a group's answers into those of its ranks that have asked."""
        if not self.registry.groups:
            return actions
        spread: list[Action] = []
        for action in actions:
            pool = self.pools.get(action.pool) if isinstance(action, Answer) else None
            if pool is None or pool.log is None or not isinstance(action, Answer):
                spread.append(action)
                continue
            members = pool.log.reply(action.seq, action.body)
            spread += [Answer(member, action.seq, action.body) for member in members]
        return spread

    def _stats(self, pool: PoolState, seq: int, body: Stats) -> list[Action]:
        found = tuple(self.check()) if body.check else ()
        return [Answer(pool.place, seq, Counters(self.figures(), found))]

    # Small things.

    def _count(self, name: str, amount: int) -> None:
        if amount:
            self.counters[name] = self.counters.get(name, 0) + amount
