"""The recount finds what is broken: each case breaks one thing and expects its line."""

# ruff: noqa: ARG005 - every case takes the same three things
from __future__ import annotations

from collections.abc import Callable

import pytest

from directory.core.directory import Directory
from directory.core.events import Insert, Stats
from directory.core.group import GroupLog
from directory.core.ids import HOST
from directory.core.node import NOT_FILED, Node, Run
from directory.core.spans import SpanState
from directory.core.states import ResidencyState
from directory.core.tokens import pack_pages, unpack_pages
from tests.unit.directory.core.world import KEY, Scheduler, World

POOL = 1
Break = Callable[[Directory, Node, Node], object]


def world_at_work() -> World:
    """A parent and two children in pool 1 and at the host, a lease, and a backup in flight."""
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2, 3])
    a.publish([1, 2, 4, 5])
    world.finish_all()
    b.match([1, 2, 3])
    b.publish([7])
    return world


def _edge(d: Directory, parent: Node, leaf: Node) -> None:
    leaf.edge += b"x"


def _misfile(d: Directory, parent: Node, leaf: Node) -> None:
    key, child = parent.children.popitem()
    parent.children[key[:-1] + b"\xff"] = child


def _empty(d: Directory, parent: Node, leaf: Node) -> None:
    d.tree.add_leaf(parent, b"\x09\0\0\0")


def _unfill(d: Directory, parent: Node, leaf: Node) -> None:
    parent.places[HOST].state = ResidencyState.FILLING


def _open(d: Directory, parent: Node, leaf: Node) -> None:
    del parent.places[HOST]


def _span_hole(d: Directory, parent: Node, leaf: Node) -> None:
    span = leaf.places[POOL].runs[0].span
    leaf.places[POOL].runs = (Run(span, 9, leaf.page_count),)


def _span_short(d: Directory, parent: Node, leaf: Node) -> None:
    leaf.places[POOL].runs = ()


def _span_unknown(d: Directory, parent: Node, leaf: Node) -> None:
    d.pools[POOL].spans[30] = SpanState(0)


def _span_parts(d: Directory, parent: Node, leaf: Node) -> None:
    d.pools[POOL].spans[leaf.places[POOL].runs[0].span].parts = []


def _page_twice(d: Directory, parent: Node, leaf: Node) -> None:
    leaf.places[POOL].pages = parent.places[POOL].pages[: 4 * leaf.page_count]


def _page_beyond(d: Directory, parent: Node, leaf: Node) -> None:
    leaf.places[POOL].pages = pack_pages([1000] * leaf.page_count)


def _slot_damaged(d: Directory, parent: Node, leaf: Node) -> None:
    d.slots.damaged.update(unpack_pages(parent.places[HOST].pages[:4]))


def _slot_lost(d: Directory, parent: Node, leaf: Node) -> None:
    d.slots.reserve(64, 1)


def _pool_gone(d: Directory, parent: Node, leaf: Node) -> None:
    d.pools[9] = d.pools.pop(POOL)


def _lease_pool_gone(d: Directory, parent: Node, leaf: Node) -> None:
    d.pools[9] = d.pools.pop(2)


def _lease_unlisted(d: Directory, parent: Node, leaf: Node) -> None:
    d.pools[2].leases.clear()


def _copy_gone(d: Directory, parent: Node, leaf: Node) -> None:
    d.transfers.copies.clear()


def _fill_op(d: Directory, parent: Node, leaf: Node) -> None:
    (op,) = d.tree.fills
    d.tree.fills[op] = [leaf]


def _group_unlisted(d: Directory, parent: Node, leaf: Node) -> None:
    d.registry.members.pop(2)


def _group_rank_lost(d: Directory, parent: Node, leaf: Node) -> None:
    d.pools[POOL].members[0] = 0


def _group_incomplete(d: Directory, parent: Node, leaf: Node) -> None:
    d.pools[POOL].complete = False


def _log_odd(d: Directory, parent: Node, leaf: Node) -> None:
    d.pools[POOL].log = GroupLog(2)


def _log_kept(d: Directory, parent: Node, leaf: Node) -> None:
    log = d.pools[POOL].log = GroupLog(1)
    d.pools[POOL].members.append(9)
    log.arrive(1, 1, Insert("r", 0, KEY, b"1234", b"1234", 1, 1, (0, 0)))
    entry = log._entries[1]
    entry.asked[2] = None
    entry.waiting[3] = None
    log._nbytes = 5
    entry.silent = True


