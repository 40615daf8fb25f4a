"""`treecored chaos`: a fleet under load, faults of every kind at a rate, and what came of it.

Owns the options, the sizes and the exit status (0: nothing wrong; 1: something was; 2: bad input).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

import click
from rich.console import Console

from directory.cli.chaos_faults import KINDS, PageDamage, possible
from directory.cli.chaos_fleet import Fleet
from directory.cli.chaos_report import Report, report_on, show
from directory.cli.chaos_run import Plan, Run
from directory.cli.driver import Job, instance_names
from directory.cli.runs import (
    BAD_INPUT,
    FAILED,
    leave,
    leaving_with_status,
    print_json,
    refuse_without_memory,
    segment_bytes,
)
from directory.cli.trace import BLOCK_TOKENS, PageCount, TraceError, TraceRequest, read_trace
from directory.cli.workload import Turn, Workload, longest_pages, unique_pages
from directory.core.events import Mode
from directory.core.limits import PAGE_SIZE_MAX, POOL_PAGES_MAX
from scheduler_shim.worker_messages import Configure, Prompt

Modes = Literal["mixed", "mirrored", "thin"]

REQUESTS_A_ROUND = 600
POOLS_SHARE = 1 / 3
HOST_SHARE = 1 / 2
"""Pools together, and the host tier, hold these parts of the different pages: both are full soon,
and everything is evicted all the time."""
CURE = "lower --pool-pages, --host-pages, --bytes-per-token or --limit"


class Options(NamedTuple):
    """The command's options; None: from the workload."""

    trace: Path | None = None
    seconds: float = 120.0
    schedulers: int = 4
    every: float = 2.0
    fault: tuple[str, ...] = ()
    modes: Modes = "mixed"
    seed: int = 1
    page_size: int | None = None
    bytes_per_token: int = 64
    pool_pages: int | None = None
    host_pages: int | None = None
    concurrency: int = 8
    limit: int | None = None


class Work(NamedTuple):
    """What is asked, again and again; different pages of one round, and pages of the longest."""

    jobs: Iterator[Job]
    unique: int
    longest: int


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option(
    "--seconds",
    type=click.FloatRange(min=1.0),
    default=120.0,
    show_default=True,
    help="How long faults are injected.",
)
@click.option(
    "--schedulers",
    type=click.IntRange(2, 64),
    default=4,
    show_default=True,
    help="Scheduler processes.",
)
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds from one fault to the next; those of different targets overlap.",
)
@click.option(
    "--fault",
    type=click.Choice(sorted(KINDS)),
    multiple=True,
    help="A kind of fault, repeatable. [all kinds, in turn]",
)
@click.option(
    "--modes",
    type=click.Choice(["mixed", "mirrored", "thin"]),
    default="mixed",
    show_default=True,
    help="How the schedulers keep their trees; mixed: every second one is thin.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of workload and faults.")
