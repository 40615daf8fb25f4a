"""`treecored purge`: remove host tiers that dead daemons have left in memory.

Owns the list, the question (`--yes`) and the exit statuses (0 done or nothing to do, 1 something
stayed, 2 usage). It must never remove what it has not listed, nothing without `--yes`, and what is
kept for another runtime folder only with `--all`: a kept tier is what the next daemon starts warm
with.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from directory.cli.tables import size
from directory.daemon.config import ConfigError, load_settings
from directory.daemon.leftovers import Leftover, find, remove

EXIT_DONE, EXIT_STAYED, EXIT_USAGE = 0, 1, 2


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="TOML file of settings (or TREECORED_CONFIG) that names runtime_dir and host_dir.",
)
@click.option(
    "--runtime-dir",
    help="List and remove the tier of this runtime folder alone. "
    "[$XDG_RUNTIME_DIR/treecored, else $TMPDIR/treecored-UID, and every orphaned tier]",
)
@click.option("--host-dir", help="The tier in this folder, too.")
@click.option("--all", "all_", is_flag=True, help="Those kept for other runtime folders, too.")
@click.option("--yes", is_flag=True, help="Remove them; without it they are only listed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def purge(
    config: Path | None,
    runtime_dir: str | None,
    host_dir: str | None,
    all_: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove host tiers that daemons of yours have left in memory.

    Lists every tier: in use, kept for the next daemon of its runtime folder, or orphaned where that
    folder is gone. With --yes this runtime folder's and the orphaned ones are removed, and with
    --all as well those of other folders, whose daemons may be between two starts; never one that a
    daemon uses. A daemon that is started after that begins with an empty host tier.
    """
    if all_ and runtime_dir is not None:
        raise click.UsageError("--all and --runtime-dir exclude one another")
    try:
        settings = load_settings(config, {"runtime_dir": runtime_dir, "host_dir": host_dir})
    except ConfigError as error:
        click.echo(f"treecored purge: {error}", err=True)
        sys.exit(EXIT_USAGE)
    host_dirs = [settings.host_dir] if settings.host_dir is not None else []
    found = find([settings.runtime_dir], host_dirs, all_=runtime_dir is None)
    mine = {leftover.path for leftover in find([settings.runtime_dir], host_dirs, all_=False)}
    chosen = [tier for tier in found if all_ or tier.orphan or tier.path in mine]
    removed = [leftover for leftover in chosen if yes and remove(leftover)]
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_rows(found, removed))).decode())
    else:
        _show(found, chosen, removed, yes)
    stayed = yes and any(not tier.holder and tier not in removed for tier in chosen)
    sys.exit(EXIT_STAYED if stayed else EXIT_DONE)


def _state(leftover: Leftover, removed: bool) -> str:
    if removed:
        return "removed"
    if leftover.holder:
        return f"in use, pid {leftover.holder}"
    return "orphaned" if leftover.orphan else "kept"


def _rows(found: list[Leftover], removed: list[Leftover]) -> dict[str, object]:
    return {
        "tiers": [
            {
                "path": str(tier.path),
                "runtime_dir": tier.owner,
                "bytes": tier.nbytes,
                "files": tier.files,
                "holder": tier.holder,
                "orphan": tier.orphan,
                "removed": tier in removed,
            }
            for tier in found
        ],
        "bytes_removed": sum(tier.nbytes for tier in removed),
    }


def _show(
    found: list[Leftover], chosen: list[Leftover], removed: list[Leftover], yes: bool
) -> None:
    console = Console()
    if not found:
        console.print("no host tier is kept")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("folder", overflow="fold")
    table.add_column("of the daemon in", overflow="fold")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for tier in found:
        state = _state(tier, tier in removed)
        table.add_row(escape(str(tier.path)), escape(tier.owner), size(tier.nbytes), state)
    console.print(table)
    if yes:
        console.print(f"{size(sum(tier.nbytes for tier in removed))} removed")
    elif nbytes := _unused(chosen):
        console.print(f"nothing was removed; the same with --yes frees {size(nbytes)}")
    else:
        console.print("nothing was removed")
    if nbytes := _unused([tier for tier in found if tier not in chosen]):
        console.print(f"{size(nbytes)} are kept for other runtime folders: --all takes those, too")


def _unused(tiers: list[Leftover]) -> int:
    """Bytes of those that no daemon uses."""
    return sum(tier.nbytes for tier in tiers if not tier.holder)
