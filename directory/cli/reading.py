"""What `report`, `simulate` and `explain` have in common: naming the file and how to read it.

Owns the options that say how blocks become pages and how conversations are played, and the form
of a capacity on the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from directory.analytics.conversations import GAP_S_MAX, USERS, LoopOptions
from directory.analytics.record import Access, Room
from directory.analytics.source import KINDS, Source
from directory.analytics.traces import BlockOptions, SourceError
from directory.cli.runs import BAD_INPUT, leave

UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
CAPACITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?B)", re.IGNORECASE)

Command = TypeVar("Command", bound=Callable[..., Any])


def capacity_text(
    context: click.Context, option: click.Parameter, value: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Check the form of a capacity: pages (a bare number) or a size with a unit.

    It stays text until the size of a page is known.
    """
    for text in (value,) if isinstance(value, str) else value or ():
        pages = text.isascii() and text.isdigit() and int(text) > 0
        if not pages and not CAPACITY.fullmatch(text):
            raise click.BadParameter(
                f"{text!r} is neither a number of pages nor a size such as 64GiB",
                context,
                option,
            )
    return value


def source_options(command: Command) -> Command:
    """Add FILE and the options that say how it is read."""
    return file_options(click.argument("file", type=click.Path(path_type=Path))(command))


def file_options(command: Command) -> Command:
    """Add the options that say how a file is read."""
    for option in reversed(
        (
            click.option(
                "--format",
                "kind",
                type=click.Choice(KINDS),
                help="What FILE is.  [default: told by its content]",
            ),
            click.option("--limit", type=click.IntRange(1), help="Only the first N requests."),
            click.option(
                "--block-tokens",
                type=click.IntRange(1, 1 << 16),
                help="Tokens of a trace's block.  [default: 512 Mooncake, 16 Bailian]",
            ),
            click.option(
                "--every-block",
                is_flag=True,
                help="Count as studies of block ids do: a partial last block can be a hit. A "
                "cache of whole pages cannot reach that.",
            ),
            click.option(
                "--users",
                type=click.IntRange(1, 1_000_000),
                default=USERS,
                show_default=True,
                help="kv-cache-tester: conversations at once, in a closed loop.",
            ),
            click.option(
                "--gap-max",
                type=click.FloatRange(0),
                default=GAP_S_MAX,
                show_default=True,
                help="kv-cache-tester: seconds between two requests of a conversation at most.",
            ),
            click.option(
                "--seed",
                type=int,
                default=0,
                show_default=True,
                help="kv-cache-tester: the order in which conversations are taken.",
            ),
        )
    ):
        command = option(command)
    return command


def source_of(
    file: Path,
    kind: Any,
    limit: int | None,
    block_tokens: int | None,
    every_block: bool,
    users: int,
    gap_max: float,
    seed: int,
) -> Source:
    """The source that the options name; leaves with a sentence when there is none."""
    try:
        return Source(
            file,
            kind=kind,
            options=BlockOptions(block_tokens, every_block, limit),
            loop=LoopOptions(users, gap_max, seed),
        )
    except SourceError as error:
        leave(BAD_INPUT, str(error))


def page_bytes_of(
    source: Source, wanted: str | None, bytes_per_token: int | None
) -> tuple[int | None, int | None]:
    """A capacity in pages and the bytes of a page, each None where nothing says it.

    Reads the source as far as its first request for the size of a page. Raises `SourceError`.
    """
    if wanted is None:
        return None, None
    sized = CAPACITY.fullmatch(wanted)
    if sized is None:
        return int(wanted), None
    page_bytes = None
    for frame in source.frames():
        if isinstance(frame, Room):
            page_bytes = frame.page_bytes
        if isinstance(frame, Access):
            if bytes_per_token is not None:
                page_bytes = bytes_per_token * frame.page_tokens
            break
    if page_bytes is None:
        leave(BAD_INPUT, f"a capacity of {wanted} needs --bytes-per-token: the file has no sizes")
    nbytes = float(sized[1]) * UNITS[sized[2].upper()]
    return max(1, int(nbytes / page_bytes)), page_bytes
