"""`treecored serve`: run the daemon in the foreground.

Owns the flags and their help. Decides nothing: the flags become settings, the exit status is the
daemon's.
"""

import sys
from pathlib import Path

import click

from directory.daemon.config import ConfigError, load_settings
from directory.daemon.main import run

EXIT_USAGE = 2


@click.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="TOML file of settings (or TREECORED_CONFIG). TREECORED_* variables and flags override.",
)
@click.option(
    "--runtime-dir",
    help="Folder of the sockets, mode 0700. [$XDG_RUNTIME_DIR/treecored]",
)
@click.option("--host-tier", help='Memory of the host tier, such as "64GiB"; 0: none. [4GiB]')
@click.option("--segment", help="Piece of the host tier given to one page size. [64MiB]")
@click.option("--device", help="Kind of device that the mover drives. [cpu]")
@click.option("--log-level", help="debug, info, warning or error. [info]")
@click.option("--log-format", help="console or json. [console]")
@click.option("--sessions-max", help="Scheduler processes at once. [256]")
@click.option(
    "--ready-fd",
    type=click.IntRange(min=0),
    default=None,
    help="Inherited descriptor that gets one byte once the daemon serves.",
)
def serve(config: Path | None, ready_fd: int | None, **flags: str | None) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Settings come from a TOML file, then TREECORED_* variables, then flags; the later override.
    """
    try:
        settings = load_settings(config, flags)
    except ConfigError as error:
        click.echo(f"treecored serve: {error}", err=True)
        sys.exit(EXIT_USAGE)
    sys.exit(run(settings, -1 if ready_fd is None else ready_fd))
