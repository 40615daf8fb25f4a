"""Deaths: of a scheduler in the middle of copies, of a mover, of a pool that is made anew."""

import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from directory.core.ids import HOST
from tests.gpu import peer_messages as m
from tests.gpu.daemon_stub import DaemonStub
from tests.gpu.poisoned_mover import WILD_STORE_FILE
from tests.gpu.support import CYCLES_PER_MS, Peer, Rig, fences, figure, packed, until
from transfer.messages import Pong, Released
from transfer.mover_handle import MoverHandle

GIB = 1 << 30
MIB = 1 << 20
BIG = {"layout": "mla", "layers": 1, "page_size": 64, "page_count": 65_536}
"""2 GiB in one allocation."""
SLOW_KERNEL_MS = 3_000


@pytest.mark.parametrize("memory", ["torch", "vmm"])
def test_a_killed_schedulers_memory_is_back_within_a_second_f62(
    uuids: list[str], rig: Rig, peers: tuple[Peer, Peer], memory: str
) -> None:
    watcher, other = peers
    other.create(m.Create("other"))
    other.fill("other", seed=1)
    baseline = watcher.free_bytes()
    victim = Peer(uuids[0])
    victim.ready()
    victim.create(m.Create("big", memory=memory, **BIG))  # type: ignore[arg-type]
    used = baseline - watcher.free_bytes()
    assert used > 2 * GIB
    assert rig.import_pool(1, victim, "big").ok
    assert rig.import_pool(2, other, "other").ok
    pages = random.Random(1).sample(range(65_536), 1_000)
    slots = rig.slots(1_000, 1 << 15, lambda n: list(range(n)))
    ops = [rig.submit("backup", [(1, pages, HOST, slots)]) for _ in range(20)]
    ops += [rig.submit("load_back", [(HOST, slots, 1, pages)]) for _ in range(20)]
    rig.done(ops[0])
    victim.process.kill()
    killed = time.monotonic()
    victim.forget("big")  # as the daemon does when the session socket ends
    rig.mover.release_pool(1)
    released = rig.wait(Released)
    assert (released.pool, released.detail) == (1, "")
    until(lambda: watcher.free_bytes() >= baseline - 4 * MIB, 5.0)
    seconds = time.monotonic() - killed
    figure(f"f62 {memory}: memory back after {seconds * 1000:.0f} ms")
    assert seconds < 1.0
    outcomes = Counter(rig.done(op).outcome for op in ops[1:])
    assert set(outcomes) <= {"ok", "void"}
    figure(f"f62 {memory}: outcomes {dict(outcomes)}")
    done = rig.copy("backup", 2, [1, 2], HOST, [1, 2])
    assert done.outcome == "ok", "the others go on"
    victim.close()


