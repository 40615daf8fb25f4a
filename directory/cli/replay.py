"""`treecored replay TRACE`: real processes, sockets and copies on a recorded trace.

Owns the options, the routing of requests and the sizes of a run with room for everything.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import click
import msgspec
from rich.console import Console

from directory.cli.driver import Job, Plan, instance_names
from directory.cli.runs import (
    BAD_INPUT,
    FAILED,
    leave,
    leaving_with_status,
    print_json,
    refuse_without_memory,
    run_jobs,
    segment_bytes,
)
from directory.cli.tables import run_tables, size
from directory.cli.tally import BytesMoved, HitTokens, Outcome, Percentiles
from directory.cli.trace import BLOCK_TOKENS, PageCount, TraceError, TraceRequest, read_trace
from directory.core.limits import PAGE_SIZE_MAX, POOL_PAGES_MAX
from scheduler_shim.worker_messages import Configure, Prompt

Route = Literal["round-robin", "hash", "random"]
ROUTE_BLOCKS = 2

CURE = (
    "lower --bytes-per-token, --limit, --pool-pages or --host-pages (pages beyond --pool-pages "
    "are evicted, as on a real node)"
)


class Options(NamedTuple):
    """The command's options; pages are None for room for everything."""

    trace: Path
    schedulers: int = 2
    route: Route = "round-robin"
    private: bool = False
    thin: bool = False
    concurrency: int = 1
    pool_pages: int | None = None
    host_pages: int | None = None
    page_size: int = BLOCK_TOKENS
    bytes_per_token: int = 64
    limit: int | None = None
    seed: int = 0
    block_tokens: int = BLOCK_TOKENS

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.page_size * self.bytes_per_token


