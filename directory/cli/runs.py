"""What `demo` and `replay` have in common: run jobs on a fleet, report, leave with a status.

Owns the exit statuses (0 success, 1 the run failed or showed something wrong, 2 bad input, 128 +
n ended by signal n) and what goes to which stream: figures to standard output, words about the
run to standard error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import click
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from directory.cli.driver import Done, Driver, Job, Plan
from directory.cli.processes import DriverError
from directory.cli.signals import Interrupted
from directory.cli.tables import size
from directory.cli.tally import Outcome, Tally
from directory.daemon.memory import available_bytes

FAILED, BAD_INPUT = 1, 2
PROCESS_BYTES = 64 * 1024 * 1024  # a Python process with these packages loaded, roughly
TOKEN_BYTES = 4
# What Python keeps of a page beside its bytes: free lists, owned sets, packed numbers; measured
# with pages of one byte over a million of them, scheduler and daemon together.
POOL_PAGE_RECORD_BYTES = 300
HOST_PAGE_RECORD_BYTES = 100

Advance = Callable[[Done], None]


@contextmanager
def progress(description: str, total: int) -> Iterator[Advance | None]:
    """A progress bar on standard error, if that is a terminal; yields what to call per request."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)

        def advance(_: Done) -> None:
            bar.advance(task)

        yield advance


def run_jobs(
    plan: Plan,
    jobs: Sequence[Job],
    *,
    concurrency: int,
    block_tokens: int | None = None,
    description: str,
) -> Outcome:
    """Start a fleet, run the jobs, check every invariant, end the fleet.

    Raises `DriverError` and `Interrupted`. `seconds` of the outcome is the time of the jobs alone.
    """
    first = plan.schedulers[0]
    tallies = [Tally(first.page_size, block_tokens) for _ in plan.schedulers]
    with progress(description, len(jobs)) as advance, Driver(plan) as driver:
        started = time.monotonic()
        for done in driver.run(jobs, concurrency=concurrency, on_done=advance):
            tallies[done.scheduler].add(done.finished)
        seconds = time.monotonic() - started
        summaries = driver.summaries(check=True)
    return Outcome(tallies, summaries, seconds)


@contextmanager
def leaving_with_status() -> Iterator[None]:
    """Turn what ended a run into one clear sentence and an exit status."""
    try:
        yield
    except DriverError as error:
        leave(FAILED, str(error))
    except Interrupted as error:
        leave(error.exit_status, f"ended by {error}")


def leave(status: int, sentence: str) -> NoReturn:
    """Say why on standard error and exit."""
    click.echo(f"treecored: {sentence}", err=True)
    raise SystemExit(status)


def print_json(report: msgspec.Struct | dict[str, object]) -> None:
    """Print one JSON object, the only thing on standard output."""
    click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())


def segment_bytes(host_pages: int, page_bytes: int) -> int:
    """Segments that waste nothing: whole pages, few of them, within the limits of slot ids."""
    pages = max(64 * 1024 * 1024 // page_bytes, -(-host_pages // 256), 1)
    return page_bytes * min(pages, 1 << 16)


def refuse_without_memory(
    *, pool_pages: int, host_pages: int, page_size: int, page_bytes: int, processes: int, cure: str
) -> int:
    """Bytes that a run may touch; leaves with a sentence when the machine has not got them.

    Pages are those of all pools together and of the host tier. The daemon holds the tokens of
    every page once, and each mirror those of its pool; with small pages the records of pages
    weigh more than the pages.
    """
    pages = pool_pages + host_pages
    records = pool_pages * POOL_PAGE_RECORD_BYTES + host_pages * HOST_PAGE_RECORD_BYTES
    needed = pages * (page_bytes + page_size * TOKEN_BYTES) + records + processes * PROCESS_BYTES
    available = available_bytes()
    if available is not None and needed > available:
        leave(
            BAD_INPUT,
            f"this run may touch {size(needed)} of memory ({size(pool_pages * page_bytes)} of "
            f"pools, {size(host_pages * page_bytes)} of host tier), and {size(available)} are "
            f"available: {cure}",
        )
    return needed
