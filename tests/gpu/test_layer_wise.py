"""Loads that land layer by layer: a forward pass of another process uses each layer as it comes."""

import os
import random
import signal
import statistics
import time
from hashlib import sha256

import pytest

from directory.core.actions import Landing
from directory.core.ids import HOST, LANDINGS
from tests.gpu import peer_messages as m
from tests.gpu.support import Peer, Rig, fences, figure, packed, until
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import TimelineTable

MIB = 1 << 20
PAGES = 40
BIG: dict[str, int] = {"layers": 16, "page_size": 64, "page_count": 128}
"""Layers of 64 KiB a page: 40 pages are 40 MiB, in 16 layers."""


def scene(rig: Rig, peer: Peer, layout: m.LayoutKind = "mha") -> tuple[list[int], list[int], bytes]:
    """A poisoned pool and random pages in the tier: slots, target pages, and their bytes."""
    rng = random.Random(17)
    pool = peer.create(m.Create("pool", layout, **BIG))  # type: ignore[arg-type]
    peer.fill("pool")
    assert rig.import_pool(1, peer, "pool").ok
    page_bytes = pool.layout.page_bytes
    count = min(PAGES, 40 * MIB // page_bytes)
    slots = rig.slots(count, page_bytes, lambda n: rng.sample(range(n), n))
    content = []
    for slot in slots:
        view = rig.tier.page(slot, page_bytes)
        view[:] = rng.randbytes(page_bytes)
        content.append(bytes(view))
        view.release()
    return slots, rng.sample(range(BIG["page_count"]), count), b"".join(content)


def begin(peer: Peer, pages: list[int], deadline_s: float, *, waits: bool = True) -> m.Begun:
    return peer.ask(m.Forward("pool", packed(pages), deadline_s, waits), m.Begun)


@pytest.mark.parametrize("layout", ["mha", "mha-one", "page-first", "mla", "mla-index"])
def test_a_forward_pass_reads_every_layer_as_it_was_backed_up(
    rig: Rig, peers: tuple[Peer, Peer], layout: m.LayoutKind
) -> None:
    peer, _ = peers
    slots, pages, content = scene(rig, peer, layout)
    begun = begin(peer, pages, 20.0)
    landing = Landing(1, begun.counter, begun.first)
    # The pass was queued first, so whatever it reads it has waited for.
    op = rig.submit("load_back", [(HOST, slots, 1, pages)], landing=landing)
    done = rig.done(op)
    assert done.outcome == "ok", done.detail
    read = peer.ask(m.Collect("pool", True), m.Forwarded)
    assert read.digest == sha256(content).digest()
    assert not any(read.lost)
    assert peer.read("pool", pages) == content
    rig.release(1)


def test_a_forward_pass_that_does_not_wait_reads_what_was_there_before(
    rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    slots, pages, content = scene(rig, peer)
    begun = begin(peer, pages, 20.0, waits=False)
    landing = Landing(1, begun.counter, begun.first)
    done = rig.done(rig.submit("load_back", [(HOST, slots, 1, pages)], landing=landing))
    assert done.outcome == "ok", done.detail
    read = peer.ask(m.Collect("pool", True), m.Forwarded)
    assert read.digest != sha256(content).digest(), "the test above can fail"
    assert read.poisoned > len(content) // 2
    rig.release(1)


def test_a_forward_pass_begins_while_later_layers_are_still_moving(
    rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    slots, pages, _ = scene(rig, peer)
    table = TimelineTable.open(SharedMemoryIPC(), peer.fds["pool"][-2])
    seen: list[int] = []
    op = rig.submit("load_back", [(HOST, slots, 1, pages)], landing=Landing(1, LANDINGS, 0))
    while table.read(LANDINGS) < BIG["layers"]:
        reached = table.read(LANDINGS)
        if not seen or seen[-1] != reached:
            seen.append(reached)
    assert rig.done(op).outcome == "ok"
    assert seen == sorted(seen)
    assert len(seen) > BIG["layers"] // 2, "layers were seen one by one, not all at the end"
    table.close()
    rig.release(1)


def test_a_mover_that_dies_leaves_no_stream_waiting_and_the_load_is_lost_f63(
    uuids: list[str], peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    rig = Rig(uuids[0])
    try:
        slots, pages, _ = scene(rig, peer)
        begun = begin(peer, pages, 0.5)
        never = fences(1, m.Position(1_000_000, 0))
        landing = Landing(1, begun.counter, begun.first)
        rig.submit("load_back", [(HOST, slots, 1, pages)], never, landing=landing)
        os.kill(rig.mover.pid, signal.SIGKILL)
    finally:
        rig.close()
    read = peer.ask(m.Collect("pool", None), m.Forwarded)
    assert all(read.lost)
    assert 0.4 < read.seconds < 2.0


def test_a_stopped_mover_cannot_hold_a_stream_and_is_noticed_to_be_late_f63(
    rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    slots, pages, content = scene(rig, peer)
    os.kill(rig.mover.pid, signal.SIGSTOP)
    begun = begin(peer, pages, 0.3)
    landing = Landing(1, begun.counter, begun.first)
    op = rig.submit("load_back", [(HOST, slots, 1, pages)], landing=landing)
    table = TimelineTable.open(SharedMemoryIPC(), peer.fds["pool"][-2])
    until(lambda: table.read(begun.counter) == begun.first + BIG["layers"], 5.0)
    table.close()
    os.kill(rig.mover.pid, signal.SIGCONT)
    done = rig.done(op)
    assert done.outcome == "failed"
    assert "its owner gave the load up" in done.detail
    read = peer.ask(m.Collect("pool", False), m.Forwarded)
    assert read.early, "the pass had ended by the watchdog"
    assert all(read.lost)
    assert read.digest != sha256(content).digest()
    again = begin(peer, pages, 20.0)
    assert again.counter == begun.counter
    landing = Landing(1, again.counter, again.first)
    op = rig.submit("load_back", [(HOST, slots, 1, pages)], landing=landing)
    assert rig.done(op).outcome == "ok"
    read = peer.ask(m.Collect("pool", True), m.Forwarded)
    assert read.digest == sha256(content).digest()
    rig.release(1)


def test_what_a_load_costs_layer_by_layer_is_known(rig: Rig, peers: tuple[Peer, Peer]) -> None:
    peer, _ = peers
    slots, pages, _ = scene(rig, peer)
    nbytes = len(slots) * peer.pools["pool"].layout.page_bytes
    table = TimelineTable.open(SharedMemoryIPC(), peer.fds["pool"][-2])
    whole: list[float] = []
    layered: list[float] = []
    firsts: list[float] = []
    parts = [(HOST, slots, 1, pages)]
    for turn in range(12):
        first = table.read(LANDINGS)
        whole.append(rig.done(rig.submit("load_back", parts)).duration_us)
        started = time.monotonic()
        op = rig.submit("load_back", parts, landing=Landing(1, LANDINGS, first))
        while table.read(LANDINGS) == first:
            pass
        firsts.append((time.monotonic() - started) * 1e6)
        layered.append(rig.done(op).duration_us)
        assert table.read(LANDINGS) == first + BIG["layers"]
        if turn < 2:
            for figures in (whole, layered, firsts):
                figures.clear()
    figure(
        f"load of {nbytes / MIB:.0f} MiB in {BIG['layers']} layers: whole "
        f"{statistics.median(whole):.0f} us ({nbytes / statistics.median(whole) / 1000:.1f} GB/s), "
        f"layer by layer {statistics.median(layered):.0f} us "
        f"({nbytes / statistics.median(layered) / 1000:.1f} GB/s), first layer seen "
        f"{statistics.median(firsts):.0f} us after the submission"
    )
    table.close()
    rig.release(1)
