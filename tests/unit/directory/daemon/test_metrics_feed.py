"""The exporter's process: what it is answered, and what comes after its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from directory.daemon import metrics_feed
from directory.daemon.config import Settings
from directory.daemon.loop import Loop
from directory.daemon.metrics_feed import Exporter
from directory.daemon.runtime import StartError
from directory.daemon.stats import Sums
from directory.protocol.admin import StatsReport, TierReport
from tests.descriptors import open_descriptors
from tests.ports import free_ports
from transfer.ipc.channel import FdChannel

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")

DEADLINE_S = 60.0


class Rig:
    """An exporter and a loop that turns as long as somebody waits for it."""

    def __init__(self, where: str) -> None:
        self.loop = Loop()
        self.counters: Counter[str] = Counter()
        self.reports = 0
        self.broken = False
        self.exporter = Exporter(Settings(metrics=where), self.loop, self.report, self.counters)

    def report(self) -> StatsReport:
        if self.broken:
            raise RuntimeError("a defect")
        self.reports += 1
        counters = {"bytes_restored": self.reports}
        return StatsReport(
            at_us=2, started_us=1, epoch=1, version="", counters=counters, gauges={}, served=(),
            pools=(), host=TierReport(0, 0, 0), histograms=Sums().histograms(),
        )  # fmt: skip

    @property
    def url(self) -> str:
        listener = self.exporter._listener
        assert listener is not None
        return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"

    def read(self) -> dict[str, float]:
        """What Prometheus reads, by name; the loop turns meanwhile. Empty: nothing came."""
        found: list[str] = []

        def ask() -> None:
            try:
                with urllib.request.urlopen(self.url, timeout=DEADLINE_S) as answer:
                    found.append(answer.read().decode())
            except OSError:
                found.append("")

        asking = threading.Thread(target=ask)
        asking.start()
        give_up = time.monotonic() + DEADLINE_S
        while asking.is_alive() and time.monotonic() < give_up:
            self.turn()
        asking.join()
        samples = re.findall(r"^(\w+) (\S+)$", found[0], re.MULTILINE)
        return {name: float(value) for name, value in samples}

    def turn(self) -> None:
        self.loop.turn(0.01)
        self.exporter.on_time()

    def until_gone(self) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while self.exporter.pid and time.monotonic() < give_up:
            self.loop.turn(0.01)
        assert self.exporter.pid == 0

    def close(self) -> None:
        self.exporter.close()
        self.loop.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig("127.0.0.1:0")
    yield rig
    rig.close()


def test_each_reading_is_a_report_of_that_moment(rig: Rig) -> None:
    assert rig.read()["treecored_restored_bytes_total"] == 1
    assert rig.read()["treecored_restored_bytes_total"] == 2
    assert rig.reports == 2
    assert rig.exporter.due_us() is None


def test_an_exporter_that_dies_is_replaced_and_who_asks_meanwhile_waits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.read()
    first = rig.exporter.pid
    os.kill(first, signal.SIGKILL)
    rig.until_gone()
    due_us = rig.exporter.due_us()
    assert due_us is not None
    monkeypatch.setattr(metrics_feed, "now_us", lambda: due_us - 1)
    rig.exporter.on_time()
    assert rig.exporter.pid == 0
    monkeypatch.setattr(metrics_feed, "now_us", lambda: due_us)
    assert rig.read()["treecored_restored_bytes_total"] == 2
    assert rig.exporter.pid not in (0, first)
    assert rig.counters == {"exporters_started": 2, "exporters_lost": 1}


def test_an_address_that_a_dead_daemons_exporter_still_has_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_feed, "PORTS_DEADLINE_S", DEADLINE_S)
    leaving = socket.create_server(("127.0.0.1", free_ports(1)))
    timer = threading.Timer(0.1, leaving.close)
    timer.start()
    try:
        other = Rig(f"127.0.0.1:{leaving.getsockname()[1]}")
        other.close()
    finally:
        timer.join()


def test_each_question_has_its_answer_however_many_have_gathered(rig: Rig) -> None:
    rig.exporter._bury()
    mine, other = FdChannel.pair()
    rig.exporter._channel, rig.exporter._watched_fd = mine, mine.fileno()
    rig.loop.watch(mine.fileno(), rig.exporter._serve)
    for _ in range(3):
        other.send(b"?")
    rig.loop.turn(0.0)
    assert len(other.receive()) == 3
    assert rig.reports == 1
    other.close()


def test_an_exporter_that_the_kernel_does_not_end_keeps_nobody_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = rig.exporter._process
    assert process is not None
    wait = process.wait

    def never(timeout: float | None = None) -> int:
        assert timeout is not None
        assert timeout <= 1.0
        raise subprocess.TimeoutExpired("exporter", timeout)

    monkeypatch.setattr(process, "wait", never)
    with structlog.testing.capture_logs() as logs:
        rig.exporter.close()
    assert [entry["event"] for entry in logs] == ["the exporter of metrics does not end"]
    assert rig.exporter.pid == 0
    wait(DEADLINE_S)


def test_a_defect_in_a_report_costs_the_exporter_and_nobody_else(rig: Rig) -> None:
    rig.read()
    rig.broken = True
    assert rig.read() == {}
    assert rig.counters["exporters_lost"] == 1
    rig.broken = False
    rig.exporter._restart_us = 0
    assert rig.read()["treecored_restored_bytes_total"] == 2


def test_nothing_is_left_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_feed, "KILLED_S_MAX", DEADLINE_S)
    before = open_descriptors()
    other = Rig("127.0.0.1:0")
    other.read()
    pid = other.exporter.pid
    other.close()
    other.close()
    assert not Path(f"/proc/{pid}").exists()
    assert open_descriptors() == before


def test_a_file_is_written_without_anybody_asking(tmp_path: Path) -> None:
    target = tmp_path / "treecored.prom"
    rig = Rig(str(target))
    give_up = time.monotonic() + DEADLINE_S
    while not target.exists() and time.monotonic() < give_up:
        rig.turn()
    rig.close()
    assert "treecored_restored_bytes_total 1.0" in target.read_text()


def test_an_address_that_is_taken_stops_the_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_feed, "PORTS_DEADLINE_S", 0.05)
    taken = rig.url.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(StartError, match="cannot be had"):
        Rig(taken)