def test_cleaning_up_after_a_killed_scheduler_never_stops_the_mover_f63(
    uuids: list[str], rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    watcher, _ = peers
    baseline = watcher.free_bytes()
    victim = Peer(uuids[0])
    victim.ready()
    victim.create(m.Create("big", **BIG))  # type: ignore[arg-type]
    assert rig.import_pool(1, victim, "big").ok
    # Once without a delay: the driver loads a kernel at its first use, and waits for others then.
    victim.ask(m.LateWrite("big", packed([0]), 1, 0), m.Position)
    late = m.LateWrite("big", packed([0]), 1, SLOW_KERNEL_MS * CYCLES_PER_MS)
    asked = time.monotonic()
    position = victim.ask(late, m.Position)
    assert time.monotonic() - asked < 1.0, "the kernel is still running"
    op = rig.submit("backup", [(1, [0], HOST, [0])], fences(1, position))
    victim.process.kill()
    killed = time.monotonic()
    victim.forget("big")
    rig.mover.release_pool(1)
    assert rig.done(op).outcome == "void"
    assert rig.wait(Released).pool == 1
    released_s = time.monotonic() - killed
    slowest = 0.0
    while watcher.free_bytes() < baseline - 4 * MIB:
        started = time.monotonic()
        rig.mover.ping(1)
        rig.wait(Pong)
        slowest = max(slowest, time.monotonic() - started)
        assert started - killed < SLOW_KERNEL_MS / 1000 + 5
    seconds = time.monotonic() - killed
    figure(
        f"f63: slowest ping {slowest * 1000:.1f} ms, released after {released_s * 1000:.0f} ms, "
        f"memory back after {seconds:.2f} s (a kernel of {SLOW_KERNEL_MS} ms was running)"
    )
    assert slowest < 0.1
    assert released_s < 1.0
    victim.close()


def test_a_pool_that_is_made_anew_is_never_reached_by_its_old_copies_f59(
    rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    page_bytes = peer.create(m.Create("old")).layout.page_bytes
    peer.fill("old", seed=1)
    assert rig.import_pool(1, peer, "old").ok
    rig.poison(0x55)
    assert rig.copy("backup", 1, [0], HOST, [9]).outcome == "ok"
    late = m.LateWrite("old", packed([7]), 3, 200 * CYCLES_PER_MS)
    position = peer.ask(late, m.Position)
    position = m.Position(position.forward, position.current + 1)  # which is never reached
    restore = rig.submit("load_back", [(HOST, [1, 2], 1, [4, 5])], fences(1, position))
    before = peer.read("old", [4, 5])
    peer.create(m.Create("new"))
    peer.fill("new", seed=2)
    assert rig.import_pool(2, peer, "new").ok, "the new generation is in before the old is out"
    assert rig.release(1).detail == ""
    assert rig.done(restore).outcome == "void"
    assert rig.copy("load_back", HOST, [1], 1, [4]).outcome == "void", "of a dead generation"
    assert rig.copy("load_back", HOST, [1], 2, [4]).outcome == "ok"
    assert peer.read("old", [4, 5]) == before
    assert peer.read("new", [4]) == b"\x55" * page_bytes
    assert rig.host_page(9, page_bytes) == peer.read("old", [0]), "host copies are kept"
    peer.drop("old")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_lost_mover_is_replaced_and_no_host_page_with_it(
    uuids: list[str], peers: tuple[Peer, Peer], how: signal.Signals
) -> None:
    peer, _ = peers
    page_bytes = peer.create(m.Create("pool")).layout.page_bytes
    peer.fill("pool", seed=1)
    content = peer.pages("pool")
    with DaemonStub(f"cuda:{uuids[0]}") as daemon:
        daemon.import_pool(1, peer.pools["pool"], peer.fds["pool"])
        assert daemon.copy("backup", 1, range(32), HOST, range(32)).outcome == "ok"
        pid = daemon.movers.pid
        ops = [daemon.submit("backup", 1, range(32), HOST, range(32, 64)) for _ in range(50)]
        os.kill(pid, how)
        struck = time.monotonic()
        daemon.turn_until(lambda: bool(daemon.lost))
        lost_s = time.monotonic() - struck
        daemon.turn_until(lambda: daemon.movers.pid not in (0, pid) and 1 in daemon.imported)
        seconds = time.monotonic() - struck
        figure(f"mover {how.name}: noticed {lost_s:.2f} s, serving again {seconds:.2f} s")
        answered = {op for op in ops if op in daemon.done}
        assert all(daemon.done[op].outcome == "ok" for op in answered)
        for slot in range(32):
            assert daemon.host_page(slot, page_bytes) == content[slot], "the tier lives on"
        peer.fill("pool")
        assert daemon.copy("load_back", HOST, range(32), 1, range(32, 64)).outcome == "ok"
        assert peer.pages("pool")[32:] == content[:32]
        assert seconds < 2.0


@pytest.mark.parametrize("busy", [True, False], ids=["in the middle of copies", "idle"])
def test_a_mover_whose_context_is_poisoned_is_replaced_and_its_copies_have_failed(
    uuids: list[str],
    peers: tuple[Peer, Peer],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    busy: bool,
) -> None:
    spawn = MoverHandle.spawn
    monkeypatch.setattr(MoverHandle, "spawn", partial(spawn, program="tests.gpu.poisoned_mover"))
    wild_store = tmp_path / "launched"
    monkeypatch.setenv(WILD_STORE_FILE, str(wild_store))
    peer, _ = peers
    page_bytes = peer.create(m.Create("pool")).layout.page_bytes
    peer.fill("pool", seed=1)
    content = peer.pages("pool")
    with DaemonStub(f"cuda:{uuids[0]}") as daemon:
        daemon.import_pool(1, peer.pools["pool"], peer.fds["pool"])
        assert daemon.copy("backup", 1, range(32), HOST, range(32)).outcome == "ok"
        pid = daemon.movers.pid
        ops = []
        if busy:
            ops += [daemon.submit("load_back", HOST, range(32), 1, range(32)) for _ in range(200)]
        os.kill(pid, signal.SIGUSR1)
        struck = time.monotonic()

        def lost() -> bool:
            """Whether it is; copies are under way until then, however fast they are."""
            if busy and not daemon.lost and sum(op not in daemon.done for op in ops) < 100:
                ops.append(daemon.submit("load_back", HOST, range(32), 1, range(32)))
            return bool(daemon.lost)

        def launched() -> bool:
            """Asked again: a signal that falls between a look for signals and a wait is seen only
            after that."""
            os.kill(pid, signal.SIGUSR1)
            return wild_store.exists()

        if not busy:
            # A context tells nobody that it is broken: the next copy finds out.
            daemon.turn_until(launched)
            ops.append(daemon.submit("load_back", HOST, range(8), 1, range(8)))
        daemon.turn_until(lost)
        assert not os.path.exists(f"/proc/{pid}"), "nothing of it can still touch a target"
        lost_s = time.monotonic() - struck
        unanswered = [op for op in ops if op not in daemon.done]
        assert unanswered, "the copies under way never said that they are done"
        assert {daemon.done[op].outcome for op in ops if op in daemon.done} <= {"ok"}
        daemon.turn_until(lambda: daemon.movers.pid not in (0, pid) and 1 in daemon.imported)
        seconds = time.monotonic() - struck
        figure(f"mover poisoned, busy {busy}: noticed {lost_s:.2f} s, serving {seconds:.2f} s")
        for slot in range(32):
            assert daemon.host_page(slot, page_bytes) == content[slot], "the tier lives on"
        peer.fill("pool")
        assert daemon.copy("load_back", HOST, range(32), 1, range(32, 64)).outcome == "ok"
        assert peer.pages("pool")[32:] == content[:32], "mapped again, and right"
        assert seconds < 2.0
    said = capfd.readouterr().err
    assert "the device is lost, and this mover with it" in said
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said


def test_what_a_mover_takes_of_its_gpu_is_known(uuids: list[str], peers: tuple[Peer, Peer]) -> None:
    watcher, peer = peers
    peer.create(m.Create("pool", layers=32))
    before = watcher.free_bytes()
    rig = Rig(uuids[0])
    started = before - watcher.free_bytes()
    assert rig.import_pool(1, peer, "pool").ok
    assert rig.copy("backup", 1, range(64), HOST, range(24)).outcome != "ok"
    assert rig.copy("backup", 1, range(8), HOST, range(8)).outcome == "ok"
    working = before - watcher.free_bytes()
    figure(
        f"mover context: {started / MIB:.0f} MiB after start, {working / MIB:.0f} MiB "
        f"with a pool and copies; ready after {rig.ready_after_s:.2f} s, serving after "
        f"{rig.serving_after_s:.2f} s"
    )
    assert working < GIB
    rig.close()
    until(lambda: watcher.free_bytes() >= before - 4 * MIB, 5.0)
