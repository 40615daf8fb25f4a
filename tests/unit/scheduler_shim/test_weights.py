"""A weight update on one scheduler: nothing of the old epoch is used there again."""

import pytest

from directory.core.events import Mode
from scheduler_shim.request import Phase
from tests.unit.scheduler_shim.support import Cluster, FakeDaemon, Node, run_until, tokens


def finish(daemon: FakeDaemon, *nodes: Node) -> None:
    daemon.hold_copies = False
    daemon.run()
    for node in nodes:
        node.settle()
    daemon.run()


def test_a_bump_while_copies_are_in_flight_brings_back_nothing_of_the_old_epoch_f7(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    keeps, bumps = cluster.add("keeps", mode), cluster.add("bumps", mode, concurrency=2)
    keeps.serve(1, tokens(1, 2, 3))
    bumps.serve(2, tokens(7, 8))
    daemon.run()
    daemon.hold_copies = True
    bumps.serve(3, tokens(4, 5, 6))  # its backup is in flight
    bumps.scheduler.submit(4, tokens(1, 2, 3, 9))  # its restore is in flight
    run_until(bumps, 4, Phase.RESTORING)
    backups = [copy.op for copy in daemon.copies if copy.kind == "backup"]

    bumps.scheduler.bump_weights()
    bumps.check()
    assert bumps.scheduler.pages.tree == 0
    finish(daemon, keeps, bumps)
    assert daemon.directory.counters["backup_void"] >= 1
    assert backups
    # The request that was in progress started over under the new weights.
    first = bumps.finished[4]
    assert (first.own_pages, first.host_pages, first.peer_pages) == (0, 0, 0)
    assert (first.error, first.wrong) == ("", 0)
    assert bumps.scheduler.pages.landing == 0
    assert bumps.scheduler.pages.tree == 4
    for number, path in ((5, (4, 5, 6, 6)), (6, (7, 8, 8)), (7, (1, 2, 3, 8))):
        record = bumps.serve(number, tokens(*path))
        own = 3 if number == 7 else 0  # what request 4 has computed since
        assert (record.own_pages, record.host_pages, record.peer_pages) == (own, 0, 0)
        assert record.wrong == 0
    # Another scheduler goes on with what it has of the old epoch, and so does the host tier.
    kept = keeps.serve(8, tokens(1, 2, 3, 4))
    assert (kept.own_pages, kept.wrong) == (3, 0)
    third = cluster.add("third", mode)
    assert third.serve(9, tokens(7, 8, 8)).host_pages == 2
    assert len(daemon.directory.leases) == 0


def test_schedulers_that_have_both_bumped_share_again(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    nodes = [cluster.add(name, mode) for name in "ab"]
    nodes[0].serve(1, tokens(1, 2, 3))
    for node in nodes:
        node.scheduler.bump_weights()
        node.settle()
    nodes[0].serve(2, tokens(4, 5, 6))
    assert nodes[1].serve(3, tokens(4, 5, 6, 7)).peer_pages == 3
    again = nodes[1].serve(4, tokens(1, 2, 3, 7))
    assert (again.own_pages, again.host_pages, again.peer_pages) == (0, 0, 0)


@pytest.mark.parametrize("phase", [Phase.RESTORING, Phase.COMPUTING, Phase.DECODING])
def test_a_request_starts_over_from_wherever_the_bump_finds_it(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode, phase: Phase
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode, chunk_pages=1)
    daemon.hold_copies = phase is Phase.RESTORING
    node.scheduler.submit(2, tokens(1, 2, 3, 4, 5), tokens(6))
    run_until(node, 2, phase)
    node.scheduler.bump_weights()
    assert node.scheduler.pages.tree == 0
    finish(daemon, node)
    record = node.finished[2]
    assert (record.own_pages, record.peer_pages, record.host_pages) == (0, 0, 0)
    assert (record.wrong, record.accepted_tokens) == (0, 24)
    assert node.scheduler.pages.free + node.scheduler.pages.tree == 16


def test_a_bump_without_a_daemon_empties_the_pool_as_well() -> None:
    node = Node(None)
    node.serve(1, tokens(1, 2, 3))
    node.scheduler.bump_weights()
    assert node.scheduler.pages.free == 16
    assert node.serve(2, tokens(1, 2, 3)).own_pages == 0
    node.close()
