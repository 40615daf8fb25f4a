"""Joins: requests of one pool share a fill of one path, by reference, until it lands or is lost."""

import pytest

from directory.core.events import Mode, Restore
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.request import Phase
from tests.unit.scheduler_shim.support import (
    Cluster,
    FakeDaemon,
    Node,
    phase_of,
    run_until,
    tokens,
)


def restores(daemon: FakeDaemon) -> list[Restore]:
    return [body for body in daemon.heard if isinstance(body, Restore)]


def two_that_wait(cluster: Cluster, mode: Mode, **options: int) -> Node:
    """Requests 2 and 3 of one pool wait for pages 1 2 3, which another pool has computed."""
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode, concurrency=4, **options)
    cluster.daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    node.scheduler.submit(3, tokens(1, 2, 3, 5))
    run_until(node, 3, Phase.RESTORING)
    return node


def let_copies_go(daemon: FakeDaemon, *nodes: Node) -> None:
    daemon.hold_copies = False
    daemon.run()
    for node in nodes:
        node.settle()
    daemon.run()


def test_the_second_request_waits_for_the_firsts_fill(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = two_that_wait(cluster, mode)
    assert len(restores(daemon)) == 1
    assert node.scheduler.counters["restores_joined"] == 1
    assert node.scheduler.pages.landing == 3
    let_copies_go(daemon, node)
    first, second = node.finished[2], node.finished[3]
    assert (first.own_pages, first.peer_pages, first.verified) == (0, 3, 3)
    assert (second.own_pages, second.peer_pages, second.verified) == (3, 0, 3)
    assert first.wrong == second.wrong == 0
    assert len(restores(daemon)) == 1
    assert node.scheduler.pages.tree == 5
    assert "duplicates_freed" not in node.scheduler.counters
    assert len(daemon.directory.leases) == 0


def test_two_pools_never_join(cluster: Cluster, daemon: FakeDaemon, mode: Mode) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    nodes = [cluster.add(name, mode) for name in "bc"]
    daemon.hold_copies = True
    for node in nodes:
        node.scheduler.submit(2, tokens(1, 2, 3, 4))
        run_until(node, 2, Phase.RESTORING)
    assert len(restores(daemon)) == 2
    let_copies_go(daemon, *nodes)
    assert [node.finished[2].peer_pages for node in nodes] == [3, 3]
    assert all("restores_joined" not in node.scheduler.counters for node in nodes)


def test_a_fill_goes_on_for_the_second_when_the_first_is_aborted(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = two_that_wait(cluster, mode)
    node.scheduler.abort(2)
    node.tick()
    assert phase_of(node, 3) is Phase.RESTORING
    let_copies_go(daemon, node)
    assert (node.finished[3].own_pages, node.finished[3].verified) == (3, 3)
    assert len(restores(daemon)) == 1
    assert node.scheduler.pages.tree == 4
    assert len(daemon.directory.leases) == 0


def test_a_shorter_path_takes_its_part_of_a_fill_and_the_rest_is_free(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode, concurrency=4)
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    node.scheduler.submit(3, tokens(1, 2, 7, 7))
    run_until(node, 3, Phase.RESTORING)
    node.scheduler.abort(2)
    let_copies_go(daemon, node)
    assert (node.finished[3].own_pages, node.finished[3].wrong) == (2, 0)
    assert node.scheduler.pages.tree == 4
    assert node.scheduler.pages.free == 12


def test_a_fill_that_nobody_wants_any_more_ends_and_its_pages_are_evictable_or_free(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = two_that_wait(cluster, mode)
    for number in (2, 3):
        node.scheduler.abort(number)
    node.tick()
    assert node.scheduler.idle
    assert node.scheduler.pages.landing == 3  # the answer is still awaited
    let_copies_go(daemon, node)
    node.tick()
    kept = 3 if mode == "mirrored" else 0
    assert node.scheduler.pages == (16 - kept, kept, 0, 0, 0)
    assert len(daemon.directory.leases) == 0
    again = node.serve(4, tokens(1, 2, 3, 4))
    assert (again.own_pages, again.peer_pages, again.wrong) == (kept, 3 - kept, 0)


def test_a_landing_whose_path_above_has_gone_is_freed(cluster: Cluster, daemon: FakeDaemon) -> None:
    cluster.add("a", "mirrored").serve(1, tokens(1, 2, 3))
    node = cluster.add("b", "mirrored")
    node.serve(9, tokens(1))
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    node.scheduler.abort(2)
    node.scheduler.flush()
    let_copies_go(daemon, node)
    node.tick()
    assert node.scheduler.pages == (16, 0, 0, 0, 0)
    assert node.scheduler.counters["landings_freed"] == 1


def test_a_longer_path_joins_and_restores_only_what_lies_beyond(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3, 4, 5))
    node = cluster.add("b", mode, concurrency=2)
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 9))
    run_until(node, 2, Phase.RESTORING)
    node.scheduler.submit(3, tokens(1, 2, 3, 4, 5, 6))
    run_until(node, 3, Phase.RESTORING)
    let_copies_go(daemon, node)
    assert [(len(r.pages) // 4, r.start_page) for r in restores(daemon)] == [(3, 0), (2, 3)]
    record = node.finished[3]
    assert (record.own_pages, record.peer_pages, record.verified, record.wrong) == (3, 2, 5, 0)


def test_what_lies_before_a_fill_is_restored_up_to_it(cluster: Cluster, daemon: FakeDaemon) -> None:
    cluster.add("a", "mirrored").serve(1, tokens(1, 2, 3, 4, 5))
    node = cluster.add("b", "mirrored", concurrency=2)
    node.serve(9, tokens(1, 2))
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4, 8))
    run_until(node, 2, Phase.RESTORING)
    node.scheduler.abort(2)
    node.scheduler.flush()  # pages 1 2 are not here any more, 3 4 are on their way
    node.scheduler.submit(3, tokens(1, 2, 3, 4, 5, 6))
    run_until(node, 3, Phase.RESTORING)
    let_copies_go(daemon, node)
    asked = [(len(r.pages) // 4, r.start_page) for r in restores(daemon)]
    # The fill behind landed first, when what is above it was not there: it was freed.
    assert asked == [(1, 0), (2, 2), (2, 0), (3, 2)]
    record = node.finished[3]
    assert (record.own_pages, record.peer_pages, record.verified, record.wrong) == (0, 5, 5, 0)
    assert node.scheduler.pages.tree == 6


@pytest.mark.parametrize("losses", [1, 2])
def test_a_lost_fill_is_lost_for_all_who_wait_and_tried_once_more_f51(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode, losses: int
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode, concurrency=2)
    failures = iter([True] * losses)
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    node.scheduler.submit(3, tokens(1, 2, 3, 5))
    run_until(node, 3, Phase.RESTORING)
    next(failures)
    daemon.fail_copies = lambda copy: copy.kind != "backup" and next(failures, False)
    daemon.lose_mover()  # and with it the first fill; a second one may fail at once
    let_copies_go(daemon, node)
    assert [node.finished[n].error for n in (2, 3)] == ["", ""]
    assert [node.finished[n].wrong for n in (2, 3)] == [0, 0]
    hits = sum(node.finished[n].own_pages + node.finished[n].peer_pages for n in (2, 3))
    assert hits == (6 if losses == 1 else 0)
    assert node.scheduler.pages.free + node.scheduler.pages.tree == 16
    assert len(daemon.directory.leases) == 0


def test_nobody_joins_a_fill_that_is_overdue(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    deadlines = Deadlines(2_000, 1_000, 1_000, misses_max=10)
    node = Node(daemon, instance="b", mode=mode, concurrency=2, deadlines=deadlines)
    cluster.nodes.append(node)
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    daemon.clock_us += 2_000_000
    node.tick(3)
    assert node.scheduler.counters["restores_expired"] == 1
    assert node.finished[2].error == ""
    assert node.scheduler.pages.landing == 3
    node.scheduler.flush()
    node.scheduler.submit(3, tokens(1, 2, 3, 5))
    run_until(node, 3, Phase.RESTORING)
    assert "restores_joined" not in node.scheduler.counters
    let_copies_go(daemon, node)
    node.tick()
    assert node.scheduler.pages.landing == 0
    assert node.scheduler.pages.free + node.scheduler.pages.tree == 16


def test_a_retracted_request_joins_the_fill_that_it_began(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode)
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    assert node.scheduler.retract(2)
    run_until(node, 2, Phase.RESTORING)
    assert len(restores(daemon)) == 1
    let_copies_go(daemon, node)
    assert (node.finished[2].own_pages, node.finished[2].verified) == (3, 3)


def test_a_wrong_landing_is_used_by_none_of_those_who_wait(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    source = cluster.add("a", mode)
    source.serve(1, tokens(1, 2, 3))
    daemon.run()
    for chunk in source.pool.chunks():
        chunk.view[2 * 24] ^= 1
    node = cluster.add("b", mode, concurrency=2)
    for number in (2, 3):
        node.scheduler.submit(number, tokens(1, 2, 3, number + 2))
    for _ in range(40):
        node.finished.update({r.number: r for r in node.scheduler.tick()})
        daemon.run()
    assert sorted(node.finished) == [2, 3]
    assert all("restored pages are wrong" in problem for problem in node.scheduler.problems)
    assert node.scheduler.pages.tree == 5
