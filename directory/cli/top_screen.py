"""The screen of `treecored top`, from 80 columns up: pure, from reports to what is printed.

Owns the layout. It must never show a gauge as a rate, nor a ratio of nothing as 0 %.
"""

from __future__ import annotations

from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from directory.analytics.words import NBSP, count, duration, named, percent, size
from directory.cli.rates import WINDOWS_S, History, Window
from directory.protocol.admin import ServedReport, StatsReport

INSTANCES_SHOWN: Final = 16
BAR_COLUMNS: Final = 16


def screen(history: History) -> RenderableType:
    """Everything, for the newest report."""
    report = history.last
    windows = [history.window(seconds) for seconds in WINDOWS_S] + [history.window(None)]
    parts: list[RenderableType] = [
        _title(report),
        _hits(report, windows),
        _places(report),
        _flow(report, windows[0]),
    ]
    if report.hottest:
        parts.append(_hottest(report))
    return Group(*parts)


def _title(report: StatsReport) -> Text:
    seconds = (report.at_us - report.started_us) / 1e6
    text = Text(f"treecored {report.version}", style="bold")
    text.append(
        f"   up {duration(seconds)}   {named(len(report.pools), 'pool')}   "
        f"{named(report.gauges.get('nodes', 0), 'node')} in "
        f"{named(report.gauges.get('namespaces', 0), 'namespace')}",
        style="not bold",
    )
    return text


def _table(title: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold cyan",
    )


def _ratio(served: ServedReport) -> str:
    if not served.prompt_tokens:
        return "-"
    return percent(sum(served.hit) / served.prompt_tokens)


def _share(part: int, served: ServedReport) -> str:
    return percent(part / served.prompt_tokens, places=0) if served.prompt_tokens else "-"


def _hits(report: StatsReport, windows: list[Window]) -> Table:
    table = _table("hit ratio, of prompt tokens")
    table.add_column("instance", overflow="ellipsis", no_wrap=True, max_width=20)
    for heading in ("req/s", "10 s", "1 min", "all", "own", "host", "other"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = sorted(report.served, key=lambda served: -served.requests)[:INSTANCES_SHOWN]
    lines = [(served.instance, [window.served[served.instance] for window in windows])
             for served in shown]  # fmt: skip
    if len(report.served) != 1:
        lines.append(("all", [_sum(window) for window in windows]))
    for name, (short, minute, ever) in lines:
        own, host, peer, store = ever.hit
        rate = short.requests / windows[0].seconds if windows[0].seconds else 0.0
        table.add_row(
            escape(name),
            f"{rate:.1f}",
            _ratio(short),
            _ratio(minute),
            _ratio(ever),
            _share(own, ever),
            _share(host + store, ever),
            _share(peer, ever),
        )
    return table


def _sum(window: Window) -> ServedReport:
    prompt = sum(served.prompt_tokens for served in window.served.values())
    hits = [served.hit for served in window.served.values()]
    own, host, peer, store = (sum(hit[at] for hit in hits) for at in range(4))
    return ServedReport(
        "all", requests=window.requests, prompt_tokens=prompt, hit=(own, host, peer, store)
    )


def _places(report: StatsReport) -> Table:
    table = _table("memory")
    table.add_column("place", overflow="ellipsis", no_wrap=True, max_width=22)
    table.add_column("", no_wrap=True)
    for heading in ("in tree", "of", "leased", "leases", "copies"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in report.pools[:INSTANCES_SHOWN]:
        table.add_row(
            escape(pool.name),
            _bar(pool.pages, pool.page_count),
            count(pool.pages),
            count(pool.page_count),
            count(pool.protected_pages),
            count(pool.leases),
            count(pool.copies),
        )
    host = report.host
    slots = sum(slots for _, slots, _ in host.sizes)
    table.add_row(
        f"host tier{NBSP}{size(host.total_bytes)}",
        _bar(host.pages, slots),
        count(host.pages),
        count(slots),
        count(host.leased_pages),
        "",
        count(report.gauges.get("copies_in_flight", 0)),
    )
    return table


def _bar(part: int, whole: int) -> RenderableType:
    return ProgressBar(
        total=max(whole, 1),
        completed=min(part, whole),
        width=BAR_COLUMNS,
        finished_style="bar.complete",
    )


def _flow(report: StatsReport, window: Window) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    evicted = {
        tier: pages / window.seconds if window.seconds else 0.0
        for tier, pages in window.evicted.items()
    }
    table.add_row(
        f"restored {size(window.rate('bytes_restored'))}/s",
        f"backed up {size(window.rate('bytes_backed_up'))}/s",
        f"backups waiting {report.gauges.get('backups_waiting', 0):,}",
    )
    table.add_row(
        f"evicted: pools {count(evicted.get('device', 0.0))} pages/s",
        f"host {count(evicted.get('host', 0.0))} pages/s",
        f"leases {report.gauges.get('leases', 0):,}",
    )
    return table


def _hottest(report: StatsReport) -> Table:
    table = _table("hottest prefixes, of late")
    table.add_column("digest of its last page", no_wrap=True)
    table.add_column("namespace", no_wrap=True)
    table.add_column("pages", justify="right")
    table.add_column("hits", justify="right")
    for hot in report.hottest:
        table.add_row(hot.digest, hot.namespace, f"{hot.pages:,}", f"{hot.hits:,}")
    return table
