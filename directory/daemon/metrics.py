"""Counters for Prometheus: over HTTP on a local port, or in a file.

Owns the names, their meaning and how they are handed out (docs/metrics.md has the table). There
are counters and histograms only, with labels whose values cannot grow for ever: a gauge that is
overwritten says whatever happened last. Reports are made by the daemon's own thread, when it is
asked; the exporter's thread must never touch the daemon's state.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from directory.daemon.loop import Loop
from directory.daemon.runtime import StartError
from directory.protocol.admin import HistogramReport, StatsReport

if TYPE_CHECKING:
    from prometheus_client.core import Metric

ANSWER_S: Final = 5.0
FILE_EVERY_S: Final = 15.0
ADDRESS: Final = re.compile(r"(?P<host>[0-9.]+|localhost|\[::1\]):(?P<port>\d{1,5})")
LOOPBACK: Final = ("127.", "localhost", "[::1]")
SOURCES: Final = ("own", "host", "peer", "store")

log = structlog.get_logger("metrics")


class Name(NamedTuple):
    """One metric: its name without prefix and `_total`, its labels, and what it counts."""

    name: str
    labels: tuple[str, ...]
    meaning: str


PREFIX: Final = "treecored_"
COUNTERS: Final = (
    Name("requests", ("instance", "kind"), "Ended requests; only kind `request` is in the sums"),
    Name("lookups", ("instance",), "Raw look-ups of all kinds of requests"),
    Name("prompt_tokens", ("instance",), "Prompt tokens of requests"),
    Name("hit_tokens", ("instance", "source"), "Prompt tokens that were not computed, by source"),
    Name("output_tokens", ("instance",), "Tokens that requests put out"),
    Name("blocks", ("instance",), "Pages of prompts, partial last ones included"),
    Name("hit_blocks", ("instance",), "Whole pages in hit prefixes"),
    Name("restored_tokens", ("instance",), "Tokens copied into the own pool for a request"),
    Name("inserted_tokens", ("instance",), "Tokens published beyond the hit"),
    Name("not_restorable_tokens", ("instance",), "Tokens promised by a match and not restored"),
    Name(
        "missed_requests",
        ("instance", "cause"),
        "Requests by the cause of their first computed token",
    ),
    Name("missed_tokens", ("instance", "cause"), "Prompt tokens that were computed, by cause"),
    Name("evicted_pages", ("tier", "reason"), "Pages given up"),
    Name("restored_bytes", (), "Bytes that movers copied into pools"),
    Name("backed_up_bytes", (), "Bytes that movers copied into the host tier"),
    Name("restores_lost", (), "Restores of which nothing counted"),
    Name("refusals", ("code",), "Messages of schedulers that were refused"),
    Name("internal_errors", (), "Defects that ended an epoch"),
    Name("movers_lost", (), "Mover processes that died or fell silent"),
    Name("access_log_records_lost", (), "Records that the access log had no room for"),
)
HISTOGRAMS: Final = (
    Name("lookup_seconds", (), "First look-up of a request, from its question to its answer"),
    Name("restore_seconds", (), "Restore of a request, from its question to its landing"),
    Name("copy_seconds", (), "Copies of movers, of any kind"),
)


def samples(report: StatsReport) -> dict[str, dict[tuple[str, ...], float]]:
    """Every counter's values by labels, in the order of COUNTERS."""
    found: dict[str, dict[tuple[str, ...], float]] = {name.name: {} for name in COUNTERS}
    for served in report.served:
        where = served.instance
        for kind, number in (
            ("request", served.requests),
            ("retry", served.retries),
            ("recompute", served.recomputations),
            ("probe", served.probes),
        ):
            found["requests"][where, kind] = number
        for source, tokens in zip(SOURCES, served.hit, strict=True):
            found["hit_tokens"][where, source] = tokens
        for name in (
            *("lookups", "prompt_tokens", "output_tokens", "blocks", "hit_blocks"),
            *("restored_tokens", "inserted_tokens", "not_restorable_tokens"),
        ):
            found[name][(where,)] = getattr(served, name)
    for missed in report.causes:
        found["missed_requests"][missed.instance, missed.cause] = missed.requests
        found["missed_tokens"][missed.instance, missed.cause] = missed.tokens
    for evicted in report.evicted:
        found["evicted_pages"][evicted.tier, evicted.reason] = evicted.pages
    counters = report.counters
    for name, counter in (
        ("restored_bytes", "bytes_restored"),
        ("backed_up_bytes", "bytes_backed_up"),
        ("restores_lost", "restores_lost"),
        ("internal_errors", "daemon_internal_errors"),
        ("movers_lost", "daemon_movers_lost"),
    ):
        found[name][()] = counters.get(counter, 0)
    for counter, value in counters.items():
        if counter.startswith("refused_"):
            found["refusals"][(counter.removeprefix("refused_"),)] = value
    found["access_log_records_lost"][()] = report.log.records_lost if report.log else 0
    return found


