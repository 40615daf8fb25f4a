"""`treecored top`: a running daemon at a glance, live.

Owns the loop and its end; top_screen.py has the layout. It asks once an interval, reads nothing
but the answers, and leaves the daemon as it was.
"""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.live import Live

from directory.cli.asking import EXIT_NO_ANSWER, Asking, NoAnswer, daemon_options, folder_of
from directory.cli.rates import History
from directory.cli.runs import BAD_INPUT, leave
from directory.cli.top_screen import screen
from directory.daemon.config import ConfigError
from directory.protocol.admin import AdminStats, StatsReport

DEADLINE_S: Final = 10.0
HOTTEST: Final = 8
SVG_COLUMNS: Final = 80


@click.command()
@daemon_options
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--count", type=click.IntRange(1), help="Look so often and end.  [default: for ever]")
@click.option(
    "--svg",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --count: write the last screen as a picture of 80 columns.",
)
def top(
    config: Path | None,
    runtime_dir: str | None,
    interval: float,
    count: int | None,
    svg: Path | None,
) -> None:
    """Watch the running daemon: instances, tiers, hit ratios, bandwidth, the hottest prefixes.

    Ratios are of the requests that ended within 10 s, a minute, and since the daemon began.
    Ctrl-C ends it.

    Exits with 0, or with 2 when no daemon answered or the picture cannot be written.
    """
    if svg is not None and count is None:
        raise click.UsageError("--svg needs --count")
    if svg is not None and not os.access(svg.parent, os.W_OK | os.X_OK):
        leave(BAD_INPUT, f"{svg}: its folder is not there, or cannot be written to")
    history = History()
    try:
        with Asking(folder_of(config, runtime_dir), DEADLINE_S, "treecored top") as daemon:
            _watch(daemon, history, interval, count)
    except (ConfigError, NoAnswer) as error:
        click.echo(f"treecored top: {error}", err=True)
        sys.exit(EXIT_NO_ANSWER)
    except KeyboardInterrupt:
        return
    if svg is not None:
        picture = Console(record=True, width=SVG_COLUMNS, file=io.StringIO(), force_terminal=True)
        picture.print(screen(history))
        try:
            picture.save_svg(str(svg), title="treecored top")
        except OSError as error:
            leave(BAD_INPUT, f"{svg}: {error.strerror}")


def _watch(daemon: Asking, history: History, interval: float, count: int | None) -> None:
    console = Console(highlight=False)
    with Live(console=console, screen=console.is_terminal and count is None) as live:
        looks = 0
        while True:
            history.add(daemon.ask(AdminStats(HOTTEST), StatsReport))
            live.update(screen(history), refresh=True)
            looks += 1
            if looks == count:
                return
            time.sleep(interval)
