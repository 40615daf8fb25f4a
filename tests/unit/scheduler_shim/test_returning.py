"""The way back: tries, republication and going on with the next daemon."""

from itertools import pairwise

import pytest

from directory.core.errors import InstanceLive
from directory.core.events import Flush, Insert, Mode, PoolClosed
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.republish import SPANS_PER_BATCH_MAX
from scheduler_shim.request import Phase
from scheduler_shim.returning import (
    DESERTED_US,
    STEP_US,
    WAIT_ABSENT_MS_MAX,
    WAIT_MS_MAX,
    WAIT_MS_MIN,
)
from scheduler_shim.session import NobodyListens
from tests.unit.scheduler_shim.support import Cluster, FakeDaemon, Node, run_until, tokens


def lose(daemon: FakeDaemon, *nodes: Node) -> None:
    """The daemon dies and its schedulers notice."""
    daemon.die()
    for node in nodes:
        node.scheduler.tick()
        assert node.scheduler.mode == "degraded"


def come_back(daemon: FakeDaemon, node: Node, ticks: int = 2_000) -> None:
    """Tick on until the scheduler has its daemon again."""
    for _ in range(ticks):
        if node.scheduler.client is not None:
            daemon.run()
            return
        daemon.clock_us += 10_000
        node.tick()
        if not daemon.absent:
            daemon.run()
    raise AssertionError(f"{node.scheduler!r} does not come back")


