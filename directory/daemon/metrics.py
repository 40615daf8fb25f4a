"""Counters for Prometheus: their names, and how a report of the daemon becomes samples.

Owns the names and their meaning (docs/metrics.md has the table). There are counters and histograms
only, with labels whose values cannot grow for ever: a gauge that is overwritten says whatever
happened last. It knows no socket and no process: metrics_feed.py is the daemon's end,
exporter.py puts samples into words in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from directory.protocol.admin import HistogramReport, StatsReport

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SOURCES: Final = ("own", "host", "peer", "store")


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


class NoReport(Exception):
    """The daemon has not said its sums in time. That is no report of nothing."""


class Collector:
    """What prometheus_client asks. `report`: makes a report, or None when that takes too long."""

    def __init__(self, report: Callable[[], StatsReport | None]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment. Raises `NoReport` when the daemon is too busy to say."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        report = self._report()
        if report is None:
            raise NoReport("the daemon is too busy to say")
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
