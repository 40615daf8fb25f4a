"""Worker processes: driven over their channels, with and without a daemon."""

import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from directory.cli.check import ask
from scheduler_shim.worker_messages import (
    AskSummary,
    Configure,
    Configured,
    Cut,
    Finished,
    FromWorker,
    Prompt,
    Quit,
    Summary,
    ToWorker,
)
from tests.integration.daemon.support import ROOT, DaemonProcess
from transfer.ipc.channel import FdChannel

DEADLINE_S = 60.0
BLOCK = 32


class WorkerProcess:
    """A worker and our end of its channel; gone when closed."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = FdChannel(ours)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "scheduler_shim.worker", "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
                cwd=ROOT,
            )

    def say(self, message: ToWorker) -> None:
        self.channel.send(msgspec.msgpack.encode(message))

    def hear(self) -> FromWorker:
        payload, _ = self.channel.wait_frame(DEADLINE_S)
        heard: FromWorker = msgspec.msgpack.decode(payload, type=FromWorker)
        return heard

    def ask(self, message: ToWorker) -> FromWorker:
        self.say(message)
        return self.hear()

    def configure(self, instance: str, runtime_dir: Path, **options: object) -> Configured:
        reply = self.ask(
            msgspec.convert(
                {
                    "instance": instance,
                    "mode": "mirrored",
                    "runtime_dir": str(runtime_dir),
                    "page_size": BLOCK,
                    "page_count": 64,
                    "bytes_per_token": 64,
                    **options,
                    "type": "configure",
                },
                Configure,
            )
        )
        assert isinstance(reply, Configured)
        return reply

    def serve(self, number: int, *blocks: int, length: int = 0) -> Finished:
        packed = array("I", blocks).tobytes()
        length = length or BLOCK * len(blocks)
        reply = self.ask(Prompt(number, blocks=packed, block_tokens=BLOCK, length=length))
        assert isinstance(reply, Finished)
        return reply

    def summary(self) -> Summary:
        reply = self.ask(AskSummary(check=True))
        assert isinstance(reply, Summary)
        return reply

    def close(self) -> None:
        self.channel.close()
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stderr is not None
            self.process.stderr.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "rt") as process:
        yield process


@pytest.fixture
def workers() -> Iterator[list[WorkerProcess]]:
    workers = [WorkerProcess(), WorkerProcess()]
    yield workers
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
def test_workers_share_what_they_have_computed(
    daemon: DaemonProcess, workers: list[WorkerProcess], named: bool
) -> None:
    left, right = workers
    assert left.configure("left", daemon.runtime_dir, named=named).ok
    assert right.configure("right", daemon.runtime_dir, mode="thin", named=named).ok
    left.serve(1, 1, 2, 3, 4)
    assert left.summary().violations == ()  # a round trip: the daemon has heard of the insert
    record = right.serve(2, 1, 2, 3, 5)
    assert (record.prompt_tokens, record.own_pages, record.peer_pages) == (4 * BLOCK, 0, 3)
    assert (record.verified, record.wrong, record.error) == (3, 0, "")
    summary = right.summary()
    assert (summary.mode, summary.violations) == ("thin", ())
    assert summary.counters["bytes_restored_peer"] == 3 * 64 * BLOCK
    assert summary.daemon["peer_pages_restored"] == 3
    assert len(summary.rtt_us) >= 2
    assert all(sample > 0 for sample in summary.rtt_us)


def test_private_workers_share_nothing(daemon: DaemonProcess, workers: list[WorkerProcess]) -> None:
    for name, worker in zip(("left", "right"), workers, strict=True):
        assert worker.configure(name, daemon.runtime_dir, private=True).ok
        worker.serve(1, 1, 2, 3, 4)
        worker.summary()
    again = workers[1].serve(2, 1, 2, 3, 5)
    assert (again.own_pages, again.host_pages, again.peer_pages) == (3, 0, 0)
    assert workers[0].serve(3, 1, 2, 3, 4).own_pages == 3


def test_a_worker_without_a_daemon_says_so_and_serves_alone(
    tmp_path: Path, workers: list[WorkerProcess]
) -> None:
    configured = workers[0].configure("alone", tmp_path)
    assert not configured.ok
    assert "no daemon listens" in configured.detail
    workers[0].serve(1, 1, 2)
    assert workers[0].serve(2, 1, 2, 3).own_pages == 2
    assert workers[0].summary().mode == "degraded"


def test_a_daemon_that_dies_under_a_worker_is_reported_and_survived_f67(
    daemon: DaemonProcess, workers: list[WorkerProcess]
) -> None:
    worker = workers[0]
    assert worker.configure("a", daemon.runtime_dir).ok
    worker.serve(1, 1, 2)
    daemon.process.kill()
    daemon.process.wait()
    assert worker.serve(2, 1, 2, 3).own_pages == 2
    summary = worker.summary()
    assert summary.mode == "degraded"
    assert summary.violations == ("the daemon was lost: the daemon closed the session",)


def test_a_worker_finds_the_next_daemon_by_itself_and_reports_the_loss(
    tmp_path: Path, workers: list[WorkerProcess]
) -> None:
    worker = workers[0]
    with DaemonProcess(tmp_path / "rt") as first:
        assert worker.configure("a", first.runtime_dir).ok
        worker.serve(1, 1, 2, 3)
        first.kill()
    with DaemonProcess(tmp_path / "rt"):
        number = 1
        while "returned" not in (summary := worker.summary()).counters:
            number += 1
            assert worker.serve(number, 1, 2, 3, number).own_pages == 3
        assert summary.mode == "mirrored"
        assert summary.violations == ("the daemon was lost: the daemon closed the session",)
        assert summary.counters["spans_republished"] >= 1


def test_a_worker_whose_session_is_cut_comes_back_as_the_next_generation(
    daemon: DaemonProcess, workers: list[WorkerProcess]
) -> None:
    worker = workers[0]
    assert worker.configure("a", daemon.runtime_dir).generation == 1
    worker.serve(1, 1, 2, 3)
    worker.say(Cut())
    number = 1
    while "returned" not in (summary := worker.summary()).counters:
        number += 1
        assert worker.serve(number, 1, 2, 3, number).own_pages == 3
    assert summary.violations == ("the daemon was lost: its session was cut",)
    (pool,) = ask(daemon.runtime_dir, 20.0).pools
    assert (pool.instance, pool.generation) == ("a", 2)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (Prompt(1, blocks=b"\1\0\0\0", block_tokens=BLOCK, length=99), "do not make 99 tokens"),
        (Prompt(1), "at least one token"),
        (Prompt(1, tokens=bytes(4 * BLOCK * 65)), "need 65 pages of 64"),
    ],
)
def test_an_impossible_prompt_is_answered_with_its_reason(
    daemon: DaemonProcess, workers: list[WorkerProcess], prompt: Prompt, error: str
) -> None:
    assert workers[0].configure("a", daemon.runtime_dir).ok
    reply = workers[0].ask(prompt)
    assert isinstance(reply, Finished)
    assert error in reply.error
    assert workers[0].serve(2, 1, 2).error == ""


def test_a_worker_is_configured_once(daemon: DaemonProcess, workers: list[WorkerProcess]) -> None:
    reply = workers[0].ask(Prompt(1, tokens=bytes(8)))
    assert isinstance(reply, Finished)
    assert "before this worker was configured" in reply.error
    assert workers[0].configure("a", daemon.runtime_dir).ok
    assert not workers[0].configure("a", daemon.runtime_dir).ok


def test_a_worker_refuses_sizes_that_make_no_pool(
    tmp_path: Path, workers: list[WorkerProcess]
) -> None:
    assert "at least 1" in workers[0].configure("a", tmp_path, page_count=0).detail


def test_quit_ends_a_worker_after_what_is_in_progress(
    daemon: DaemonProcess, workers: list[WorkerProcess]
) -> None:
    worker = workers[0]
    assert worker.configure("a", daemon.runtime_dir).ok
    for number in range(20):
        worker.say(Prompt(number, tokens=array("I", range(number, number + 900)).tobytes()))
    worker.say(Quit())
    heard = [worker.hear() for _ in range(20)]
    assert [m.number for m in heard if isinstance(m, Finished)] == list(range(20))
    assert worker.process.wait(DEADLINE_S) == 0


def test_a_worker_ends_with_its_driver(daemon: DaemonProcess, workers: list[WorkerProcess]) -> None:
    worker = workers[0]
    assert worker.configure("a", daemon.runtime_dir).ok
    worker.channel.close()
    assert worker.process.wait(DEADLINE_S) == 0


def test_a_message_that_is_none_ends_a_worker_with_a_reason(workers: list[WorkerProcess]) -> None:
    workers[0].channel.send(b"junk")
    assert workers[0].process.wait(DEADLINE_S) == 2
    assert workers[0].process.stderr is not None
    assert b"not a message" in workers[0].process.stderr.read()
