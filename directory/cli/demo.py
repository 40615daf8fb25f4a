"""`treecored demo`: a seeded workload on shared and then on private caches, side by side.

Owns the options, the sizes (pools small enough that pages are evicted) and the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
from directory.cli.tables import run_tables, saving
from directory.cli.tally import BytesMoved, HitTokens, Outcome, Percentiles, percentiles
from directory.cli.workload import Turn, Workload, longest_pages, unique_pages
from directory.core.events import Mode
from directory.core.limits import PAGE_SIZE_MAX, POOL_PAGES_MAX
from scheduler_shim.worker_messages import Configure, Prompt

# All pools together hold this part of the workload's pages, so that some are found in the host
# tier alone; a pool always has room for this many of the longest requests.
POOLS_SHARE = 1 / 3
LONGEST_REQUESTS = 2
CURE = "lower --requests, --page-size or --bytes-per-token"


class Options(NamedTuple):
    """The command's options; `pool_pages` None: from the workload's size."""

    schedulers: int = 2
    seed: int = 1
    requests: int = 600
    page_size: int = 16
    bytes_per_token: int = 1024
    pool_pages: int | None = None
    concurrency: int | None = None


class SchedulerReport(msgspec.Struct, frozen=True):
    """One scheduler's part."""

    instance: str
    mode: str
    requests: int
    prompt_tokens: int
    hit_tokens: HitTokens
    missed_tokens: int
    bytes_moved: BytesMoved
    pages_verified: int
    pages_wrong: int
    rtt_us: Percentiles


class RunReport(msgspec.Struct, frozen=True):
    """A whole run, all schedulers together."""

    hit_tokens: HitTokens
    missed_tokens: int
    bytes_moved: BytesMoved
    pages_verified: int
    pages_wrong: int
    seconds: float
    rtt_us: Percentiles
    violations: list[str]
    problems: list[str]
    daemon: dict[str, int]


class Report(RunReport, frozen=True, kw_only=True):
    """What `--json` prints: the run with sharing, and the one with private caches."""

    requests: int
    prompt_tokens: int
    seed: int
    page_size: int
    bytes_per_token: int
    pool_pages: int
    schedulers: list[SchedulerReport]
    private: RunReport
    saving: str


