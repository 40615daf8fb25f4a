"""Places: the bookkeeping of one pool or of the host tier beside the tree.

Owns page totals, the eviction order and, for pools, the spans. `tree.Tree` mutates totals, order
and span parts; `Directory` (or the mirror) creates and closes places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from directory.core.again import Again
from directory.core.eviction import EvictionOrder
from directory.core.group import GroupLog
from directory.core.ids import HOST, POOL_WORD, NodeId, Place, PoolId
from directory.core.node import Node, Run
from directory.core.page_set import PageSet
from directory.core.spans import SpanState, merge_parts, split_parts
from directory.core.states import PoolPhase


class PlaceState(ABC):
    """One place. Page counts are of RESIDENT pages; `locked_pages` of those under a lease."""

    __slots__ = ("locked_pages", "order", "pages", "place", "tick")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.order = EvictionOrder(place)
        self.pages = 0
        self.locked_pages = 0
        self.tick = 0

    def next_tick(self) -> int:
        """Advance this place's clock of uses by one operation."""
        self.tick += 1
        return self.tick

    def order_for(self, node: Node) -> EvictionOrder:  # noqa: ARG002 - the host tier needs it
        """Return the eviction order a node belongs to."""
        return self.order

    def count(self, node: Node, pages: int, locked: int) -> None:  # noqa: ARG002 - likewise
        """Add to the totals of resident and of locked pages."""
        self.pages += pages
        self.locked_pages += locked

    @property
    @abstractmethod
    def nodes(self) -> dict[NodeId, Node]:
        """The nodes that are here, in whichever state."""

    @abstractmethod
    def on_attach(self, node: Node, runs: tuple[Run, ...]) -> None:
        """A node is here from now on."""

    @abstractmethod
    def on_detach(self, node: Node, runs: tuple[Run, ...]) -> None:
        """A node is here no more."""

    @abstractmethod
    def on_split(self, lower: Node, upper: Node) -> None:
        """A node here was split; `upper` is its new upper half."""

    @abstractmethod
    def on_merge(self, upper: Node, lower: Node, runs: tuple[Run, ...]) -> None:
        """A node here (its runs were `runs`) was merged into its child."""

    @property
    def evictable_pages(self) -> int:
        """Resident pages that no lease protects."""
        return self.pages - self.locked_pages


class HostState(PlaceState):
    """The host tier: one eviction order a page size, for slots of one size free only that size.

    `evictable`: resident pages without a lease, by page size in bytes. `unwritten`: nodes that a
    compaction of the journal under way has still to write (`journal` mutates it, too).
    """

    __slots__ = ("_nodes", "evictable", "orders", "unwritten")

    def __init__(self) -> None:
        super().__init__(HOST)
        self._nodes: dict[NodeId, Node] = {}
        self.unwritten: dict[NodeId, None] = {}
        self.orders: dict[int, EvictionOrder] = {}
        self.evictable: dict[int, int] = {}

    def count(self, node: Node, pages: int, locked: int) -> None:
        """Add to the totals, and to those of the node's page size."""
        super().count(node, pages, locked)
        size = node.space.page_bytes
        self.evictable[size] = self.evictable.get(size, 0) + pages - locked

    @property
    def nodes(self) -> dict[NodeId, Node]:
        """The nodes that are here, in the order in which they came."""
        return self._nodes

    def on_attach(self, node: Node, runs: tuple[Run, ...]) -> None:
        """Remember it."""
        del runs
        self._nodes[node.id] = node

    def on_detach(self, node: Node, runs: tuple[Run, ...]) -> None:
        """Forget it."""
        del runs
        del self._nodes[node.id]

    def on_split(self, lower: Node, upper: Node) -> None:
        """Both halves are to be written where the whole was."""
        self._nodes[upper.id] = upper
        if lower.id in self.unwritten:
            self.unwritten[upper.id] = None

    def on_merge(self, upper: Node, lower: Node, runs: tuple[Run, ...]) -> None:
        """The whole is to be written where the upper half was."""
        del runs, self._nodes[upper.id]
        if upper.id in self.unwritten:
            del self.unwritten[upper.id]
            self.unwritten[lower.id] = None

    def order_for(self, node: Node) -> EvictionOrder:
        """Return the order of the node's page size in bytes."""
        size = node.space.page_bytes
        order = self.orders.get(size)
        if order is None:
            order = self.orders[size] = EvictionOrder(HOST)
        return order


