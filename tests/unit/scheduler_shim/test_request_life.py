"""A running request's inserts, and its end at every point of its life, in both modes."""

from collections.abc import Callable

import pytest

from directory.core.actions import SubmitCopy, Totals
from directory.core.events import Insert, Mode
from directory.core.ids import HOST
from scheduler_shim.request import Phase
from tests.unit.scheduler_shim.support import (
    Cluster,
    FakeDaemon,
    Node,
    phase_of,
    run_until,
    tokens,
)

Step = Callable[[FakeDaemon, Node], None]


def at_rest(daemon: FakeDaemon, node: Node) -> None:
    """Nothing is leased, locked, landing or lost, here and at the daemon."""
    daemon.hold_copies = False
    daemon.run()
    node.settle()
    daemon.run()
    node.check()
    pages = node.scheduler.pages
    assert (pages.held, pages.landing, pages.quarantined) == (0, 0, 0)
    assert pages.free + pages.tree == node.pool.page_count
    assert len(daemon.directory.leases) == 0
    pool = daemon.directory.pools[node.link_pool]
    assert (pool.locked_pages, pool.pages) == (0, pages.tree)
    assert daemon.directory.host.locked_pages == 0


# Chunks.


def test_each_chunk_is_published_and_the_claim_moves_to_the_longer_path(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode, chunk_pages=2)
    node.scheduler.submit(1, tokens(1, 2, 3, 4, 5), tokens(6))
    seen = []
    while 1 not in node.finished:
        node.tick()
        daemon.run()
        pool = daemon.directory.pools[node.link_pool]
        request = node.scheduler.requests.get(1)
        if request is not None and request.tree_pages:
            assert node.scheduler.pages.tree == request.tree_pages == pool.pages
            locked = pool.locked_pages if mode == "thin" else node.totals.protected
            seen.append((request.tree_pages, locked))
    assert seen == [(2, 2), (4, 4), (5, 5)]
    assert node.finished[1].accepted_tokens == 4 * 6
    at_rest(daemon, node)
    assert node.scheduler.pages.tree == 6


