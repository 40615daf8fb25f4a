"""What the daemon counts of requests, evictions and durations: plain numbers that only ever grow.

Owns the sums. It knows no clock, no socket and no file, and nothing here is overwritten or goes
back: whoever wants a rate takes the difference of two moments. Retries, probes and recomputations
stand beside the sums and in none of them, so that a ratio of sums lies between 0 and 1 whatever
was restarted in between.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from directory.protocol.admin import EvictedReport, HistogramReport, ServedReport
from directory.protocol.ended import Ended

INSTANCES_MAX: Final = 1_024
OTHERS: Final = "(others)"
"""What further instances are counted under, so that names cannot grow for ever."""
LATENCY_BOUNDS_US: Final = (
    *(50, 100, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600),
    *(51_200, 102_400, 204_800, 409_600, 819_200, 1_638_400),
)


class Served:
    """Sums over the ended requests of one instance; the fields are those of `ServedReport`."""

    __slots__ = (
        "blocks",
        "hit",
        "hit_blocks",
        "inserted_tokens",
        "instance",
        "lookups",
        "not_restorable_tokens",
        "output_tokens",
        "probes",
        "prompt_tokens",
        "recomputations",
        "requests",
        "restored_tokens",
        "retries",
    )

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.requests = self.retries = self.recomputations = self.probes = self.lookups = 0
        self.prompt_tokens = self.output_tokens = self.blocks = self.hit_blocks = 0
        self.restored_tokens = self.inserted_tokens = self.not_restorable_tokens = 0
        self.hit = [0, 0, 0, 0]

    def add(self, ended: Ended, page_tokens: int) -> None:
        """Count a sound report in."""
        self.lookups += ended.lookups
        if ended.kind == "request":
            self._query(ended, page_tokens)
        elif ended.kind == "retry":
            self.retries += 1
        elif ended.kind == "recompute":
            self.recomputations += 1
        else:
            self.probes += 1

    def _query(self, ended: Ended, page_tokens: int) -> None:
        total = 0
        for at, tokens in enumerate(ended.hit):
            self.hit[at] += tokens
            total += tokens
        self.requests += 1
        self.prompt_tokens += ended.prompt_tokens
        self.output_tokens += ended.output_tokens
        self.blocks += -(-ended.prompt_tokens // page_tokens)
        self.hit_blocks += total // page_tokens
        self.restored_tokens += ended.restored
        self.inserted_tokens += ended.inserted
        hittable = max(0, ended.prompt_tokens - 1) // page_tokens * page_tokens
        self.not_restorable_tokens += max(0, min(ended.found, hittable) - total)

    def report(self) -> ServedReport:
        """The sums as a message."""
        own, host, peer, store = self.hit
        return ServedReport(
            instance=self.instance,
            requests=self.requests,
            retries=self.retries,
            recomputations=self.recomputations,
            probes=self.probes,
            lookups=self.lookups,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            hit=(own, host, peer, store),
            blocks=self.blocks,
            hit_blocks=self.hit_blocks,
            restored_tokens=self.restored_tokens,
            inserted_tokens=self.inserted_tokens,
            not_restorable_tokens=self.not_restorable_tokens,
        )


class Histogram:
    """Durations by length, and their sum."""

    __slots__ = ("bounds_us", "counts", "name", "sum_us")

    def __init__(self, name: str, bounds_us: tuple[int, ...] = LATENCY_BOUNDS_US) -> None:
        self.name = name
        self.bounds_us = bounds_us
        self.counts = [0] * (len(bounds_us) + 1)
        self.sum_us = 0

    def add(self, duration_us: int) -> None:
        """Count a duration in."""
        self.counts[bisect_left(self.bounds_us, duration_us)] += 1
        self.sum_us += duration_us

    def report(self) -> HistogramReport:
        """The counts as a message."""
        return HistogramReport(self.name, self.bounds_us, tuple(self.counts), self.sum_us)


class Sums:
    """All sums of one daemon. Mutated by its thread alone."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}
        self._evicted: dict[tuple[str, str], int] = {}
        self.lookup = Histogram("lookup")
        self.restore = Histogram("restore")
        self.copy = Histogram("copy")

    def ended(self, instance: str, ended: Ended, page_tokens: int) -> None:
        """A request of an instance has ended; the report is a sound one."""
        served = self._served.get(instance)
        if served is None:
            name = instance if len(self._served) < INSTANCES_MAX else OTHERS
            served = self._served.setdefault(name, Served(name))
        served.add(ended, page_tokens)
        if ended.latency_us:
            self.lookup.add(ended.latency_us)
        if ended.restore_us:
            self.restore.add(ended.restore_us)

    def evicted(self, tier: str, reason: str, pages: int) -> None:
        """Pages were given up at a tier."""
        self._evicted[tier, reason] = self._evicted.get((tier, reason), 0) + pages

    def served(self) -> tuple[ServedReport, ...]:
        """By instance, in the order in which they were first heard of."""
        return tuple(served.report() for served in self._served.values())

    def given_up(self) -> tuple[EvictedReport, ...]:
        """By tier and reason."""
        return tuple(
            EvictedReport(tier, reason, pages)
            for (tier, reason), pages in sorted(self._evicted.items())
        )

    def histograms(self) -> tuple[HistogramReport, ...]:
        """All of them."""
        return self.lookup.report(), self.restore.report(), self.copy.report()
