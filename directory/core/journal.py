"""The host tier's journal: what a successor of this daemon must know to take the tier up again.

Owns the stamps of host pages and the order of what is written down; the shell keeps the bytes, in
memory that outlives the process. Two things are kept: a word for every slot, and an append-only
log. A host page is valid while its slot's word is the stamp that a record of the log names for it.
The word goes to 0 before a copy into the slot may begin and when the page is given up; it becomes
the new stamp once the copy has ended. So a log that has lost its tail, or anything else, loses
pages and never makes a wrong one. It must never be asked what the tier holds: the tree knows.

Every action of the journal comes before all others of its event, in the order it was made.
"""

from __future__ import annotations

from collections.abc import Iterable

from directory.core import limits
from directory.core.actions import Action, Journal, JournalBegin, JournalEnd
from directory.core.ids import HOST, NodeId
from directory.core.namespace import NamespaceKey
from directory.core.node import Node, Residency, Run, Space
from directory.core.place import HostState
from directory.core.records import PagesRecord, SpaceRecord, frame, stamp_of
from directory.core.tokens import unpack_pages

SpaceKey = tuple[bytes, NamespaceKey, int, int, int]


class HostJournal:
    """Writes the journal of one directory. `salt` 0: nothing is written, and nothing costs.

    `records`, `log_bytes`: written since the start, and in the logs that are not dropped.
    """

    def __init__(self, host: HostState, nodes: dict[NodeId, Node], salt: int) -> None:
        self.on = salt != 0
        self.log_bytes = 0
        self.seq = 0
        self._host = host
        self._nodes = nodes
        self._salt = salt
        self._pending: list[Action] = []
        self._named: dict[SpaceKey, tuple[int, int]] = {}
        self._numbers = 0
        self._begun_at = 0
        """Bytes of the log when its present file was begun: those before are to be dropped."""
        self._compact_at = 0

    def take(self, *, go_on: bool = True) -> list[Action]:
        """Return what is to be written now, with a bounded part of a compaction under way, if that
        is to `go_on` now."""
        if go_on and (self._pending or self._host.unwritten):
            self._compact()
        pending, self._pending = self._pending, []
        return pending

    def invalidate(self, slots: bytes) -> None:
        """Slots are about to be written into, or their pages were given up."""
        if self.on and slots:
            self._pending.append(Journal(b"", slots, 0))

    def validate(self, nodes: Iterable[Node]) -> None:
        """These nodes have become resident at the host, ancestors first."""
        if not self.on:
            return
        for node in nodes:
            residency = node.places[HOST]
            stamp = stamp_of(self._salt, self.seq + 1)
            residency.runs = (Run(stamp, 0, node.page_count),)
            self._write(node, residency, valid=True)

    def give_up(self, residency: Residency) -> None:
        """Pages of the host are matched by nobody any more, whoever still reads them."""
        self.invalidate(residency.pages)
        residency.runs = ()

    def rewrite(self) -> list[Action]:
        """Return a whole log of what is resident now, coldest first, that replaces all others."""
        for node in sorted(self._host.nodes.values(), key=lambda node: node.places[HOST].tick):
            self._host.unwritten[node.id] = None
        self._host.unwritten = dict(reversed(self._host.unwritten.items()))
        self._begin()
        while self._host.unwritten:
            self._step()
        self._end()
        pending, self._pending = self._pending, []
        return pending

    # Records.

    def _write(self, node: Node, residency: Residency, *, valid: bool) -> None:
        """Write a node's pages down under their stamps, in records of bounded size."""
        parent_slot, parent_stamp = _parent(node)
        key = node.space.page_key
        most = max(1, limits.JOURNAL_TOKENS_BYTES_MAX // key)
        at = 0
        for run in residency.runs:
            for first in range(at, at + run.length, most):
                last = min(first + most, at + run.length)
                slots = residency.pages[4 * first : 4 * last]
                space = self._number(node.space)
                tokens = node.edge[first * key : last * key]
                record = PagesRecord(space, run.span, parent_slot, parent_stamp, slots, tokens)
                framed = self._frame(record)
                self._pending.append(
                    Journal(framed, slots, run.span) if valid else Journal(framed, b"", 0)
                )
                parent_slot, parent_stamp = unpack_pages(slots[-4:])[0], run.span
            at += run.length

    def _number(self, space: Space) -> int:
        """A namespace's number in this log; its record is repeated, for damage to leave one."""
        key = (space.fingerprint, space.key, space.page_size, space.page_bytes, space.ranks)
        number, said_at = self._named.get(key, (0, 0))
        if not number or self.log_bytes - said_at > limits.JOURNAL_SPACE_AGAIN_BYTES:
            if not number:
                self._numbers += 1
                number = self._numbers
            self._named[key] = (number, self.log_bytes)
            self._pending.append(Journal(self._frame(SpaceRecord(number, *key)), b"", 0))
        return number

    def _frame(self, record: PagesRecord | SpaceRecord) -> bytes:
        self.seq += 1
        framed = frame(self.seq, record)
        self.log_bytes += len(framed)
        return framed

    # Compaction: a new log is begun, everything resident is written into it a little at a time,
    # and then the older ones are dropped. Until then all of them count.

    def _compact(self) -> None:
        if self._host.unwritten:
            written = self.log_bytes
            for _ in range(limits.JOURNAL_COMPACT_NODES_A_STEP):
                self._step()
                if self.log_bytes - written > limits.JOURNAL_COMPACT_BYTES_A_STEP:
                    break
                if not self._host.unwritten:
                    break
            if not self._host.unwritten:
                self._end()
        elif self.log_bytes >= max(limits.JOURNAL_COMPACT_BYTES_MIN, self._compact_at):
            self._host.unwritten = dict.fromkeys(reversed(self._host.nodes))
            self._begin()
            if not self._host.unwritten:
                self._end()

    def _begin(self) -> None:
        self._pending.append(JournalBegin())
        self._named.clear()
        self._numbers = 0
        self._begun_at = self.log_bytes

    def _step(self) -> None:
        node_id, _ = self._host.unwritten.popitem()
        node = self._nodes.get(node_id)
        if node is not None:
            residency = node.resident(HOST)
            if residency is not None:
                self._write(node, residency, valid=False)

    def _end(self) -> None:
        self._pending.append(JournalEnd())
        self.log_bytes -= self._begun_at
        self._named = {
            key: (number, said_at - self._begun_at)
            for key, (number, said_at) in self._named.items()
        }
        self._begun_at = 0
        self._compact_at = 2 * self.log_bytes

    def __repr__(self) -> str:
        return f"<HostJournal {self.seq} records, {self.log_bytes} bytes>"


def _parent(node: Node) -> tuple[int, int]:
    """Slot and stamp of the page before a node's first one; (0, 0) at the root."""
    parent = node.parent
    if parent is None or parent.parent is None:
        return 0, 0
    above = parent.places[HOST]
    return unpack_pages(above.pages[-4:])[0], above.runs[-1].span
