"""Both trees: what a thin one must ask for more than once, and what a mirrored one need not."""

import pytest

from directory.core import limits
from directory.core.errors import InternalError
from directory.core.events import Evict, Flush, Insert, Match, Mode
from directory.core.namespace import NamespaceKey
from scheduler_shim.mirror import Mirror
from scheduler_shim.request import Request
from tests.unit.scheduler_shim.support import MODES, PAGE_SIZE, Cluster, FakeDaemon, Node, tokens


def test_a_thin_flush_asks_until_nothing_is_evictable(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GAVE_UP_PAGES_MAX", 2)
    node = cluster.add("a", "thin")
    node.serve(1, tokens(1, 2, 3, 4, 5))
    daemon.heard.clear()
    node.scheduler.flush()
    node.check()
    assert (node.scheduler.pages.free, node.scheduler.pages.tree) == (16, 0)
    assert daemon.heard == [Flush("pool")] * 3


def test_a_thin_eviction_asks_until_it_has_enough_or_nothing_is_evictable(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GAVE_UP_PAGES_MAX", 2)
    node = cluster.add("a", "thin", page_count=8)
    node.serve(1, tokens(1, 2, 3, 4, 5, 6, 7))
    daemon.heard.clear()
    assert node.serve(2, tokens(11, 12, 13, 14, 15, 16)).error == ""
    assert [body for body in daemon.heard if isinstance(body, Evict)] == [
        Evict(5),
        Evict(3),
        Evict(1),
    ]
    assert len(node.scheduler.room.tree.evict(8)) == 4 * 8


def test_a_thin_flush_that_has_no_answer_gives_up_the_daemon_and_frees_what_went(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GAVE_UP_PAGES_MAX", 2)
    node = cluster.add("a", "thin")
    node.serve(1, tokens(1, 2, 3, 4, 5))
    daemon.drop_request = lambda body: (
        isinstance(body, Flush) and any(isinstance(heard, Flush) for heard in daemon.heard)
    )
    node.scheduler.flush()
    node.check()
    assert node.scheduler.mode == "degraded"
    assert node.scheduler.pages.free == 16


def test_a_thin_insert_whose_answer_is_gone_gives_up_the_daemon(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    node = cluster.add("a", "thin")
    daemon.gone = lambda body: isinstance(body, Insert)
    node.serve(1, tokens(1, 2, 3))
    node.check()
    assert node.scheduler.mode == "degraded"
    assert node.scheduler.pages.free + node.scheduler.pages.tree == 16


def test_a_thin_eviction_whose_answer_is_gone_gives_up_the_daemon(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    node = cluster.add("a", "thin")
    node.serve(1, tokens(1, 2, 3))
    daemon.gone = lambda body: isinstance(body, Flush)
    node.scheduler.flush()
    node.check()
    assert node.scheduler.mode == "degraded"
    assert node.scheduler.pages.free == 16


def test_a_thin_match_whose_answer_is_gone_is_a_miss(cluster: Cluster, daemon: FakeDaemon) -> None:
    node = cluster.add("a", "thin")
    daemon.gone = lambda body: isinstance(body, Match)
    assert node.serve(1, tokens(1, 2, 3)).error == ""
    node.check()
    assert node.scheduler.mode == "thin"


def told_again(node: Node, path: bytes) -> bool:
    """Whether the tree has all of a path that a request has computed."""
    request = Request(99, "again", NamespaceKey(), path, b"", 4 * PAGE_SIZE)
    there = node.scheduler.room.tree.use_again(request, path)
    node.settle()
    return there


def test_a_tree_that_is_wrong_about_a_path_leaves_it_to_the_insert(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.add("a", "mirrored")
    node.serve(1, tokens(1, 2, 3))

    def wrong(*_: object) -> None:
        raise InternalError("a defect")

    monkeypatch.setattr(Mirror, "again", wrong)
    assert not told_again(node, tokens(1, 2, 3))


def test_a_path_that_is_used_again_is_backed_up_again(cluster: Cluster, daemon: FakeDaemon) -> None:
    node = cluster.add("a", "mirrored")
    node.serve(1, tokens(1, 2, 3))
    daemon.run_copies()
    host, client = daemon.directory.host, node.scheduler.client
    assert client is not None
    assert host.nodes
    client.report(Flush("host"))
    node.settle()
    assert not host.nodes
    before = node.totals
    assert told_again(node, tokens(1, 2, 3))
    daemon.run_copies()
    node.check()
    assert sum(held.page_count for held in host.nodes.values()) == 3
    assert node.totals == before


@pytest.mark.parametrize("mode", MODES)
def test_a_path_is_told_of_again_where_this_side_knows_that_it_is_there_whole(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode)
    node.serve(1, tokens(1, 2, 3))
    daemon.heard.clear()
    assert not told_again(node, tokens(1, 2, 3, 4))
    assert not daemon.heard
    assert told_again(node, tokens(1, 2, 3)) == (mode == "mirrored")
    told = [body for body in daemon.heard if isinstance(body, Insert)]
    assert [(body.tokens, body.span, body.fresh_pages) for body in told] == (
        [(tokens(1, 2, 3), 0, 0)] if mode == "mirrored" else []
    )
