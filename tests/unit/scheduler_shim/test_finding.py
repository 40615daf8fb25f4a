"""Both trees: what was found is protected by nobody, until it is held; and what the sums say."""

from __future__ import annotations

from array import array

import pytest

from directory.core.actions import Matched, Totals
from directory.core.events import Lock, Match, Mode, Unlock
from directory.core.ids import NO_LEASE
from directory.core.namespace import NamespaceKey
from scheduler_shim.client import DaemonClient
from scheduler_shim.own_tree import Found
from scheduler_shim.request import Request
from scheduler_shim.thin_tree import ThinTree
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


def thin(node: Node, mode: Mode) -> tuple[ThinTree, DaemonClient]:
    """The thin tree of a node and the client that it asks."""
    if mode == "mirrored":
        pytest.skip("a mirror asks nobody")
    tree, client = node.scheduler.room.tree, node.scheduler.client
    assert isinstance(tree, ThinTree)
    assert client is not None
    return tree, client


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


def test_a_thin_tree_counts_its_sums_itself(node: Node, daemon: FakeDaemon, mode: Mode) -> None:
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
    assert [type(body) for body in daemon.heard] == [Lock], "the release goes with what is next"
    assert isinstance(tree, ThinTree)
    assert tree.recount() == [], "the daemon counts the same"
    assert [type(body) for body in daemon.heard] == [Lock, Unlock, Match]


