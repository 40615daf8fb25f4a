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
    help="Folder of the sockets, mode 0700. "
    "[$XDG_RUNTIME_DIR/treecored, else $TMPDIR/treecored-UID]",
)
@click.option(
    "--host-tier",
    help='Memory of the host tier, such as "64GiB"; 0: none. With a GPU all of it is pinned at the '
    "start. [4GiB]",
)
@click.option("--segment", help="Piece of the host tier given to one page size. [64MiB]")
@click.option(
    "--host-keep/--no-host-keep",
    default=None,
    help="Keep the host tier for the next daemon when this one ends, however it does. [keep]",
)
@click.option(
    "--host-dir",
    help="Folder (0700, in memory) where it is kept. [in the runtime folder, or shared memory]",
)
@click.option(
    "--cold", is_flag=True, default=None, help="Begin with an empty host tier all the same."
)
@click.option(
    "--host-checksums",
    help="Checksums of host pages: off, kept (for the scrubber) or verified (at every load). [off]",
)
@click.option("--host-scrub", help='Compare so much of the host tier a second: "64MiB". [0]')
@click.option(
    "--device",
    help='What the mover drives: "cpu", or "cuda:" and the UUID of a GPU as nvidia-smi -L names '
    "it, never an ordinal; several with commas. Engines on a GPU share nothing through a daemon "
    "that does not drive it. [cpu]",
)
@click.option(
    "--host-unpinned/--host-pinned",
    default=None,
    help="Leave the host tier unregistered with the GPU's driver: slower copies, but no locked "
    "memory. [pinned]",
)
@click.option(
    "--copy-rate",
    help='Restores, backups and copies between pools take at most so much a second, each: "20GiB". '
    "[no limit]",
)
@click.option(
    "--readers-dir",
    help="Folder (mode 0750): other users of its group may ask there, with `--runtime-dir` of "
    "`stats`, `top`, `tree` and `explain`. [none]",
)
@click.option(
    "--access-log",
    metavar="off|on|DIR",
    help="Write a record of every request, without its tokens, in the runtime folder or DIR. Where "
    "more end than can be written in half of the daemon's time, records are dropped and counted. "
    "[off]",
)
@click.option(
    "--access-log-size", help="What the access log may take; older files go. [64MiB, in DIR 1GiB]"
)
@click.option(
    "--metrics",
    metavar="127.0.0.1:PORT|FILE",
    help="Counters for Prometheus over HTTP, or in a file (needs the extra `metrics`).",
)
@click.option(
    "--kv-events",
    metavar="tcp://127.0.0.1:PORT",
    help="Publish KV events of the first scheduler here, of the others three ports on. [off]",
)
@click.option("--kv-events-form", help="map (SGLang since 0.5.20) or array (before). [map]")
@click.option(
    "--kv-events-union",
    metavar="tcp://127.0.0.1:PORT",
    help="One more stream of all schedulers together, for viewers, never for a router. [off]",
)
@click.option(
    "--kv-events-detokenizer",
    metavar="URL",
    help="Where the streams' /detokenize is handed on to, such as an engine's. [off]",
)
@click.option("--log-level", help="debug, info, warning or error. [info]")
@click.option("--log-format", help="console or json. [console]")
@click.option("--sessions-max", help="Scheduler processes at once. [256]")
@click.option(
    "--look-us",
    help="Microseconds of looking for the next question before sleeping, while they come close "
    "upon one another; more wants a core of its own. [50]",
)
@click.option(
    "--mover-silence-ms-max",
    help="Milliseconds after which a mover that has copies and says nothing is replaced. [1200]",
)
@click.option(
    "--mover-start-ms-max",
    help="The same while one starts, or maps memory: pinning a large host tier takes long. [60000]",
)
@click.option(
    "--ready-fd",
    type=click.IntRange(min=0),
    default=None,
    help="Inherited descriptor that gets one byte once the daemon serves.",
)
def serve(config: Path | None, ready_fd: int | None, **flags: object) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Settings come from a TOML file, then TREECORED_* variables, then flags; the later override.
    """
    try:
        settings = load_settings(config, flags)
    except ConfigError as error:
        click.echo(f"treecored serve: {error}", err=True)
        sys.exit(EXIT_USAGE)
    sys.exit(run(settings, -1 if ready_fd is None else ready_fd))
