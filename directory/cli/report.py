"""`treecored report FILE`: what an access log or a public trace says about the cache.

Owns the options and what goes where: a page, a picture, exported records, one JSON object, or a
summary in the terminal. It must never change the file it reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
from rich import box
from rich.console import Console
from rich.table import Table

from directory.analytics.attribution import Cause
from directory.analytics.export import FORMATS, ExportError, export
from directory.analytics.figures import Figures, figures
from directory.analytics.page import CAUSE_NAMES, page
from directory.analytics.pictures import NoPictures, draw
from directory.analytics.source import Source
from directory.analytics.study import Study
from directory.analytics.traces import SourceError
from directory.analytics.words import capacity, count, duration, percent
from directory.cli.reading import capacity_text, page_bytes_of, source_of, source_options
from directory.cli.runs import BAD_INPUT, leave, print_json

EXPORTS: Final = ", ".join(FORMATS)


@click.command()
@source_options
@click.option(
    "--capacity",
    metavar="PAGES|SIZE",
    callback=capacity_text,
    help="The cache there is: pages, or a size such as 64GiB (with --bytes-per-token). Marked on "
    "the curve; of a trace, the hits of an LRU cache of this size are reported.  [default: of a "
    "log, what it says; of a trace, a cache that never evicts]",
)
@click.option(
    "--bytes-per-token",
    type=click.IntRange(1),
    help="KV bytes of one token over all layers and ranks, to show pages as sizes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as one JSON object.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the page.")
@click.option(
    "--png",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the charts as a picture (needs the extra `analytics`).",
)
@click.option(
    "--export",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"Write the requests in another format, by the name's ending: {EXPORTS}.",
)
def report(
    capacity: str | None,
    bytes_per_token: int | None,
    as_json: bool,
    html: Path | None,
    png: Path | None,
    target: Path | None,
    **reading: Any,
) -> None:
    """Report on FILE: an access log (file or folder) or a public trace.

    \b
    Reads the formats access log, Mooncake, Qwen-Bailian and kv-cache-tester (.gz as well), which
    it tells apart by their content.
    \b
    block_hit_ratio  whole blocks in hit prefixes / blocks, partial last ones included
    token_hit_ratio  hit prompt tokens / prompt tokens

    Retries, health probes and recomputation after preemption are counted beside, never as hits.
    All ratios are defined in docs/analytics.md.

    Exits with 0, or with 2 when FILE or an option is no good.
    """
    source = source_of(**reading)
    try:
        found = gather(source, capacity, bytes_per_token)
        if html is not None:
            html.write_text(page(found), encoding="utf-8")
        if png is not None:
            draw(found, png)
        if target is not None:
            export(source, target)
    except (SourceError, NoPictures, ExportError) as error:
        leave(BAD_INPUT, str(error))
    except OSError as error:
        leave(BAD_INPUT, f"{error.filename or 'the report'}: {error.strerror}")
    if as_json:
        print_json(found)
    else:
        show(found, Console(highlight=False))
    for written in (html, png, target):
        if written is not None:
            click.echo(f"treecored: wrote {written}", err=True)


def gather(source: Source, wanted: str | None, bytes_per_token: int | None) -> Figures:
    """Read the source and compute every figure. Raises `SourceError`."""
    pages, page_bytes = page_bytes_of(source, wanted, bytes_per_token)
    study = Study.of(source, capacity=pages)
    return figures(
        study,
        file=source.path.name,
        format=source.kind,
        page_bytes=page_bytes or (bytes_per_token or 0) * study.page_tokens or None,
        present_pages=pages if source.observed else None,
        health=source.health,
    )


def show(found: Figures, console: Console) -> None:
    """The summary for a terminal, from 80 columns up."""
    if found.basis == "observed":
        basis = "as the caches did"
    elif found.simulated_pages is None:
        basis = "as one shared cache would that never evicts"
    else:
        held = capacity(found.simulated_pages, found.page_bytes)
        basis = f"as one shared LRU cache of {held} would"
    console.print(
        f"{found.file} ({found.format}): {count(found.requests)} requests over "
        f"{duration(found.span_s)}, pages of {found.page_tokens} tokens"
    )
    console.print(
        f"Block hit ratio [bold]{percent(found.block_hit_ratio)}[/], token hit ratio "
        f"[bold]{percent(found.token_hit_ratio)}[/], {basis}."
    )
    _show_causes(found, console)
    if found.curve:
        enough = capacity(found.pages_for_95_percent, found.page_bytes)
        console.print(
            f"A shared cache that never evicts: {percent(found.block_hit_ratio_max)}; "
            f"{enough} give 95 % of that."
        )
    _show_capacities(found, console)
    if found.dropped_records:
        console.print(f"{count(found.dropped_records)} records were dropped when this was written.")


def _show_causes(found: Figures, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("why tokens were computed")
    for heading in ("tokens", "share", "requests"):
        table.add_column(heading, justify="right")
    for line in sorted(found.causes, key=lambda line: -line.tokens):
        if line.tokens or line.requests:
            share = line.tokens / found.missed_tokens if found.missed_tokens else 0.0
            name = CAUSE_NAMES[Cause(line.cause)]
            table.add_row(name, count(line.tokens), percent(share), count(line.requests))
    console.print(table)


def _show_capacities(found: Figures, console: Console) -> None:
    lines = [(mark.label, mark.pages, mark.block_hit_ratio) for mark in found.present]
    lines += [
        (f"+{capacity(extra.extra_pages, found.page_bytes)}", extra.pages, extra.block_hit_ratio)
        for extra in found.more
    ]
    if not lines:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("one LRU cache of")
    table.add_column("capacity", justify="right")
    table.add_column("block hit ratio", justify="right")
    for name, pages, ratio in lines:
        table.add_row(name, capacity(pages, found.page_bytes), percent(ratio))
    console.print(table)
