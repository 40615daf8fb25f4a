"""`treecored tree`: the radix tree of a running daemon as text.

Owns the filters' words and the drawing. Pages are named by digests: no token of a prompt is shown.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from directory.analytics.words import named, size
from directory.cli.asking import EXIT_NO_ANSWER, Asking, NoAnswer, daemon_options, folder_of
from directory.cli.runs import print_json
from directory.daemon.config import ConfigError
from directory.protocol.admin import AdminTree, NodeReport, SpaceReport, TreeReport

DEADLINE_S: Final = 30.0
DIGEST_CHARS: Final = 8
FIELDS_SHOWN: Final = ("model", "weight_epoch", "cache_salt", "extra_key", "adapter")


@click.command()
@daemon_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a drawing.")
@click.option(
    "--nodes",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Draw so many nodes at most: those with most pages in and below them.",
)
@click.option(
    "--min-pages",
    type=click.IntRange(0),
    default=0,
    help="Leave out subtrees with fewer pages.",
)
@click.option("--depth", type=click.IntRange(0), default=0, help="Generations of nodes; 0: all.")
@click.option("--instance", default="", help="Only what the pool of this instance has.")
@click.option("--namespace", default="", help="Only this namespace (16 hex digits).")
def tree(
    config: Path | None,
    runtime_dir: str | None,
    as_json: bool,
    nodes: int,
    min_pages: int,
    depth: int,
    instance: str,
    namespace: str,
) -> None:
    """Draw the running daemon's tree: pages, who has them, who holds them, when used last.

    \b
    128 pages 9f3c01aa  a +2 ~3, host ~3   (+4,000 below)
    says: 128 pages, the last one's digest begins with 9f3c01aa; instance a has them, two leases
    hold them, its last use was 3 uses of that pool ago; the host tier has them, too.

    Exits with 0, or with 2 when no daemon answered.
    """
    question = AdminTree(nodes, min_pages, depth, instance, namespace)
    try:
        with Asking(folder_of(config, runtime_dir), DEADLINE_S, "treecored tree") as daemon:
            report = daemon.ask(question, TreeReport)
    except (ConfigError, NoAnswer) as error:
        click.echo(f"treecored tree: {error}", err=True)
        sys.exit(EXIT_NO_ANSWER)
    if as_json:
        print_json(report)
    else:
        show(report, Console(highlight=False))


def show(report: TreeReport, console: Console) -> None:
    """Each namespace with its nodes."""
    for space in report.spaces:
        console.print(draw(space))
    if not report.spaces:
        console.print("The tree has nothing that fits." if report.nodes else "The tree is empty.")
    elif report.nodes_left_out:
        console.print(f"{named(report.nodes_left_out, 'node')} not drawn")


def draw(space: SpaceReport) -> Tree:
    """One namespace."""
    fields = ", ".join(
        f"{name} {space.fields[name]!r}" for name in FIELDS_SHOWN if name in space.fields
    )
    root = Tree(
        f"[bold]namespace {space.namespace}[/] ({escape(fields)}): {named(space.pages, 'page')} "
        f"of {space.page_tokens} tokens, {size(space.pages * space.page_bytes)}",
        guide_style="dim",
    )
    branches = {0: root}
    for node in space.nodes:
        above = branches.get(node.parent, root)
        branches[node.node] = above.add(line(node))
    return root


def line(node: NodeReport) -> str:
    """A node in one line."""
    places = ", ".join(
        escape(place)
        + (f" {state}" if state != "resident" else "")
        + (f" +{locks}" if locks else "")
        + f" ~{age}"
        for place, state, locks, age in node.places
    )
    below = f"   (+{node.below:,} below)" if node.below else ""
    digest = node.digest[:DIGEST_CHARS]
    return f"{named(node.pages, 'page')} [dim]{digest}[/]  {places or 'nowhere'}{below}"
