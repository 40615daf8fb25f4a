"""The radix tree: walking, splitting, merging, residency."""

from __future__ import annotations

import pytest

from directory.core import limits
from directory.core.errors import InternalError, InvalidTransition, StaleNode, TooMany
from directory.core.ids import HOST
from directory.core.invariants import tree_violations
from directory.core.namespace import NamespaceKey
from directory.core.node import Node, RootedSpace
from directory.core.place import HostState
from directory.core.tokens import pack_pages, pack_tokens
from directory.core.tree import Tree
from tests.unit.directory.core.world import KEY, Scheduler, World


def host_tree(page_size: int = 1) -> tuple[Tree, RootedSpace]:
    tree = Tree()
    tree.places[HOST] = HostState()
    return tree, tree.space(b"f", KEY, page_size, 64)


def leaf(tree: Tree, parent: Node, tokens: list[int], pages: list[int], tick: int = 1) -> Node:
    node = tree.add_leaf(parent, pack_tokens(tokens))
    tree.publish(node, HOST, pack_pages(pages), (), (0, 0), tick)
    return node


def walked(tree: Tree, space: RootedSpace, tokens: list[int]) -> list[tuple[int, int]]:
    return [(node.id, pages) for node, pages in tree.walk(space, pack_tokens(tokens))]


def test_a_walk_takes_whole_pages_only() -> None:
    tree, space = host_tree(page_size=2)
    node = leaf(tree, space.root, [1, 2, 3, 4], [0, 1])
    assert walked(tree, space, [1]) == []
    assert walked(tree, space, [1, 2, 3]) == [(node.id, 1)]
    assert walked(tree, space, [1, 2, 3, 9]) == [(node.id, 1)]
    assert walked(tree, space, [1, 2, 3, 4, 5]) == [(node.id, 2)]
    assert walked(tree, space, [1, 9, 3, 4]) == []


@pytest.mark.parametrize("common", range(1, 9))
def test_a_walk_finds_the_page_where_an_edge_differs(common: int) -> None:
    tree, space = host_tree()
    node = leaf(tree, space.root, list(range(8)), list(range(8)))
    tokens = [*range(common), *[99] * (8 - common)]
    assert walked(tree, space, tokens) == [(node.id, common)]


def test_a_split_keeps_the_id_below_and_all_claims_on_both_halves() -> None:
    tree, space = host_tree()
    node = leaf(tree, space.root, [1, 2, 3], [7, 8, 9])
    tree.lock(node, HOST)
    upper = tree.split(node, 1)
    assert tree.node(node.id) is node
    assert upper.path() == [upper]
    assert node.path() == [upper, node]
    assert (upper.places[HOST].pages, node.places[HOST].pages) == (
        pack_pages([7]),
        pack_pages([8, 9]),
    )
    assert (upper.places[HOST].locks, node.places[HOST].locks) == (1, 1)
    assert tree_violations(tree, {HOST: [node]}) == []
    tree.unlock(node, HOST)
    assert tree.places[HOST].locked_pages == 0


@pytest.mark.parametrize("at", [0, 3, -1])
def test_a_split_at_an_end_is_a_defect(at: int) -> None:
    tree, space = host_tree()
    node = leaf(tree, space.root, [1, 2, 3], [7, 8, 9])
    with pytest.raises(InternalError, match="cannot split"):
        tree.split(node, at)


def test_a_chain_is_merged_only_where_nothing_tells_its_nodes_apart() -> None:
    tree, space = host_tree()
    node = leaf(tree, space.root, [1, 2, 3], [7, 8, 9])
    upper = tree.split(node, 2)
    upper.places[HOST].tick = 5
    tree.merge(upper)
    assert len(tree.nodes) == 2
    upper.places[HOST].tick = node.places[HOST].tick
    upper.ends = 1
    tree.merge(upper)
    assert len(tree.nodes) == 2
    upper.ends = 0
    tree.merge(upper)
    assert list(tree.nodes) == [node.id]
    assert node.places[HOST].pages == pack_pages([7, 8, 9])
    assert tree_violations(tree, {}) == []


def test_a_fill_that_is_split_lands_on_both_halves() -> None:
    tree, space = host_tree()
    node = tree.add_leaf(space.root, pack_tokens([1, 2]))
    tree.begin_fill(node, HOST, pack_pages([0, 1]), 5, 1)
    assert node.resident(HOST) is None
    upper = tree.split(node, 1)
    landed, freed = tree.land(5, HOST)
    assert (landed, freed) == ([upper, node], b"")
    assert tree.places[HOST].pages == 2
    assert tree_violations(tree, {}) == []


