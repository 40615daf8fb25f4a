"""`treecored doctor`: does this machine have what a daemon needs, and if not, what to do.

Owns the options, the table and the exit status. It changes nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from directory.cli.asking import daemon_options
from directory.cli.doctor_checks import Line, judge
from directory.cli.doctor_facts import Facts, gather
from directory.cli.runs import print_json
from directory.daemon.config import ConfigError, Settings, load_settings

EXIT_PROBLEM: Final = 1
STYLES: Final = {"ok": "green", "note": "yellow", "problem": "bold red"}


class Diagnosis(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    problems: int
    lines: list[Line]
    facts: Facts


@click.command()
@daemon_options
@click.option("--host-tier", help='Judge for a host tier of this size, such as "64GiB".')
@click.option("--device", help='Judge for this device: "cpu", or "cuda:" and a UUID.')
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def doctor(
    config: Path | None,
    runtime_dir: str | None,
    host_tier: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Look whether this machine has what a daemon needs; each line is ok, or says what to do.

    Settings come from where `serve` has them. Run it where the engines run, too: their environment
    counts (SGLang's version, the allocator's settings, limits).

    Exits with 0, or with 1 when there is a problem.
    """
    flags = {"runtime_dir": runtime_dir, "host_tier": host_tier, "device": device}
    problem = ""
    try:
        settings = load_settings(config, flags)
    except ConfigError as error:
        settings, problem = Settings.model_construct(), str(error)
    facts = gather(
        Path(settings.runtime_dir),
        device=str(settings.device),
        host_tier=int(settings.host_tier),
        settings_problem=problem,
    )
    lines = judge(facts)
    problems = sum(line.state == "problem" for line in lines)
    if as_json:
        print_json(Diagnosis(problems, lines, facts))
    else:
        show(lines, Console(highlight=False))
    sys.exit(EXIT_PROBLEM if problems else 0)


def show(lines: list[Line], console: Console) -> None:
    """A line a finding, and its cure beneath."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        style = STYLES[line.state]
        text = escape(line.text)
        if line.cure:
            text += f"\n[dim]{escape(line.cure)}[/]"
        table.add_row(f"[{style}]{line.state}[/]", line.topic, text)
    console.print(table)
    count = sum(line.state == "problem" for line in lines)
    if count:
        console.print(f"{count} problem{'' if count == 1 else 's'}", style="bold red")
    else:
        console.print("no problems", style="bold green")
