"""`treecored stats`: every figure of a running daemon, once.

Owns the tables. Figures are sums since the daemon began; a rate is the difference of two of them
(`treecored top` takes it). It must never print a gauge as if it were a sum.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from directory.analytics.words import duration, percent, size
from directory.cli.asking import EXIT_NO_ANSWER, Asking, NoAnswer, daemon_options, folder_of
from directory.cli.runs import print_json
from directory.daemon.config import ConfigError
from directory.protocol.admin import AdminStats, ServedReport, StatsReport

DEADLINE_S: Final = 10.0
SOURCES: Final = ("own pool", "host tier", "other pool", "store")


class Ratios(msgspec.Struct, frozen=True):
    """Quotients of sums over all requests; docs/analytics.md defines them."""

    block_hit_ratio: float
    token_hit_ratio: float


@click.command()
@daemon_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--hottest",
    type=click.IntRange(0, 100),
    default=5,
    show_default=True,
    help="Name so many of the hottest prefixes (with an access log).",
)
def stats(config: Path | None, runtime_dir: str | None, as_json: bool, hottest: int) -> None:
    """Print the figures of the running daemon.

    Sums are since the daemon began and only grow. Retries, health probes and recomputation after
    preemption stand beside the requests and in no ratio.

    Exits with 0, or with 2 when no daemon answered.
    """
    try:
        with Asking(folder_of(config, runtime_dir), DEADLINE_S, "treecored stats") as daemon:
            report = daemon.ask(AdminStats(hottest), StatsReport)
    except (ConfigError, NoAnswer) as error:
        click.echo(f"treecored stats: {error}", err=True)
        sys.exit(EXIT_NO_ANSWER)
    if as_json:
        together = total(report)
        print_json(
            {
                **msgspec.structs.asdict(report),
                "total": together,
                "ratios": ratios(together),
                "missed_tokens": together.prompt_tokens - sum(together.hit),
                "missed": missed(report),
            }
        )
    else:
        show(report, Console(highlight=False))


def total(report: StatsReport) -> ServedReport:
    """The sums over all instances."""
    sums: dict[str, int] = {}
    hit = [0, 0, 0, 0]
    for served in report.served:
        for name, value in msgspec.structs.asdict(served).items():
            if isinstance(value, int):
                sums[name] = sums.get(name, 0) + value
        hit = [so_far + more for so_far, more in zip(hit, served.hit, strict=True)]
    return ServedReport("(all)", hit=(hit[0], hit[1], hit[2], hit[3]), **sums)


def ratios(served: ServedReport) -> Ratios:
    """Hits by what was asked; 0 where nothing was."""
    return Ratios(
        round(served.hit_blocks / served.blocks, 6) if served.blocks else 0.0,
        round(sum(served.hit) / served.prompt_tokens, 6) if served.prompt_tokens else 0.0,
    )


def missed(report: StatsReport) -> dict[str, int]:
    """Computed tokens by cause, over all instances."""
    tokens: dict[str, int] = {}
    for line in report.causes:
        tokens[line.cause] = tokens.get(line.cause, 0) + line.tokens
    return tokens


def show(report: StatsReport, console: Console) -> None:
    """Tables for a terminal, from 80 columns up."""
    seconds = (report.at_us - report.started_us) / 1e6
    console.print(
        f"treecored {escape(report.version)}, up {duration(seconds)}, "
        f"{len(report.pools)} pools, {report.gauges.get('nodes', 0):,} nodes"
    )
    console.print(_served(report))
    for table in (_memory(report), _counters(report)):
        console.print(table)
    if report.log is not None:
        log = report.log
        lost = f", {log.records_lost:,} records lost" if log.records_lost else ""
        console.print(
            f"access log: {escape(log.folder)}, {size(log.bytes_written)} written, "
            f"{log.waiting} waiting{lost}",
            soft_wrap=True,
        )
    for hot in report.hottest:
        console.print(f"hot prefix {hot.digest}: {hot.pages:,} pages, {hot.hits:,} hits of late")


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _served(report: StatsReport) -> Table:
    table = _table()
    table.add_column("instance", overflow="fold")
    for heading in ("requests", "prompt tok.", "hit", "own", "host", "peer", "missed"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [*report.served]
    if len(rows) != 1:
        rows.append(total(report))
    for served in rows:
        own, host, peer, store = served.hit
        table.add_row(
            escape(served.instance),
            f"{served.requests:,}",
            f"{served.prompt_tokens:,}",
            percent(ratios(served).token_hit_ratio),
            f"{own:,}",
            f"{host + store:,}",
            f"{peer:,}",
            f"{served.prompt_tokens - sum(served.hit):,}",
        )
    return table


def _memory(report: StatsReport) -> Table:
    table = _table()
    table.add_column("memory", overflow="fold")
    for heading in ("pages", "in tree", "leased", "leases"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pool in report.pools:
        table.add_row(
            f"pool of {escape(pool.name)}",
            f"{pool.page_count:,}",
            f"{pool.pages:,}",
            f"{pool.protected_pages:,}",
            f"{pool.leases:,}",
        )
    host = report.host
    room = ", ".join(f"{slots:,} of {size(nbytes)}" for nbytes, slots, _ in host.sizes)
    table.add_row(
        f"host tier, {size(host.total_bytes)}",
        room or "-",
        f"{host.pages:,}",
        f"{host.leased_pages:,}",
        "",
    )
    return table


def _counters(report: StatsReport) -> Table:
    table = _table()
    table.add_column("since the daemon began")
    table.add_column("sum", justify="right")
    both = total(report)
    rows = {
        "lookups": both.lookups,
        "retries": both.retries,
        "recomputations": both.recomputations,
        "probes": both.probes,
        "tokens promised and not restored": both.not_restorable_tokens,
        "bytes restored": report.counters.get("bytes_restored", 0),
        "bytes backed up": report.counters.get("bytes_backed_up", 0),
        "restores lost": report.counters.get("restores_lost", 0),
    }
    for cause, tokens in missed(report).items():
        rows[f"tokens computed: {cause.replace('_', ' ')}"] = tokens
    for evicted in report.evicted:
        why = evicted.reason.replace("_", " ")
        rows[f"pages evicted: {evicted.tier}, {why}"] = evicted.pages
    for name, value in rows.items():
        table.add_row(name, size(value) if name.startswith("bytes") else f"{value:,}")
    return table
