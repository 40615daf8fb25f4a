"""Schedulers whose real daemon is killed or stopped, and the next one that they find."""

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from directory.cli.check import ask
from directory.core.actions import Counters
from directory.core.events import Flush, Mode, Stats
from directory.core.tokens import pack_tokens
from directory.protocol.runtime_dir import deserted
from scheduler_shim import dial
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.dial import DaemonDial
from scheduler_shim.lane_link import LaneLink
from scheduler_shim.link import ZmqLink
from scheduler_shim.pools import SharedPool
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.worker_messages import Finished
from tests.descriptors import open_descriptors
from tests.integration.daemon.support import DaemonProcess, wait_until
from transfer.ipc.lane import FrameLane

PAGE_SIZE = 16
PATIENT = Deadlines(call_ms=30_000, restore_ms=30_000, connect_ms=60_000)
"""A daemon that ends is noticed at once; one that only takes its time is to be waited for."""
TICK_S_MAX = 2.0
"""Far from any deadline: whoever waits for a daemon in a tick waits for one of those."""
GIVE_UP_S = 60.0


class Node:
    """A scheduler in this process that finds its daemon by itself."""

    def __init__(self, runtime_dir: Path, instance: str, mode: Mode) -> None:
        self.pool = SharedPool(page_size=PAGE_SIZE, page_count=32, bytes_per_token=256)
        client = DaemonClient.connect(
            runtime_dir, self.pool, instance=instance, mode=mode, deadlines=PATIENT
        )
        self.scheduler = ReferenceScheduler(
            self.pool,
            client,
            instance=instance,
            thin=mode == "thin",
            dial=DaemonDial(runtime_dir, self.pool, instance=instance, deadlines=PATIENT),
        )
        self.longest_tick_s = 0.0

    def tick(self) -> list[Finished]:
        began = time.monotonic()
        records = self.scheduler.tick()
        self.longest_tick_s = max(self.longest_tick_s, time.monotonic() - began)
        if self.scheduler.client is not None and not self.scheduler.moved:
            self.scheduler.client.wait(5_000)
        return records

    def serve(self, number: int, *blocks: int) -> Finished:
        self.scheduler.submit(number, pack_tokens([b for b in blocks for _ in range(PAGE_SIZE)]))
        give_up = time.monotonic() + GIVE_UP_S
        while time.monotonic() < give_up:
            for record in self.tick():
                return record
        raise AssertionError(f"request {number} does not end: {self.scheduler!r}")

    def until(self, *, alone: bool) -> None:
        """Tick until the daemon is lost, or there again."""
        give_up = time.monotonic() + GIVE_UP_S
        while (self.scheduler.client is None) is not alone:
            assert time.monotonic() < give_up, repr(self.scheduler)
            self.tick()
        self.tick()  # what was said last leaves, at the latest, with the next tick

    def violations(self) -> list[str]:
        assert self.scheduler.client is not None
        reply = self.scheduler.client.call(Stats(check=True), 30_000)
        assert isinstance(reply, Counters)
        return [*reply.violations, *self.scheduler.check()]

    def close(self) -> None:
        self.scheduler.close()
        self.pool.close()


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_after_kill_and_restart_pages_travel_again_f67(tmp_path: Path, mode: Mode) -> None:
    runtime_dir = tmp_path / "rt"
    with DaemonProcess(runtime_dir) as daemon:
        nodes = [Node(runtime_dir, name, mode) for name in ("left", "right")]
        nodes[0].serve(1, 1, 2, 3)
        daemon.kill()
        for node in nodes:
            node.until(alone=True)
        # What is computed alone is known to the next daemon without having been computed again.
        assert nodes[0].serve(2, 1, 2, 3, 4).error == ""
    with DaemonProcess(runtime_dir):
        for node in nodes:
            node.until(alone=False)
            assert node.scheduler.mode == mode
        record = nodes[1].serve(3, 1, 2, 3, 4, 5)
        assert (record.own_pages, record.wrong) == (0, 0)
        assert record.peer_pages + record.host_pages == 4
        assert nodes[0].serve(4, 1, 2, 3, 4, 6).own_pages == 4
        for node in nodes:
            assert node.violations() == []
            node.close()