def test_after_a_restart_the_daemon_knows_what_the_pool_holds_again_f67(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    left, right = cluster.add("a", mode), cluster.add("b", mode)
    left.serve(1, tokens(1, 2, 3))
    left.serve(2, tokens(1, 2, 7), tokens(8))
    left.serve(3, tokens(1, 5))
    lose(daemon, left, right)
    daemon.restart()
    if mode == "mirrored":
        come_back(daemon, left)
        come_back(daemon, right)
        pool = daemon.directory.pools[left.link_pool]
        assert pool.pages == left.scheduler.pages.tree == 6
    else:
        # A thin scheduler had nothing running: its daemon took the knowledge of its pool along.
        assert left.scheduler.pages.tree == 0
        left.serve(4, tokens(1, 2, 3))
        left.serve(5, tokens(1, 2, 7), tokens(8))
        come_back(daemon, left)
        come_back(daemon, right)
        assert daemon.directory.pools[left.link_pool].pages == left.scheduler.pages.tree == 5
    assert (left.scheduler.mode, left.scheduler.degraded) == (mode, "")
    assert left.scheduler.last_loss
    record = right.serve(9, tokens(1, 2, 7, 8, 8))
    assert (record.peer_pages + record.host_pages, record.wrong) == (4, 0)
    left.serve(10, tokens(1, 2, 3, 4))
    left.scheduler.flush()
    left.settle()
    daemon.run()
    assert daemon.directory.pools[left.link_pool].pages == 0


def test_later_reports_are_understood_because_the_spans_are_the_same(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode, page_count=12)
    lose(daemon, node)
    for number in range(12):
        node.serve(number, tokens(1, number % 3, number % 5, number))
    daemon.restart()
    come_back(daemon, node)
    for number in range(20, 40):
        record = node.serve(number, tokens(1, number % 3, number % 5, number))
        assert record.wrong == 0
        daemon.run()
        node.check()
        assert daemon.directory.pools[node.link_pool].pages == node.scheduler.pages.tree
    assert node.scheduler.mode == mode


def test_who_stops_when_it_has_registered_leaves_no_session(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    """Registering was a step, and saying what the pool holds begins with the next one."""
    node = cluster.add("a", mode)
    node.serve(1, tokens(1, 2, 3))
    lose(daemon, node)
    daemon.restart()
    connection = node.scheduler._connection
    returning = connection._returning
    assert returning is not None
    while returning._client is None:
        assert returning._republisher is None
        daemon.clock_us += 10_000
        node.scheduler.tick()
    client = returning._client
    assert returning.wake_us - daemon.clock_us == STEP_US, "there is something to do soon"
    assert not client.lost
    node.scheduler.close()
    assert client.lost


def test_republication_comes_in_bounded_batches_while_requests_go_on(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    count = 3 * SPANS_PER_BATCH_MAX
    node = cluster.add("a", mode, page_count=2 * count)
    lose(daemon, node)
    for number in range(count):
        node.serve(number, tokens(number))
    daemon.restart()
    daemon.heard.clear()
    said = [0]
    number = 10_000
    while node.scheduler.client is None:
        daemon.clock_us += 5_000
        number += 1
        node.scheduler.submit(number, tokens(number))
        node.tick()
        daemon.run()
        said.append(sum(isinstance(body, Insert) for body in daemon.heard))
    steps = [after - before for before, after in pairwise(said)]
    assert max(steps) <= SPANS_PER_BATCH_MAX + 2
    assert isinstance(daemon.heard[0], Flush)
    assert len([step for step in steps if step]) >= 3
    node.settle()
    daemon.run()
    assert daemon.directory.pools[node.link_pool].pages == node.scheduler.pages.tree


def test_an_eviction_in_the_middle_of_republication_is_told_or_answered(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    count = 2 * SPANS_PER_BATCH_MAX
    node = cluster.add("a", mode, page_count=count)
    lose(daemon, node)
    for number in range(count):
        node.serve(number, tokens(number))
    daemon.restart()
    while not any(isinstance(body, Insert) for body in daemon.heard):
        daemon.clock_us += 5_000
        node.tick()
        daemon.run()
    assert node.scheduler.client is None
    for number in range(1_000, 1_008):  # every one of them needs room
        record = node.serve(number, tokens(number, number))
        assert record.error == ""
        daemon.run()
        node.check()
    come_back(daemon, node)
    node.settle()
    daemon.run()
    assert daemon.directory.pools[node.link_pool].pages == node.scheduler.pages.tree == count
    assert node.scheduler.mode == mode


def test_running_rows_are_protected_at_the_next_daemon(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode, page_count=64, chunk_pages=1)
    node.scheduler.submit(1, tokens(*range(60)), tokens(4))
    run_until(node, 1, Phase.COMPUTING)
    lose(daemon, node)
    daemon.restart()
    come_back(daemon, node)
    request = node.scheduler.requests[1]
    assert 3 < request.tree_pages < 50
    assert node.scheduler.mode == mode
    pool = daemon.directory.pools[node.link_pool]
    assert pool.pages == request.tree_pages
    assert pool.locked_pages == (request.tree_pages if mode == "thin" else 0)
    assert (request.node is None, bool(request.receipt)) == (mode == "thin", mode == "thin")
    node.scheduler.flush()
    assert node.scheduler.pages.tree == request.tree_pages
    node.settle()
    daemon.run()
    assert (node.finished[1].error, node.finished[1].accepted_tokens) == ("", 4 * 61)
    assert len(daemon.directory.leases) == 0


def test_targets_that_were_not_answered_are_quarantined_until_a_registration_is_answered(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode)
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    lose(daemon, node)
    node.tick(10)
    assert node.finished[2].error == ""
    assert node.scheduler.pages.quarantined == 3
    daemon.hold_copies = False
    daemon.restart()
    come_back(daemon, node)
    assert node.scheduler.pages.quarantined == 0
    assert node.scheduler.counters["quarantine_released"] == 3
    assert node.scheduler.pages.free + node.scheduler.pages.tree == 16


def test_an_answered_registration_with_the_same_boot_ends_the_quarantine_too(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode)
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    client = node.scheduler.client
    assert client is not None
    client.lose("given up by the test")
    for _ in range(100):  # it registers, and is not answered while the copy may still write
        daemon.clock_us += 10_000
        node.tick()
        daemon.run()
    assert node.scheduler.mode == "degraded"
    assert node.scheduler.pages.quarantined == 3
    daemon.hold_copies = False
    come_back(daemon, node)
    assert node.scheduler.pages.quarantined == 0
    assert node.scheduler.counters["quarantine_released"] == 3
    assert node.scheduler.pages.free + node.scheduler.pages.tree == 16
    assert node.serve(3, tokens(7, 8, 9, 10, 11)).wrong == 0


def test_pages_that_a_dead_mover_may_have_written_are_free_again_though_no_daemon_comes(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode)
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    lose(daemon, node)

    def pass_time(seconds: int) -> None:
        for _ in range(100 * seconds):
            daemon.clock_us += 10_000
            node.tick()

    pass_time(10)
    assert node.scheduler.pages.quarantined == 3, "a mover may live and write"
    node.dial.movers_gone = True
    pass_time(1)
    assert node.scheduler.pages.quarantined == 3, "its device may be writing still"
    pass_time(DESERTED_US // 1_000_000 + 1)
    assert node.scheduler.pages.quarantined == 0
    assert node.scheduler.counters["quarantine_released"] == 3
    assert node.serve(3, tokens(*range(100, 116))).error == "", "it needs the whole pool"
    node.check()


@pytest.mark.parametrize("answer", ["nobody", "nobody, a step later", "refused"])
def test_tries_wait_longer_and_longer_up_to_a_cap_with_jitter(
    cluster: Cluster, daemon: FakeDaemon, answer: str
) -> None:
    nodes = [cluster.add(name, "mirrored") for name in "ab"]
    nodes[1].scheduler._connection._seed = 7
    lose(daemon, *nodes)
    wait_ms_max = WAIT_ABSENT_MS_MAX
    if answer != "nobody":
        daemon.restart()
        for node in nodes:
            node.dial.refusal = NobodyListens("nobody is there")
    if answer == "refused":
        wait_ms_max = WAIT_MS_MAX
        for node in nodes:
            node.dial.refusal = InstanceLive("somebody else has the name")
    for _ in range(4_000):
        daemon.clock_us += 10_000
        for node in nodes:
            node.scheduler.tick()
    waits = [[b - a for a, b in pairwise(node.dial.tries_us)] for node in nodes]
    assert waits[0] != waits[1]
    for row in waits:
        assert row[0] < row[3]
        assert row[0] >= WAIT_MS_MIN * 500
        assert max(row) <= wait_ms_max * 1_000 + 10_000
        assert min(row[8:]) >= wait_ms_max * 500


def test_a_refusal_is_not_the_end_of_the_tries(cluster: Cluster, daemon: FakeDaemon) -> None:
    node = cluster.add("a", "mirrored")
    node.serve(1, tokens(1, 2))
    lose(daemon, node)
    daemon.restart()
    node.dial.refusal = InstanceLive("somebody else has the name")
    for _ in range(50):
        daemon.clock_us += 10_000
        node.tick()
    assert len(node.dial.tries_us) > 2
    node.dial.refusal = None
    come_back(daemon, node)


def test_a_daemon_that_dies_during_republication_is_left_again(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    count = 3 * SPANS_PER_BATCH_MAX
    node = cluster.add("a", mode, page_count=count + 8)
    lose(daemon, node)
    for number in range(count):
        node.serve(number, tokens(number))
    daemon.restart()
    while not any(isinstance(body, Insert) for body in daemon.heard):
        daemon.clock_us += 5_000
        node.tick()
        daemon.run()
    daemon.die()
    node.tick(3)
    assert node.serve(5_000, tokens(0)).error == ""
    assert node.scheduler.mode == "degraded"
    daemon.restart()
    come_back(daemon, node)
    daemon.run()
    assert daemon.directory.pools[node.link_pool].pages == node.scheduler.pages.tree == count


@pytest.mark.parametrize("thin", [False, True])
def test_a_scheduler_that_began_alone_registers_when_a_daemon_comes(
    cluster: Cluster, daemon: FakeDaemon, thin: bool
) -> None:
    node = cluster.add("a", "thin" if thin else "mirrored")
    node.scheduler.close()
    node.scheduler = ReferenceScheduler(
        node.pool, None, instance="a", thin=thin, dial=node.dial, seed=1
    )
    assert node.serve(1, tokens(1, 2, 3)).error == ""
    come_back(daemon, node)
    assert node.scheduler.mode == ("thin" if thin else "mirrored")
    assert cluster.add("b", "mirrored").serve(2, tokens(1, 2, 3, 4)).peer_pages == 3


def test_a_scheduler_whose_registration_was_reaped_registers_again_and_its_request_ends_f65(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode)
    node.serve(1, tokens(1, 2, 3))
    first = node.link_pool
    daemon.tell(PoolClosed(first, daemon.clock_us))
    assert node.serve(2, tokens(1, 2, 3, 4)).error == ""
    assert "registration is gone" in node.scheduler.last_loss
    come_back(daemon, node)
    assert node.link_pool != first
    node.settle()
    daemon.run()
    assert daemon.directory.pools[node.link_pool].pages == node.scheduler.pages.tree == 4


def test_without_a_dial_a_lost_daemon_is_lost_for_good() -> None:
    node = Node(None)
    assert node.scheduler.wake_us is None
    node.serve(1, tokens(1, 2))
    assert node.scheduler.mode == "degraded"
    node.close()


def test_republished_spans_say_how_many_pages_are_new(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode)
    lose(daemon, node)
    node.serve(1, tokens(1, 2, 3))
    node.serve(2, tokens(1, 2, 7, 8))
    daemon.restart()
    come_back(daemon, node)
    daemon.run()
    fresh = [body.fresh_pages for body in daemon.heard if isinstance(body, Insert)]
    # A thin pool's daemon answers with its own number, and takes none from the shim.
    assert fresh == ([3, 2] if mode == "mirrored" else [-1, -1])
