"""Groups over the real daemon and mover: both ranks' bytes, one decision, one end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from directory.core.actions import GaveUp, Inserted, Matched, Refused, Restored
from directory.core.events import Body, Evict, Insert, Match, Restore, Stats
from directory.core.namespace import NamespaceKey
from directory.protocol.messages import Registered, SessionRefused
from tests.integration.daemon.support import (
    DaemonProcess,
    Pool,
    RawClient,
    SessionClient,
    packed,
    wait_until,
)

TOKENS = range(100, 112)
PAGES = [4, 7, 5]


@contextmanager
def group(daemon: DaemonProcess, instance: str, ranks: int = 2) -> Iterator[list[RawClient]]:
    """The thin ranks of one instance."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                RawClient(daemon.runtime_dir, instance, "thin", world_size=ranks, rank=rank)
            )
            for rank in range(ranks)
        ]


def all_ask(ranks: list[RawClient], body: Body) -> list[object]:
    """The same message from every rank; their answers."""
    return [rank.ask(body) for rank in ranks]


def publish(ranks: list[RawClient]) -> None:
    """Write pages, each rank other bytes, and publish them."""
    for number, rank in enumerate(ranks):
        for page in PAGES:
            rank.pool_memory.write(page, b"rank %d page %d " % (number, page))
    body = Insert("r", 0, NamespaceKey(), packed(TOKENS), packed(PAGES), 1, 0, (3, 3))
    for answer in all_ask(ranks, body):
        assert isinstance(answer, Inserted), answer
        assert answer.fresh_pages == 3


def restore(ranks: list[RawClient], targets: list[int]) -> Restored:
    """Match on every rank, then restore on every rank; the one answer."""
    matched = all_ask(ranks, Match("r", 0, NamespaceKey(), packed(TOKENS)))
    first = matched[0]
    assert isinstance(first, Matched)
    assert first.restorable_pages == 3
    assert matched == [first] * len(ranks)
    restored = all_ask(ranks, Restore("r", 0, first.receipt, 0, packed(targets), (0, 0)))
    assert restored == [restored[0]] * len(ranks)
    assert isinstance(restored[0], Restored)
    return restored[0]


def test_every_ranks_shard_is_backed_up_and_loaded_into_the_same_rank_elsewhere(
    daemon: DaemonProcess,
) -> None:
    with group(daemon, "h") as other:
        with group(daemon, "g") as ranks:
            publish(ranks)
            wanted = [[rank.pool_memory.read(page) for page in PAGES] for rank in ranks]
            assert wanted[0] != wanted[1]
            wait_until(lambda: all_stats(ranks).get("pages_backed_up") == 3)
        wait_until(lambda: all_stats(other)["pools"] == 1)
        restored = restore(other, [1, 9, 2])
        assert (restored.landed, restored.host_pages) == (True, 3)
        page_bytes = other[0].pool_memory.layout.page_bytes
        assert restored.nbytes == 2 * 3 * page_bytes
        for rank, pages in zip(other, wanted, strict=True):
            assert [rank.pool_memory.read(page) for page in (1, 9, 2)] == pages


def test_a_peer_copy_brings_each_rank_the_bytes_of_its_own_peer(daemon: DaemonProcess) -> None:
    with group(daemon, "g", 3) as ranks, group(daemon, "h", 3) as other:
        publish(ranks)
        restored = restore(other, [1, 2, 3])
        assert (restored.landed, restored.peer_pages) == (True, 3)
        for mine, theirs in zip(other, ranks, strict=True):
            assert [mine.pool_memory.read(page) for page in (1, 2, 3)] == [
                theirs.pool_memory.read(page) for page in PAGES
            ]


def test_one_ranks_bumped_word_voids_the_copy_for_all(daemon: DaemonProcess) -> None:
    with group(daemon, "g") as ranks, group(daemon, "h") as other:
        ranks[1].pool_memory.words.bump(1)
        publish(ranks)
        restored = restore(other, [1, 2, 3])
        assert not restored.landed
        assert all_stats(other).get("pages_backed_up", 0) == 0


def test_a_lost_rank_ends_its_group_and_the_instance_comes_back_whole(
    daemon: DaemonProcess,
) -> None:
    with group(daemon, "h") as other, group(daemon, "g") as ranks:
        publish(ranks)
        ranks[1].session.close()
        wait_until(lambda: all_stats(other)["pools"] == 1)
        refused = ranks[0].ask(Stats())
        assert isinstance(refused, Refused)
        assert refused.code == "unknown_pool"
        with group(daemon, "g") as again:
            assert [rank.generation for rank in again] == [2, 2]
            publish(again)
            gone = all_ask(again, Evict(3))
            assert isinstance(gone[0], GaveUp)
            assert gone[1] == gone[0]


def test_a_rank_that_differs_is_refused_and_the_group_stays(daemon: DaemonProcess) -> None:
    pool, small = Pool(), Pool(page_count=8)
    with SessionClient(daemon.runtime_dir) as first:
        first.hello()
        registered = first.call(pool.register("g", "thin", 2, 0), pool.fds)
        assert isinstance(registered, Registered)
        for message, fds, code in (
            (small.register("g", "thin", 2, 1), small.fds, "group_mismatch"),
            (pool.register("g", "thin", 2, 0), pool.fds, "instance_live"),
            (pool.register("g", "thin", 2, 2), pool.fds, "bad_message"),
        ):
            with SessionClient(daemon.runtime_dir) as session:
                session.hello()
                refused = session.call(message, fds)
                assert isinstance(refused, SessionRefused)
                assert refused.code == code
        with SessionClient(daemon.runtime_dir) as second:
            second.hello()
            joined = second.call(pool.register("g", "thin", 2, 1), pool.fds)
            assert isinstance(joined, Registered)
            assert joined.pool != registered.pool
            assert joined.generation == registered.generation
    pool.close()
    small.close()


def all_stats(ranks: list[RawClient]) -> dict[str, int]:
    """The counters, asked by every rank so that the group stays in step."""
    said = [rank.stats() for rank in ranks]
    return said[0]
