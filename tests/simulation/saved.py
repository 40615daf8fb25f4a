"""Saved states: a tiny node is set back to a state that it, or another one, was in.

Owns the list of everything that a later event may read: a field that is missing here shows itself
in test_exhaustive.py, which compares what was set back with what never was. Counters and the
story are left alone, for they decide nothing. Values that are never changed in place are shared.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple, cast

from directory.core.actions import SubmitCopy
from directory.core.again import Again
from directory.core.copies import Copy
from directory.core.eviction import EvictionOrder
from directory.core.ids import HOST
from directory.core.lease import Lease
from directory.core.node import Node, Residency, RootedSpace
from directory.core.page_set import PageSet
from directory.core.place import PlaceState, PoolState
from directory.core.spans import SpanState
from tests.simulation.tiny import Tiny
from tests.simulation.tiny_parts import KEY, Scheduler

Values = tuple[Any, ...]
of_pool = attrgetter(
    *("place", "pages", "locked_pages", "tick", "complete", "fingerprint", "generation"),
    *("instance", "mode", "page_bytes", "page_count", "page_size", "phase", "restores", "word"),
)
of_copy = attrgetter(
    *("op", "kind", "pools", "again", "state", "target", "seq", "body", "host_pages"),
    *("peer_pages", "so_far", "words"),
)
of_scheduler = attrgetter("pool", "mode", "seq", "receipt", "key", "own", "beyond", "restore")
SPACE = RootedSpace(b"f", KEY, 1, 1)
"""The only space there ever is."""


class Saved(NamedTuple):
    """One state, in tuples."""

    numbers: Values
    nodes: tuple[Values, ...]
    fills: tuple[tuple[int, tuple[int, ...]], ...]
    host: Values
    pools: tuple[Values, ...]
    leases: tuple[Values, ...]
    copies: tuple[Values, ...]
    model: Values


def save(tiny: Tiny) -> Saved:
    """Everything that may matter later."""
    directory = tiny.directory
    tree, slots, leases = directory.tree, directory.slots, directory.leases
    registry, transfers, host = directory.registry, directory.transfers, directory.host
    assert not registry.groups, "groups are not modelled"
    return Saved(
        (
            tree._last_id,
            leases._last,
            registry._last,
            transfers._last_op,
            transfers._backups,
            tuple(transfers.wished.items()),
            tuple(registry._generations.items()),
        ),
        _nodes(tiny),
        tuple((op, tuple(node.id for node in nodes)) for op, nodes in tree.fills.items()),
        (
            host.pages,
            host.locked_pages,
            host.tick,
            tuple(host.evictable.items()),
            tuple(host.orders),
            tuple(slots.page_bytes_of.items()),
            tuple((size, tuple(free)) for size, free in slots._free.items()),
            tuple(slots._capacity.items()),
        ),
        tuple(
            (
                of_pool(pool),
                tuple((s, sp.value, tuple(n.id for n in sp.parts)) for s, sp in pool.spans.items()),
                tuple(pool.owned),
                tuple(pool.filling),
                tuple(pool.leases),
                tuple(pool.copies),
            )
            for pool in directory.pools.values()
        ),
        tuple(
            (
                lease.id,
                lease.owner,
                lease.state,
                None if lease.end is None else lease.end.id,
                tuple((place, node.id) for place, node in lease.claims.items()),
            )
            for lease in leases
        ),
        tuple(
            (
                of_copy(copy),
                None if copy.claim is None else copy.claim.id,
                None if copy.end is None else copy.end.id,
            )
            for copy in transfers.copies.values()
        ),
        (
            tuple(None if s is None else s.pool for s in tiny.schedulers),
            tuple(
                (
                    of_scheduler(s),
                    tuple(s.free),
                    tuple(s.held.items()),
                    tuple(s.content.items()),
                    tuple(s.words),
                    tuple(s.span_of.items()),
                )
                for place, s in tiny.by_pool.items()
                if place in directory.pools
            ),
            tuple(tiny.copies.items()),
            tuple(tiny.host.items()),
        ),
    )


def _nodes(tiny: Tiny) -> tuple[Values, ...]:
    """The nodes, each after its parent and before those that came after it."""
    found: list[Values] = []
    spaces = list(tiny.directory.tree.spaces.values())
    stack = [child for space in spaces for child in reversed(space.root.children.values())]
    while stack:
        node = stack.pop()
        assert node.parent is not None
        residencies = tuple(
            (place, r.state, r.pages, r.runs, r.written, r.tick, r.locks, r.children)
            for place, r in node.places.items()
        )
        found.append((node.id, node.parent.id, node.edge, node.ends, residencies))
        stack += reversed(node.children.values())
    return tuple(found)


def load(tiny: Tiny, saved: Saved) -> None:
    """Set a node back. Its directory stays the same object, and so do the parts of it."""
    directory = tiny.directory
    tree, leases = directory.tree, directory.leases
    registry, transfers = directory.registry, directory.transfers
    tree._last_id, leases._last, registry._last, transfers._last_op = saved.numbers[:4]
    transfers._backups, wished, generations = saved.numbers[4:]
    transfers.wished.clear()
    transfers.wished.update(wished)
    registry._generations = dict(generations)
    nodes = _load_nodes(tiny, saved.nodes)
    tree.fills = {op: [nodes[node] for node in ids] for op, ids in saved.fills}
    tree.filling = {(node, HOST): op for op, ids in saved.fills for node in ids}
    _load_host(tiny, saved.host, nodes)
    _load_pools(tiny, saved.pools, nodes)
    held = leases._held
    held.clear()
    for id_, owner, state, end, claims in saved.leases:
        lease = Lease.__new__(Lease)
        lease.id, lease.owner, lease.state = id_, owner, state
        lease.end = _node(end, nodes)
        lease.claims = {place: nodes[node] for place, node in claims}
        held[id_] = lease
    copies = transfers.copies
    copies.clear()
    for plain, claim, end in saved.copies:
        copy = Copy.__new__(Copy)
        copy.op, copy.kind, copy.pools, copy.again, copy.state, copy.target = plain[:6]
        copy.seq, copy.body, copy.host_pages, copy.peer_pages = plain[6:10]
        copy.so_far, copy.words = plain[10:]
        copy.claim = None if claim is None else nodes[claim]
        copy.end = _node(end, nodes)
        copy.open = {}
        copies[copy.op] = copy
    _load_model(tiny, saved.model)


def _node(id_: int | None, nodes: dict[int, Node]) -> Node | None:
    """A node by id. Of one that is not in the tree any more nothing but its id is ever used."""
    if id_ is None:
        return None
    return nodes.get(id_) or Node(id_, None, b"", SPACE)


def _load_nodes(tiny: Tiny, saved: tuple[Values, ...]) -> dict[int, Node]:
    tree = tiny.directory.tree
    space = RootedSpace(SPACE.fingerprint, KEY, 1, 1)  # a tree's own: it unties it when it goes
    root = space.root
    nodes: dict[int, Node] = {}
    for id_, above, edge, ends, residencies in saved:
        parent = nodes[above] if above else root
        node = nodes[id_] = Node(id_, parent, edge, root.space)
        node.ends = ends
        parent.hang(edge[:4], node)
        places = node.places
        for place, state, pages, runs, written, tick, locks, children in residencies:
            residency = places[place] = Residency(place, state, pages, written, tick)
            residency.runs = runs
            residency.locks = locks
            residency.children = children
    tree.nodes = nodes
    tree.spaces = {(SPACE.fingerprint, SPACE.key): space} if nodes else {}
    return nodes


def _file(tiny: Tiny, state: PlaceState) -> None:
    """The order of eviction follows from the nodes."""
    for node in state.nodes.values():
        tiny.directory.tree.refresh(node, state.place)


def _load_host(tiny: Tiny, saved: Values, nodes: dict[int, Node]) -> None:
    host, slots = tiny.directory.host, tiny.directory.slots
    host.pages, host.locked_pages, host.tick, evictable, orders, sizes, free, capacity = saved
    host.evictable = dict(evictable)
    host.orders = {size: EvictionOrder(HOST) for size in orders}
    host._nodes = {id_: node for id_, node in nodes.items() if HOST in node.places}
    _file(tiny, host)
    slots.page_bytes_of = dict(sizes)
    spare = reversed(range(slots._segment_count))
    slots._spare = [segment for segment in spare if segment not in slots.page_bytes_of]
    slots._free = {size: list(ids) for size, ids in free}
    slots._capacity = dict(capacity)


def _load_pools(tiny: Tiny, saved: tuple[Values, ...], nodes: dict[int, Node]) -> None:
    registry, places = tiny.directory.registry, tiny.directory.tree.places
    host = places[HOST]
    for table in (registry.pools, registry.members, registry._closing, registry._live, places):
        table.clear()
    places[HOST] = host
    for plain, spans, owned, filling, leases, copies in saved:
        pool = PoolState.__new__(PoolState)
        pool.place, pool.pages, pool.locked_pages, pool.tick, pool.complete = plain[:5]
        pool.fingerprint, pool.generation, pool.instance, pool.mode = plain[5:9]
        pool.page_bytes, pool.page_count, pool.page_size, pool.phase = plain[9:13]
        pool.restores, pool.word = plain[13:]
        pool.again = Again()  # what it has found changes no answer
        pool.members = [pool.place]
        pool.log = None
        pool.unlisted = None  # nobody lists live requests here
        pool.order = EvictionOrder(pool.place)
        pool.spans = {}
        for span, value, parts in spans:
            state = pool.spans[span] = SpanState(value)
            state.parts = [nodes[node] for node in parts]
        pool.owned, pool.filling = PageSet(owned), set(filling)
        pool.leases, pool.copies = dict.fromkeys(leases), dict.fromkeys(copies)
        registry.pools[pool.place] = registry.members[pool.place] = places[pool.place] = pool
        _file(tiny, pool)
        if pool.live:
            registry._live[pool.instance] = pool.place
        else:
            registry._closing[pool.place] = pool


def _load_model(tiny: Tiny, saved: Values) -> None:
    live, schedulers, copies, host = saved
    by_pool: dict[int, Scheduler] = {}
    for plain, free, held, content, words, span_of in schedulers:
        scheduler = Scheduler.__new__(Scheduler)
        scheduler.pool, scheduler.mode, scheduler.seq, scheduler.receipt = plain[:4]
        scheduler.key, scheduler.own, scheduler.beyond, scheduler.restore = plain[4:]
        scheduler.free = list(free)
        scheduler.held = dict(held)
        scheduler.content = dict(content)
        scheduler.words = list(words)
        scheduler.span_of = dict(span_of)
        by_pool[scheduler.pool] = scheduler
    tiny.by_pool = by_pool
    tiny.schedulers = [None if place is None else by_pool[place] for place in live]
    tiny.copies = cast("dict[int, SubmitCopy]", dict(copies))
    tiny.host = dict(host)
    tiny.replies.clear()
