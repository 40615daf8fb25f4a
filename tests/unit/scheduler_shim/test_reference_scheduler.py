"""The reference scheduler's request life, in both modes, over a daemon in the same process."""

import random

import pytest

from directory.core.actions import Matched
from directory.core.events import Evict, Evicted, Flush, Insert, Lock, Match, Mode, Restore, Unlock
from directory.core.namespace import NamespaceKey
from scheduler_shim.request import Phase
from tests.unit.scheduler_shim.support import (
    MODES,
    Cluster,
    FakeDaemon,
    Node,
    phase_of,
    run_until,
    tokens,
)


def test_a_second_turn_hits_the_own_pool(cluster: Cluster, mode: Mode) -> None:
    node = cluster.add("a", mode)
    first = node.serve(1, tokens(1, 2, 3))
    second = node.serve(2, tokens(1, 2, 3, 4))
    assert (first.own_pages, second.own_pages) == (0, 3)
    assert second.verified == 3
    assert second.wrong == 0


def test_what_one_has_computed_another_restores_from_its_pool(cluster: Cluster, mode: Mode) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3, 4))
    hit = cluster.add("b", mode).serve(2, tokens(1, 2, 3, 9))
    assert (hit.own_pages, hit.peer_pages, hit.host_pages) == (0, 3, 0)
    assert (hit.verified, hit.wrong) == (3, 0)


def test_what_left_the_pool_comes_back_from_the_host_tier(cluster: Cluster, mode: Mode) -> None:
    node = cluster.add("a", mode, page_count=4)
    node.serve(1, tokens(1, 2, 3))
    node.serve(2, tokens(7, 8, 9, 10))
    back = node.serve(3, tokens(1, 2, 3, 4))
    assert (back.own_pages, back.host_pages, back.peer_pages) == (0, 3, 0)
    assert (back.verified, back.wrong) == (3, 0)


@pytest.mark.parametrize(("length", "hit_pages"), [(7, 1), (8, 1), (9, 2)])
def test_one_token_is_always_left_to_compute_f32(
    cluster: Cluster, mode: Mode, length: int, hit_pages: int
) -> None:
    node = cluster.add("a", mode)
    prompt = tokens(1, 2, 3)[: 4 * length]
    node.serve(1, tokens(1, 2, 3))
    again = node.serve(2, prompt)
    assert again.own_pages == hit_pages
    restored = cluster.add("b", mode).serve(3, prompt)
    assert restored.peer_pages == hit_pages
    assert restored.wrong == again.wrong == 0


def test_equal_prompts_in_one_pool_end_with_one_set_of_pages_f13(
    cluster: Cluster, mode: Mode
) -> None:
    node = cluster.add("a", mode, concurrency=2)
    node.scheduler.submit(1, tokens(1, 2, 3), tokens(8))
    node.scheduler.submit(2, tokens(1, 2, 3), tokens(9))
    node.settle()
    assert node.scheduler.pages.tree == 5
    assert node.scheduler.pages.free == 16 - 5
    assert node.scheduler.counters["duplicates_freed"] == 3
    assert node.serve(3, tokens(1, 2, 3, 8, 9)).own_pages == 4


def test_equal_prompts_in_two_pools_free_nothing_f13(cluster: Cluster, mode: Mode) -> None:
    left, right = cluster.add("a", mode), cluster.add("b", mode)
    left.scheduler.submit(1, tokens(1, 2, 3))
    right.scheduler.submit(1, tokens(1, 2, 3))
    for _ in range(8):
        left.tick()
        right.tick()
    left.settle()
    right.settle()
    assert left.scheduler.pages.tree == right.scheduler.pages.tree == 3
    for node in (left, right):
        assert "duplicates_freed" not in node.scheduler.counters


def test_a_prompt_longer_than_the_pool_is_a_clear_error(cluster: Cluster, mode: Mode) -> None:
    node = cluster.add("a", mode, page_count=3)
    record = node.serve(1, tokens(1, 2, 3, 4))
    assert record.error == "16 tokens need 4 pages of 3"
    assert node.scheduler.pages.free == 3
    assert node.serve(2, tokens(1, 2, 3)).error == ""


def test_an_empty_prompt_is_a_clear_error(cluster: Cluster, mode: Mode) -> None:
    assert "at least one token" in cluster.add("a", mode).serve(1, b"").error


