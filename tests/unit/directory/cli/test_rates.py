"""Rates and the screen of `top`: differences of sums, never below zero, readable at 80 columns."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from directory.cli.rates import History
from directory.cli.stats import ratios, show, total
from directory.cli.top_screen import screen
from directory.protocol.admin import (
    EvictedReport,
    HotPrefix,
    LogReport,
    PoolReport,
    ServedReport,
    StatsReport,
    TierReport,
)

SECOND = 1_000_000


def report(at_s: float, requests: int = 0, *, epoch: int = 1, probes: int = 0) -> StatsReport:
    """A daemon's figures when so many requests of 100 tokens with 40 hit have ended."""
    served = ServedReport(
        "replica-0",
        requests=requests,
        probes=probes,
        prompt_tokens=100 * requests,
        hit=(30 * requests, 10 * requests, 0, 0),
    )
    return StatsReport(
        at_us=int(at_s * SECOND),
        started_us=0,
        epoch=epoch,
        version="0.1.0",
        counters={"bytes_restored": 1 << 20 if requests else 0},
        gauges={"nodes": 3},
        served=(served,),
        pools=(
            PoolReport(1, "replica-0", 1, "mirrored", "live", 1, 1, 20_000, 15_000, 7_000, 9, 1),
        ),
        host=TierReport(64 << 30, 90_000, 12, ((1 << 20, 100_000, 10_000),)),
        evicted=(EvictedReport("device", "capacity", 5 * requests),),
        log=LogReport("/var/log/treecored", 10, 1_000, 0, 0),
        hottest=(HotPrefix("00112233aabbccdd", "6f71a912dc6b4419", 128, 4_321),),
    )


def watched(*reports: StatsReport) -> History:
    history = History()
    for each in reports:
        history.add(each)
    return history


def printed(history: History, columns: int) -> str:
    console = Console(file=io.StringIO(), width=columns, force_terminal=False, highlight=False)
    console.print(screen(history))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("\u00a0", " ")


def test_a_window_is_the_difference_of_its_ends() -> None:
    history = watched(report(0, 0), report(30, 100), report(60, 160))
    short, minute, ever = (history.window(seconds) for seconds in (10, 60, None))
    assert (short.seconds, short.requests) == (30, 60)
    assert (minute.seconds, minute.requests) == (60, 160)
    assert ever.requests == 160
    assert short.evicted == {"device": 300}


def test_what_is_older_than_any_window_is_forgotten() -> None:
    history = watched(*(report(second, second) for second in range(300)))
    assert history.window(60).seconds == 60
    assert history.window(60).requests == 60


def test_a_daemon_that_was_started_anew_gives_no_negative_rate_f117() -> None:
    history = watched(report(0, 500), report(10, 600), report(20, 3, epoch=2))
    for seconds in (10, 60, None):
        window = history.window(seconds)
        assert window.requests >= 0
        assert min(window.evicted.values()) >= 0
    assert history.window(None).requests == 3


def test_a_stretch_of_nothing_but_probes_has_no_ratio_rather_than_a_bad_one_f117() -> None:
    history = watched(report(0, 500), report(30, 500, probes=100))
    row = next(line for line in printed(history, 80).splitlines() if "replica-0" in line)
    name, rate, short, minute, ever, *_ = row.split()
    assert (name, rate, short, minute, ever) == ("replica-0", "0.0", "-", "-", "40.0")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_screen_fits_and_says_what_matters(columns: int) -> None:
    text = printed(watched(report(0, 0), report(60, 160)), columns)
    assert max(map(len, text.splitlines())) <= columns
    for word in ("replica-0", "40.0 %", "30 %", "host tier", "100 k", "90 k", "hottest", "4,321"):
        assert word in text
    assert "…" not in text


def test_the_sum_over_instances_is_that_of_its_parts() -> None:
    one = report(1, 10)
    second = msgspec.structs.replace(one.served[0], instance="b", requests=5)
    both = total(msgspec.structs.replace(one, served=(one.served[0], second)))
    assert (both.requests, both.prompt_tokens, both.hit) == (15, 2_000, (600, 200, 0, 0))
    assert ratios(both).token_hit_ratio == 0.4
    assert ratios(ServedReport("nothing")).token_hit_ratio == 0.0


def test_a_pool_that_has_ended_is_told_from_the_live_one_of_its_instance() -> None:
    one = report(60, 160)
    dead = msgspec.structs.replace(one.pools[0], pool=2, phase="closing")
    both = msgspec.structs.replace(one, pools=(dead, *one.pools))
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(both, console)
    assert isinstance(console.file, io.StringIO)
    for text in (console.file.getvalue(), printed(watched(both), 80)):
        assert text.count("replica-0 (closing)") == 1
    assert dead.name == "replica-0 (closing)"
    assert one.pools[0].name == "replica-0"


def test_stats_fit_80_columns_and_name_the_log() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(report(60, 160), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue().replace("\u00a0", " ")
    assert "/var/log/treecored" in text
    assert "pages evicted: device, capacity" in text
    assert all(len(line) <= 80 for line in text.splitlines() if "access log" not in line)