@click.option(
    "--page-size",
    type=click.IntRange(1, PAGE_SIZE_MAX),
    help="Tokens of a page.  [default: 16, of a trace 512]",
)
@click.option(
    "--bytes-per-token", type=click.IntRange(1), default=64, show_default=True, help="KV bytes."
)
@click.option(
    "--pool-pages",
    type=click.IntRange(1, POOL_PAGES_MAX),
    help="Pages of each pool.  [default: all pools together hold a third]",
)
@click.option("--host-pages", type=click.IntRange(1), help="Of the host tier.  [default: a half]")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1_024),
    default=8,
    show_default=True,
    help="Requests under way in all.",
)
@click.option("--limit", type=click.IntRange(1), help="Use the trace's first N requests only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def chaos(as_json: bool, **given: object) -> None:
    """Serve a workload, or a Mooncake-format TRACE over and over, while processes are killed,
    stopped and damaged; verify every page, every request and every invariant.

    Exits with 0 when every request finished, no page was wrong, every invariant held and nothing
    leaked; with 1 when not, and with 2 when the trace or an option is no good.
    """
    options = Options(**given)  # type: ignore[arg-type]
    if PageDamage.kind in options.fault and PageDamage.kind not in possible():
        leave(BAD_INPUT, f"{PageDamage.kind} needs checksums: pip install 'treecored[checksum]'")
    if options.page_size is None:
        options = options._replace(page_size=16 if options.trace is None else BLOCK_TOKENS)
    try:
        work = work_of(options)
    except TraceError as error:
        leave(BAD_INPUT, str(error))
    with leaving_with_status():
        report = run(options, work)
    if as_json:
        print_json(report)
    else:
        show(report, Console())
    if report.problems:
        leave(FAILED, "; ".join(report.problems))


def run(options: Options, work: Work) -> Report:
    """Size the fleet, start it, let chaos loose, and judge. Raises `DriverError`."""
    assert options.page_size is not None
    page_bytes = options.page_size * options.bytes_per_token
    each = -(-options.concurrency // options.schedulers) + 1
    working = (work.longest + 1) * each
    share = int(work.unique * POOLS_SHARE / options.schedulers)
    pool_pages = options.pool_pages or max(working, share)
    host_pages = options.host_pages or max(work.longest, int(work.unique * HOST_SHARE))
    if pool_pages < work.longest:
        leave(BAD_INPUT, f"the longest request has {work.longest} pages: raise --pool-pages")
    refuse_without_memory(
        pool_pages=pool_pages * options.schedulers,
        host_pages=host_pages,
        page_size=options.page_size,
        page_bytes=page_bytes,
        processes=options.schedulers + 2,
        cure=CURE,
    )
    configures = [
        Configure(
            instance=name,
            mode=_mode(options.modes, number),
            runtime_dir="",
            page_size=options.page_size,
            page_count=pool_pages,
            bytes_per_token=options.bytes_per_token,
            concurrency=each,
        )
        for number, name in enumerate(instance_names(options.schedulers))
    ]
    plan = Plan(
        seconds=options.seconds,
        every_s=options.every,
        kinds=options.fault or possible(),
        concurrency=options.concurrency,
        seed=options.seed,
        page_size=options.page_size,
        block_tokens=None if options.trace is None else BLOCK_TOKENS,
    )
    with Fleet(
        configures,
        host_bytes=host_pages * page_bytes,
        segment_bytes=segment_bytes(host_pages, page_bytes),
    ) as fleet:
        counted = Run(fleet, work.jobs, plan).run()
    return report_on(counted, options.seed)


def work_of(options: Options) -> Work:
    """What is to be asked. Raises `TraceError`."""
    assert options.page_size is not None
    if options.trace is None:
        turns = _workload(options, 0)
        return Work(
            _chats(options),
            unique_pages(turns, options.page_size),
            longest_pages(turns, options.page_size),
        )
    requests = read_trace(options.trace, limit=options.limit)
    pages = PageCount(options.page_size, BLOCK_TOKENS)
    for request in requests:
        pages.add(request)
    return Work(_replays(options, requests), pages.unique_pages, pages.longest_pages)


def _workload(options: Options, number: int) -> list[Turn]:
    assert options.page_size is not None
    return Workload(
        seed=1_000 * options.seed + number,
        schedulers=options.schedulers,
        page_size=options.page_size,
        requests=REQUESTS_A_ROUND,
    ).turns()


def _chats(options: Options) -> Iterator[Job]:
    """Round after round of chats, each over documents of its own."""
    numbers = count()
    for number in count():
        for turn in _workload(options, number):
            prompt = Prompt(next(numbers), tokens=turn.prompt, output=turn.answer)
            yield Job(turn.scheduler, prompt)


def _replays(options: Options, requests: list[TraceRequest]) -> Iterator[Job]:
    """The trace over and over, round robin."""
    for number in count():
        request = requests[number % len(requests)]
        prompt = Prompt(
            number, blocks=request.blocks, block_tokens=BLOCK_TOKENS, length=request.length
        )
        yield Job(number % options.schedulers, prompt)


def _mode(modes: Modes, number: int) -> Mode:
    if modes == "mixed":
        return "thin" if number % 2 else "mirrored"
    return modes