class Sizes(NamedTuple):
    """Pages of each pool and of the host tier."""

    pool_pages: tuple[int, ...]
    host_pages: int


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints. Ratios are fractions; tally.py defines them."""

    requests: int
    prompt_tokens: int
    blocks: int
    block_hit_ratio: float
    token_hit_ratio: float
    hit_tokens: HitTokens
    missed_tokens: int
    bytes_moved: BytesMoved
    pages_verified: int
    pages_wrong: int
    requests_failed: int
    seconds: float
    schedulers: int
    mode: str
    route: str
    private: bool
    concurrency: int
    page_size: int
    bytes_per_token: int
    rtt_us: Percentiles
    violations: list[str]
    problems: list[str]
    daemon: dict[str, int]


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--schedulers",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Scheduler processes.",
)
@click.option(
    "--route",
    type=click.Choice(["round-robin", "hash", "random"]),
    default="round-robin",
    show_default=True,
    help="Which scheduler serves a request: in turn, by a hash of its first "
    f"{ROUTE_BLOCKS} blocks, or by chance (see --seed).",
)
@click.option(
    "--private", is_flag=True, help="Nothing is shared: each scheduler has a cache salt of its own."
)
@click.option(
    "--thin", is_flag=True, help="Schedulers keep no mirror and ask the daemon for everything."
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Requests in progress at once, over all schedulers; 1 is strict trace order.",
)
@click.option(
    "--pool-pages",
    type=click.IntRange(1, POOL_PAGES_MAX),
    help="Pages of each pool.  [default: room for everything]",
)
@click.option(
    "--host-pages",
    type=click.IntRange(1),
    help="Pages of the host tier.  [default: room for everything]",
)
@click.option(
    "--page-size",
    type=click.IntRange(1, PAGE_SIZE_MAX),
    default=BLOCK_TOKENS,
    show_default=True,
    help="Tokens of a page.",
)
@click.option(
    "--bytes-per-token",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="KV bytes of a token over all layers.",
)
@click.option("--limit", type=click.IntRange(1), help="Replay the first N requests only.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of --route random.")
@click.option(
    "--block-tokens",
    type=click.IntRange(1),
    default=BLOCK_TOKENS,
    show_default=True,
    help="Tokens of a trace block.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def replay(as_json: bool, **options: object) -> None:
    """Replay a Mooncake-format TRACE (JSON lines with timestamp, input_length, output_length and
    hash_ids) through a daemon and scheduler processes, and verify every page that is reused.

    \b
    block_hit_ratio  whole trace blocks in reused prefixes / blocks listed in the trace
    token_hit_ratio  reused prompt tokens / prompt tokens

    A request is reused as far as its pages are in the scheduler's own pool, in the host tier or in
    another scheduler's pool. At least one token of each prompt is always computed.

    Exits with 0 when every request finished, no page held wrong bytes and every invariant holds;
    with 1 when not, and with 2 when the trace or an option is no good.
    """
    chosen = Options(**options)  # type: ignore[arg-type]
    try:
        requests = read_trace(chosen.trace, block_tokens=chosen.block_tokens, limit=chosen.limit)
    except TraceError as error:
        leave(BAD_INPUT, str(error))
    with leaving_with_status():
        outcome = run(chosen, requests)
    report = report_on(chosen, outcome, len(requests))
    if as_json:
        print_json(report)
    else:
        _print(chosen, outcome, report)
    if report.problems:
        leave(FAILED, "; ".join(report.problems))


def run(options: Options, requests: Sequence[TraceRequest]) -> Outcome:
    """Size the run, say what memory it may use, and run it."""
    routes = route(options, requests)
    sizes = size_up(options, requests, routes)
    needed = refuse_without_memory(
        pool_pages=sum(sizes.pool_pages),
        host_pages=sizes.host_pages,
        page_size=options.page_size,
        page_bytes=options.page_bytes,
        processes=options.schedulers + 2,
        cure=CURE,
    )
    click.echo(
        f"treecored: {len(requests):,} requests over {options.schedulers} schedulers, up to "
        f"{size(needed)} of memory ({sum(sizes.pool_pages):,} pool pages, "
        f"{sizes.host_pages:,} host pages of {size(options.page_bytes)})",
        err=True,
    )
    plan = Plan(
        schedulers=tuple(
            Configure(
                instance=name,
                mode="thin" if options.thin else "mirrored",
                runtime_dir="",
                page_size=options.page_size,
                page_count=pages,
                bytes_per_token=options.bytes_per_token,
                private=options.private,
                concurrency=options.concurrency,
                settle=options.concurrency == 1,
            )
            for name, pages in zip(
                instance_names(options.schedulers), sizes.pool_pages, strict=True
            )
        ),
        host_bytes=sizes.host_pages * options.page_bytes,
        segment_bytes=segment_bytes(sizes.host_pages, options.page_bytes),
    )
    jobs = [
        Job(
            scheduler,
            Prompt(
                number,
                blocks=request.blocks,
                block_tokens=options.block_tokens,
                length=request.length,
            ),
        )
        for number, (request, scheduler) in enumerate(zip(requests, routes, strict=True))
    ]
    return run_jobs(
        plan,
        jobs,
        concurrency=options.concurrency,
        block_tokens=options.block_tokens,
        description="replay",
    )


def route(options: Options, requests: Sequence[TraceRequest]) -> list[int]:
    """Say which scheduler serves each request."""
    count = options.schedulers
    if options.route == "round-robin":
        return [number % count for number in range(len(requests))]
    if options.route == "random":
        chance = random.Random(options.seed)
        return [chance.randrange(count) for _ in requests]
    heads = (request.blocks[: 4 * ROUTE_BLOCKS] for request in requests)
    digests = (blake2b(head, digest_size=8).digest() for head in heads)
    return [int.from_bytes(digest, "little") % count for digest in digests]


def size_up(options: Options, requests: Sequence[TraceRequest], routes: Sequence[int]) -> Sizes:
    """Room for everything unless the options ask for less; more would never be touched.

    A pool needs its different pages, and beside them the pages of the requests in progress. Leaves
    with a sentence when the longest prompt does not fit into the pools that were asked for.
    """
    counts = [PageCount(options.page_size, options.block_tokens) for _ in range(options.schedulers)]
    everywhere = PageCount(options.page_size, options.block_tokens)
    for request, scheduler in zip(requests, routes, strict=True):
        counts[scheduler].add(request)
        everywhere.add(request)
    longest = everywhere.longest_pages
    if options.pool_pages is not None and options.pool_pages < longest:
        leave(
            BAD_INPUT,
            f"the longest prompt has {longest} pages of {options.page_size} tokens, and a pool has "
            f"{options.pool_pages}: raise --pool-pages to {longest} or more",
        )
    working = (longest + 1) * options.concurrency
    room = [count.unique_pages + working for count in counts]
    pools = tuple(min(options.pool_pages or pages, pages) for pages in room)
    unique = sum(c.unique_pages for c in counts) if options.private else everywhere.unique_pages
    host_room = max(1, unique)
    return Sizes(pools, min(options.host_pages or host_room, host_room))


def report_on(options: Options, outcome: Outcome, requests: int) -> Report:
    """Gather what `--json` prints."""
    total = outcome.total
    return Report(
        requests=total.requests,
        prompt_tokens=total.prompt_tokens,
        blocks=total.blocks,
        block_hit_ratio=round(total.block_hit_ratio, 6),
        token_hit_ratio=round(total.token_hit_ratio, 6),
        hit_tokens=total.hit_tokens,
        missed_tokens=total.missed_tokens,
        bytes_moved=outcome.bytes_moved,
        pages_verified=total.verified,
        pages_wrong=total.wrong,
        requests_failed=total.failed,
        seconds=round(outcome.seconds, 3),
        schedulers=options.schedulers,
        mode="thin" if options.thin else "mirrored",
        route=options.route,
        private=options.private,
        concurrency=options.concurrency,
        page_size=options.page_size,
        bytes_per_token=options.bytes_per_token,
        rtt_us=outcome.rtt_us,
        violations=outcome.violations,
        problems=outcome.problems(requests),
        daemon=outcome.daemon,
    )


def _print(options: Options, outcome: Outcome, report: Report) -> None:
    console = Console(highlight=False)
    for table in run_tables(outcome, [report.mode] * options.schedulers):
        console.print(table)
    console.print(
        f"{report.requests:,} requests in {report.seconds:.1f} s: block hit ratio "
        f"{report.block_hit_ratio:.4f}, token hit ratio {report.token_hit_ratio:.4f}."
    )
