"""`treecored simulate FILE`: what caches of other sizes, shared or private, would have hit.

Owns the options and the table. Nothing is started: for the real machinery on a trace there is
`treecored replay`.
"""

from __future__ import annotations

from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from directory.analytics.simulate import ROUTES, Route, Simulation
from directory.analytics.simulate import simulate as run
from directory.analytics.traces import SourceError
from directory.analytics.words import capacity as sized
from directory.analytics.words import count, percent
from directory.cli.reading import capacity_text, page_bytes_of, source_of, source_options
from directory.cli.runs import BAD_INPUT, leave, print_json


@click.command()
@source_options
@click.option(
    "--capacity",
    "capacities",
    metavar="PAGES|SIZE",
    callback=capacity_text,
    multiple=True,
    help="Memory in all: pages, or a size such as 64GiB (with --bytes-per-token). Repeatable.  "
    "[default: shares of the different pages]",
)
@click.option("--bytes-per-token", type=click.IntRange(1), help="KV bytes of one token.")
@click.option(
    "--schedulers",
    type=click.IntRange(1, 1024),
    default=4,
    show_default=True,
    help="Private caches to compare with; each has an equal part of the memory.",
)
@click.option(
    "--route",
    type=click.Choice(ROUTES),
    default="round-robin",
    show_default=True,
    help="Which scheduler a request goes to; `recorded`: the one in the record.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(
    capacities: tuple[str, ...],
    bytes_per_token: int | None,
    schedulers: int,
    route: Route,
    as_json: bool,
    **reading: Any,
) -> None:
    """Compare one shared LRU cache with private ones on the requests of FILE.

    The caches hold whole pages, evict the least recently used leaf, and hit a page only if all
    pages before it are hit. One pass answers for every capacity, exactly.

    Exits with 0, or with 2 when FILE or an option is no good.
    """
    source = source_of(**reading)
    try:
        sizes = [page_bytes_of(source, wanted, bytes_per_token) for wanted in capacities]
        found = run(
            source,
            schedulers=schedulers,
            route=route,
            seed=reading["seed"],
            capacities=[pages for pages, _ in sizes if pages is not None],
            page_bytes=next((nbytes for _, nbytes in sizes if nbytes is not None), None),
        )
    except SourceError as error:
        leave(BAD_INPUT, str(error))
    if as_json:
        print_json(found)
    else:
        show(found, Console(highlight=False))


def show(found: Simulation, console: Console) -> None:
    """The table, from 80 columns up."""
    console.print(
        f"{found.file} ({found.format}): {count(found.requests)} requests, "
        f"{count(found.different_pages)} different pages of {found.page_tokens} tokens, "
        f"{found.route} over {found.schedulers}"
    )
    sizes = found.capacities[0].bytes is not None if found.capacities else False
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("memory in all", "one shared cache", f"{found.schedulers} private caches"):
        table.add_column(heading, justify="right")
    for line in found.capacities:
        page_bytes = (line.bytes or 0) // line.pages if sizes else None
        table.add_row(sized(line.pages, page_bytes), percent(line.shared), percent(line.private))
    table.add_section()
    table.add_row("without end", percent(found.unlimited_shared), percent(found.unlimited_private))
    console.print(table)
