"""Sync between a GPU's streams and the mover: late writes, three backends, guarded waits."""

import time

import pytest

from directory.core.actions import Word
from directory.core.ids import CURRENT, FORWARD, HOST
from tests.gpu import peer_messages as m
from tests.gpu.support import CYCLES_PER_MS, Peer, Rig, fences, packed
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import TimelineTable

PAGES, SLOTS = [3, 5, 8], [1, 0, 2]
SYNCS: list[m.Sync] = ["stream", "events", "host"]


def late_write(peer: Peer, name: str, value: int, ms: int, *, current: bool = False) -> m.Position:
    request = m.LateWrite(name, packed(PAGES), value, ms * CYCLES_PER_MS, current)
    return peer.ask(request, m.Position)


@pytest.mark.parametrize("current", [False, True], ids=["forward", "current"])
@pytest.mark.parametrize("sync", SYNCS)
def test_a_backup_stores_what_a_slow_kernel_writes_later_f47(
    rig: Rig, peers: tuple[Peer, Peer], sync: m.Sync, current: bool
) -> None:
    peer, _ = peers
    page_bytes = peer.create(m.Create("pool", sync=sync)).layout.page_bytes
    peer.fill("pool")
    assert rig.import_pool(1, peer, "pool").ok
    late_write(peer, "pool", 0x11, 60, current=current)  # the host thread runs ahead of the stream
    position = late_write(peer, "pool", 0x22, 60, current=current)
    started = time.monotonic()
    # Written behind the sleep: without the fences the copy would be over before that.
    done = rig.copy("backup", 1, PAGES, HOST, SLOTS, fences(1, position))
    if sync != "host":
        assert time.monotonic() - started > 0.05
    assert done.outcome == "ok", done.detail
    assert {rig.host_page(slot, page_bytes) for slot in SLOTS} == {b"\x22" * page_bytes}


def test_without_its_fences_the_same_backup_stores_old_bytes_f47(
    rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    page_bytes = peer.create(m.Create("pool")).layout.page_bytes
    peer.fill("pool")
    assert rig.import_pool(1, peer, "pool").ok
    position = late_write(peer, "pool", 0x22, 200)
    assert rig.copy("backup", 1, PAGES, HOST, SLOTS).outcome == "ok"
    assert rig.host_page(SLOTS[0], page_bytes) == b"\xee" * page_bytes, "the test can fail"
    assert rig.copy("backup", 1, PAGES, HOST, SLOTS, fences(1, position)).outcome == "ok"
    assert rig.host_page(SLOTS[0], page_bytes) == b"\x22" * page_bytes


def test_a_restore_waits_until_late_writes_into_its_target_are_over(
    rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    page_bytes = peer.create(m.Create("pool")).layout.page_bytes
    assert rig.import_pool(1, peer, "pool").ok
    rig.poison(0x77)
    position = late_write(peer, "pool", 0x22, 100)
    assert rig.copy("load_back", HOST, SLOTS, 1, PAGES, fences(1, position)).outcome == "ok"
    late_write(peer, "pool", 0x22, 0)  # and its own fences, so that the pool is quiet
    rig.copy("load_back", HOST, SLOTS, 1, PAGES, fences(1, late_write(peer, "pool", 0x33, 1)))
    assert peer.read("pool", PAGES) == b"\x77" * page_bytes * len(PAGES)


def test_a_bumped_word_voids_a_copy_that_was_under_way(rig: Rig, peers: tuple[Peer, Peer]) -> None:
    peer, _ = peers
    peer.create(m.Create("pool"))
    assert rig.import_pool(1, peer, "pool").ok
    position = late_write(peer, "pool", 0x22, 50)
    op = rig.submit(
        "backup", [(1, PAGES, HOST, SLOTS)], fences(1, position), [Word(1, 0, 0), Word(1, 7, 0)]
    )
    peer.ask(m.Bump("pool", 7), m.Done)
    done = rig.done(op)
    assert (done.outcome, done.nbytes) == ("void", 0)


@pytest.mark.parametrize("drop_first", [True, False], ids=["before-opening", "after-opening"])
def test_events_that_their_owner_dropped_are_refused_never_taken_for_passed_f37(
    rig: Rig, peers: tuple[Peer, Peer], drop_first: bool
) -> None:
    peer, _ = peers
    peer.create(m.Create("pool", sync="events"))
    if drop_first:
        peer.ask(m.DropEvents("pool"), m.Done)
        imported = rig.import_pool(1, peer, "pool")
        assert not imported.ok
        assert "let go of them" in imported.detail
        return
    assert rig.import_pool(1, peer, "pool").ok
    position = late_write(peer, "pool", 0x22, 300)
    op = rig.submit("backup", [(1, PAGES, HOST, SLOTS)], fences(1, position))
    peer.ask(m.DropEvents("pool"), m.Done)
    done = rig.done(op)
    assert done.outcome == "failed"
    assert "let go of them" in done.detail


def test_an_unknown_sync_or_forged_events_are_refused(rig: Rig, peers: tuple[Peer, Peer]) -> None:
    import msgspec

    from transfer.ipc.sync import SyncHandle

    peer, _ = peers
    pool = peer.create(m.Create("pool", sync="events"))
    for sync, words in (
        (SyncHandle("semaphore"), "not 'semaphore'"),
        (SyncHandle("cuda-events", b"\x01"), "cannot be decoded"),
        (SyncHandle("cuda-events", msgspec.msgpack.encode((b"x" * 64,) * 31)), "32 event handles"),
        (SyncHandle("cuda-events", msgspec.msgpack.encode((b"x" * 64,) * 32)), "cannot be used"),
    ):
        forged = msgspec.structs.replace(pool, sync=sync)
        imported = rig.import_raw(1, forged, peer.fds["pool"])
        assert not imported.ok
        assert words in imported.detail
    assert rig.import_pool(1, peer, "pool").ok, "the mover goes on"


def test_a_waiting_stream_goes_on_when_the_counter_is_written(peers: tuple[Peer, Peer]) -> None:
    peer, _ = peers
    peer.create(m.Create("pool"))
    table = TimelineTable.open(SharedMemoryIPC(), peer.fds["pool"][-2])
    peer.ask(m.WaitFor("pool", FORWARD, 7, 20.0), m.Done)
    table.write(FORWARD, 7)
    waited = peer.answer(m.Waited)
    table.close()
    assert not waited.lost
    assert waited.seconds < 5


def test_the_watchdog_releases_a_stream_that_waits_for_a_dead_mover_f63(
    peers: tuple[Peer, Peer],
) -> None:
    peer, _ = peers
    peer.create(m.Create("pool"))
    peer.ask(m.WaitFor("pool", CURRENT, 7, 0.3), m.Done)
    waited = peer.answer(m.Waited)
    assert waited.lost
    assert 0.25 < waited.seconds < 2