def _log_done(d: Directory, parent: Node, leaf: Node) -> None:
    log = d.pools[POOL].log = GroupLog(1)
    d.pools[POOL].members.append(9)
    log.arrive(1, 1, Stats())
    log._entries[1].waiting.clear()


def _shard_unlisted(d: Directory, parent: Node, leaf: Node) -> None:
    d.transfers.shards[99] = next(iter(d.transfers.copies.values()))


def _claim_nowhere(d: Directory, parent: Node, leaf: Node) -> None:
    (lease,) = d.leases
    (filling,) = next(iter(d.tree.fills.values()))
    lease.claims[POOL] = filling


CASES: list[tuple[Break, str]] = [
    (_edge, "shape: edge of node"),
    (_misfile, "misfiled"),
    (_empty, "neither pages nor children"),
    (lambda d, p, n: d.tree.nodes.pop(n.id), "nodes hang on roots"),
    (lambda d, p, n: setattr(n.places[POOL], "pages", b""), "pages on an edge"),
    (lambda d, p, n: setattr(p.places[POOL], "children", 5), "counts 5 children"),
    (_unfill, "below a filling ancestor"),
    (_open, "its ancestor"),
    (lambda d, p, n: d.host.nodes.pop(p.id), "nodes resident"),
    (lambda d, p, n: setattr(d.host, "pages", 99), "totals: place -1"),
    (lambda d, p, n: setattr(n.places[POOL], "filed", NOT_FILED), "is filed under -1"),
    (lambda d, p, n: setattr(n.places[POOL], "filed", 0), "is filed but has no entry"),
    (lambda d, p, n: setattr(n.places[POOL], "tick", 0), "at 1 is filed under"),
    (lambda d, p, n: setattr(d.pools[POOL].order, "count", 99), "not all in order"),
    (lambda d, p, n: setattr(d.pools[POOL].order, "outdated", 99), "entries, a recount"),
    (_span_short, "do not cover its pages"),
    (_span_hole, "hole or overlap"),
    (_span_unknown, "spans: pool 1 knows"),
    (_span_parts, "lists [], holds"),
    (_page_twice, "a page in two nodes"),
    (_page_beyond, "a page beyond 32"),
    (lambda d, p, n: d.pools[POOL].owned.add(31), "pages: pool 1 owns"),
    (lambda d, p, n: setattr(p.places[HOST], "locks", 7), "has 7, claims below are"),
    (_claim_nowhere, "without pages there"),
    (_slot_lost, "free slots of 64 bytes"),
    (_slot_damaged, "1 damaged slots of 64 bytes are still matched"),
    (_lease_pool_gone, "which is gone"),
    (_lease_unlisted, "leases, wrongly"),
    (_copy_gone, "are not the backups in flight"),
    (_fill_op, "is not filling by copy"),
    (lambda d, p, n: d.pools[POOL].copies.update({77: None}), "lists copies"),
    (
        lambda d, p, n: d.registry.begin_close(d.pools[POOL]),
        "closing, pages=5/32, locked=0, leases=0, copies=0) has",
    ),
    (_group_unlisted, "ranks of pools, 1 registered"),
    (_group_rank_lost, "has the ranks [0]"),
    (_group_incomplete, "complete or not, wrongly"),
    (_group_incomplete, "is not complete and holds something"),
    (_log_odd, "of 1 ranks has a log or none"),
    (_log_kept, "counts 5 bytes, wrongly"),
    (_log_kept, "ranks that have not asked"),
    (_log_kept, "wait for it"),
    (_log_done, "done with and kept"),
    (_log_odd, "0 groups are counted, wrongly"),
    (_shard_unlisted, "are open, others are listed"),
    (_pool_gone, "is at pool 1, which is gone"),
    (lambda d, p, n: d.pools[POOL].filling.add(3), "filling"),
]


@pytest.mark.parametrize(("break_it", "line"), CASES, ids=[line for _, line in CASES])
def test_a_broken_state_is_reported_with_its_numbers(break_it: Break, line: str) -> None:
    world = world_at_work()
    directory = world.directory
    assert directory.check() == []
    parent = next(n for n in directory.tree.nodes.values() if len(n.children) == 2)
    leaf = next(n for n in parent.children.values() if n.page_count == 2)
    break_it(directory, parent, leaf)
    found = directory.check()
    assert any(line in text for text in found), found


def test_a_check_changes_nothing_and_raises_nothing() -> None:
    world = world_at_work()
    before = repr(sorted(world.directory.tree.nodes.items()))
    assert world.directory.check() == world.directory.check() == []
    assert repr(sorted(world.directory.tree.nodes.items())) == before
