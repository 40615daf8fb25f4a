"""Nodes and their residencies: small, and gone when nobody needs them."""

import gc
from typing import ClassVar

import pytest

from directory.core.ids import HOST
from directory.core.namespace import NamespaceKey
from directory.core.node import NO_CHILDREN, Node, Residency, Run, Space
from directory.core.place import HostState
from directory.core.states import ResidencyState
from directory.core.tree import Tree

SPACE = Space(b"f", NamespaceKey(), 1, 1)


class Marked(bytes):
    """Pages that say when they go."""

    gone: ClassVar[list[bytes]] = []

    def __del__(self) -> None:
        self.gone.append(bytes(self))


def residency(place: int, pages: bytes = b"\0\0\0\0") -> Residency:
    return Residency(place, ResidencyState.RESIDENT, pages, (0, 0), 1)


def test_places_are_in_the_order_in_which_they_came() -> None:
    node = Node(1, None, b"", SPACE)
    for place in (3, HOST, 2):
        node.places[place] = residency(place)
    assert list(node.places) == [3, HOST, 2]
    assert node.places.keys() == {2, 3, HOST}
    assert [node.at(place) is not None for place in (3, HOST, 2, 1)] == [True, True, True, False]
    del node.places[HOST]
    assert list(node.places) == [3, 2]
    del node.places[3]
    del node.places[2]
    assert not node.places
    with pytest.raises(KeyError):
        node.places[2]
    with pytest.raises(KeyError):
        del node.places[2]


@pytest.mark.parametrize(
    "runs", [(), (Run(4, 2, 3),), (Run(4, 2, 1), Run(9, 0, 2)), (Run(4, 0, 1), Run(7, 5, 2))]
)
def test_runs_come_back_as_they_were_set(runs: tuple[Run, ...]) -> None:
    at = residency(1, bytes(12))
    at.runs = runs
    assert at.runs == runs


def test_leaves_share_having_no_children_and_none_can_change_it() -> None:
    node, child = Node(1, None, b"", SPACE), Node(2, None, b"", SPACE)
    with pytest.raises(TypeError):
        node.children[b"a"] = child
    node.hang(b"a", child)
    node.hang(b"b", child)
    node.unhang(b"a")
    assert list(node.children) == [b"b"]
    with pytest.raises(KeyError):
        node.unhang(b"a")
    node.unhang(b"b")
    assert node.children is NO_CHILDREN


@pytest.mark.parametrize("emptied", [True, False])
def test_nodes_go_with_their_tree_though_nobody_collects_them(emptied: bool) -> None:
    tree = Tree()
    tree.places[HOST] = HostState()
    space = tree.space(b"f", NamespaceKey(), 1, 1)
    parent = space.root
    Marked.gone.clear()
    for at in range(2):
        page = bytes([at, 0, 0, 0])
        parent = tree.add_leaf(parent, page)
        tree.publish(parent, HOST, Marked(page), (), (0, 0), 1)
    gc.collect()
    gc.disable()
    try:
        if emptied:
            while parent.parent is not None:
                dropped, parent = parent, parent.parent
                tree.drop(dropped, HOST)
                tree.prune(dropped)
                del dropped
            assert not tree.nodes
        else:
            del tree, space
        del parent
        assert sorted(Marked.gone) == [b"\0\0\0\0", b"\1\0\0\0"]
    finally:
        gc.enable()


def test_a_million_nodes_are_nothing_to_collect() -> None:
    node = Node(1, None, b"", SPACE)
    node.hang(b"a", Node(2, node, b"", SPACE))
    node.places[1] = residency(1)
    assert not gc.is_tracked(node)
    assert not gc.is_tracked(node.children)
    assert not gc.is_tracked(node.places[1])
