"""A shim on a real daemon leaves turns out once all is said, and has one again when anything is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from directory.core.events import Mode
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_tokens
from scheduler_shim.client import LIVE_EVERY_US, DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.pools import SharedPool
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.shim import Shim
from scheduler_shim.sglang.waiting import Waiting
from tests.integration.daemon.support import DaemonProcess, wait_until

PAGE_SIZE = 16
KEY = NamespaceKey()
PATIENT = Deadlines(call_ms=30_000, restore_ms=30_000, connect_ms=60_000)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "rt") as process:
        yield process


class Engine:
    """A shim on a daemon, with a loop that does nothing else."""

    def __init__(self, daemon: DaemonProcess, mode: Mode, *, lane: bool = True) -> None:
        self.pool = SharedPool(page_size=PAGE_SIZE, page_count=32, bytes_per_token=256)
        client = DaemonClient.connect(
            daemon.runtime_dir, self.pool, instance="a", mode=mode, deadlines=PATIENT, lane=lane
        )
        settings = Settings(mode=mode, idle_wait_us=0, busy_wait_us=0)
        self.shim = Shim(self.pool, self.pool.make_allocator(), client, settings)
        self.shim.key_of = lambda req: (KEY, req.tokens)
        self.waiting: list[Waiting] = []

    def loop(self, *, busy: bool = True) -> bool:
        """Whether the turn was left out."""
        rests = self.shim.rests(self.waiting, lambda: busy)
        if not rests:
            self.shim.tick(self.waiting, busy=busy)
        return rests

    def publish(self, *numbers: int) -> None:
        tokens = pack_tokens([number for number in numbers for _ in range(PAGE_SIZE)])
        request = self.shim.request(KEY, tokens)
        pages = self.shim.room.allocate(len(numbers))
        assert pages is not None
        request.row = pages
        assert self.shim.publish(request, len(numbers), self.pool.advance(), keep=False)

    def close(self) -> None:
        self.shim.close()
        self.pool.close()


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_turns_are_left_out_once_all_is_said_until_anything_new_is(
    daemon: DaemonProcess, mode: Mode
) -> None:
    engine = Engine(daemon, mode)
    wait_until(engine.loop)
    engine.publish(1, 2)
    if mode == "mirrored":
        assert not engine.loop(), "a report is open until it was acknowledged"
    wait_until(engine.loop)
    tokens = pack_tokens([7] * (2 * PAGE_SIZE))
    engine.waiting = [SimpleNamespace(rid="r", tokens=tokens)]
    assert not engine.loop(), "somebody has come"
    wait_until(engine.loop)
    assert not engine.shim.held("r"), "its question was asked and answered"
    assert engine.shim.counters["asked" if mode == "mirrored" else "ticks"] >= 1
    engine.waiting = []
    assert not engine.loop(), "somebody has gone"
    wait_until(engine.loop)
    assert engine.shim.check() == []
    engine.close()


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_an_engine_that_has_been_idle_for_long_leaves_turns_out(
    daemon: DaemonProcess, mode: Mode
) -> None:
    engine = Engine(daemon, mode)
    engine.publish(1, 2)
    client = engine.shim.client
    assert client is not None
    long_us = client.live_us + LIVE_EVERY_US
    wait_until(lambda: client.now_us() > long_us and engine.loop(busy=False))
    engine.close()


def test_who_waits_is_looked_up_anew_once_the_weights_have_changed(daemon: DaemonProcess) -> None:
    engine = Engine(daemon, "mirrored")
    engine.waiting = [SimpleNamespace(rid="r", tokens=pack_tokens([7] * (2 * PAGE_SIZE)))]
    wait_until(engine.loop)
    asked = engine.shim.counters["asked"]
    engine.shim.change_weights(7)
    assert not engine.loop()
    assert engine.shim.counters["asked"] == asked + 1
    engine.close()


def test_a_daemon_that_dies_ends_the_rest(daemon: DaemonProcess) -> None:
    engine = Engine(daemon, "mirrored")
    wait_until(engine.loop)
    daemon.kill()
    wait_until(lambda: engine.loop() is False)
    assert engine.shim.mode == "degraded"
    assert not engine.loop(), "a way back may be open"
    engine.close()


def test_by_zeromq_every_loop_has_its_turn(daemon: DaemonProcess) -> None:
    engine = Engine(daemon, "mirrored", lane=False)
    for _ in range(50):
        assert not engine.loop()
    engine.close()
