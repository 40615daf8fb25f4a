"""Staging end to end: a real daemon and mover, workers that pack and unpack, and what dies."""

import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from directory.cli.check import ask
from directory.core.actions import Counters
from directory.core.events import Stats
from directory.core.limits import FENCE_DEADLINE_MS
from scheduler_shim.client import DaemonClient
from scheduler_shim.dial import DaemonDial
from scheduler_shim.pools import SharedPool
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.staging import HostPacker
from scheduler_shim.worker_messages import Cut, Prompt
from tests.integration.daemon.support import DEADLINE_S, DaemonProcess, wait_until
from tests.integration.scheduler_shim.test_worker import BLOCK, WorkerProcess
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.stage_ring import StageRequest, StageRing, wake

PAGE_BYTES = 64 * BLOCK
SLAB = 8 * PAGE_BYTES
POOL_PAGES = 24
PATHS = 12
"""Of four pages each: together they are twice the pool."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "rt", "--host-tier", "16MiB", "--segment", "1MiB") as process:
        yield process


@pytest.fixture
def workers() -> Iterator[list[WorkerProcess]]:
    workers = [WorkerProcess(), WorkerProcess()]
    yield workers
    for worker in workers:
        worker.close()


def staged(worker: WorkerProcess, name: str, daemon: DaemonProcess, **options: object) -> None:
    """Configure a worker whose pool is small and has a slab."""
    given = {"page_count": POOL_PAGES, "staging_bytes": SLAB, **options}
    assert worker.configure(name, daemon.runtime_dir, **given).ok


def serve(worker: WorkerProcess, number: int, path: int) -> int:
    """One request over a path of four pages; returns how many came from the host tier."""
    record = worker.serve(number, *range(100 * path + 1, 100 * path + 6))
    assert (record.error, record.wrong) == ("", 0)
    return record.host_pages


@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_what_went_out_through_one_slab_comes_back_through_another(
    daemon: DaemonProcess, workers: list[WorkerProcess], mode: str, named: bool
) -> None:
    left, right = workers
    staged(left, "left", daemon, mode=mode, named=named)
    staged(right, "right", daemon, mode=mode, named=named)
    restored = 0
    for number in range(4 * PATHS):
        restored += serve(workers[number % 2], number, number * 5 % PATHS)
    summaries = [worker.summary() for worker in workers]
    assert [s.violations for s in summaries] == [(), ()]
    assert restored >= PATHS, "the pools are too small for all of it"
    for summary in summaries:
        assert summary.counters["stage_requests"] > 0
        assert summary.counters["bytes_restored_host"] > 0
        assert "restores_lost" not in summary.counters
    moved = summaries[0].daemon["pages_backed_up"] + restored // 4
    asked = sum(s.counters["stage_requests"] for s in summaries)
    assert asked >= moved // 8, "backups and loads go through the slabs"


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_a_mover_that_dies_with_requests_open_costs_no_page(
    daemon: DaemonProcess, workers: list[WorkerProcess], mode: str
) -> None:
    for name, worker in zip(("left", "right"), workers, strict=True):
        staged(worker, name, daemon, mode=mode, named=True)
    number = 0
    for _ in range(6):
        mover = workers[0].summary().daemon["daemon_mover_pid"]
        for turn in range(PATHS):
            if turn == PATHS // 2:
                os.kill(mover, signal.SIGKILL)
            serve(workers[number % 2], number, number * 7 % PATHS)
            number += 1
        while workers[0].summary().daemon.get("daemon_mover_pid", 0) in (0, mover):
            time.sleep(0.02)
    for worker in workers:
        summary = worker.summary()
        assert summary.violations == ()
        assert summary.counters["stage_requests"] > 0


def test_a_worker_that_dies_or_stops_holds_nobody_up(
    daemon: DaemonProcess, workers: list[WorkerProcess]
) -> None:
    left, right = workers
    staged(left, "left", daemon)
    staged(right, "right", daemon)
    for number in range(PATHS):
        serve(left, number, number)
        serve(right, number, number + PATHS)
    os.kill(left.process.pid, signal.SIGSTOP)
    left.say(
        Prompt(
            1000, blocks=array("I", range(301, 306)).tobytes(), block_tokens=BLOCK, length=5 * BLOCK
        )
    )
    slowest_s = 0.0
    for number in range(PATHS):
        began = time.monotonic()
        serve(right, 100 + number, number + PATHS)
        slowest_s = max(slowest_s, time.monotonic() - began)
    assert slowest_s < FENCE_DEADLINE_MS / 1_000, "what waits for the stopped one waits so long"
    os.kill(left.process.pid, signal.SIGKILL)
    left.process.wait()
    for number in range(PATHS):
        serve(right, 200 + number, number)
    assert right.summary().violations == ()


def test_a_worker_that_returns_stages_with_a_new_ring(
    daemon: DaemonProcess, workers: list[WorkerProcess]
) -> None:
    worker = workers[0]
    staged(worker, "a", daemon, named=True)
    number = 0
    for _ in range(3):
        for path in range(PATHS):
            serve(worker, number, path)
            number += 1
        asked = worker.summary().counters["stage_requests"]
        returned = worker.summary().counters.get("returned", 0)
        worker.say(Cut())
        while worker.summary().counters.get("returned", 0) == returned:
            serve(worker, number, number % PATHS)
            number += 1
        for path in range(PATHS):
            serve(worker, number, path)
            number += 1
        assert worker.summary().counters["stage_requests"] > asked


def test_a_client_waits_for_its_pools_stager_before_it_tells_of_a_loss(
    daemon: DaemonProcess,
) -> None:
    pool = SharedPool(page_size=16, page_count=8, bytes_per_token=64, staging_bytes=SLAB)
    first = DaemonClient.connect(daemon.runtime_dir, pool, instance="a", mode="mirrored")
    assert first.before_loss == pool.settle
    ring = pool.fds[-2:]
    first.close()
    wait_until(lambda: not ask(daemon.runtime_dir, DEADLINE_S).pools)
    attempt = DaemonDial(daemon.runtime_dir, pool, instance="a").begin("mirrored")
    give_up = time.monotonic() + DEADLINE_S
    while (client := attempt.step()) is None:
        assert time.monotonic() < give_up
    assert client.before_loss == pool.settle
    assert pool.staging is not None
    assert pool.fds[-2:] == pool.staging.fds
    assert len(ring) == 2
    client.close()
    pool.close()


def test_a_registration_stays_though_the_stager_of_the_last_one_is_still_at_work(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, move = threading.Event(), HostPacker.move

    def held(packer: HostPacker, request: StageRequest) -> None:
        assert go.wait(60)
        move(packer, request)

    monkeypatch.setattr(HostPacker, "move", held)
    pool = SharedPool(page_size=16, page_count=8, bytes_per_token=64, staging_bytes=SLAB)
    client = DaemonClient.connect(daemon.runtime_dir, pool, instance="a", mode="mirrored")
    dial = DaemonDial(daemon.runtime_dir, pool, instance="a")
    scheduler = ReferenceScheduler(pool, client, instance="a", dial=dial)
    ring = StageRing.take_over(SharedMemoryIPC(), pool.fds[-2])
    ring.post(1, StageRequest(True, 0, 0, 0, pool.page_bytes, [1]))
    wake(pool.fds[-1])
    targets = scheduler.room.allocate(2)
    assert targets is not None
    scheduler.room.quarantine(targets)  # as those of a load that the loss left unanswered
    client.lose("cut by the test")

    def ticks(until: Callable[[], object]) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < give_up, repr(scheduler)
            scheduler.tick()
            time.sleep(0.001)

    ticks(lambda: scheduler.client is not None and scheduler.client is not client)
    again = scheduler.client
    assert again is not None
    assert isinstance(again.call(Stats(), 10_000), Counters)
    assert len(pool.fds) == len(pool.table_fds) + len(pool.layout.allocation_bytes), "no slab"
    assert len(scheduler.room.quarantined) == 2
    again.before_loss()  # as for a restore of this registration that is lost: it does not wait
    assert not again.lost
    go.set()
    ticks(lambda: not scheduler.room.quarantined)
    assert (scheduler.client, again.lost) == (again, "")
    assert scheduler.counters["quarantine_released"] == 2
    ring.close()
    scheduler.close()
    pool.close()
