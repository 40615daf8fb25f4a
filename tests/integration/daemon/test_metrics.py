"""Prometheus reads a running daemon: over HTTP and in a file, and what it reads are the sums."""

import http.client
import re
import urllib.request
from pathlib import Path

import pytest

from directory.core.namespace import NamespaceKey
from directory.protocol.ended import Ended, EndedKind
from tests.integration.daemon.support import DEADLINE_S, DaemonProcess, RawClient, wait_until

pytest.importorskip("prometheus_client", reason="the extra `metrics` is not installed")


def url_of(daemon: DaemonProcess) -> str:
    """Where the daemon says that its counters are."""
    found = wait_until(lambda: re.search(r"url=(http://\S+)", daemon.log()))
    assert found is not None
    return found[1]


def read(url: str) -> dict[str, float]:
    """All samples by name and labels."""
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return parsed(answer.read().decode())


def refused(url: str) -> bool:
    """Whether nobody answers there any more; one that is being ended may break off."""
    try:
        read(url)
    except (OSError, http.client.HTTPException):
        return True
    return False


def parsed(text: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def end(client: RawClient, kind: EndedKind, prompt: int, own: int, host: int) -> None:
    client.report(
        Ended(
            request="r",
            attempt=0,
            namespace=NamespaceKey(),
            kind=kind,
            prompt_tokens=prompt,
            hit=(own, host, 0, 0),
            latency_us=150,
        )
    )


def test_the_sums_are_read_over_http_and_probes_are_in_none_of_them_f117(tmp_path: Path) -> None:
    runtime_dir = tmp_path / "rt"
    with DaemonProcess(runtime_dir, "--metrics", "127.0.0.1:0") as daemon:
        url = url_of(daemon)
        with RawClient(runtime_dir, "a") as client:
            end(client, "request", 100, 40, 20)
            before = read(url)
            end(client, "probe", 1, 0, 0)
            end(client, "recompute", 100, 100, 0)
            after = read(url)
        with RawClient(runtime_dir, "a") as client:  # the scheduler is started anew
            end(client, "request", 10, 0, 0)
            last = read(url)
    hits = 'treecored_hit_tokens_total{instance="a",source="own"}'
    prompt = 'treecored_prompt_tokens_total{instance="a"}'
    assert (before[hits], before[prompt]) == (after[hits], after[prompt]) == (40, 100)
    assert after['treecored_requests_total{instance="a",kind="probe"}'] == 1
    assert after['treecored_requests_total{instance="a",kind="recompute"}'] == 1
    assert (last[hits], last[prompt]) == (40, 110)
    assert all(last[name] >= value for name, value in before.items() if "_created" not in name)
    assert before["treecored_lookup_seconds_count"] == 1
    assert before['treecored_lookup_seconds_bucket{le="0.0002"}'] == 1
    assert before['treecored_lookup_seconds_bucket{le="0.0001"}'] == 0


def test_the_sums_are_written_to_a_file_for_a_collector_to_find(tmp_path: Path) -> None:
    target = tmp_path / "treecored.prom"
    with DaemonProcess(tmp_path / "rt", "--metrics", str(target)):
        wait_until(target.exists)
        samples = parsed(target.read_text())
    assert samples["treecored_internal_errors_total"] == 0


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("8.8.8.8:9400", "no address of this machine alone"),
        ("127.0.0.1:99999", "cannot be had"),
        ("/nowhere/at/all.prom", "no folder that can be written to"),
    ],
)
def test_a_place_that_cannot_be_had_stops_the_start(tmp_path: Path, where: str, why: str) -> None:
    daemon = DaemonProcess(tmp_path / "rt", "--metrics", where, wait=False)
    with daemon:
        assert daemon.process.wait(DEADLINE_S) == 1
    assert why in daemon.log()


def test_a_daemon_that_ends_while_it_is_asked_ends(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "rt", "--metrics", "127.0.0.1:0") as daemon:
        url = url_of(daemon)
        read(url)
        assert daemon.stop() == 0
        wait_until(lambda: refused(url))


def test_a_daemon_that_is_killed_takes_its_exporter_along(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "rt", "--metrics", "127.0.0.1:0") as daemon:
        url = url_of(daemon)
        read(url)
        daemon.kill()
        wait_until(lambda: refused(url))
