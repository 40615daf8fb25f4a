"""Damage: host pages that differ from their checksums are matched by nobody from here on.

Owns what becomes of them. A damaged page is given up with everything below it, its slot is
quarantined (never handed out again by this directory), and copies that are reading it do not count.
What a pool still holds of it is backed up again, elsewhere. It never looks at a page: a mover does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from directory.core.copies import Copy
from directory.core.events import PagesDamaged
from directory.core.host import HostSlots
from directory.core.ids import HOST, NodeId
from directory.core.journal import HostJournal
from directory.core.node import Node
from directory.core.place import HostState
from directory.core.states import ResidencyState
from directory.core.tokens import unpack_pages
from directory.core.tree import Tree


class Damage:
    """Takes reports of damage in; mutates the tree, the slots and the journal."""

    def __init__(
        self,
        tree: Tree,
        host: HostState,
        slots: HostSlots,
        journal: HostJournal,
        count: Callable[[str, int], None],
    ) -> None:
        self._tree = tree
        self._host = host
        self._slots = slots
        self._journal = journal
        self._count = count

    def take(self, event: PagesDamaged, copies: Iterable[Copy]) -> list[Node]:
        """Give damaged pages up; returns nodes (ancestors first) that may be backed up again.

        `copies`: those in flight. A slot that is being filled now, or is not of this tier, is left
        alone: what was read there is gone already.
        """
        filling = {
            slot
            for nodes in self._tree.fills.values()
            for node in nodes
            for slot in unpack_pages(node.places[HOST].pages)
        }
        known = {slot for slot in unpack_pages(event.slots) if slot not in filling}
        damaged = {slot for slot in known if self._slots.quarantine(slot)}
        if not damaged:
            return []
        self._count("host_pages_damaged", len(damaged))
        given_up: dict[NodeId, Node] = {}
        for node in list(self._host.nodes.values()):
            if self._cut(node, damaged):
                given_up.update((below.id, below) for below in self._give_up(node))
        for copy in copies:
            if copy.body is None or copy.claim is None:
                continue
            if any(node.id in given_up for node in copy.claim.path()):
                copy.doom()
        self._free(reversed(given_up.values()))
        return [node for node in given_up.values() if node.id in self._tree.nodes]

    def _cut(self, node: Node, damaged: set[int]) -> bool:
        """Whether pages of a node that is matched are damaged; what precedes them is cut off."""
        residency = node.resident(HOST)
        if residency is None:
            return False
        slots = unpack_pages(residency.pages)
        first = next((at for at, slot in enumerate(slots) if slot in damaged), None)
        if first:
            self._tree.split(node, first)  # the lower half is the node itself
        return first is not None

    def _give_up(self, top: Node) -> list[Node]:
        """Retire a node and all below it at the host, ancestors first."""
        order: list[Node] = []
        todo = [top]
        while todo:
            node = todo.pop()
            residency = node.places.get(HOST)
            if residency is None:
                continue
            todo += node.children.values()
            order.append(node)
            if residency.state is not ResidencyState.DRAINING:
                self._journal.give_up(residency)
                self._tree.retire(node, HOST)
        return order

    def _free(self, nodes: Iterable[Node]) -> None:
        """Let go of what nobody holds, leaves first; the rest goes with its last holder."""
        for node in nodes:
            if node.id in self._tree.nodes and HOST in node.places:
                size = node.space.page_bytes
                freed = self._tree.release_drained(node, HOST)
                if freed:
                    self._slots.release(size, freed)