@click.command()
@click.option(
    "--schedulers",
    type=click.IntRange(2, 64),
    default=Options._field_defaults["schedulers"],
    show_default=True,
    help="Scheduler processes; the last one is thin, the others are mirrored.",
)
@click.option(
    "--seed",
    type=int,
    default=Options._field_defaults["seed"],
    show_default=True,
    help="Seed of the workload: same seed, same requests.",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 1_000_000),
    default=Options._field_defaults["requests"],
    show_default=True,
    help="Requests in all.",
)
@click.option(
    "--page-size",
    type=click.IntRange(1, PAGE_SIZE_MAX),
    default=Options._field_defaults["page_size"],
    show_default=True,
    help="Tokens of a page; the workload's lengths scale with it.",
)
@click.option(
    "--bytes-per-token",
    type=click.IntRange(1),
    default=Options._field_defaults["bytes_per_token"],
    show_default=True,
    help="KV bytes of a token over all layers.",
)
@click.option(
    "--pool-pages",
    type=click.IntRange(1, POOL_PAGES_MAX),
    help="Pages of each pool.  [default: all pools hold a third of the workload]",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    help="Requests in progress at once, over all schedulers.  [default: one a scheduler]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def demo(as_json: bool, **options: object) -> None:
    """Show several schedulers sharing one tree: chats over shared system prompts and documents,
    first with sharing and then with private caches, every reused page verified.

    Exits with 0 when pages came from all three places (own pool, host tier, another scheduler's
    pool), none held wrong bytes and every invariant holds; with 1 when not.
    """
    chosen = Options(**options)  # type: ignore[arg-type]
    turns = Workload(
        seed=chosen.seed,
        schedulers=chosen.schedulers,
        page_size=chosen.page_size,
        requests=chosen.requests,
    ).turns()
    pool_pages = pool_size(chosen, turns)
    with leaving_with_status():
        shared = run(chosen, turns, pool_pages, private=False)
        private = run(chosen, turns, pool_pages, private=True)
    problems = problems_of(shared, private, chosen.requests)
    if as_json:
        print_json(report_on(chosen, pool_pages, shared, private, problems))
    else:
        _print(chosen, pool_pages, shared, private)
    if problems:
        leave(FAILED, "; ".join(problems))


def pool_size(options: Options, turns: list[Turn]) -> int:
    """Pages of each pool. Leaves with a sentence when the longest request does not fit."""
    longest = longest_pages(turns, options.page_size)
    concurrency = options.concurrency or options.schedulers
    if options.pool_pages is None:
        part = int(unique_pages(turns, options.page_size) * POOLS_SHARE / options.schedulers)
        return max(longest * max(LONGEST_REQUESTS, concurrency), part)
    if options.pool_pages < longest:
        leave(
            BAD_INPUT,
            f"the longest request has {longest} pages of {options.page_size} tokens, and a pool "
            f"has {options.pool_pages}: raise --pool-pages to {longest} or more",
        )
    return options.pool_pages


def mode_of(number: int, schedulers: int) -> Mode:
    """The last scheduler is thin."""
    return "thin" if number == schedulers - 1 else "mirrored"


def run(options: Options, turns: list[Turn], pool_pages: int, *, private: bool) -> Outcome:
    """Run the workload once. The host tier has room for everything, shared or not."""
    page_bytes = options.page_size * options.bytes_per_token
    host_pages = unique_pages(turns, options.page_size) * options.schedulers
    refuse_without_memory(
        pool_pages=pool_pages * options.schedulers,
        host_pages=host_pages,
        page_size=options.page_size,
        page_bytes=page_bytes,
        processes=options.schedulers + 2,
        cure=CURE,
    )
    concurrency = options.concurrency or options.schedulers
    plan = Plan(
        schedulers=tuple(
            Configure(
                instance=name,
                mode=mode_of(number, options.schedulers),
                runtime_dir="",
                page_size=options.page_size,
                page_count=pool_pages,
                bytes_per_token=options.bytes_per_token,
                private=private,
                concurrency=concurrency,
            )
            for number, name in enumerate(instance_names(options.schedulers))
        ),
        host_bytes=host_pages * page_bytes,
        segment_bytes=segment_bytes(host_pages, page_bytes),
    )
    jobs = [
        Job(turn.scheduler, Prompt(number, tokens=turn.prompt, output=turn.answer))
        for number, turn in enumerate(turns)
    ]
    name = "private caches" if private else "one shared tree"
    return run_jobs(plan, jobs, concurrency=concurrency, description=name)


def problems_of(shared: Outcome, private: Outcome, requests: int) -> list[str]:
    """Why the demo did not show what it is to show; empty when it did."""
    problems = shared.problems(requests)
    for pages, place in (
        (shared.total.own_pages, "a scheduler's own pool"),
        (shared.total.host_pages, "the host tier"),
        (shared.total.peer_pages, "another scheduler's pool"),
    ):
        if not pages:
            problems.append(
                f"no page was reused from {place}: the workload is too small for this (raise "
                "--requests) or the pools too large or too small (leave --pool-pages out)"
            )
    problems += [f"private caches: {problem}" for problem in private.problems(requests)]
    if private.total.peer_pages:
        problems.append("private caches: a page came from another scheduler's pool")
    return problems


def report_on(
    options: Options,
    pool_pages: int,
    shared: Outcome,
    private: Outcome,
    problems: list[str],
) -> Report:
    """Gather what `--json` prints."""
    whole = _run_report(shared, problems)
    return Report(
        **{name: getattr(whole, name) for name in RunReport.__struct_fields__},
        requests=shared.total.requests,
        prompt_tokens=shared.total.prompt_tokens,
        seed=options.seed,
        page_size=options.page_size,
        bytes_per_token=options.bytes_per_token,
        pool_pages=pool_pages,
        schedulers=[_scheduler_report(shared, number) for number in range(len(shared.tallies))],
        private=_run_report(private, private.problems(options.requests)),
        saving=saving(shared, private),
    )


def _run_report(outcome: Outcome, problems: Sequence[str]) -> RunReport:
    total = outcome.total
    return RunReport(
        hit_tokens=total.hit_tokens,
        missed_tokens=total.missed_tokens,
        bytes_moved=outcome.bytes_moved,
        pages_verified=total.verified,
        pages_wrong=total.wrong,
        seconds=round(outcome.seconds, 3),
        rtt_us=outcome.rtt_us,
        violations=outcome.violations,
        problems=list(problems),
        daemon=outcome.daemon,
    )


def _scheduler_report(outcome: Outcome, number: int) -> SchedulerReport:
    tally, summary = outcome.tallies[number], outcome.summaries[number]
    return SchedulerReport(
        instance=summary.instance,
        mode=summary.mode,
        requests=tally.requests,
        prompt_tokens=tally.prompt_tokens,
        hit_tokens=tally.hit_tokens,
        missed_tokens=tally.missed_tokens,
        bytes_moved=outcome.bytes_moved_by(number),
        pages_verified=tally.verified,
        pages_wrong=tally.wrong,
        rtt_us=percentiles(summary.rtt_us),
    )


def _print(options: Options, pool_pages: int, shared: Outcome, private: Outcome) -> None:
    console = Console(highlight=False)
    console.print(
        f"{options.schedulers} schedulers, one daemon: {shared.total.requests:,} requests (seed "
        f"{options.seed}), pools of {pool_pages:,} pages of {options.page_size} tokens"
    )
    modes = [summary.mode for summary in shared.summaries]
    for table in run_tables(shared, modes, private):
        console.print(table)
    console.print(saving(shared, private))