class Collector:
    """What prometheus_client asks. `report`: makes a report, or None when that takes too long."""

    def __init__(self, report: Callable[[], StatsReport | None]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment; none when the daemon is too busy to say."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        report = self._report()
        if report is None:
            return
        values = samples(report)
        for name in COUNTERS:
            family = CounterMetricFamily(PREFIX + name.name, name.meaning, labels=name.labels)
            for labels, value in values[name.name].items():
                family.add_metric(labels, value)
            yield family
        by_name = {f"{histogram.name}_seconds": histogram for histogram in report.histograms}
        for name in HISTOGRAMS:
            histogram = by_name[name.name]
            buckets = HistogramMetricFamily(PREFIX + name.name, name.meaning)
            buckets.add_metric((), list(_cumulated(histogram)), histogram.sum_us / 1e6)
            yield buckets

    def describe(self) -> Iterable[Any]:
        """Nothing is collected when the collector is registered."""
        return ()


def _cumulated(histogram: HistogramReport) -> Iterator[tuple[str, float]]:
    total = 0
    for bound, count in zip(histogram.bounds_us, histogram.counts, strict=False):
        total += count
        yield str(bound / 1e6), total
    yield "+Inf", total + histogram.counts[-1]


class Exporter:
    """Hands the counters out. Made and closed by the daemon's thread; serves from another one."""

    def __init__(self, where: str, loop: Loop, report: Callable[[], StatsReport]) -> None:
        """Raises `StartError` where the library is missing or the port or file cannot be had."""
        try:
            from prometheus_client import CollectorRegistry
        except ImportError:
            raise StartError(
                "metrics need the extra `metrics`: pip install 'treecored[metrics]'"
            ) from None
        self._report = report
        self._wanted = threading.Lock()
        self._answer: StatsReport | None = None
        self._answered = threading.Event()
        self._ended = threading.Event()
        self._loop = loop
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._stop: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        registry = CollectorRegistry()
        registry.register(Collector(self._ask))
        address = ADDRESS.fullmatch(where)
        try:
            if address is not None:
                self._serve(address["host"], int(address["port"]), registry)
            else:
                self._write(Path(where), registry)
        except BaseException:
            self._wake_in.close()
            self._wake_out.close()
            raise
        loop.watch(self._wake_in.fileno(), self._on_asked)

    def close(self) -> None:
        """Serve no more; a file keeps the last counters."""
        self._ended.set()
        self._answered.set()
        self._stop()
        if self._thread is not None:
            self._thread.join(ANSWER_S)
        self._loop.unwatch(self._wake_in.fileno())
        self._wake_in.close()
        self._wake_out.close()

    def _serve(self, host: str, port: int, registry: Any) -> None:
        from prometheus_client import start_http_server

        if not host.startswith(LOOPBACK):
            raise StartError(
                f"metrics: {host} is no address of this machine alone; use 127.0.0.1 and let a "
                "collector on this machine pass them on"
            )
        name = host.strip("[]")
        try:
            server, self._thread = start_http_server(port, name, registry)
        except (OSError, OverflowError) as error:
            raise StartError(f"metrics: {host}:{port} cannot be had: {error}") from None

        def stop() -> None:
            server.shutdown()
            server.server_close()

        self._stop = stop
        log.info("metrics", url=f"http://{host}:{server.server_port}/metrics")

    def _write(self, path: Path, registry: Any) -> None:
        from prometheus_client import write_to_textfile

        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise StartError(f"metrics: {path.parent} is no folder that can be written to")

        def go_on() -> None:
            while not self._ended.is_set():
                try:
                    write_to_textfile(str(path), registry)
                except OSError as error:
                    log.warning("metrics not written", file=str(path), reason=str(error))
                self._ended.wait(FILE_EVERY_S)

        self._thread = threading.Thread(target=go_on, name="metrics", daemon=True)
        self._thread.start()
        log.info("metrics", file=str(path))

    # Between the two threads: one asks, the daemon's own answers.

    def _ask(self) -> StatsReport | None:
        with self._wanted:
            self._answer = None
            self._answered.clear()
            if self._ended.is_set():
                return None
            try:
                self._wake_out.send(b"?")
            except OSError:
                return None
            self._answered.wait(ANSWER_S)
            return self._answer

    def _on_asked(self, _: int) -> None:
        try:
            self._wake_in.recv(4096)
        except BlockingIOError:
            return
        try:
            self._answer = self._report()
        except Exception as error:
            log.error("no metrics", exc_info=error)
        self._answered.set()
