"""Invariants: a recount of the whole state from scratch, reported and never repaired.

Owns the list of what must hold after every event (docs/invariants.md has the table). Reads
everything, changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from directory.core.eviction import SECOND_CLASS, EvictionOrder, evictable, key_of
from directory.core.ids import HOST, Place, is_pool
from directory.core.node import NOT_FILED, Node
from directory.core.place import PlaceState, PoolState
from directory.core.states import ResidencyState, TransferState
from directory.core.tokens import unpack_pages
from directory.core.tree import Tree

if TYPE_CHECKING:
    from directory.core.directory import Directory


def violations(directory: Directory) -> list[str]:
    """Return every violated invariant with the numbers that disagree; empty when all hold."""
    found = tree_violations(directory.tree, _claims(directory))
    found += _host(directory)
    found += _journal(directory)
    found += _leases(directory)
    found += _transfers(directory)
    found += _groups(directory)
    return found


def tree_violations(tree: Tree, claims: dict[Place, list[Node]] | None) -> list[str]:
    """Check shape, closure, totals, orders, spans and locks of a tree (a mirror's too).

    `claims`: the deepest node of every claim by place; None leaves lock counts unchecked.
    """
    found: list[str] = []
    seen = _shape(tree, found)
    if seen.keys() != tree.nodes.keys():
        found.append(f"tree: {len(seen)} nodes hang on roots, {len(tree.nodes)} are indexed")
    for place, state in tree.places.items():
        here = {id_: node for id_, node in seen.items() if place in node.places}
        if here.keys() != state.nodes.keys():
            found.append(f"place {place}: {len(here)} nodes resident, {len(state.nodes)} indexed")
        found += _totals(place, state, here)
        found += _orders(place, state, here)
        if isinstance(state, PoolState):
            found += _pool(state, here)
        if claims is not None:
            found += _locks(place, here, claims.get(place, []))
    return found


def _shape(tree: Tree, found: list[str]) -> dict[int, Node]:
    seen: dict[int, Node] = {}
    for space in tree.spaces.values():
        stack = [space.root]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                seen[node.id] = node
                found += _node(node)
            for key, child in node.children.items():
                if child.parent is not node or child.edge[: space.page_key] != key:
                    found.append(f"shape: child {child.id} of node {node.id} is misfiled")
                stack.append(child)
    return seen


def _node(node: Node) -> list[str]:
    found: list[str] = []
    if not node.edge or len(node.edge) % node.space.page_key:
        found.append(f"shape: edge of node {node.id} has {len(node.edge)} bytes")
    if not node.places and not node.children:
        found.append(f"shape: node {node.id} has neither pages nor children")
    for place, residency in node.places.items():
        if residency.page_count != node.page_count:
            found.append(
                f"residency: node {node.id} at {place} has {residency.page_count} pages on an edge "
                f"of {node.page_count}"
            )
        below = sum(place in child.places for child in node.children.values())
        if below != residency.children:
            found.append(
                f"residency: node {node.id} at {place} counts {residency.children} children, "
                f"has {below}"
            )
        parent = node.parent
        if parent is None or parent.parent is None:
            continue
        above = parent.places.get(place)
        if above is None:
            found.append(f"closure: node {node.id} is at {place}, its ancestor {parent.id} not")
        elif residency.state is ResidencyState.RESIDENT and above.state is ResidencyState.FILLING:
            found.append(f"closure: node {node.id} is resident at {place} below a filling ancestor")
    return found


def _totals(place: Place, state: PlaceState, here: dict[int, Node]) -> list[str]:
    held = [node.places[place] for node in here.values()]
    resident = [r for r in held if r.state is ResidencyState.RESIDENT]
    pages = sum(r.page_count for r in resident)
    locked = sum(r.page_count for r in resident if r.locks)
    said = (state.pages, state.locked_pages)
    if (pages, locked) == said:
        return []
    return [f"totals: place {place} says (resident, locked) = {said}, a recount {pages, locked}"]


def _orders(place: Place, state: PlaceState, here: dict[int, Node]) -> list[str]:
    """Every leaf that can go has an entry, not above its key and of its class; all others are
    counted outdated."""
    found: list[str] = []
    orders: list[EvictionOrder] = list(getattr(state, "orders", {0: state.order}).values())
    entries = {id(order): set(order) for order in orders}
    filed = 0
    for node in here.values():
        r = node.places[place]
        filed += r.filed != NOT_FILED
        key = key_of(node, r)
        filed_right = r.filed != NOT_FILED and r.filed <= key
        if evictable(r) and not (filed_right and (key < SECOND_CLASS) == (r.filed < SECOND_CLASS)):
            found.append(f"evictable: leaf {node.id} at {place} is filed under {r.filed}")
        known = entries.get(id(state.order_for(node)), set())
        if r.filed != NOT_FILED and (r.filed, node.id) not in known:
            found.append(f"evictable: node {node.id} at {place} is filed but has no entry")
    for order in orders:
        listed = [key for key, _ in order]
        if listed != sorted(listed) or len(listed) != order.count:
            found.append(f"evictable: {order!r} has {len(listed)} entries, not all in order")
    counted = sum(order.count - order.outdated for order in orders)
    if counted != filed:
        found.append(f"evictable: place {place} counts {counted} entries, a recount {filed}")
    return found


def _pool(pool: PoolState, here: dict[int, Node]) -> list[str]:
    found: list[str] = []
    pages: list[int] = []
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for node in here.values():
        residency = node.places[pool.place]
        pages += unpack_pages(residency.pages)
        if sum(run.length for run in residency.runs) != residency.page_count:
            found.append(f"spans: runs of node {node.id} do not cover its pages")
        for run in residency.runs:
            parts.setdefault(run.span, []).append((run.first, run.length, node.id))
    if len(set(pages)) != len(pages):
        found.append(f"pages: pool {pool.place} has a page in two nodes")
    if set(pages if pool.live else ()) != set(pool.owned):
        found.append(f"pages: pool {pool.place} owns {len(pool.owned)}, nodes hold {len(pages)}")
    if any(page >= pool.page_count for page in pages):
        found.append(f"pages: pool {pool.place} has a page beyond {pool.page_count}")
    if parts.keys() != pool.spans.keys():
        found.append(f"spans: pool {pool.place} knows {len(pool.spans)}, nodes hold {len(parts)}")
    for span, runs in parts.items():
        runs.sort()
        listed = [node.id for node in pool.spans[span].parts] if span in pool.spans else []
        if [node_id for _, _, node_id in runs] != listed:
            found.append(f"spans: span {span} of pool {pool.place} lists {listed}, holds {runs}")
        at = 0
        for first, length, node_id in runs:
            if first != at:
                found.append(f"spans: span {span} has a hole or overlap at node {node_id}")
            at = first + length
    return found


def _locks(place: Place, here: dict[int, Node], ends: list[Node]) -> list[str]:
    counted: dict[int, int] = {}
    for end in ends:
        for node in end.path():
            counted[node.id] = counted.get(node.id, 0) + 1
    found: list[str] = []
    for node in here.values():
        locks = node.places[place].locks
        if locks != counted.get(node.id, 0):
            found.append(
                f"locks: node {node.id} at {place} has {locks}, claims below are "
                f"{counted.get(node.id, 0)}"
            )
    missing = sorted(counted.keys() - here.keys())
    if missing:
        found.append(f"locks: claims at {place} on nodes {missing} without pages there")
    return found


def _claims(directory: Directory) -> dict[Place, list[Node]]:
    claims: dict[Place, list[Node]] = {}
    for lease in directory.leases:
        for place, node in lease.claims.items():
            claims.setdefault(place, []).append(node)
    for copy in directory.transfers.copies.values():
        if copy.claim is not None:
            claims.setdefault(HOST, []).append(copy.claim)
    return claims


def _host(directory: Directory) -> list[str]:
    found: list[str] = []
    held: dict[int, list[int]] = {}
    matchable: dict[int, set[int]] = {}
    for node in directory.tree.nodes.values():
        if HOST in node.places:
            pages = unpack_pages(node.places[HOST].pages)
            held.setdefault(node.space.page_bytes, []).extend(pages)
            if directory.slots.damaged and node.resident(HOST) is not None:
                matchable.setdefault(node.space.page_bytes, set()).update(pages)
    for size in sorted({*held, *directory.slots.page_sizes}):
        mine, free = held.get(size, []), directory.slots.free_slots(size)
        damaged = set(directory.slots.damaged_slots(size))
        out = damaged - set(mine)
        both = set(mine) | set(free) | out
        capacity = directory.slots.capacity(size)
        if len(both) != len(mine) + len(free) + len(out) or len(both) != capacity:
            found.append(
                f"host: {len(mine)} held + {len(free)} free slots of {size} bytes + {len(out)} "
                f"damaged, {len(both)} distinct of {capacity}"
            )
        matched = damaged & matchable.get(size, set())
        if matched:
            found.append(f"host: {len(matched)} damaged slots of {size} bytes are still matched")
    return found


def _journal(directory: Directory) -> list[str]:
    found: list[str] = []
    for node in directory.host.nodes.values():
        residency = node.places.get(HOST)
        if residency is None:
            continue  # its index is wrong, and said to be
        stamped = sum(run.length for run in residency.runs)
        wanted = residency.page_count if node.resident(HOST) and directory.journal.on else 0
        if stamped != wanted:
            found.append(
                f"journal: {stamped} pages of node {node.id} ({residency.state}) have stamps, "
                f"{wanted} should"
            )
    return found


def _leases(directory: Directory) -> list[str]:
    found: list[str] = []
    by_pool: dict[int, set[int]] = {}
    for lease in directory.leases:
        by_pool.setdefault(lease.owner.pool, set()).add(lease.id)
    gone = sorted(by_pool.keys() - directory.pools.keys())
    found += [f"leases: {len(by_pool[place])} of pool {place}, which is gone" for place in gone]
    for place, pool in directory.pools.items():
        if by_pool.get(place, set()) != pool.leases.keys():
            found.append(f"leases: pool {place} lists {len(pool.leases)} leases, wrongly")
    return found


def _transfers(directory: Directory) -> list[str]:
    found: list[str] = []
    copies = directory.transfers.copies
    fills = directory.tree.fills
    parts = {op for copy in copies.values() for op in copy.open} - copies.keys()
    if parts != directory.transfers.shards.keys():
        found.append(f"transfers: shards {sorted(parts)} are open, others are listed")
    said = sum(map(len, fills.values()))
    if said != len(directory.tree.filling):
        found.append(f"transfers: {len(directory.tree.filling)} nodes fill, copies have {said}")
    if {op for op, copy in copies.items() if copy.kind == "backup"} != fills.keys():
        found.append(f"transfers: fills {sorted(fills)} are not the backups in flight")
    wished = directory.transfers.wished
    if not wished.keys() <= directory.tree.nodes.keys():
        found.append("transfers: backups are wished for of nodes that are gone")
    if wished and not fills and not directory.closing.busy:
        found.append(f"transfers: {len(wished)} backups wait, and nothing is to come for them")
    for op, nodes in fills.items():
        found += [
            f"transfers: node {node.id} is not filling by copy {op}"
            for node in nodes
            if HOST not in node.places or directory.tree.filling.get((node.id, HOST)) != op
        ]
    targets: dict[Place, list[int]] = {}
    for copy in copies.values():
        if copy.body is not None:
            targets.setdefault(copy.target, []).extend(unpack_pages(copy.body.pages))
    for place, pool in directory.pools.items():
        filling = targets.get(place, [])
        if sorted(filling) != sorted(pool.filling) or not pool.owned.isdisjoint(filling):
            found.append(f"pages: pool {place} is filling {sorted(pool.filling)}, wrongly")
        touching = {op for op, copy in copies.items() if place in copy.pools}
        if touching != pool.copies.keys():
            found.append(f"transfers: pool {place} lists copies {sorted(pool.copies)}")
        found += _closing(directory, pool) if not pool.live else []
    found += [
        f"residency: node {node.id} is at pool {place}, which is gone"
        for node in directory.tree.nodes.values()
        for place in node.places
        if is_pool(place) and place not in directory.pools
    ]
    return found


def _closing(directory: Directory, pool: PoolState) -> list[str]:
    found: list[str] = []
    copies = directory.transfers.copies
    counting = [op for op in pool.copies if copies[op].state is not TransferState.DOOMED]
    if counting:
        found.append(f"transfers: copies {counting} of {pool!r} count")
    on_its_way = directory.closing.holds(pool.place)
    if (pool.leases or pool.spans) and not on_its_way:
        found.append(f"residency: {pool!r} has something left, and nobody sees to it")
    if not (pool.leases or pool.spans or pool.copies or on_its_way):
        found.append(f"residency: {pool!r} has nothing left, and is still there")
    return found


def _groups(directory: Directory) -> list[str]:
    found: list[str] = []
    ranks: dict[int, PoolState] = {}
    for place, pool in directory.pools.items():
        here = [member for member in pool.members if member]
        ranks.update(dict.fromkeys(here, pool))
        if place not in here or len(set(here)) != len(here):
            found.append(f"groups: pool {place} has the ranks {pool.members}")
        if pool.complete != (len(here) == len(pool.members)):
            found.append(f"groups: pool {place} is complete or not, wrongly: {pool.members}")
        if not pool.complete and (pool.nodes or pool.leases or pool.copies):
            found.append(f"groups: pool {place} is not complete and holds something")
        if (pool.log is None) != (len(pool.members) == 1):
            found.append(f"groups: pool {place} of {len(pool.members)} ranks has a log or none")
        elif pool.log is not None:
            found += [f"groups: pool {place}: {line}" for line in pool.log.violations()]
    registry = directory.registry
    if ranks != registry.members:
        found.append(f"groups: {len(ranks)} ranks of pools, {len(registry.members)} registered")
    if registry.groups != sum(pool.log is not None for pool in directory.pools.values()):
        found.append(f"groups: {registry.groups} groups are counted, wrongly")
    return found
