"""Tables for people: what each scheduler did, and what the whole run came to.

Owns the wording and layout, for terminals from 80 columns up. It must never compute a figure that
`tally` does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from directory.cli.tally import Outcome, Tally, percentiles

COLUMNS_PER_TABLE = 2
KIB = 1024

Figure = tuple[str, Callable[[Tally], str]]


def size(nbytes: float) -> str:
    """Bytes for people: `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < KIB or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= KIB
    raise AssertionError("unreachable")


def share(part: int, whole: int) -> str:
    """A whole percentage: `37 %`."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _tokens(part: int, tally: Tally) -> str:
    """A number of prompt tokens and its share of them."""
    share_of_all = 100 * part / tally.prompt_tokens if tally.prompt_tokens else 0.0
    return f"{part:,} {share_of_all:3.0f}%"


FIGURES: tuple[Figure, ...] = (
    ("requests", lambda t: f"{t.requests:,}"),
    ("prompt tokens", lambda t: f"{t.prompt_tokens:,}"),
    ("  hit, own pool", lambda t: _tokens(t.hit_tokens.own, t)),
    ("  hit, host tier", lambda t: _tokens(t.hit_tokens.host, t)),
    ("  hit, other pool", lambda t: _tokens(t.hit_tokens.peer, t)),
    ("  missed", lambda t: _tokens(t.missed_tokens, t)),
)


def run_tables(
    outcome: Outcome, modes: Sequence[str], beside: Outcome | None = None
) -> list[Table]:
    """One column a scheduler, then all together, then a private run beside it if there is one.

    More schedulers than a narrow terminal has room for are spread over several tables; the last
    one has the sums.
    """
    count = len(outcome.tallies)
    groups = [
        range(first, min(first + COLUMNS_PER_TABLE, count))
        for first in range(0, count, COLUMNS_PER_TABLE)
    ]
    tables = []
    for group in groups:
        last = group[-1] == count - 1
        tables.append(_table(outcome, modes, group, beside if last else None, with_sums=last))
    return tables


def _table(
    outcome: Outcome, modes: Sequence[str], group: range, beside: Outcome | None, *, with_sums: bool
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for number in group:
        table.add_column(f"sched. {number}\n{modes[number]}", justify="right", no_wrap=True)
    columns = [outcome.tallies[number] for number in group]
    rtts = [percentiles(outcome.summaries[number].rtt_us) for number in group]
    sums: list[Outcome] = []
    if with_sums:
        sums.append(outcome)
        heading = "all" if beside is None else "all\nsharing"
        table.add_column(Text(heading, style="bold"), justify="right", no_wrap=True)
        if beside is not None:
            sums.append(beside)
            table.add_column("all\nprivate", justify="right", no_wrap=True)
    columns += [run.total for run in sums]
    rtts += [run.rtt_us for run in sums]
    for name, figure in FIGURES:
        table.add_row(name, *(figure(tally) for tally in columns))
    moved = [outcome.bytes_moved_by(number) for number in group]
    moved += [run.bytes_moved for run in sums]
    table.add_section()
    table.add_row("host tier to pool", *(size(m.host_to_pool) for m in moved))
    table.add_row("pool to pool", *(size(m.pool_to_pool) for m in moved))
    backed_up = ("" if m.pool_to_host is None else size(m.pool_to_host) for m in moved)
    table.add_row("pool to host tier", *backed_up)
    table.add_section()
    table.add_row("pages verified", *(f"{t.verified:,}" for t in columns))
    table.add_row("pages wrong", *(f"{t.wrong:,}" for t in columns))
    table.add_row("round trip p50, us", *(_microseconds(rtt.p50) for rtt in rtts))
    table.add_row("round trip p99, us", *(_microseconds(rtt.p99) for rtt in rtts))
    return table


def _microseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def saving(shared: Outcome, private: Outcome) -> str:
    """The one sentence that says what sharing saved."""
    tokens = shared.total.prompt_tokens
    saved = private.total.missed_tokens - shared.total.missed_tokens
    if saved <= 0:
        return f"Sharing saved nothing here: {shared.total.missed_tokens:,} tokens were computed."
    return (
        f"Sharing saved computing {saved:,} of {tokens:,} prompt tokens: "
        f"{share(shared.total.missed_tokens, tokens)} had to be computed instead of "
        f"{share(private.total.missed_tokens, tokens)} with private caches."
    )