class PoolState(PlaceState):
    """One registration of one scheduler's pool: of all ranks of its group.

    `members`: the ranks' own numbers in rank order (0: not registered yet); `place` is the number
    of the first one to register. `page_bytes`: one host page, all ranks' shards. `log`: what the
    ranks have asked (None for a group of one). `owned`: pages in the tree. `filling`: targets of
    restores that have not been answered. `again`: what its last matches found. `unlisted`: while a
    list of live requests arrives in parts, the leases from before it that no part has named yet.
    """

    __slots__ = (
        "again",
        "complete",
        "copies",
        "filling",
        "fingerprint",
        "generation",
        "instance",
        "leases",
        "log",
        "members",
        "mode",
        "owned",
        "page_bytes",
        "page_count",
        "page_size",
        "phase",
        "restores",
        "spans",
        "unlisted",
        "word",
    )

    def __init__(
        self,
        pool: PoolId,
        *,
        instance: str,
        generation: int,
        fingerprint: bytes,
        page_size: int,
        page_count: int,
        page_bytes: int,
        mode: str,
        world_size: int = 1,
    ) -> None:
        super().__init__(pool)
        self.instance = instance
        self.generation = generation
        self.fingerprint = fingerprint
        self.page_size = page_size
        self.page_count = page_count
        self.page_bytes = page_bytes
        self.mode = mode
        self.members: list[PoolId] = [pool] if world_size == 1 else [0] * world_size
        self.complete = world_size == 1
        self.log = None if world_size == 1 else GroupLog(world_size)
        self.phase = PoolPhase.LIVE
        self.word = 0
        self.spans: dict[int, SpanState] = {}
        self.owned = PageSet()
        self.filling: set[int] = set()
        self.leases: dict[int, None] = {}
        self.copies: dict[int, None] = {}
        self.restores = 0
        self.again = Again()
        self.unlisted: dict[int, None] | None = None

    @property
    def nodes(self) -> dict[NodeId, Node]:
        """The nodes that are here: those that the spans are in. Made when asked for."""
        parts = (node for span in self.spans.values() for node in span.parts)
        return {node.id: node for node in parts}

    def on_attach(self, node: Node, runs: tuple[Run, ...]) -> None:
        """Enter it into its spans' parts, behind those from before."""
        for run in runs:
            self.spans[run.span].append(node)

    def on_detach(self, node: Node, runs: tuple[Run, ...]) -> None:
        """Take it out of them; a span without parts is over."""
        for run in runs:
            span = self.spans[run.span]
            span.remove(node)
            if span.first is None:
                del self.spans[run.span]

    def on_split(self, lower: Node, upper: Node) -> None:
        """Enter the upper half into its spans' parts."""
        split_parts(self, lower, upper)

    def on_merge(self, upper: Node, lower: Node, runs: tuple[Run, ...]) -> None:
        """Replace the node by its child in its spans' parts."""
        merge_parts(self, upper, lower, runs)

    @property
    def live(self) -> bool:
        """Whether the owner is alive and its pages may be read."""
        return self.phase is PoolPhase.LIVE

    @property
    def shard_bytes(self) -> int:
        """Bytes of one page at one rank."""
        return self.page_bytes // len(self.members)

    def join(self, member: PoolId, rank: int) -> None:
        """A rank is registered under a number of its own."""
        self.members[rank] = member
        self.complete = 0 not in self.members

    def span_value(self, span: int) -> int:
        """Return the value a span was last reported with (the pool word's for slot 0)."""
        return self.word if span == POOL_WORD else self.spans[span].value

    def says(self, slot: int, value: int) -> bool:
        """Whether a word is still as it was reported."""
        if slot == POOL_WORD:
            return self.word == value
        span = self.spans.get(slot)
        return span is not None and span.value == value

    def __repr__(self) -> str:
        return (
            f"Pool({self.place} {self.instance!r} generation {self.generation} {self.phase}, "
            f"{'' if self.log is None else f'ranks={self.members}, '}"
            f"pages={self.pages}/{self.page_count}, locked={self.locked_pages}, "
            f"leases={len(self.leases)}, copies={len(self.copies)})"
        )