def test_a_folder_is_deserted_once_daemon_and_mover_are_dead(tmp_path: Path) -> None:
    assert not deserted(tmp_path / "rt"), "there is none: nothing is known"
    with DaemonProcess(tmp_path / "rt") as daemon:
        assert not deserted(daemon.runtime_dir)
        daemon.process.send_signal(signal.SIGSTOP)
        assert not deserted(daemon.runtime_dir)
        daemon.process.send_signal(signal.SIGCONT)
        daemon.kill()
        wait_until(lambda: deserted(daemon.runtime_dir))
    with DaemonProcess(tmp_path / "rt") as daemon:  # to have asked does not bar the next one
        assert not deserted(daemon.runtime_dir)


def test_a_daemon_that_stands_still_blocks_no_tick_of_a_scheduler_on_its_way_back(
    tmp_path: Path,
) -> None:
    runtime_dir = tmp_path / "rt"
    with DaemonProcess(runtime_dir) as daemon:
        node = Node(runtime_dir, "a", "mirrored")
        node.serve(1, 1, 2)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            assert node.scheduler.client is not None
            node.scheduler.client.lose("it stands still")
            node.until(alone=True)
            node.longest_tick_s = 0.0
            give_up = time.monotonic() + 1.0
            while time.monotonic() < give_up:  # it connects, and says Hello to nobody
                node.tick()
            assert node.serve(2, 1, 2, 3).own_pages == 2
            assert node.longest_tick_s < TICK_S_MAX
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        node.until(alone=False)
        assert node.violations() == []
        node.close()


def test_no_step_of_the_way_back_makes_two_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step stands between two ticks: arena, link and ZeroMQ's part are not made in one."""
    made: list[str] = []

    def noted(name: str, make: Callable[..., object]) -> Callable[..., object]:
        def noting(*given: object, **named: object) -> object:
            made.append(f"{name} {named.get('warm', '')}".strip())
            return make(*given, **named)

        return noting

    for name in ("make_arena", "make_link"):
        monkeypatch.setattr(dial, name, noted(name, getattr(dial, name)))
    monkeypatch.setattr(ZmqLink, "connect", noted("connect", ZmqLink.connect))
    pool = SharedPool(page_size=PAGE_SIZE, page_count=32, bytes_per_token=256)
    with DaemonProcess(tmp_path / "rt") as daemon:
        attempt = DaemonDial(daemon.runtime_dir, pool, instance="a").begin("mirrored")
        steps: list[tuple[str, ...]] = []
        give_up = time.monotonic() + GIVE_UP_S
        client = None
        while client is None:
            assert time.monotonic() < give_up
            made.clear()
            client = attempt.step()
            if made:
                steps.append(tuple(made))
        assert steps == [("make_arena False",), ("make_link",)]
        assert isinstance(client.call(Stats(), 30_000), Counters)
        # ZeroMQ's part, with its threads, is made only when the lane ends.
        link = client._link
        assert isinstance(link, LaneLink)
        assert link._lane is not None
        made.clear()
        link._lane._sock.shutdown(socket.SHUT_RDWR)
        assert isinstance(client.call(Stats(), 30_000), Counters)
        assert made == ["connect"]
        assert client.counters["lanes_ended"] == 1
        client.close()
    pool.close()


def test_what_is_held_goes_in_one_piece_and_a_try_that_is_given_up_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    send = FrameLane._send_data

    def noting(self: FrameLane, data: bytes) -> bool:
        pieces.append(len(data))
        return send(self, data)

    pool = SharedPool(page_size=PAGE_SIZE, page_count=32, bytes_per_token=256)
    with DaemonProcess(tmp_path / "rt") as daemon:
        client = DaemonClient.connect(daemon.runtime_dir, pool, instance="a", mode="mirrored")
        monkeypatch.setattr(FrameLane, "_send_data", noting)
        for value in (1, 2, 3):
            client.report(Flush("pool", value), hold=True)
        assert not pieces
        client.send_held()
        assert len(pieces) == 1
        wait_until(lambda: not client.poll() and not client.open_count)
        assert not client.refused
        client.close()
        before = open_descriptors()
        for steps in range(12):
            wait_until(lambda: not ask(daemon.runtime_dir, GIVE_UP_S).pools)
            attempt = DaemonDial(daemon.runtime_dir, pool, instance="a").begin("mirrored")
            for _ in range(steps):
                attempt.step()
                time.sleep(0.05)
            attempt.close()
            assert open_descriptors() == before
    pool.close()
