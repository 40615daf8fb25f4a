"""The exporter's work: a daemon that says nothing for a while is no daemon with nothing to say."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
import structlog

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")

from prometheus_client import CollectorRegistry

from directory.daemon import exporter
from directory.daemon.exporter import Asking, Handler, write_once
from directory.daemon.metrics import Collector
from directory.daemon.stats import Sums
from directory.protocol.admin import StatsReport, TierReport
from transfer.ipc.channel import FdChannel

DEADLINE_S = 60.0
NAME = "treecored_restored_bytes_total"


def report(number: int = 0) -> StatsReport:
    return StatsReport(
        at_us=2, started_us=1, epoch=1, version="", counters={"bytes_restored": number}, gauges={},
        served=(), pools=(), host=TierReport(0, 0, 0), histograms=Sums().histograms(),
    )  # fmt: skip


def registry(source: Callable[[], StatsReport | None]) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(Collector(source))
    return made


@contextmanager
def served(source: Callable[[], StatsReport | None]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler.factory(registry(source))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def test_a_reading_without_a_report_fails_instead_of_being_empty() -> None:
    answers: list[StatsReport | None] = [None, report(3)]
    with served(lambda: answers.pop(0)) as url:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=DEADLINE_S)
        refused.value.close()
        assert refused.value.code == 500
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            assert f"{NAME} 3.0" in answer.read().decode()


def test_a_file_stays_as_it_is_where_there_is_no_report(tmp_path: Path) -> None:
    target = tmp_path / "treecored.prom"
    write_once(str(target), registry(lambda: report(3)))
    before = target.read_text()
    assert f"{NAME} 3.0" in before
    with structlog.testing.capture_logs() as logs:
        write_once(str(target), registry(lambda: None))
    assert [entry["event"] for entry in logs] == ["metrics not written"]
    assert target.read_text() == before
    assert list(tmp_path.iterdir()) == [target]


def test_answers_that_come_too_late_are_not_taken_for_those_of_later_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "ANSWER_S", 0.05)
    mine, other = FdChannel.pair()
    asking = Asking(mine)
    assert asking.report() is None
    assert asking.report() is None
    for number in (1, 2, 3):  # two late ones and the one that is asked for next
        other.send(msgspec.msgpack.encode(report(number)))
    found = asking.report()
    assert found is not None
    assert found.counters == {"bytes_restored": 3}
    mine.close()
    other.close()


def test_an_exporter_is_tied_to_its_daemon_before_anything_large_is_imported() -> None:
    program = (
        "import sys; from directory.daemon import metrics_main;"
        "print(sorted({'msgspec', 'structlog', 'zmq', 'prometheus_client'} & set(sys.modules)));"
        "print(metrics_main.main(['{\"parent\": 0}']))"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert said.stdout == "[]\n1\n"
