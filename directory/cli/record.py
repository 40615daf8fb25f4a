"""`treecored record OUT`: keep the requests of the next while as a trace.

Owns the wait and the choice of records. It reads the access log that the daemon writes; it never
changes the daemon, nor the log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import msgspec

from directory.analytics.export import FORMATS, ExportError, check, export_accesses
from directory.analytics.log import log_files
from directory.analytics.reader import LogError, LogReader
from directory.analytics.record import Access
from directory.cli.asking import EXIT_NO_ANSWER, Asking, NoAnswer, daemon_options, folder_of
from directory.cli.runs import BAD_INPUT, FAILED, leave
from directory.daemon.config import ConfigError
from directory.protocol.admin import AdminStats, LogReport, StatsReport

DEADLINE_S: Final = 10.0
SETTLE_S: Final = 10.0
LOOK_S: Final = 0.1
FORMATS_NAMED: Final = ", ".join(FORMATS)


@click.command()
@daemon_options
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    help="Record so long.  [default: until Ctrl-C]",
)
@click.option(
    "--last",
    type=click.FloatRange(0),
    default=0.0,
    help="Begin so many seconds ago, as far as the access log goes back.",
)
def record(
    config: Path | None, runtime_dir: str | None, out: Path, seconds: float | None, last: float
) -> None:
    """Record the requests of the running daemon into OUT, by its ending: .jsonl, .csv, .parquet.

    A .jsonl file is a Mooncake trace, which `treecored replay`, `simulate` and `report` read. No
    tokens are recorded. The daemon must write an access log (`serve --access-log`).

    Exits with 0, with 1 when nothing was recorded, or with 2 when no daemon answered, it writes no
    log, or OUT is no good.
    """
    if out.suffix.lower() not in FORMATS:
        leave(BAD_INPUT, f"{out}: the name must end in one of {FORMATS_NAMED}")
    try:
        with Asking(folder_of(config, runtime_dir), DEADLINE_S, "treecored record") as daemon:
            began = daemon.ask(AdminStats(), StatsReport)
            if began.log is None:
                leave(BAD_INPUT, "the daemon writes no access log: `treecored serve --access-log`")
            check(out)
            _wait(seconds)
            ended = _settled(daemon)
            assert ended.log is not None
            since_us = began.at_us - int(last * 1e6)
            written = export_accesses(_between(ended.log, since_us, ended.at_us), out)
    except (ConfigError, NoAnswer) as error:
        click.echo(f"treecored record: {error}", err=True)
        sys.exit(EXIT_NO_ANSWER)
    except (ExportError, LogError) as error:
        leave(BAD_INPUT, str(error))
    except OSError as error:
        leave(BAD_INPUT, f"{error.filename or out}: {error.strerror}")
    if not written:
        leave(FAILED, f"nothing was recorded in {out}: no request ended in that time")
    click.echo(f"treecored: {written} requests in {out}", err=True)


def _wait(seconds: float | None) -> None:
    try:
        if seconds is None:
            click.echo("treecored: recording, Ctrl-C ends it", err=True)
            while True:
                time.sleep(3600)
        time.sleep(seconds)
    except KeyboardInterrupt:
        pass


def _settled(daemon: Asking) -> StatsReport:
    """Wait until what had ended by now stands in the log."""
    first = report = daemon.ask(AdminStats(), StatsReport)
    give_up = time.monotonic() + SETTLE_S
    while report.log is not None and report.log.waiting and time.monotonic() < give_up:
        time.sleep(LOOK_S)
        report = daemon.ask(AdminStats(), StatsReport)
    if report.log is None:
        raise NoAnswer("the daemon has given its access log up; its own log says why")
    return msgspec.structs.replace(report, at_us=first.at_us)


def _between(log: LogReport, since_us: int, until_us: int) -> Iterator[Access]:
    if not log_files(Path(log.folder)):
        return  # no request has ended since the daemon began
    for frame in LogReader(Path(log.folder)):
        if isinstance(frame, Access) and since_us <= frame.at_us <= until_us:
            yield frame
