"""The radix tree of token paths, with a residency of pages a node and place.

Owns nodes, edges, residencies, lock counts, page totals and eviction orders, and keeps them
consistent under split, merge and prune. It decides no policy: what to copy, lease or evict is
the caller's (`pool`, `Directory`, the shim's mirror). It never compares anything but tokens.
"""

from __future__ import annotations

from collections import OrderedDict

from directory.core import limits
from directory.core.errors import InternalError, StaleNode, TooMany
from directory.core.ids import HOST, NodeId, OpId, Place, PoolId
from directory.core.namespace import NamespaceKey
from directory.core.node import NOT_FILED, RESIDENT, Node, Residency, RootedSpace, Run, Tap, untie
from directory.core.place import PlaceState
from directory.core.spans import join_runs, split_runs
from directory.core.states import RESIDENCY, ResidencyEvent, ResidencyState, step
from directory.core.tokens import common_pages

Step = tuple[Node, int]
"""A node on a path and how many of its pages matched (all, but for the last node)."""


class Tree:
    """Nodes by id, roots by namespace, places by id, fills in flight by operation."""

    def __init__(self) -> None:
        self.spaces: dict[tuple[bytes, NamespaceKey], RootedSpace] = {}
        self.nodes: dict[NodeId, Node] = {}
        self.places: dict[Place, PlaceState] = {}
        self.fills: dict[OpId, list[Node]] = {}
        self.filling: dict[tuple[NodeId, Place], OpId] = {}
        """The operation that fills a node at a place, until it ends."""
        self.wished: OrderedDict[NodeId, PoolId] = OrderedDict()
        """Backups that are wished for (transfers.py), by node: a wish goes with its node."""
        self.tap: Tap | None = None
        self._last_id: NodeId = 0

    # Namespaces and look-up.

    def space(
        self, fingerprint: bytes, key: NamespaceKey, page_size: int, page_bytes: int, ranks: int = 1
    ) -> RootedSpace:
        """Return the namespace's space, made on first use; raises `TooMany` beyond the limit."""
        space = self.spaces.get((fingerprint, key))
        if space is None:
            if len(self.spaces) >= limits.NAMESPACES_MAX:
                raise TooMany(f"{limits.NAMESPACES_MAX} namespaces are in use; flush or reuse some")
            key.check()
            space = RootedSpace(fingerprint, key, page_size, page_bytes, ranks)
            self.spaces[fingerprint, key] = space
        return space

    def find_space(self, fingerprint: bytes, key: NamespaceKey) -> RootedSpace | None:
        """Return the namespace's space if anything was ever published in it."""
        return self.spaces.get((fingerprint, key))

    def node(self, node_id: NodeId) -> Node:
        """Return a node by id, or raise `StaleNode`."""
        try:
            return self.nodes[node_id]
        except KeyError:
            raise StaleNode(f"node {node_id} is not in the tree any more; match again") from None

    def walk(
        self, space: RootedSpace, tokens: bytes, after: Node | None = None, position: int = 0
    ) -> list[Step]:
        """Return the longest path of whole pages that starts `tokens`, or goes on `after` one."""
        steps: list[Step] = []
        page = space.page_key
        end = len(tokens) - len(tokens) % page
        children = (after or space.root).children
        while position < end:
            child = children.get(tokens[position : position + page])
            if child is None:
                break
            edge = child.edge
            if not tokens.startswith(edge, position, end):
                steps.append((child, common_pages(edge, tokens, position, end, page)))
                break
            size = len(edge)
            steps.append((child, size // page))
            position += size
            children = child.children
        return steps

    # Shape.

    def add_leaf(self, parent: Node, edge: bytes) -> Node:
        """Hang a new node without residency below `parent`."""
        self._last_id += 1
        node = Node(self._last_id, parent, edge, parent.space)
        parent.hang(edge[: parent.space.page_key], node)
        parent.space.version += 1
        self.nodes[node.id] = node
        return node

    def split(self, node: Node, pages: int) -> Node:
        """Cut a node after `pages` pages; return the new upper half. The lower keeps the id.

        Both halves inherit residency, locks and fills in flight.
        """
        parent, key = node.parent, node.space.page_key
        cut = pages * key
        if parent is None or not 0 < cut < len(node.edge):
            raise InternalError(f"cannot split {node!r} at {pages}")
        upper = self.add_leaf(parent, node.edge[:cut])
        node.edge = node.edge[cut:]
        node.parent = upper
        upper.hang(node.edge[:key], node)
        for place, lower in node.places.items():
            top, bottom = split_runs(lower.runs, pages)
            above = lower.pages[: 4 * pages]
            half = Residency(place, lower.state, above, lower.written, lower.tick)
            half.runs = top
            half.locks = lower.locks
            half.children = 1
            lower.pages = lower.pages[4 * pages :]
            lower.runs = bottom
            upper.attach(half)
            self.places[place].on_split(node, upper)
            if (op := self.filling.get((node.id, place))) is not None:
                self.fills[op].insert(self.fills[op].index(node), upper)
                self.filling[upper.id, place] = op
        return upper

    def prune(self, node: Node) -> None:
        """Remove a node that has neither pages nor children, and its ancestors likewise; merge
        what is left of the chain. A space without nodes goes too."""
        while node.parent is not None and node.here is None and not node.children:
            parent = node.parent
            parent.unhang(node.edge[: node.space.page_key])
            parent.space.version += 1
            del self.nodes[node.id]
            self.wished.pop(node.id, None)
            node = parent
        if node.parent is not None:
            self.merge(node)
        elif not node.children:
            self.spaces.pop((node.space.fingerprint, node.space.key), None)

    def merge(self, node: Node) -> None:
        """Merge a node into its only child where nothing tells the two apart."""
        if node.parent is None or node.ends or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if node.places.keys() != child.places.keys():
            return
        for place, upper in node.places.items():
            lower = child.there(place)
            same = upper.locks == lower.locks and upper.tick == lower.tick
            if not (same and upper.state is lower.state is RESIDENT):
                return
        key = node.space.page_key
        for place, lower in child.places.items():
            upper = node.there(place)
            runs, above = join_runs(upper.runs, lower.runs), upper.runs
            lower.pages = upper.pages + lower.pages
            lower.runs = runs
            lower.written = (
                max(upper.written[0], lower.written[0]),
                max(upper.written[1], lower.written[1]),
            )
            state = self.places[place]
            if upper.filed != NOT_FILED:
                state.order_for(node).forget(upper, self.nodes)
            state.on_merge(node, child, above)
        node.parent.hang(node.edge[:key], child)
        node.space.version += 1
        child.edge = node.edge + child.edge
        child.parent = node.parent
        del self.nodes[node.id]
        if node.id in self.wished:
            self.wished.setdefault(child.id, self.wished.pop(node.id))

    # Residency.

    def publish(
        self,
        node: Node,
        place: Place,
        pages: bytes,
        runs: tuple[Run, ...],
        written: tuple[int, int],
        tick: int,
    ) -> None:
        """Absent -> resident. For pools, the runs' spans must be known to the pool."""
        state = step(RESIDENCY, ResidencyState.ABSENT, ResidencyEvent.PUBLISH, node)
        residency = Residency(place, state, pages, written, tick)
        residency.runs = runs
        self._attach(node, residency, runs)

    def begin_fill(self, node: Node, place: Place, pages: bytes, op: OpId, tick: int) -> None:
        """Absent -> filling by an operation; several nodes of one path may share it."""
        state = step(RESIDENCY, ResidencyState.ABSENT, ResidencyEvent.BEGIN_FILL, node)
        self.fills.setdefault(op, []).append(node)
        self.filling[node.id, place] = op
        self._attach(node, Residency(place, state, pages, (0, 0), tick), ())

    def land(self, op: OpId, place: Place) -> tuple[list[Node], bytes]:
        """Filling -> resident for all nodes of an operation; a retired one is detached instead.

        Returns the nodes now resident (root side first) and the pages that are free again.
        """
        landed: list[Node] = []
        freed: list[bytes] = []
        nodes = self.fills.pop(op)
        for node in reversed(nodes):
            residency = node.there(place)
            del self.filling[node.id, place]
            if residency.state is ResidencyState.DRAINING:
                freed.append(self._release(node, place))
                continue
            residency.state = step(RESIDENCY, residency.state, ResidencyEvent.LAND, node)
            self._count(place, node, residency, 1)
            self.refresh(node, place)
            landed.append(node)
        landed.reverse()
        if freed:
            freed.append(self._sweep(nodes, place))
        return landed, b"".join(freed)

    def lose(self, op: OpId, place: Place) -> tuple[list[Node], bytes]:
        """Filling -> absent for all nodes of an operation. Returns nodes and freed pages."""
        nodes = self.fills.pop(op)
        freed: list[bytes] = []
        for node in reversed(nodes):
            residency = node.there(place)
            del self.filling[node.id, place]
            event = ResidencyEvent.LOSE
            if residency.state is ResidencyState.DRAINING:
                event = ResidencyEvent.RELEASE
            step(RESIDENCY, residency.state, event, node)
            freed.append(self._detach(node, place))
        freed.append(self._sweep(nodes, place))
        return nodes, b"".join(freed)

    def drop(self, node: Node, place: Place) -> bytes:
        """Resident -> absent, of an unlocked leaf there. Returns its pages; the caller prunes."""
        residency = node.there(place)
        step(RESIDENCY, residency.state, ResidencyEvent.DROP, node)
        return self._detach(node, place)

    def retire(self, node: Node, place: Place) -> None:
        """Resident or filling -> draining: matched by nobody, freed when nothing holds it."""
        residency = node.there(place)
        if residency.state is RESIDENT:
            self._count(place, node, residency, -1)
        residency.state = step(RESIDENCY, residency.state, ResidencyEvent.RETIRE, node)
        self.refresh(node, place)

    def release_drained(self, node: Node, place: Place) -> bytes:
        """Detach a node, and then its ancestors, that are draining and held by nothing more.

        Returns the freed pages; prunes."""
        freed: list[bytes] = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            residency = at.at(place)
            if residency is None or residency.state is not ResidencyState.DRAINING:
                break
            if residency.locks or residency.children or (at.id, place) in self.filling:
                break
            parent = at.parent
            freed.append(self._release(at, place))
            at = parent
        if freed:
            self.prune(node)
        return b"".join(freed)

    # Locks, recency, order.

    def lock(self, node: Node, place: Place) -> None:
        """Protect the pages of a node and its ancestors at a place (one more claim)."""
        node.ends += 1
        at, more = node, 0
        while at.parent is not None:
            residency = at.here
            while residency is not None and residency.place != place:
                residency = residency.next
            if residency is None:
                raise InternalError(f"cannot lock {at!r} at {place}")
            if not residency.locks and residency.state is RESIDENT:
                more += len(residency.pages)
            residency.locks += 1
            at = at.parent
        if more:
            self.places[place].count(node, 0, more // 4)

    def unlock(self, node: Node, place: Place) -> bytes:
        """Undo one `lock`. Returns pages that were only draining and are free now."""
        node.ends -= 1
        at, less = node, 0
        while at.parent is not None:
            residency = at.here
            while residency is not None and residency.place != place:
                residency = residency.next
            if residency is None or residency.locks <= 0:
                raise InternalError(f"negative lock count at {place} of {at!r}")
            residency.locks -= 1
            if not residency.locks and residency.state is RESIDENT:
                less += len(residency.pages)
            at = at.parent
        if less:
            self.places[place].count(node, 0, -less // 4)
        self.refresh(node, place)  # those above have children, and are no leaves
        end = node.at(place)
        return b"" if end is None or end.state is RESIDENT else self.release_drained(node, place)

    def touch(self, steps: list[Step], place: Place, tick: int) -> None:
        """Mark the nodes of a path as used at a place, as far as they are there."""
        end: Node | None = None
        for node, _ in steps:
            residency = node.here
            while residency is not None and residency.place != place:
                residency = residency.next
            if residency is None:
                break
            residency.tick = tick
            end = node
        if end is not None:
            self.refresh(end, place)  # those above have children there, and are no leaves

    def refresh(self, node: Node, place: Place) -> None:
        """See that a node which can be evicted at a place has its turn there."""
        residency = node.here
        while residency is not None and residency.place != place:
            residency = residency.next
        if residency is None or residency.children or residency.locks:
            return
        if residency.state is RESIDENT:
            self.places[place].order_for(node).file(node, residency, self.nodes)

    # Private.

    def _attach(self, node: Node, residency: Residency, runs: tuple[Run, ...]) -> None:
        place = residency.place
        if node.at(place) is not None or residency.page_count != node.page_count:
            raise InternalError(f"cannot attach {residency!r} at {place} to {node!r}")
        parent = node.parent
        if parent is not None and parent.parent is not None:
            above = parent.at(place)
            if above is None:
                raise InternalError(f"{node!r} at {place} without its ancestor {parent!r}")
            above.children += 1
        node.attach(residency)
        node.space.version += 1
        self.places[place].on_attach(node, runs)
        if residency.state is RESIDENT:
            self._count(place, node, residency, 1)
        self.refresh(node, place)
        if place != HOST:
            self.refresh(node, HOST)

    def _detach(self, node: Node, place: Place) -> bytes:
        residency = node.there(place)
        if residency.locks or residency.children:
            raise InternalError(f"cannot detach {residency!r} at {place} from {node!r}")
        state = self.places[place]
        node.detach(place)
        node.space.version += 1
        state.order_for(node).forget(residency, self.nodes)
        if residency.state is RESIDENT:
            self._count(place, node, residency, -1)
        state.on_detach(node, residency.runs)
        parent = node.parent
        if parent is not None and parent.parent is not None:
            parent.there(place).children -= 1
            self.refresh(parent, place)
        if place != HOST:
            self.refresh(node, HOST)
        return residency.pages

    def _sweep(self, nodes: list[Node], place: Place) -> bytes:
        """Prune nodes of one path after they lost a place, and let go what drained above them."""
        above = nodes[0].parent
        for node in reversed(nodes):
            if node.id in self.nodes:
                self.prune(node)
        if above is not None and above.id in self.nodes:
            return self.release_drained(above, place)
        return b""

    def _release(self, node: Node, place: Place) -> bytes:
        step(RESIDENCY, node.there(place).state, ResidencyEvent.RELEASE, node)
        return self._detach(node, place)

    def _count(self, place: Place, node: Node, residency: Residency, sign: int) -> None:
        node.space.version += 1
        pages = sign * residency.page_count
        self.places[place].count(node, pages, pages if residency.locks else 0)
        if self.tap is not None:
            self.tap(node, place, sign)

    def __del__(self) -> None:
        untie(space.root for space in self.spaces.values())
        untie(self.nodes.values())
