"""Tree nodes and their residencies: the data that `tree.Tree` alone mutates.

Owns no behaviour beyond reading itself. A node's edge is packed tokens, a whole number of pages;
children are keyed by the bytes of their first page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from directory.core.ids import NodeId, OpId, Place
from directory.core.namespace import NamespaceKey
from directory.core.states import ResidencyState
from directory.core.tokens import unpack_pages


class Run(NamedTuple):
    """Consecutive pages of one span: pages [first, first + length) of the insert report."""

    span: int
    first: int
    length: int


class Residency:
    """One node's pages at one place.

    `pages`: packed, one a page of the edge. `runs`: the spans behind them (pools only).
    `written`: timelines after which they may be read. `locks`: lease claims at or below.
    `children`: child nodes with a residency here. `tick`: last use. `op`: the fill, or 0.
    """

    __slots__ = ("children", "locks", "op", "pages", "runs", "state", "tick", "written")

    def __init__(
        self,
        state: ResidencyState,
        pages: bytes,
        runs: tuple[Run, ...],
        written: tuple[int, int],
        tick: int,
        op: OpId = 0,
    ) -> None:
        self.state = state
        self.pages = pages
        self.runs = runs
        self.written = written
        self.tick = tick
        self.op = op
        self.locks = 0
        self.children = 0

    @property
    def page_count(self) -> int:
        """Pages held."""
        return len(self.pages) // 4

    def __repr__(self) -> str:
        return (
            f"Residency({self.state}, pages={list(unpack_pages(self.pages))}, "
            f"locks={self.locks}, children={self.children})"
        )


class Space:
    """One namespace's root. `page_key`: bytes of packed tokens a page.

    `page_bytes`: one host page; it consists of as many shards as its groups have ranks.
    """

    __slots__ = ("fingerprint", "key", "page_bytes", "page_key", "page_size", "ranks", "root")

    def __init__(
        self,
        fingerprint: bytes,
        key: NamespaceKey,
        page_size: int,
        page_bytes: int,
        ranks: int = 1,
    ) -> None:
        self.fingerprint = fingerprint
        self.key = key
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.ranks = ranks
        self.page_key = page_size * key.unit_bytes
        self.root = Node(0, None, b"", self)


class Node:
    """A tree node. `ends`: lease claims and leases that end exactly here (they bar merging)."""

    __slots__ = ("children", "edge", "ends", "id", "parent", "places", "space")

    def __init__(self, node_id: NodeId, parent: Node | None, edge: bytes, space: Space) -> None:
        self.id = node_id
        self.parent = parent
        self.edge = edge
        self.space = space
        self.children: dict[bytes, Node] = {}
        self.places: dict[Place, Residency] = {}
        self.ends = 0

    @property
    def page_count(self) -> int:
        """Pages of the edge."""
        return len(self.edge) // self.space.page_key

    def path(self) -> list[Node]:
        """Return the nodes from the root's child down to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def resident(self, place: Place) -> Residency | None:
        """Return the residency at a place if its pages can be used, else None."""
        residency = self.places.get(place)
        if residency is None or residency.state is not ResidencyState.RESIDENT:
            return None
        return residency

    def __repr__(self) -> str:
        where = " ".join(f"{place}:{r.state}" for place, r in sorted(self.places.items()))
        return f"Node({self.id}, pages={self.page_count}, children={len(self.children)}, {where})"


Tap = Callable[[Node, Place, int], None]
"""Told by the tree of every node that becomes usable at a place (1) or no longer is (-1), while its
path still is what it was. Splits and merges are not told. It must change nothing."""
