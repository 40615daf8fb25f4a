"""`treecored explain FILE REQUEST`: how far a request hit, from where, and why it ended there.

Owns the options and the words on the terminal. It reads records; only what is to be known of this
moment (`--tokens`, explain_now.py) and where a running daemon's log is are asked of the daemon.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

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
from directory.analytics.log import log_files
from directory.analytics.traces import SourceError
from directory.cli.asking import Asking, NoAnswer, daemon_options, folder_of
from directory.cli.explain_now import BadTokens, namespace_of, read_tokens
from directory.cli.explain_now import show as show_now
from directory.cli.reading import capacity_text, file_options, page_bytes_of, source_of
from directory.cli.runs import BAD_INPUT, FAILED, leave, print_json
from directory.core.namespace import NamespaceKey
from directory.daemon.config import ConfigError
from directory.protocol.admin import AdminExplain, AdminStats, ExplainReport, StatsReport

DEADLINE_S: Final = 10.0


@click.command()
@click.argument("file", required=False)
@click.argument("request", required=False)
@file_options
@daemon_options
@click.option(
    "--tokens",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Token ids in a file: ask the running daemon how far they would match now, and why.",
)
@click.option(
    "--instance", default="", help="--tokens: for this instance.  [default: for a new one]"
)
@click.option("--salt", help="--tokens: the cache salt.  [default: none]")
@click.option("--extra-key", help="--tokens: the extra key.  [default: none]")
@click.option("--weight-epoch", type=click.IntRange(0), default=0, help="--tokens: the weights'.")
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
    file: str | None,
    request: str | None,
    config: Path | None,
    runtime_dir: str | None,
    tokens: Path | None,
    instance: str,
    salt: str | None,
    extra_key: str | None,
    weight_epoch: int,
    worst: int,
    capacity: str | None,
    bytes_per_token: int | None,
    as_json: bool,
    **reading: Any,
) -> None:
    """Explain why REQUEST of FILE was no hit any further.

    REQUEST is a request id, or #N for the N-th request that counts. Without it, the requests that
    lost most are listed. FILE is an access log or a public trace; without it (REQUEST alone, or
    nothing) it is the access log of the running daemon. With --tokens the running daemon says how
    far a prompt would match now.

    Exits with 0, with 1 when there is no such request, with 2 when FILE is no good or no daemon
    answered.
    """
    if tokens is not None:
        key = namespace_of(salt, extra_key, weight_epoch)
        _explain_now(config, runtime_dir, tokens, key, instance, as_json=as_json)
        return
    path = Path(file) if file is not None else None
    if path is None or (request is None and not path.exists() and not _looks_like_path(path)):
        request, path = file, _log_of_daemon(config, runtime_dir)
    source = source_of(file=path, **reading)
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


def _looks_like_path(path: Path) -> bool:
    """Whether a word that is no file was meant to be one: then it says so that it is missing."""
    return len(path.parts) > 1 or bool(path.suffix)


def _log_of_daemon(config: Path | None, runtime_dir: str | None) -> Path:
    try:
        with Asking(folder_of(config, runtime_dir), DEADLINE_S, "treecored explain") as daemon:
            report = daemon.ask(AdminStats(), StatsReport)
    except (ConfigError, NoAnswer) as error:
        leave(BAD_INPUT, f"without FILE, the running daemon's access log is read: {error}")
    if report.log is None:
        leave(BAD_INPUT, "the daemon writes no access log: `treecored serve --access-log`")
    folder = Path(report.log.folder)
    if not log_files(folder):
        leave(BAD_INPUT, f"the daemon's access log in {folder} has no request yet")
    return folder


def _explain_now(
    config: Path | None,
    runtime_dir: str | None,
    tokens: Path,
    key: NamespaceKey,
    instance: str,
    *,
    as_json: bool,
) -> None:
    try:
        question = AdminExplain(read_tokens(tokens), key, instance)
        with Asking(folder_of(config, runtime_dir), DEADLINE_S, "treecored explain") as daemon:
            report = daemon.ask(question, ExplainReport)
    except (BadTokens, ConfigError, NoAnswer) as error:
        leave(BAD_INPUT, str(error))
    except OSError as error:
        leave(BAD_INPUT, f"{tokens}: {error.strerror}")
    if as_json:
        print_json(report)
    else:
        show_now(report, Console(highlight=False))


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
