"""`treecored serve --device cuda:<UUID>` with schedulers whose pools lie on GPUs, end to end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from directory.protocol.admin import AdminCheck, AdminReport
from scheduler_shim.worker_messages import Finished, Summary
from tests.gpu.conftest import gpus
from tests.gpu.cuda_worker import MEMORY_VARIABLE
from tests.gpu.support import figure
from tests.integration.daemon.support import ROOT, DaemonProcess, SessionClient, wait_until
from tests.integration.scheduler_shim.test_worker import WorkerProcess
from transfer.ipc.channel import FdChannel

PAGES = 12
SIZES = {"page_size": 32, "page_count": 64, "bytes_per_token": 2048, "layers": 4}


class CudaWorker(WorkerProcess):
    """A worker process on one GPU."""

    def __init__(self, gpu: str, memory: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = FdChannel(ours)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, MEMORY_VARIABLE: memory}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.cuda_worker", "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                cwd=ROOT,
                env=environment,
            )


@pytest.fixture
def daemon(tmp_path: Path, uuids: list[str]) -> Iterator[DaemonProcess]:
    """A real daemon with a mover on the first GPU."""
    flags = ["--device", f"cuda:{uuids[0]}", "--host-tier", "64MiB", "--segment", "16MiB"]
    with DaemonProcess(tmp_path / "rt", *flags) as process:
        yield process


def blocks(first: int) -> range:
    """Prompt blocks that nobody else has."""
    return range(1000 * first, 1000 * first + PAGES)


def right(finished: Finished, restored: int) -> None:
    assert finished.error == ""
    assert finished.wrong == 0
    assert finished.host_pages + finished.peer_pages == restored, finished
    assert finished.verified >= restored


def clean(summary: Summary) -> None:
    assert summary.violations == ()


def daemons_counter(daemon: DaemonProcess, name: str) -> int:
    """A counter as `treecored check` sees it; no invariant may be broken."""
    with SessionClient(daemon.runtime_dir) as session:
        session.hello()
        report = session.call(AdminCheck())
    assert isinstance(report, AdminReport)
    assert report.violations == ()
    return report.counters.get(name, 0)


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
@pytest.mark.parametrize("memory", ["legacy", "vmm"])
@pytest.mark.parametrize("second_gpu", [0, 1], ids=["one GPU", "two GPUs"])
def test_pages_travel_between_schedulers_on_gpus_through_a_real_daemon(
    daemon: DaemonProcess, uuids: list[str], second_gpu: int, memory: str, mode: str
) -> None:
    if len(gpus()) <= second_gpu:
        pytest.skip("needs two CUDA devices")
    workers = [CudaWorker(uuids[0], memory), CudaWorker(uuids[second_gpu], memory)]
    try:
        for number, worker in enumerate(workers):
            configured = worker.configure(f"gpu-{number}", daemon.runtime_dir, mode=mode, **SIZES)
            assert configured.ok, configured.detail
        a, b = workers
        right(a.serve(1, *blocks(1)), 0)
        # One token is always left to compute, and so is its page.
        right(b.serve(2, *blocks(1)), PAGES - 1)
        wait_until(lambda: daemons_counter(daemon, "pages_backed_up") >= PAGES)
        for other in range(2, 9):  # more than the pool holds: what came first is evicted
            right(b.serve(10 + other, *blocks(other)), 0)
        right(b.serve(30, *blocks(1)), PAGES - 1)
        right(a.serve(31, *blocks(8)), PAGES - 1)
        wait_until(lambda: daemons_counter(daemon, "pages_backed_up") >= 8 * PAGES)

        os.kill(daemons_counter(daemon, "daemon_mover_pid"), signal.SIGKILL)
        right(a.serve(40, *blocks(4)), PAGES - 1)
        clean(a.summary())

        a.process.kill()
        a.process.wait()
        wait_until(lambda: daemons_counter(daemon, "pools") == 1)
        right(b.serve(50, *blocks(2)), PAGES - 1)
        clean(b.summary())
        counters = {
            name: daemons_counter(daemon, name)
            for name in ("peer_pages_restored", "host_pages_restored", "pages_backed_up")
        }
        figure(f"serve, {memory}, {mode}, second scheduler on GPU {second_gpu}: {counters}")
        assert min(counters.values()) > 0
        assert daemon.stop() == 0
    finally:
        for worker in workers:
            worker.close()


def test_pools_of_host_memory_and_of_the_gpu_share_one_daemon_and_their_pages(
    daemon: DaemonProcess, uuids: list[str]
) -> None:
    on_gpu, on_cpu = CudaWorker(uuids[0], "legacy"), WorkerProcess()
    try:
        for name, worker in (("gpu", on_gpu), ("cpu", on_cpu)):
            configured = worker.configure(name, daemon.runtime_dir, **SIZES)
            assert configured.ok, configured.detail
        right(on_gpu.serve(1, *blocks(1)), 0)
        wait_until(lambda: daemons_counter(daemon, "pages_backed_up") >= PAGES)
        right(on_cpu.serve(2, *blocks(1)), PAGES - 1)
        right(on_cpu.serve(3, *blocks(2)), 0)
        clean(on_cpu.summary())
        right(on_gpu.serve(4, *blocks(2)), PAGES - 1)
        clean(on_gpu.summary())
    finally:
        on_gpu.close()
        on_cpu.close()
