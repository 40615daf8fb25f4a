"""Rates out of reports: differences of sums over a stretch of time, and nothing else.

Owns the history of reports and the windows. A daemon that was restarted begins a new history: no
rate is ever below zero, and no ratio above one.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from directory.protocol.admin import ServedReport, StatsReport

WINDOWS_S: Final = (10, 60)
KEPT_S: Final = 65
NOTHING: Final = ServedReport("")


class Window(NamedTuple):
    """What happened in a stretch of time. `seconds`: its real length."""

    seconds: float
    served: dict[str, ServedReport]
    counters: dict[str, int]
    evicted: dict[str, int]

    def rate(self, name: str) -> float:
        """A counter's growth a second."""
        return self.counters.get(name, 0) / self.seconds if self.seconds else 0.0

    @property
    def requests(self) -> int:
        """Of all instances."""
        return sum(served.requests for served in self.served.values())


class History:
    """Reports of one daemon, oldest first."""

    def __init__(self) -> None:
        self._reports: deque[StatsReport] = deque()

    def add(self, report: StatsReport) -> None:
        """Take in a newer report. One of another epoch begins anew."""
        last = self._reports[-1] if self._reports else None
        if last is not None and (last.epoch, last.started_us) != (report.epoch, report.started_us):
            self._reports.clear()
        self._reports.append(report)
        while report.at_us - self._reports[0].at_us > KEPT_S * 1_000_000:
            self._reports.popleft()

    @property
    def last(self) -> StatsReport:
        """The newest one."""
        return self._reports[-1]

    def window(self, seconds: float | None) -> Window:
        """What happened in the last `seconds`, as far as it was watched; None: ever."""
        last = self.last
        if seconds is None:
            return _between(None, last)
        first = self._reports[0]
        for report in self._reports:
            if last.at_us - report.at_us >= seconds * 1_000_000:
                first = report
        return _between(first, last)


def _between(first: StatsReport | None, last: StatsReport) -> Window:
    before = {served.instance: served for served in first.served} if first else {}
    counters = first.counters if first else {}
    evicted: dict[str, int] = {}
    for sign, report in ((1, last), (-1, first)):
        for line in report.evicted if report else ():
            evicted[line.tier] = evicted.get(line.tier, 0) + sign * line.pages
    began_us = first.at_us if first else last.started_us
    return Window(
        max(0, last.at_us - began_us) / 1e6,
        {served.instance: _minus(served, before.get(served.instance)) for served in last.served},
        {name: value - counters.get(name, 0) for name, value in last.counters.items()},
        evicted,
    )


def _minus(served: ServedReport, before: ServedReport | None) -> ServedReport:
    old = before or NOTHING
    own, host, peer, store = (now - was for now, was in zip(served.hit, old.hit, strict=True))
    numbers = {
        name: getattr(served, name) - getattr(old, name)
        for name in ServedReport.__struct_fields__
        if name not in ("instance", "hit")
    }
    return ServedReport(served.instance, hit=(own, host, peer, store), **numbers)
