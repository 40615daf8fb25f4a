"""A radix tree over chained digests: which paths were seen, and when each page was last touched.

Owns its nodes; holds no pages, places or leases. A chained digest names a whole path, so a node
is found by the digest of its first page alone and a walk compares one digest a node. The digests
have 64 bits: among ten million pages two differ by 1 chance in 400,000 of being taken for one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from directory.analytics.record import Digests

EDGE_PAGES_MAX: Final = 4_096
"""Pages of one node: to split one copies its pages, and is to stay a small piece of work."""


class Stretch(NamedTuple):
    """Neighbouring pages of a path that were last touched by the same access."""

    tick: int
    pages: int


class PathNode:
    """An edge of the tree. `edge`: its digests; `tick`: last access; `children`: how many."""

    __slots__ = ("children", "edge", "tick")

    def __init__(self, edge: Digests, tick: int, children: int = 0) -> None:
        self.edge = edge
        self.tick = tick
        self.children = children

    def __repr__(self) -> str:
        return f"<PathNode {len(self.edge)} pages, tick {self.tick}, {self.children} children>"


class Walk(NamedTuple):
    """How far a path is known. `forked`: another path leaves the known part at its end."""

    known: int
    stretches: list[Stretch]
    forked: bool


class Known(NamedTuple):
    """The same without when: of whoever asks for nothing else."""

    pages: int
    forked: bool


class PathTree:
    """Paths seen so far. Every page on a path was touched at its descendants' last tick or later.

    `pages`: different pages seen.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, PathNode] = {}
        self.pages = 0

    def touch(self, path: Digests, tick: int, extent: int | None = None) -> Walk:
        """Walk a path, mark its first `extent` pages (all if None) as touched at `tick`.

        Pages within the extent that were not known are added. Returns what was known before, of
        the whole path.
        """
        extent = len(path) if extent is None else min(extent, len(path))
        nodes, known, forked = self._find(path)
        stretches = _stretches(nodes)
        self._mark(nodes, path, tick, extent)
        return Walk(known, stretches, forked)

    def take(self, path: Digests, tick: int, extent: int) -> Known:
        """The same for an `extent` that the path has, told in fewer words."""
        nodes, known, forked = self._find(path)
        self._mark(nodes, path, tick, extent)
        return Known(known, forked)

    def look(self, path: Digests) -> Walk:
        """Walk a path without touching it."""
        nodes, known, forked = self._find(path)
        return Walk(known, _stretches(nodes), forked)

    def known(self, path: Digests) -> Known:
        """The same in fewer words."""
        _, known, forked = self._find(path)
        return Known(known, forked)

    def _mark(
        self, nodes: list[tuple[PathNode, int]], path: Digests, tick: int, extent: int
    ) -> None:
        """Take in the first `extent` pages of a path of which `nodes` are known."""
        covered = 0
        last: PathNode | None = None
        for node, pages in nodes:
            if covered >= extent:
                break
            pages = min(pages, extent - covered)
            if pages < len(node.edge):
                self._split(node, pages)
            if (
                last is not None
                and last.children == 1
                and len(last.edge) + len(node.edge) <= EDGE_PAGES_MAX
            ):
                # Nothing else leaves here: one node does for both, and walks stay short.
                del self._nodes[node.edge[0]]
                last.edge.extend(node.edge)
                last.children = node.children
            else:
                node.tick = tick
                last = node
            covered += pages
        if covered < extent:
            self.pages += extent - covered
            if last is not None and not last.children:
                end = min(extent, covered + max(0, EDGE_PAGES_MAX - len(last.edge)))
                last.edge.extend(path[covered:end])
                covered = end
            while covered < extent:
                end = min(extent, covered + EDGE_PAGES_MAX)
                node = self._nodes[path[covered]] = PathNode(path[covered:end], tick)
                if last is not None:
                    last.children += 1
                last, covered = node, end

    def _find(self, path: Digests) -> tuple[list[tuple[PathNode, int]], int, bool]:
        """The known nodes of a path with how many of their pages are on it."""
        nodes: list[tuple[PathNode, int]] = []
        get = self._nodes.get
        position, length = 0, len(path)
        forked = False
        while position < length:
            node = get(path[position])
            if node is None:
                break
            pages = len(node.edge)
            if position + pages > length or path[position + pages - 1] != node.edge[-1]:
                pages = shared_pages(node.edge, path, position)
                nodes.append((node, pages))
                position += pages
                forked = True
                break
            nodes.append((node, pages))
            position += pages
            forked = node.children > 0
        return nodes, position, forked and position < length

    def _split(self, node: PathNode, pages: int) -> None:
        """Cut a node after `pages` pages; the node itself stays the upper part."""
        lower = PathNode(node.edge[pages:], node.tick, node.children)
        self._nodes[lower.edge[0]] = lower
        node.edge = node.edge[:pages]
        node.children = 1

    def drop(self, nodes: int) -> bool:
        """Let go of so many nodes of a tree that nobody asks any more; whether some are left."""
        for _ in range(min(nodes, len(self._nodes))):
            self._nodes.popitem()
        return bool(self._nodes)

    def copy(self) -> PathTree:
        """Another tree that knows the same and shares nothing."""
        twin = PathTree()
        twin.pages = self.pages
        twin._nodes = {
            first: PathNode(node.edge[:], node.tick, node.children)
            for first, node in self._nodes.items()
        }
        return twin

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        return f"<PathTree {self.pages} pages in {len(self._nodes)} nodes>"


def shared_pages(edge: Digests, path: Digests, position: int) -> int:
    """How many leading digests agree, at least 1: chained, so agreement is a prefix."""
    low, high = 1, min(len(edge), len(path) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if edge[middle - 1] == path[position + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _stretches(nodes: list[tuple[PathNode, int]]) -> list[Stretch]:
    stretches: list[Stretch] = []
    for node, pages in nodes:
        if stretches and stretches[-1].tick == node.tick:
            stretches[-1] = Stretch(node.tick, stretches[-1].pages + pages)
        else:
            stretches.append(Stretch(node.tick, pages))
    return stretches
