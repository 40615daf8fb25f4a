"""Working sets: how many different pages the requests of the last minute, hour, ... touched.

Owns the samples. A working set that is larger than the cache means that what is used again has
been evicted before: it is the figure to size a cache by when the load changes over the day.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

import msgspec

from directory.analytics.reuse import ReuseDistances

WINDOWS_S: Final = (60, 600, 3600)
SAMPLE_US: Final = 10_000_000
SAMPLES_MAX: Final = 480


class Sample(msgspec.Struct, frozen=True):
    """Different pages touched in the last window before `at_us`, one a window of WINDOWS_S, and
    since the beginning."""

    at_us: int
    pages: tuple[int, ...]
    ever: int


class WorkingSets:
    """Samples at equal distances in time, which double when there are too many of them.

    Times that go back (a log is in order of completion) are taken as the latest one before.
    """

    def __init__(self, sample_us: int = SAMPLE_US, samples_max: int = SAMPLES_MAX) -> None:
        self._sample_us = sample_us
        self._samples_max = samples_max
        self._times = array("q")
        self.samples: list[Sample] = []

    def before(self, at_us: int, reuse: ReuseDistances) -> None:
        """Call before the access at `at_us` is added: takes a sample where one is due."""
        if self._times:
            at_us = max(at_us, self._times[-1])
            previous = self.samples[-1].at_us if self.samples else self._times[0]
            if at_us - previous >= self._sample_us:
                self.take(at_us, reuse)
        self._times.append(at_us)

    def take(self, at_us: int, reuse: ReuseDistances) -> None:
        """Take a sample now."""
        pages = tuple(
            reuse.touched_since(bisect_left(self._times, at_us - 1_000_000 * seconds))
            for seconds in WINDOWS_S
        )
        self.samples.append(Sample(at_us, pages, reuse.pages))
        if len(self.samples) > self._samples_max:
            self._sample_us *= 2
            self.samples = _spaced(self.samples, self._sample_us)

    def end(self, reuse: ReuseDistances) -> None:
        """Take the last sample."""
        if self._times and (not self.samples or self.samples[-1].at_us < self._times[-1]):
            self.take(self._times[-1], reuse)


def _spaced(samples: list[Sample], spacing_us: int) -> list[Sample]:
    kept = samples[:1]
    for sample in samples[1:]:
        if sample.at_us - kept[-1].at_us >= spacing_us:
            kept.append(sample)
    return kept
