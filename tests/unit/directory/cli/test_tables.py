"""Tables show what was counted, within 80 columns."""

import pytest
from rich.console import Console

from directory.cli.tables import run_tables, saving, size
from directory.cli.tally import Outcome, Tally
from scheduler_shim.worker_messages import Finished, Summary


def outcome(schedulers: int, *, peer: int = 5_000) -> Outcome:
    tallies, summaries = [], []
    for number in range(schedulers):
        tally = Tally(16)
        tally.add(Finished(number, 1_234_567, 20_000, 9_000, peer, 34_000, 0, 0.1))
        tallies.append(tally)
        rtt = (150.0 + number, 12_345.0)
        counters, daemon = {"bytes_restored_host": 1 << 30}, {"bytes_backed_up": 3 << 20}
        name = f"scheduler-{number}"
        summaries.append(Summary(name, "mirrored", rtt, counters, daemon, ()))
    return Outcome(tallies, summaries, 2.0)


def rendered(shared: Outcome, private: Outcome | None) -> str:
    console = Console(width=80, record=True, file=None, force_terminal=False, quiet=False)
    with console.capture() as capture:
        for table in run_tables(shared, ["mirrored"] * len(shared.tallies), private):
            console.print(table)
    return capture.get()


@pytest.mark.parametrize("schedulers", [1, 2, 3, 7])
def test_every_figure_fits_into_80_columns(schedulers: int) -> None:
    text = rendered(outcome(schedulers), outcome(schedulers, peer=0))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    for number in range(schedulers):
        assert f"sched. {number}" in text
    assert "1,234,567" in text
    assert f"{schedulers * 1_234_567:,}" in text
    assert "320,000  26%" in text
    assert "12,345" in text
    assert "1.0 GiB" in text
    assert "3.0 MiB" in text


def test_a_run_alone_has_no_private_column() -> None:
    assert "private" not in rendered(outcome(2), None)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (1 << 42, "4096.0 GiB"),
    ],
)
def test_sizes_are_for_people(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_one_sentence_says_what_sharing_saved() -> None:
    assert saving(outcome(2), outcome(2, peer=0)) == (
        "Sharing saved computing 160,000 of 2,469,134 prompt tokens: 56 % had to be computed "
        "instead of 62 % with private caches."
    )


def test_sharing_that_saved_nothing_is_not_praised() -> None:
    assert saving(outcome(2, peer=0), outcome(2)).startswith("Sharing saved nothing here")