def test_a_lost_fill_frees_its_pages_and_removes_its_nodes_and_namespace() -> None:
    tree, space = host_tree()
    node = tree.add_leaf(space.root, pack_tokens([1, 2]))
    tree.begin_fill(node, HOST, pack_pages([0, 1]), 5, 1)
    tree.split(node, 1)
    _, freed = tree.lose(5, HOST)
    assert sorted(freed) == sorted(pack_pages([0, 1]))
    assert not tree.nodes
    assert not tree.spaces


def test_a_retired_path_is_freed_when_its_last_claim_falls() -> None:
    tree, space = host_tree()
    top = leaf(tree, space.root, [1], [0])
    below = leaf(tree, top, [2], [1])
    tree.lock(below, HOST)
    for node in (top, below):
        tree.retire(node, HOST)
    assert top.resident(HOST) is None
    assert tree.release_drained(below, HOST) == b""
    freed = tree.unlock(below, HOST)
    assert freed == pack_pages([1, 0])
    assert not tree.nodes


def test_pages_that_are_held_cannot_be_dropped() -> None:
    tree, space = host_tree()
    node = leaf(tree, space.root, [1], [0])
    tree.lock(node, HOST)
    with pytest.raises(InternalError, match="cannot detach"):
        tree.drop(node, HOST)


def test_lock_counts_never_go_below_nothing() -> None:
    tree, space = host_tree()
    node = leaf(tree, space.root, [1], [0])
    with pytest.raises(InternalError, match="negative lock count"):
        tree.unlock(node, HOST)


def test_residency_is_closed_under_ancestors_and_fits_the_edge() -> None:
    tree, space = host_tree()
    top = tree.add_leaf(space.root, pack_tokens([1]))
    below = tree.add_leaf(top, pack_tokens([2]))
    with pytest.raises(InternalError, match="without its ancestor"):
        tree.publish(below, HOST, pack_pages([1]), (), (0, 0), 1)
    with pytest.raises(InternalError, match="cannot attach"):
        tree.publish(top, HOST, pack_pages([1, 2]), (), (0, 0), 1)


def test_pages_are_dropped_only_where_they_are_resident() -> None:
    tree, space = host_tree()
    node = tree.add_leaf(space.root, pack_tokens([1]))
    tree.begin_fill(node, HOST, pack_pages([0]), 5, 1)
    with pytest.raises(InvalidTransition, match="no step from filling by drop"):
        tree.drop(node, HOST)


def test_a_stale_node_id_is_refused_and_never_another_node() -> None:
    world = World(host_pages=0)
    a = Scheduler(world, "a")
    a.publish([1, 2])
    gone = a.match([1, 2], acquire=False).node
    a.flush()
    a.publish([1, 2])
    with pytest.raises(StaleNode, match="match again"):
        world.directory.tree.node(gone)


def test_namespaces_have_a_limit_and_go_with_their_last_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "NAMESPACES_MAX", 2)
    tree, _ = host_tree()
    space = tree.space(b"f", NamespaceKey(extra_key="b"), 1, 64)
    node = leaf(tree, space.root, [1], [0])
    with pytest.raises(TooMany):
        tree.space(b"f", NamespaceKey(extra_key="c"), 1, 64)
    tree.drop(node, HOST)
    tree.prune(node)
    assert tree.find_space(b"f", NamespaceKey(extra_key="b")) is None
    assert tree.space(b"f", NamespaceKey(extra_key="c"), 1, 64) is not space


def test_the_tree_of_a_bounded_pool_levels_off_f100() -> None:
    world = World(host_pages=48, checked=False)
    a = Scheduler(world, "a", pages=32)
    hot = [1, 2, 3, 4]
    most = 0
    for number in range(2500):
        got = a.match(hot)
        a.publish([*hot, 1000 + number, number], receipt=got.receipt)
        if got.receipt:
            a.unlock(got.receipt)
        if number % 7 == 0:
            world.finish_all()
        most = max(most, len(world.directory.tree.nodes))
    world.finish_all()
    assert world.directory.check() == []
    assert most <= 32 + 48
    assert len(world.directory.story) <= limits.STORY_LINES_MAX
    a.flush()
    world.directory.transfers.evict_host(64, 48)
    assert not world.directory.tree.nodes
    assert not world.directory.tree.spaces


def test_reprs_tell_the_state_in_one_line() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    receipt = b.match([1, 2]).receipt
    directory = world.directory
    node = next(iter(directory.tree.nodes.values()))
    assert repr(node) == f"Node({node.id}, pages=2, children=0, -1:filling 1:resident)"
    assert repr(node.places[a.pool]) == "Residency(resident, pages=[0, 1], locks=0, children=0)"
    assert repr(directory.leases.get(receipt, b.pool)) == f"Lease({receipt}, 2/r, held, {{}})"
    assert repr(directory.transfers.copies[1]) == "Copy(1, backup, copying, pools=(1,))"
    assert "live, pages=2/32" in repr(directory.pools[a.pool])