def test_a_chunk_is_restored_elsewhere_while_its_request_still_computes_f15(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    left, right = cluster.add("a", mode, chunk_pages=2), cluster.add("b", mode)
    left.scheduler.submit(1, tokens(1, 2, 3, 4, 5, 6))
    run_until(left, 1, Phase.COMPUTING)
    record = right.serve(2, tokens(1, 2, 3))
    assert (record.peer_pages, record.wrong) == (2, 0)
    left.settle()
    assert right.serve(3, tokens(1, 2, 3, 4, 5, 9)).peer_pages == 2


def test_a_published_chunk_is_read_by_others_only_behind_its_write_fence_f15(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    left, right = cluster.add("a", mode, chunk_pages=2), cluster.add("b", mode)
    left.scheduler.submit(1, tokens(1, 2, 3, 4, 5, 6))
    run_until(left, 1, Phase.COMPUTING)
    written = [body.written for body in daemon.heard if isinstance(body, Insert)][-1]
    assert written == left.pool.now()  # the values behind the write of this very chunk
    right.scheduler.submit(2, tokens(1, 2, 3))
    run_until(right, 2, Phase.RESTORING)
    fences = {(f.timeline, f.value) for copy in daemon.copies for f in copy.fences if f.pool == 1}
    assert {(0, written[0]), (1, written[1])} <= fences


def test_two_requests_that_compute_one_path_both_compute_and_one_set_of_pages_stays_f13(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode, chunk_pages=1, concurrency=2)
    for number in (1, 2):
        node.scheduler.submit(number, tokens(1, 2, 3), tokens(number + 3))
    node.settle()
    assert node.scheduler.counters["pages_computed"] == 8
    assert node.scheduler.counters["duplicates_freed"] == 3
    at_rest(daemon, node)
    assert node.scheduler.pages.tree == 5


def test_a_chunked_prompt_that_finds_its_first_chunk_computes_the_rest(
    cluster: Cluster, mode: Mode
) -> None:
    node = cluster.add("a", mode, chunk_pages=2)
    node.serve(1, tokens(1, 2, 3))
    node.scheduler.counters.clear()
    record = node.serve(2, tokens(1, 2, 3, 4, 5))
    assert (record.own_pages, node.scheduler.counters["pages_computed"]) == (3, 2)


def test_a_request_that_outgrows_the_room_steps_back_between_its_chunks(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode, chunk_pages=1, page_count=6, concurrency=3)
    for number in range(3):
        node.scheduler.submit(number, tokens(number, 7, 8, 9, number), tokens(5))
    node.settle()
    assert [r.error for r in node.finished.values()] == ["", "", ""]
    assert node.scheduler.counters["retracted"] > 0
    at_rest(daemon, node)


# Lengths.


@pytest.mark.parametrize("chunk_pages", [0, 1])
@pytest.mark.parametrize(("length", "output"), [(3, 0), (4, 0), (11, 0), (8, 5), (7, 6), (7, 2)])
def test_only_whole_pages_are_stored_and_the_accepted_length_is_returned_f32(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode, length: int, output: int, chunk_pages: int
) -> None:
    node = cluster.add("a", mode, chunk_pages=chunk_pages)
    path = tokens(1, 2, 3, 4)
    record = node.serve(1, path[: 4 * length], path[4 * length : 4 * (length + output)])
    whole = (length + output) // 4
    assert record.accepted_tokens == 4 * whole
    at_rest(daemon, node)
    assert node.scheduler.pages == (16 - whole, whole, 0, 0, 0)


# Ends at every point.


def queued(daemon: FakeDaemon, node: Node) -> None:
    node.scheduler.submit(2, tokens(1, 2, 3, 4, 5), tokens(6))


def matched(daemon: FakeDaemon, node: Node) -> None:
    queued(daemon, node)
    run_until(node, 2, Phase.MATCHING)


def matched_and_answered(daemon: FakeDaemon, node: Node) -> None:
    matched(daemon, node)
    daemon.run()  # the answer, with its lease, lies in the link


def restoring(daemon: FakeDaemon, node: Node) -> None:
    daemon.hold_copies = True
    queued(daemon, node)
    run_until(node, 2, Phase.RESTORING)


def landed_not_inserted(daemon: FakeDaemon, node: Node) -> None:
    restoring(daemon, node)
    daemon.run()
    daemon.run_copies()  # the answer lies in the link
    assert phase_of(node, 2) is Phase.RESTORING


def computing(daemon: FakeDaemon, node: Node) -> None:
    queued(daemon, node)
    run_until(node, 2, Phase.COMPUTING)
    assert node.scheduler.requests[2].tree_pages == 4


def inserted_unfinished(daemon: FakeDaemon, node: Node) -> None:
    queued(daemon, node)
    run_until(node, 2, Phase.DECODING)


POINTS: list[Step] = [
    queued,
    matched,
    matched_and_answered,
    restoring,
    landed_not_inserted,
    computing,
    inserted_unfinished,
]


def name_of(step: Step) -> str:
    return str(getattr(step, "__name__", step))


def get_to(cluster: Cluster, mode: Mode, point: Step) -> Node:
    """Three pages can be restored; the request gets to a point of its life."""
    if mode == "thin" and point in (matched, matched_and_answered):
        pytest.skip("a thin scheduler waits for the answer to Match inside one tick")
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode, chunk_pages=1)
    point(cluster.daemon, node)
    return node


@pytest.mark.parametrize("point", POINTS, ids=name_of)
def test_an_abort_anywhere_releases_all_and_keeps_what_was_accepted_f15_f72(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode, point: Step
) -> None:
    node = get_to(cluster, mode, point)
    request = node.scheduler.requests.get(2)
    accepted = request.tree_pages if request is not None else 0
    assert node.scheduler.abort(2)
    assert not node.scheduler.abort(2)
    node.check()
    node.tick()
    assert node.finished[2].error == "aborted"
    assert node.finished[2].accepted_tokens == (4 * accepted if accepted > 3 else 0)
    at_rest(daemon, node)
    assert node.scheduler.pages.tree >= accepted
    assert node.serve(3, tokens(1, 2, 3, 4, 5)).wrong == 0
    at_rest(daemon, node)


@pytest.mark.parametrize("point", POINTS, ids=name_of)
def test_a_retract_anywhere_releases_all_and_the_request_starts_over_f72(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode, point: Step
) -> None:
    node = get_to(cluster, mode, point)
    assert node.scheduler.retract(2) is (point is not queued)
    node.check()
    at_rest(daemon, node)
    record = node.finished[2]
    assert (record.error, record.wrong, record.accepted_tokens) == ("", 0, 24)
    assert record.own_pages + record.peer_pages + record.host_pages >= 3
    assert node.serve(3, tokens(1, 2, 3, 4, 5)).own_pages == 4


def test_a_landing_after_the_abort_is_inserted_and_nobody_holds_it_f72(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    cluster.add("a", "mirrored").serve(1, tokens(1, 2, 3))
    node = cluster.add("b", "mirrored")
    landed_not_inserted(daemon, node)
    node.scheduler.abort(2)
    node.tick()
    at_rest(daemon, node)
    assert node.scheduler.counters["landings_kept"] == 1
    assert node.totals == Totals(3, 0)
    assert node.serve(3, tokens(1, 2, 3, 4)).own_pages == 3


@pytest.mark.parametrize("how", ["failed", "void"])
def test_a_restore_that_fails_or_is_void_leaves_the_row_as_it_was_f51(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode, how: str
) -> None:
    source = cluster.add("a", mode, page_count=8)
    source.serve(1, tokens(1, 2, 3))
    daemon.run()
    node = cluster.add("b", mode)
    node.serve(9, tokens(1, 7))
    free = node.scheduler.pages.free
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    if how == "failed":
        daemon.lose_mover()
    else:
        source.scheduler.flush()  # its words move on under the copy
    at_rest(daemon, node)
    record = node.finished[2]
    assert (record.error, record.wrong, record.own_pages) == ("", 0, 1)
    if how == "void":
        assert (record.peer_pages, record.host_pages) == (0, 2)  # the host is the fallback
    assert node.scheduler.pages.free == free - 3


def test_hard_eviction_between_match_and_restore_takes_nothing_that_was_promised_f51(
    cluster: Cluster, mode: Mode
) -> None:
    daemon = cluster.daemon
    source = cluster.add("a", mode)
    source.serve(1, tokens(1, 2, 3))
    daemon.run()
    node = cluster.add("b", mode)
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    source.scheduler.flush()
    for number in range(3, 12):  # the host tier turns over as far as its leases let it
        source.serve(number, tokens(*range(10 * number, 10 * number + 12)))
        daemon.run_copies()
    held = [n for n in daemon.directory.tree.nodes.values() if n.resident(HOST)]
    assert any(n.places[HOST].locks for n in held) or node.scheduler.pages.landing == 0
    at_rest(daemon, node)
    assert (node.finished[2].wrong, node.finished[2].error) == (0, "")


def test_one_failed_page_copy_makes_the_whole_load_zero_f51(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode)
    heard: list[SubmitCopy] = []
    daemon.fail_copies = lambda copy: copy.kind != "backup" and not heard.append(copy)  # type: ignore[func-returns-value]
    record = node.serve(2, tokens(1, 2, 3, 4))
    assert len(heard) == 2
    assert (record.own_pages, record.peer_pages, record.host_pages) == (0, 0, 0)
    assert node.scheduler.counters["pages_computed"] == 4
    at_rest(daemon, node)
