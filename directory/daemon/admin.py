"""Answers to people: figures, the tree, explanations. Everything here only reads.

Owns how an answer is put together out of the directory, the sums and the sockets' counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final, NamedTuple

import structlog

from directory.core import limits
from directory.core.directory import Directory
from directory.core.errors import InternalError, TreecoredError
from directory.daemon.explaining import Explainer
from directory.daemon.recording import Recording
from directory.daemon.report import pool_report
from directory.daemon.tree_report import tree_report
from directory.protocol.admin import (
    AdminExplain,
    AdminReply,
    AdminReport,
    AdminRequest,
    AdminStats,
    AdminTree,
    StatsReport,
    TierReport,
)

LINE_CHARS_MAX: Final = 1_000
HOTTEST_MAX: Final = 100
OWN_GAUGES: Final = frozenset(
    {"daemon_sessions", "daemon_mover_pid", "daemon_breakers_open", "daemon_unmapping"}
)

log = structlog.get_logger("daemon")


class Facts(NamedTuple):
    """What answers are made of."""

    directory: Directory
    recording: Recording
    epoch: int
    now_us: int


def answer(request: AdminRequest, facts: Facts, own: Mapping[str, int]) -> AdminReply:
    """Answer a question. `own`: the daemon's own counters and gauges.

    Raises a typed error for a question that has no answer.
    """
    try:
        return _answer(request, facts, own)
    except TreecoredError:
        raise
    except Exception as error:
        # A question must never cost the daemon its life.
        log.error("a question has no answer", question=type(request).__name__, exc_info=error)
        raise InternalError(f"a defect in the answer: {type(error).__name__}: {error}") from error


def _answer(request: AdminRequest, facts: Facts, own: Mapping[str, int]) -> AdminReply:
    match request:
        case AdminStats():
            return stats_report(facts, own, hottest=request.hottest)
        case AdminTree():
            return tree_report(facts.directory, facts.recording, request)
        case AdminExplain():
            return Explainer(facts.directory, facts.recording, request).report()
        case _:
            return check_report(facts, own)


def check_report(facts: Facts, own: Mapping[str, int]) -> AdminReport:
    """Have the directory walk its state, and say what it found."""
    directory = facts.directory
    try:
        found = directory.check()
    except Exception as error:
        # A state so broken that it cannot be walked is a finding, not the end of the daemon.
        log.error("the directory cannot be walked", exc_info=error)
        found = [f"check: the state cannot be walked: {type(error).__name__}: {error}"]
    return AdminReport(
        facts.epoch,
        {**directory.figures(), **own},
        tuple(line[:LINE_CHARS_MAX] for line in found[: limits.VIOLATIONS_REPORTED_MAX]),
        tuple(pool_report(pool) for pool in directory.pools.values()),
        max(0, len(found) - limits.VIOLATIONS_REPORTED_MAX),
    )


def stats_report(facts: Facts, own: Mapping[str, int], *, hottest: int = 0) -> StatsReport:
    """Every figure of this moment."""
    directory, recording = facts.directory, facts.recording
    counters = dict(recording.past)
    for name, value in directory.counters.items():
        counters[name] = counters.get(name, 0) + value
    counters.update((name, value) for name, value in own.items() if name not in OWN_GAUGES)
    counters["daemon_ended_not_believed"] = recording.refused
    figures = directory.figures()
    gauges = {name: value for name, value in figures.items() if name not in directory.counters}
    gauges.update((name, value) for name, value in own.items() if name in OWN_GAUGES)
    sizes = tuple(
        (size, directory.slots.capacity(size), directory.slots.free_count(size))
        for size in directory.slots.page_sizes
    )
    return StatsReport(
        at_us=recording.wall_us(facts.now_us),
        started_us=recording.started_us,
        epoch=facts.epoch,
        version=software_version(),
        counters=dict(sorted(counters.items())),
        gauges=gauges,
        served=recording.sums.served(),
        pools=tuple(pool_report(pool) for pool in directory.pools.values()),
        host=TierReport(
            directory.slots.total_bytes, directory.host.pages, directory.host.locked_pages, sizes
        ),
        evicted=recording.sums.given_up(),
        histograms=recording.sums.histograms(),
        log=recording.log_report(),
        hottest=recording.hottest(min(hottest, HOTTEST_MAX)),
        causes=recording.missed(),
    )


@cache
def software_version() -> str:
    """What this daemon is. (To look it up reads files: a millisecond.)"""
    try:
        return version("treecored")
    except PackageNotFoundError:
        return "unknown"
