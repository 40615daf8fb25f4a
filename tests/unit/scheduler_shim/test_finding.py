"""Both trees: what was found is protected by nobody, until it is held; and what the sums say."""

from __future__ import annotations

from array import array

import pytest

from directory.core.actions import Totals
from directory.core.events import Lock, Match, Mode, Unlock
from directory.core.ids import NO_LEASE
from directory.core.namespace import NamespaceKey
from scheduler_shim.own_tree import Found
from scheduler_shim.request import Request
from tests.unit.scheduler_shim.support import MODES, PAGE_SIZE, Cluster, FakeDaemon, Node, tokens

pytestmark = pytest.mark.parametrize("mode", MODES)

KEY = NamespaceKey()
PATH = tokens(1, 2, 3, 4)


def holding(found: Found, path: bytes = PATH) -> Request:
    """A request whose row has what was found."""
    request = Request(99, "holder", KEY, path, b"", 4 * PAGE_SIZE)
    request.row = array("I")
    request.row.frombytes(found.pages)
    request.tree_pages = len(request.row)
    return request


@pytest.fixture
def node(cluster: Cluster, mode: Mode) -> Node:
    """A scheduler that has served a path of four pages."""
    made = cluster.add("a", mode)
    made.serve(1, PATH)
    return made


def test_what_was_found_can_be_held_and_is_let_go_once(node: Node) -> None:
    tree = node.scheduler.room.tree
    assert tree.totals == Totals(4, 0)
    found = tree.find(KEY, PATH[: 3 * 4 * PAGE_SIZE])
    assert len(found.pages) == 4 * 3
    assert tree.totals == Totals(4, 0)
    request = holding(found)
    assert tree.hold(request, found)
    assert tree.totals == Totals(1, 3)
    assert len(tree.evict(1)) == 4
    tree.release(request)
    assert tree.totals == Totals(3, 0)


def test_nothing_is_found_of_another_path_or_namespace(node: Node) -> None:
    tree = node.scheduler.room.tree
    assert tree.find(KEY, tokens(7, 8)).pages == b""
    assert tree.find(NamespaceKey(cache_salt="s"), PATH).pages == b""
    assert tree.find(KEY, b"").pages == b""
    assert tree.hold(holding(Found(b"")), Found(b""))


def test_what_was_given_up_meanwhile_is_not_held(node: Node) -> None:
    tree = node.scheduler.room.tree
    found = tree.find(KEY, PATH)
    node.scheduler.room.free(tree.evict(2))
    request = holding(found)
    assert not tree.hold(request, found)
    assert (request.node, request.receipt) == (None, NO_LEASE)
    assert tree.totals == Totals(2, 0)
    assert node.scheduler.client is not None
    assert not node.scheduler.client.lost


def test_what_was_found_is_held_by_its_path_when_its_node_is_another_one_now(node: Node) -> None:
    """A node that a match has split off is merged again when what parted there goes."""
    tree, half = node.scheduler.room.tree, PATH[: 2 * 4 * PAGE_SIZE]
    found = tree.find(KEY, half)
    node.serve(2, half + tokens(8, 9))
    node.serve(3, PATH)
    node.scheduler.room.free(tree.evict(2))
    request = holding(found, half)
    assert tree.hold(request, found)
    assert tree.totals == Totals(2, 2)
    tree.release(request)
    node.check()


def test_a_touched_path_is_given_up_last(node: Node) -> None:
    tree = node.scheduler.room.tree
    node.serve(2, tokens(7, 8))
    tree.touch(KEY, PATH)
    node.scheduler.room.free(tree.evict(2))
    assert (tree.find(KEY, tokens(7, 8)).pages, len(tree.find(KEY, PATH).pages)) == (b"", 16)


def test_a_thin_tree_asks_for_its_sums_only_where_it_must(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    if mode == "mirrored":
        pytest.skip("a mirror asks nobody")
    tree = node.scheduler.room.tree
    found = tree.find(KEY, PATH)
    request = holding(found)
    daemon.heard.clear()
    assert tree.hold(request, found)
    assert [tree.totals for _ in range(3)] == [Totals(0, 4)] * 3
    tree.release(request)
    assert [tree.totals for _ in range(3)] == [Totals(4, 0)] * 3
    assert [type(body) for body in daemon.heard] == [Lock, Unlock, Match]


def test_a_thin_tree_that_has_no_answer_counts_the_released_as_protected(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    if mode == "mirrored":
        pytest.skip("a mirror asks nobody")
    tree = node.scheduler.room.tree
    found = tree.find(KEY, PATH)
    request = holding(found)
    assert tree.hold(request, found)
    tree.release(request)
    daemon.drop_request = lambda body: isinstance(body, Match)
    assert tree.totals == Totals(0, 4)
    assert tree.find(KEY, PATH).pages == b""


def test_an_answer_that_comes_late_changes_no_sums_within_a_tick(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    """SGLang reads what can be given up, and then what is protected; the daemon stood still at the
    first question and answers the second one."""
    if mode == "mirrored":
        pytest.skip("a mirror asks nobody")
    tree = node.scheduler.room.tree
    found = tree.find(KEY, PATH)
    request = holding(found)
    assert tree.hold(request, found)
    tree.release(request)
    daemon.drop_request = lambda body: isinstance(body, Match)
    evictable = tree.totals.evictable
    daemon.drop_request = lambda _: False
    assert evictable + tree.totals.protected == tree.pages == 4
    tree.new_tick()
    assert tree.totals == Totals(4, 0)


def test_a_lock_that_has_no_answer_gives_up_the_daemon(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    if mode == "mirrored":
        pytest.skip("a mirror asks nobody")
    tree = node.scheduler.room.tree
    found = tree.find(KEY, PATH)
    daemon.drop_request = lambda body: isinstance(body, Lock)
    assert not tree.hold(holding(found), found)
    assert node.scheduler.client is not None
    assert node.scheduler.client.lost
