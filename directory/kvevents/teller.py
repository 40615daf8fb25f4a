"""The teller: turns records into batches of events, one stream a scheduler and one for viewers.

Owns which instance is which pool, and who has to be told everything anew: a scheduler that has
just come, or gone, and everybody after a break in what the daemon says. It knows no socket, clock
or sequence number.
"""

from __future__ import annotations

from collections.abc import Iterable

from directory.core import limits
from directory.core.ids import PoolId
from directory.kvevents.blocks import Stored
from directory.kvevents.ledger import Change, Ledger
from directory.kvevents.records import AnyRecord, Begin, Closed, Opened
from directory.kvevents.union import UNION, Union
from directory.kvevents.wire import Event

Batch = list[Event]


class Teller:
    """`take` records, get batches by instance. `union`: also one stream of everything, `UNION`."""

    def __init__(self, *, union: bool = False) -> None:
        self.ledger = Ledger()
        self.instances: dict[str, PoolId | None] = {}
        """Every instance that was ever told of, and its pool if it has one now."""
        self._union = Union(self.ledger) if union else None
        self._anew: set[str] = {UNION} if union else set()

    @property
    def union_page_size(self) -> int:
        """Page size of the union, 0 while there is none or nobody has come."""
        return 0 if self._union is None else self._union.page_size

    def take(self, records: Iterable[AnyRecord]) -> dict[str, list[Batch]]:
        """Take in records; return what is to be published now, in order, by instance."""
        for record in records:
            self._meet(record)
            self.ledger.take(record)
        if not self.ledger.whole:
            return {}
        told: dict[str, list[Batch]] = {}
        if self._union is not None:
            events = self._union.everything() if UNION in self._anew else self._union.settle()
            told[UNION] = batches(events)
            self._anew.discard(UNION)
        changes = self.ledger.settle()
        for instance, pool in self.instances.items():
            if instance in self._anew:
                told[instance] = batches(self.everything(instance))
            elif pool in changes:
                told[instance] = batches(_events(changes[pool]))
        self._anew.clear()
        return told

    def everything(self, instance: str) -> Batch:
        """Return the events that make any consumer know all of one stream: first, a clear."""
        if instance == UNION:
            return [None] if self._union is None else self._union.everything()
        pool = self.instances.get(instance)
        stored = [] if pool is None or not self.ledger.whole else self.ledger.snapshot(pool)
        return [None, *stored]

    def drop(self, instance: str) -> None:
        """Forget an instance that has no pool."""
        if self.instances.get(instance) is None:
            self.instances.pop(instance, None)

    def _meet(self, record: AnyRecord) -> None:
        match record:
            case Begin():
                self.instances = dict.fromkeys(self.instances)
                self._anew.update(self.instances)
                if self._union is not None:
                    self._anew.add(UNION)
            case Opened():
                self.instances[record.instance] = record.pool
                self._anew.add(record.instance)
            case Closed():
                opened = self.ledger.open.get(record.pool)
                # Its successor may have been opened before.
                if opened is not None and self.instances[opened.instance] == record.pool:
                    self.instances[opened.instance] = None
                    self._anew.add(opened.instance)


def batches(events: Batch) -> list[Batch]:
    """Cut what is to be told into batches of bounded size (and one event more)."""
    cut: list[Batch] = []
    room = 0
    for event in events:
        size = 1 if event is None else len(event.blocks if isinstance(event, Stored) else event[1])
        if not cut or size > room:
            cut.append([])
            room = limits.KV_EVENTS_BATCH_PAGES
        cut[-1].append(event)
        room -= size
    return cut


def _events(change: Change) -> Batch:
    return [*change.removed.items(), *change.stored]