def test_what_a_late_lease_may_protect_counts_until_it_is_released(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    """SGLang evicts what it is told can be evicted: nothing else may hold it by then."""
    tree, client = thin(node, mode)
    request = holding(tree.find(KEY, PATH[: 3 * 4 * PAGE_SIZE]))
    daemon.drop_request = lambda body: isinstance(body, Match)
    assert tree.match(request) == 3, "no answer is a miss"
    assert tree.totals == Totals(1, 3)
    daemon.drop_request = lambda _: False
    while client.abandoned_count:
        client.wait(1_000)
        client.poll()
    assert tree.totals == Totals(4, 0)
    assert tree.recount() == []


def test_a_thin_tree_asks_once_for_what_does_not_change(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    if mode == "mirrored":
        pytest.skip("a mirror asks nobody")
    tree = node.scheduler.room.tree
    node.serve(2, tokens(7, 8))
    tree.find(KEY, PATH)
    daemon.heard.clear()
    first, second = tree.find(KEY, PATH), tree.find(KEY, tokens(7, 8))
    for _ in range(3):
        assert tree.find(KEY, PATH, first) is first
        assert tree.find(KEY, tokens(7, 8), second) is second
    assert [type(body) for body in daemon.heard] == [Match], "the second one, at its first time"
    node.serve(3, tokens(7, 8, 9))
    daemon.heard.clear()
    assert len(tree.find(KEY, tokens(7, 8, 9), second).pages) == 3 * 4
    assert [type(body) for body in daemon.heard] == [Match], "something was published"


def test_the_last_uses_are_told_before_anything_is_given_up(node: Node, mode: Mode) -> None:
    tree = node.scheduler.room.tree
    node.serve(2, tokens(7, 8))
    both = [(path, tree.find(KEY, path)) for path in (PATH, tokens(7, 8))]
    for path, found in [*both, *both[:1]]:
        assert tree.find(KEY, path, found) is found
    node.scheduler.room.free(tree.evict(2))
    assert (tree.find(KEY, tokens(7, 8)).pages, len(tree.find(KEY, PATH).pages)) == (b"", 16)
    assert tree.check() == []


def test_nothing_that_was_found_in_one_tree_passes_for_found_in_another(
    node: Node, mode: Mode
) -> None:
    """The daemon may have been lost in between, and the pages given to somebody else."""
    if mode == "mirrored":
        pytest.skip("a mirror looks up what it has")
    tree, client = node.scheduler.room.tree, node.scheduler.client
    assert isinstance(tree, ThinTree)
    assert client is not None
    found = tree.find(KEY, PATH)
    other = ThinTree(tree._spans, client)
    node.scheduler.room.free(tree.evict(4))
    assert other.changes != found.changes
    assert other.find(KEY, PATH, found).pages == b""
    assert not other.hold(holding(found), found)


def test_a_lock_that_has_no_answer_gives_up_the_daemon(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    if mode == "mirrored":
        pytest.skip("a mirror asks nobody")
    tree = node.scheduler.room.tree
    found = tree.find(KEY, PATH)
    daemon.drop_request = lambda body: isinstance(body, Lock)
    assert tree.hold(holding(found), found), "it is asked for, and not waited for"
    assert node.scheduler.client is not None
    assert not node.scheduler.client.lost
    assert tree.evict(1) == b"", "it might give up what is to be locked"
    assert node.scheduler.client.lost


def test_a_lock_of_a_node_that_is_another_one_by_then_is_taken_by_its_path(
    node: Node, mode: Mode
) -> None:
    """Whatever others do may merge the node that a match has named."""
    tree, client = thin(node, mode)
    found = tree.find(KEY, PATH[: 3 * 4 * PAGE_SIZE])._replace(node_id=999)
    request = holding(found)
    assert tree.hold(request, found)
    assert len(tree.evict(4)) == 4, "the lock is settled before anything is given up"
    assert not client.lost
    assert request.receipt != NO_LEASE
    assert tree.totals == Totals(0, 3)
    assert tree.recount() == []


def test_a_lock_that_is_let_go_before_its_answer_is_released(node: Node, mode: Mode) -> None:
    tree = node.scheduler.room.tree
    found = tree.find(KEY, PATH)
    request = holding(found)
    assert tree.hold(request, found)
    tree.release(request)
    assert tree.totals == Totals(4, 0)
    assert len(tree.evict(4)) == 16


def test_what_a_late_lease_may_protect_ends_with_its_own_question(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    """Others may always be late: what they hold up would add up, and nobody would be admitted."""
    if mode == "mirrored":
        pytest.skip("a mirror asks nobody")
    tree, client = node.scheduler.room.tree, node.scheduler.client
    assert client is not None
    request = holding(tree.find(KEY, PATH[: 3 * 4 * PAGE_SIZE]))
    assert isinstance(tree, ThinTree)
    daemon.drop_request = lambda body: isinstance(body, Match)
    assert tree.match(request) == 3
    assert tree.totals == Totals(1, 3)
    daemon.drop_request = lambda body: isinstance(body, Match) and body.request == "other"
    client.abandon(client.ask(Match("other", 0, KEY, PATH, acquire=False)))
    while client.abandoned_count > 1:
        client.wait(1_000)
        client.poll()
    assert client.abandoned_count == 1
    assert tree.totals == Totals(4, 0)
    daemon.drop_request = lambda _: False
    assert tree.recount() == []


def test_a_late_lease_may_protect_what_the_row_does_not_have(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    tree, client = thin(node, mode)
    daemon.drop_reply = lambda body: isinstance(body, Matched)
    assert tree.match(holding(Found(b""), PATH + tokens(9))) == 0
    assert tree.totals == Totals(0, 4)
    assert tree.evict(4) == b"", "the daemon says the same"
    daemon.drop_reply = lambda _: False
    while client.abandoned_count:
        client.wait(1_000)
        client.poll()
    assert tree.totals == Totals(4, 0)
    assert tree.recount() == []


def test_a_lease_whose_answer_is_gone_counts_until_a_list_makes_it_fall(
    node: Node, daemon: FakeDaemon, mode: Mode
) -> None:
    tree, client = thin(node, mode)
    request = holding(tree.find(KEY, PATH))
    daemon.gone = lambda body: isinstance(body, Match)
    assert tree.match(request) == 4
    daemon.gone = lambda _: False
    client.report_live(request.alive_as)
    assert (tree.totals, tree.doubts) == (Totals(1, 3), True)
    client.report_live([])
    assert (tree.totals, tree.doubts) == (Totals(4, 0), False)
    assert tree.recount() == []


def test_a_daemon_that_goes_in_the_asking_leaves_no_row_what_was_given_up(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    """The pages are another row's by then, and a mirror would have two paths to them."""
    if mode == "mirrored":
        pytest.skip("a mirror asks nobody")
    node = cluster.add("b", mode, page_count=4)
    node.serve(1, PATH)
    room, client = node.scheduler.room, node.scheduler.client
    assert client is not None
    found = room.tree.find(KEY, PATH)
    room.free(room.tree.evict(4))
    pages = room.allocate(4)
    assert pages is not None
    path = tokens(7, 8, 9, 10)
    other = holding(Found(pages.tobytes()), path)
    assert room.tree.publish(other, 4, node.pool.advance(), keep=True) is not None
    request = holding(found)
    daemon.drop_request = lambda body: isinstance(body, Match)
    assert not room.tree.hold(request, found)
    assert client.lost
    assert (list(request.row), request.tree_pages) == ([], 0)
    room.lose_daemon([other, request])
    assert room.tree.find(KEY, PATH).pages == b""
    assert room.tree.find(KEY, path).pages == pages.tobytes()
    assert room.tree.check() == []