def test_a_restore_that_is_short_of_room_takes_what_fits(cluster: Cluster, mode: Mode) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3, 4, 5))
    node = cluster.add("b", mode, page_count=6, concurrency=2)
    node.scheduler.submit(2, tokens(9, 8, 7), tokens(6))
    run_until(node, 2, Phase.DECODING)
    node.scheduler.submit(3, tokens(1, 2, 3, 4, 5))
    node.settle()
    assert node.finished[3].error == node.finished[2].error == ""
    assert node.finished[3].peer_pages <= 4
    assert node.finished[3].wrong == 0


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.MATCHING, Phase.RESTORING, Phase.DECODING])
def test_an_abort_at_any_step_releases_everything_f72(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode, phase: Phase
) -> None:
    if mode == "thin" and phase is Phase.MATCHING:
        pytest.skip("a thin scheduler waits for the answer to Match and cannot be aborted in it")
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode, page_count=8)
    daemon.hold_copies = phase is Phase.RESTORING
    node.scheduler.submit(2, tokens(1, 2, 3, 4), tokens(5))
    if phase is not Phase.WAITING:
        run_until(node, 2, phase)
    assert node.scheduler.abort(2)
    assert not node.scheduler.abort(2)
    node.tick()
    daemon.run()
    node.tick()
    assert node.finished[2].error == "aborted"
    if phase is Phase.RESTORING:
        assert node.scheduler.pages.landing == 3
    daemon.hold_copies = False
    daemon.run()
    node.settle()
    daemon.run()
    assert node.scheduler.pages.landing == 0
    assert node.scheduler.pages.free + node.scheduler.pages.tree == 8
    assert len(daemon.directory.leases) == 0
    assert daemon.directory.host.locked_pages == 0
    assert node.serve(3, tokens(1, 2, 3, 4)).wrong == 0


def test_an_abort_while_short_of_room_releases_everything_f72(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode, page_count=6, concurrency=2)
    node.serve(9, tokens(6, 6))
    daemon.hold_copies = True
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    run_until(node, 2, Phase.RESTORING)
    node.scheduler.submit(3, tokens(6, 6, 5, 4))  # holds two own pages and needs two of one left
    run_until(node, 3, Phase.ADMITTED)
    node.tick()
    assert phase_of(node, 3) is Phase.ADMITTED
    assert node.scheduler.abort(3)
    daemon.hold_copies = False
    node.settle()
    daemon.run()
    assert (node.finished[2].error, node.finished[2].peer_pages) == ("", 3)
    assert node.scheduler.pages.free + node.scheduler.pages.tree == 6
    assert len(daemon.directory.leases) == 0


def test_a_lost_restore_is_tried_once_more_and_then_computed_f51(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode)
    daemon.fail_copies = lambda copy: copy.kind != "backup"
    record = node.serve(2, tokens(1, 2, 3, 4))
    assert (record.host_pages, record.peer_pages, record.error) == (0, 0, "")
    assert node.scheduler.counters["restores_lost"] == 2
    assert node.scheduler.pages.tree == 4
    daemon.fail_copies = lambda _: False
    assert node.serve(3, tokens(1, 2, 3, 4, 5)).own_pages == 4


