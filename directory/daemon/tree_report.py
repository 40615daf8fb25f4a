"""The radix tree for people: its largest parts, who has them, and when they were used last.

Owns the choice of nodes. It walks a bounded part of the tree from the roots down, reads and never
changes it: not even the order of eviction knows that somebody looked.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from directory.core.directory import Directory
from directory.core.ids import HOST, Place
from directory.core.node import Node, RootedSpace, Space
from directory.daemon.names import fields_of
from directory.daemon.recording import Recording
from directory.protocol.admin import AdminTree, NodeReport, SpaceReport, TreeReport

VISITED_MAX: Final = 50_000
"""Nodes that one report looks at; some tens of milliseconds."""
NODES_MAX: Final = 10_000
SPACES_MAX: Final = 1_000


class _Seen:
    """A node that was looked at. `total`: pages of it and of what was looked at below it."""

    __slots__ = ("below", "depth", "node", "start", "total", "wanted")

    def __init__(self, node: Node, depth: int, start: int, wanted: bool) -> None:
        self.node = node
        self.depth = depth
        self.start = start
        self.wanted = wanted
        self.total = node.page_count if wanted else 0
        self.below: list[_Seen] = []


def tree_report(directory: Directory, recording: Recording, request: AdminTree) -> TreeReport:
    """The part of the tree that was asked for, larger subtrees first."""
    spaces: list[tuple[Space, bytes, list[_Seen]]] = []
    left, seen_count = VISITED_MAX, 0
    for space in list(directory.tree.spaces.values()):
        digest = recording.names.digest(space.fingerprint, space.key)
        if request.namespace not in ("", digest.hex()):
            continue
        seen = _look(directory, space, request, left)
        left -= len(seen)
        seen_count += len(seen)
        spaces.append((space, digest, seen))
        if left <= 0 or len(spaces) >= SPACES_MAX:
            break
    chosen = _choose(spaces, request)
    reports = [
        _space_report(directory, recording, space, digest, seen, chosen)
        for space, digest, seen in spaces
    ]
    reports.sort(key=lambda report: -report.pages)
    return TreeReport(
        tuple(report for report in reports if report.nodes),
        len(directory.tree.nodes),
        seen_count - len(chosen),
    )


def _look(directory: Directory, space: RootedSpace, request: AdminTree, most: int) -> list[_Seen]:
    """Nodes of a namespace from the root down, each after its parent, with their totals."""
    seen: list[_Seen] = []
    waiting: deque[tuple[Node, _Seen | None]] = deque(
        (child, None) for child in space.root.children.values()
    )
    while waiting and len(seen) < most:
        node, above = waiting.popleft()
        depth = above.depth + 1 if above else 0
        start = above.start + above.node.page_count if above else 0
        found = _Seen(node, depth, start, _is_at(directory, node, request.instance))
        seen.append(found)
        if above is not None:
            above.below.append(found)
        waiting.extend((child, found) for child in node.children.values())
    for found in reversed(seen):
        found.total += sum(child.total for child in found.below)
    return seen


def _choose(spaces: list[tuple[Space, bytes, list[_Seen]]], request: AdminTree) -> set[int]:
    """Ids of the nodes to name: those with most pages. A parent never has fewer than its child."""
    fitting = [
        found
        for _, _, seen in spaces
        for found in seen
        if found.total >= max(1, request.pages_min)
        and (not request.depth_max or found.depth < request.depth_max)
    ]
    fitting.sort(key=lambda found: (-found.total, found.depth))
    most = max(0, min(request.nodes_max, NODES_MAX))
    return {found.node.id for found in fitting[:most]}


def _space_report(
    directory: Directory,
    recording: Recording,
    space: Space,
    digest: bytes,
    seen: list[_Seen],
    chosen: set[int],
) -> SpaceReport:
    nodes: list[NodeReport] = []
    tops = [found for found in seen if found.depth == 0]
    waiting = sorted(tops, key=lambda found: found.total)
    while waiting:
        found = waiting.pop()
        if found.node.id not in chosen:
            continue
        nodes.append(_node_report(directory, recording, found))
        waiting.extend(sorted(found.below, key=lambda child: child.total))
    return SpaceReport(
        digest.hex(),
        fields_of(space.fingerprint, space.key),
        space.page_size,
        space.page_bytes,
        sum(found.total for found in tops),
        tuple(nodes),
    )


def _node_report(directory: Directory, recording: Recording, found: _Seen) -> NodeReport:
    node = found.node
    path = b"".join(above.edge for above in node.path())
    digests = recording.chains.whole(path, node.space.page_key)
    parent = node.parent
    return NodeReport(
        node=node.id,
        parent=parent.id if parent is not None else 0,
        depth=found.depth,
        start=found.start,
        pages=node.page_count,
        digest=f"{digests[-1]:016x}",
        places=tuple(
            (
                place_name(directory, place),
                str(residency.state),
                residency.locks,
                directory.tree.places[place].tick - residency.tick,
            )
            for place, residency in sorted(node.places.items())
        ),
        below=found.total - (node.page_count if found.wanted else 0),
        children=len(node.children),
    )


def place_name(directory: Directory, place: Place) -> str:
    """A place as people know it; the instance of a pool that has ended may be live again."""
    if place == HOST:
        return "host"
    pool = directory.pools.get(place)
    if pool is None:
        return f"pool {place}"
    return pool.instance if pool.live else f"{pool.instance} ({pool.phase})"


def _is_at(directory: Directory, node: Node, instance: str) -> bool:
    return not instance or any(place_name(directory, at) == instance for at in node.places)
