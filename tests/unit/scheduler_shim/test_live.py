"""Who lives: the list that a scheduler reports, and what it makes fall and what not."""

from directory.core.actions import Matched
from directory.core.events import Live, Match, Mode
from directory.core.ids import NO_LEASE
from directory.core.namespace import NamespaceKey
from directory.protocol.messages import DaemonBody
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.request import Phase
from tests.unit.scheduler_shim.support import Cluster, FakeDaemon, Node, run_until, tokens

SECOND_US = 1_000_000


def lists(daemon: FakeDaemon) -> list[tuple[tuple[str, int], ...]]:
    return [body.requests for body in daemon.heard if isinstance(body, Live)]


def restoring(cluster: Cluster, mode: Mode, name: str = "b") -> Node:
    """A scheduler with request 2, whose restore is under way."""
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add(name, mode)
    cluster.daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    return node


def test_requests_in_progress_are_listed_once_a_second_f72(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = restoring(cluster, mode)
    for _ in range(35):
        daemon.clock_us += SECOND_US // 10
        node.tick()
        daemon.run()
    assert lists(daemon) == [(("b-2", 0),)] * 3
    assert len(daemon.directory.leases) == 1
    daemon.hold_copies = False
    node.settle()
    assert "leases_unlisted" not in daemon.directory.counters


def test_a_lease_whose_release_was_lost_falls_within_a_second_f72(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = restoring(cluster, mode)
    assert node.scheduler.client is not None
    lost = node.scheduler.client.call(Match("lost", 0, NamespaceKey(), tokens(1, 2)))
    assert isinstance(lost, Matched)
    assert len(daemon.directory.leases) == 2
    daemon.clock_us += SECOND_US
    node.tick()
    daemon.run()
    assert [lease.owner.request for lease in daemon.directory.leases] == ["b-2"]
    assert daemon.directory.counters["leases_unlisted"] == 1


def test_before_a_long_rest_a_lease_that_nobody_will_release_falls_at_once_f72(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = restoring(cluster, mode)
    node.scheduler.requests[2].receipt = NO_LEASE
    node.scheduler.abort(2)
    daemon.hold_copies = False
    node.settle()
    daemon.run()
    assert node.scheduler.idle
    assert len(daemon.directory.leases) == 0
    assert daemon.directory.host.locked_pages == 0


def test_an_idle_scheduler_without_leases_lists_nobody_f72(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode)
    node.serve(1, tokens(1, 2, 3))
    for _ in range(10):
        daemon.clock_us += SECOND_US
        node.tick()
        daemon.run()
    assert lists(daemon) == []


def test_a_request_with_an_unanswered_or_abandoned_question_is_alive_f72(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    cluster.add("a", "mirrored").serve(1, tokens(1, 2, 3))
    node = cluster.add("b", "mirrored", concurrency=2)
    daemon.drop_reply = lambda _: True
    for number in (2, 3):
        node.scheduler.submit(number, tokens(1, 2, 3, number))
    node.tick()
    daemon.run()
    node.scheduler.abort(3)  # the daemon has granted its lease, and nobody here knows the receipt
    assert len(daemon.directory.leases) == 2
    daemon.clock_us += SECOND_US
    node.tick()
    daemon.drop_reply = lambda _: False
    daemon.run()
    assert set(lists(daemon)[-1]) == {("b-2", 0), ("b-3", 0)}
    node.settle()
    daemon.run()
    assert len(daemon.directory.leases) == 0
    assert "leases_unlisted" not in daemon.directory.counters
    assert "problems" not in node.scheduler.counters


def test_a_thin_row_stays_leased_under_the_attempt_that_the_lease_was_granted_to_f72(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    cluster.add("a", "thin").serve(1, tokens(1, 2, 3))
    node = Node(
        daemon,
        instance="b",
        mode="thin",
        chunk_pages=1,
        deadlines=Deadlines(call_ms=300, misses_max=1_000),
    )
    cluster.nodes.append(node)
    node.serve(9, tokens(1))
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    daemon.lose_mover()
    daemon.drop_reply = is_matched
    node.tick()  # the restore is lost, and the second attempt's Match has no answer
    request = node.scheduler.requests[2]
    assert (request.attempt, request.lease_attempt, request.tree_pages) == (1, 0, 2)
    daemon.clock_us += SECOND_US
    client = node.scheduler.client
    assert client is not None
    client.report_live(request.alive_as)
    daemon.run()
    assert {("b-2", 0), ("b-2", 1)} == set(lists(daemon)[-1])
    assert "leases_unlisted" not in daemon.directory.counters
    daemon.drop_reply = lambda _: False
    daemon.hold_copies = False
    node.settle()
    assert node.finished[2].error == ""


def test_a_request_that_fits_waits_for_late_leases_on_its_own_pool_f72(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    node = Node(
        daemon,
        instance="a",
        mode="thin",
        page_count=4,
        deadlines=Deadlines(call_ms=300, misses_max=1_000),
    )
    cluster.nodes.append(node)
    node.serve(1, tokens(1, 2, 3))
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    daemon.drop_reply = is_matched
    node.tick(2)  # the answer to Match, with its lease on three pages, is not heard in time
    assert len(daemon.directory.leases) == 1
    for _ in range(20):
        node.tick()
        assert 2 not in node.finished
    daemon.drop_reply = lambda _: False
    node.settle()
    assert node.finished[2].error == ""
    daemon.run()
    assert len(daemon.directory.leases) == 0


def is_matched(body: DaemonBody) -> bool:
    return isinstance(body, Matched)
