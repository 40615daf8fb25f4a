"""`treecored explain FILE REQUEST`: how far a request hit, from where, and why it ended there.

Owns the options and the words on the terminal. It reads records; it asks no daemon.
"""

from __future__ import annotations

from typing import Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from directory.analytics.explanation import (
    Explanation,
    Explanations,
    explain_request,
    explain_worst,
    sentences,
)
from directory.analytics.traces import SourceError
from directory.cli.reading import capacity_text, page_bytes_of, source_of, source_options
from directory.cli.runs import BAD_INPUT, FAILED, leave, print_json


@click.command()
@source_options
@click.argument("request", required=False)
@click.option(
    "--worst",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    help="Without REQUEST: list those that computed most of what had been computed before.",
)
@click.option(
    "--capacity",
    metavar="PAGES|SIZE",
    callback=capacity_text,
    help="Of a trace: the size of the one LRU cache assumed.  [default: it never evicts]",
)
@click.option("--bytes-per-token", type=click.IntRange(1), help="KV bytes of one token.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def explain(
    request: str | None,
    worst: int,
    capacity: str | None,
    bytes_per_token: int | None,
    as_json: bool,
    **reading: Any,
) -> None:
    """Explain why REQUEST of FILE was no hit any further.

    REQUEST is a request id, or #N for the N-th request that counts. Without it, the requests that
    lost most are listed. FILE is an access log or a public trace.

    Exits with 0, with 1 when there is no such request, with 2 when FILE is no good.
    """
    source = source_of(**reading)
    try:
        pages, _ = page_bytes_of(source, capacity, bytes_per_token)
        if request is None:
            found = explain_worst(source, worst, capacity=pages)
        else:
            found = explain_request(source, request, capacity=pages)
    except SourceError as error:
        leave(BAD_INPUT, str(error))
    if request is not None and not found.found:
        leave(FAILED, f"{source.path} has no request {request!r} that counts")
    if as_json:
        print_json(found)
    elif request is None:
        show_list(found.found, Console(highlight=False))
    else:
        show(found, Console(highlight=False))


def show(found: Explanations, console: Console) -> None:
    """Each attempt with its verdict."""
    for each in found.found:
        name = f"request {each.request}" if each.request else f"request #{each.number}"
        where = f" on {each.instance}" if each.instance else ""
        space = f", namespace {each.namespace}" if each.namespace else ""
        attempt = f", attempt {each.attempt}" if each.attempt else ""
        console.print(
            f"[bold]{escape(name)}[/] (#{each.number}{attempt}) at {each.at_s:.3f} s"
            f"{escape(where)}{space}"
        )
        for line in sentences(each, found.first_us):
            console.print(f"  {escape(line)}")
        if each.lookups > 1:
            console.print(f"  looked up {each.lookups} times before it was admitted: one request")


def show_list(found: list[Explanation], console: Console) -> None:
    """A line a request, from 80 columns up."""
    if not found:
        console.print("No request computed anything that had been computed before.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("request", overflow="fold")
    for heading in ("at, s", "tokens", "hit", "computed again"):
        table.add_column(heading, justify="right")
    table.add_column("first cause")
    for each in found:
        table.add_row(
            str(each.number),
            escape(each.request),
            f"{each.at_s:.1f}",
            f"{each.tokens:,}",
            f"{each.hit_tokens:,}",
            f"{each.avoidable_tokens:,}",
            each.parts[0].cause.value.replace("_", " ") if each.parts else "-",
        )
    console.print(table)