def test_a_restore_lost_once_is_restored_the_second_time(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    cluster.add("a", mode).serve(1, tokens(1, 2, 3))
    node = cluster.add("b", mode)
    failures = iter([True])
    daemon.fail_copies = lambda copy: copy.kind != "backup" and next(failures, False)
    record = node.serve(2, tokens(1, 2, 3, 4))
    assert (record.host_pages + record.peer_pages, record.verified) == (3, 3)
    assert node.scheduler.counters["restores_lost"] == 1


def test_a_wrong_restored_page_is_reported_and_not_used(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    source = cluster.add("a", mode)
    source.serve(1, tokens(1, 2, 3))
    source.pool.chunks()[1].view[2 * 24] ^= 1  # page 2, second buffer, first byte
    node = cluster.add("b", mode)
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    for _ in range(20):
        node.finished.update({r.number: r for r in node.scheduler.tick()})
        daemon.run()
    assert node.finished[2].wrong == 2  # both attempts read the same peer
    assert node.finished[2].peer_pages == 0
    assert "restored pages are wrong" in node.scheduler.check()[0]


def test_a_wrong_page_of_the_own_pool_is_reported(cluster: Cluster, mode: Mode) -> None:
    node = cluster.add("a", mode)
    node.serve(1, tokens(1, 2, 3))
    node.pool.chunks()[0].view[0] ^= 1
    node.scheduler.submit(2, tokens(1, 2, 3, 4))
    for _ in range(20):
        node.finished.update({r.number: r for r in node.scheduler.tick()})
        assert node.daemon is not None
        node.daemon.run()
    assert node.finished[2].wrong == 1
    assert "of its own pool are wrong" in node.scheduler.check()[0]


def test_the_output_is_published_with_its_prompt(cluster: Cluster, mode: Mode) -> None:
    node = cluster.add("a", mode)
    node.serve(1, tokens(1, 2)[:28], tokens(2, 3)[4:])
    assert node.serve(2, tokens(1, 2, 2, 3)[:28] + tokens(2, 3)[4:] + tokens(5)).own_pages == 3


def test_namespaces_share_nothing(cluster: Cluster, mode: Mode) -> None:
    cluster.add("a", mode, key=NamespaceKey(cache_salt="x")).serve(1, tokens(1, 2, 3))
    other = cluster.add("b", mode, key=NamespaceKey(cache_salt="y")).serve(1, tokens(1, 2, 3))
    assert (other.own_pages, other.host_pages, other.peer_pages) == (0, 0, 0)


def test_requests_that_block_one_another_all_end(cluster: Cluster, mode: Mode) -> None:
    node = cluster.add("a", mode, page_count=6, concurrency=3)
    for number in range(6):
        node.scheduler.submit(number, tokens(number, 7, 8), tokens(50 + number))
    node.settle()
    assert [r.error for r in node.finished.values()] == [""] * 6


def test_the_youngest_of_two_restored_requests_steps_back_when_neither_can_go_on(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    source = cluster.add("a", mode)
    source.serve(1, tokens(1, 2, 3))
    source.serve(2, tokens(4, 5, 6))
    node = cluster.add("b", mode, page_count=6, concurrency=2)
    daemon.hold_copies = True
    node.scheduler.submit(3, tokens(1, 2, 3, 8, 8))
    node.scheduler.submit(4, tokens(4, 5, 6, 9, 9))
    run_until(node, 3, Phase.RESTORING)
    run_until(node, 4, Phase.RESTORING)
    daemon.hold_copies = False
    node.settle()
    assert node.scheduler.counters["retracted"] == 1
    assert list(node.finished) == [3, 4]
    assert [r.error for r in node.finished.values()] == ["", ""]


def test_a_full_pool_of_single_pages_takes_a_report_without_new_ones(
    cluster: Cluster, mode: Mode
) -> None:
    node = cluster.add("a", mode, page_count=4)
    for number, page in enumerate((1, 2, 3, 4)):
        node.serve(number, tokens(page))
    assert node.scheduler.pages.free == 0
    assert node.serve(9, tokens(4)).error == ""


def test_a_flush_gives_up_all_that_no_request_uses(
    cluster: Cluster, daemon: FakeDaemon, mode: Mode
) -> None:
    node = cluster.add("a", mode, concurrency=2)
    node.serve(1, tokens(1, 2, 3))
    node.scheduler.submit(2, tokens(1, 2, 9), tokens(4))
    run_until(node, 2, Phase.DECODING)
    node.scheduler.flush()
    node.check()
    assert node.scheduler.pages.tree == 3
    node.settle()
    node.scheduler.flush()
    node.settle()
    daemon.run()
    assert (node.scheduler.pages.tree, node.scheduler.pages.free) == (0, 16)
    assert daemon.directory.pools[1].pages == 0
    assert node.serve(3, tokens(1, 2, 3)).own_pages == 0


def test_every_message_of_the_protocol_is_said_by_one_mode_or_the_other(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    for base, mode in enumerate(MODES, 1):
        node = cluster.add(mode, mode, page_count=5)
        node.serve(1, tokens(base, 2, 3))
        node.serve(2, tokens(base, 5, 6), tokens(7))
        node.serve(3, tokens(base, 2, 3, 4))
        node.serve(4, tokens(base + 10, 2, 3), tokens(4))
        node.scheduler.flush()
        node.settle()
    said = {type(body) for body in daemon.heard}
    assert said == {Match, Lock, Unlock, Insert, Evict, Evicted, Restore, Flush}


def test_a_mirrored_scheduler_asks_nothing_when_its_pool_has_it_all(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    node = cluster.add("a", "mirrored")
    node.serve(1, tokens(1, 2, 3))
    daemon.heard.clear()
    node.serve(2, tokens(1, 2, 3)[:40])
    assert [type(body) for body in daemon.heard] == [Insert]


def test_both_modes_hit_alike_on_the_same_requests(daemon: FakeDaemon) -> None:
    chance = random.Random(5)
    prompts = [
        tokens(*(chance.choice((1, 1, 2)) for _ in range(chance.randint(1, 6)))) for _ in range(120)
    ]
    hits = []
    for mode in MODES:
        alone = FakeDaemon(host_pages=24)
        node = Node(alone, mode=mode, page_count=9)
        records = [node.serve(number, prompt) for number, prompt in enumerate(prompts)]
        hits.append([(r.own_pages, r.host_pages, r.peer_pages, r.verified) for r in records])
        node.close()
        alone.close()
    assert hits[0] == hits[1]
    assert sum(own for own, *_ in hits[0]) > 20
    assert sum(host for _, host, *_ in hits[0]) > 5


def test_a_match_that_overtakes_nothing_is_answered_with_what_is_there(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    cluster.add("a", "mirrored").serve(1, tokens(1, 2, 3))
    cluster.add("b", "mirrored").serve(2, tokens(1, 2, 3, 4))
    matched = [body for body in daemon.said if isinstance(body, Matched)]
    assert matched[-1].restorable_pages == 3
