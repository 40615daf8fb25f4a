"""`treecored check`: have a running daemon walk its own state and report what does not hold.

Owns the question, the tables and the exit statuses (0 every invariant holds, 1 some do not, 2 no
daemon answered). It must never change, end or kill anything: it opens a session, asks and leaves.
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

from directory.cli.asking import DEADLINE_S, Asking, NoAnswer, daemon_options, folder_of
from directory.daemon.config import ConfigError
from directory.protocol.admin import AdminCheck, AdminReport, PoolReport

EXIT_CLEAN, EXIT_VIOLATIONS, EXIT_NO_ANSWER = 0, 1, 2
SHOWN: Final = (
    "nodes",
    "namespaces",
    "leases",
    "copies_in_flight",
    "backups_waiting",
    "host_pages",
    "host_pages_leased",
    "host_pages_quarantined",
    "daemon_unmapping",
    "daemon_breakers_open",
    "daemon_copies_not_tried",
)
"""Figures that stand in the table; `--json` has all of them."""


@click.command()
@daemon_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0.1),
    default=DEADLINE_S,
    show_default=True,
    help="Seconds to wait for each answer; a large tree takes some to be walked.",
)
def check(config: Path | None, runtime_dir: str | None, as_json: bool, deadline_s: float) -> None:
    """Have the running daemon check every invariant of its state.

    Exits with 0 when all hold, 1 when some do not, 2 when no daemon answered. The daemon answers
    nobody else while it walks its state.
    """
    try:
        report = ask(folder_of(config, runtime_dir), deadline_s)
    except (ConfigError, NoAnswer) as error:
        click.echo(f"treecored check: {error}", err=True)
        sys.exit(EXIT_NO_ANSWER)
    if as_json:
        fields = {"clean": not report.violations, **msgspec.structs.asdict(report)}
        click.echo(msgspec.json.format(msgspec.json.encode(fields)).decode())
    else:
        show(report, Console())
    sys.exit(EXIT_VIOLATIONS if report.violations else EXIT_CLEAN)


def ask(folder: Path, deadline_s: float) -> AdminReport:
    """Ask the daemon of a runtime folder for its report. Raises `NoAnswer`."""
    with Asking(folder, deadline_s, "treecored check") as daemon:
        return daemon.ask(AdminCheck(), AdminReport)


def show(report: AdminReport, console: Console) -> None:
    """Print the tables and then the verdict."""
    console.print(_pools(report.pools))
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    figures.add_column("figure")
    figures.add_column("value", justify="right")
    for name in SHOWN:
        figures.add_row(name.replace("_", " "), f"{report.counters.get(name, 0):,}")
    console.print(figures)
    quarantined = report.counters.get("host_pages_quarantined", 0)
    if quarantined:
        console.print(
            f"{quarantined:,} pages of the host tier differed from their checksums and are not "
            "used any more: look at the machine's memory",
            style="yellow",
        )
    for line in report.violations:
        console.print(f"[red]violated[/red] {escape(line)}", soft_wrap=True)
    if report.violations:
        count = len(report.violations) + report.violations_left_out
        more = f" ({report.violations_left_out} not listed)" if report.violations_left_out else ""
        console.print(f"{count} invariants do not hold{more}", style="bold red")
    else:
        console.print("every invariant holds", style="bold green")


def _pools(pools: tuple[PoolReport, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("pool", no_wrap=True)
    table.add_column("instance", overflow="fold")
    for heading in ("gen.", "ranks", "pages", "in tree", "leased", "leases", "copies"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state")
    for pool in pools:
        table.add_row(
            str(pool.pool),
            escape(pool.instance),
            str(pool.generation),
            f"{pool.ranks}/{pool.world_size}",
            f"{pool.page_count:,}",
            f"{pool.pages:,}",
            f"{pool.protected_pages:,}",
            f"{pool.leases:,}",
            f"{pool.copies:,}",
            pool.phase,
        )
    return table
