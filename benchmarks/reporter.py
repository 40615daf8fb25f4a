"""A mirrored scheduler that does nothing but report: as much as a daemon can be told.

Owns its pool, whose pages are never read back: it says of one path after the other that it was
computed, and of the one that had its pages before that it was given up. What it says is true of its
words and timelines, so that the daemon backs up what it says it has. It never has more than
OPEN_MAX messages on their way, so that it is as fast as it is heard, and no faster.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from benchmarks.trees import KEY
from directory.core.events import Evicted, Insert
from scheduler_shim.client import DaemonClient
from scheduler_shim.pools import SharedPool

PAGE: Final = 16
POOL_PAGES: Final = 2_048
PATH_PAGES: Final = 32
OPEN_MAX: Final = 64


class Reporter:
    """One such scheduler."""

    def __init__(self, runtime_dir: Path, name: str) -> None:
        self.pool = SharedPool(page_size=PAGE, page_count=POOL_PAGES, bytes_per_token=16, layers=2)
        self.client = DaemonClient.connect(runtime_dir, self.pool, instance=name, mode="mirrored")
        self.reports = 0
        self._chance = Random(name)
        self._rows = [
            array("I", range(first, first + PATH_PAGES)).tobytes()
            for first in range(0, POOL_PAGES, PATH_PAGES)
        ]
        self._paths = 0

    def work(self, seconds: float) -> int:
        """Report for so long; returns how often it ever did."""
        client = self.client
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if client.open_count < OPEN_MAX:
                self.report()
            elif not client.poll():
                client.wait(10_000)
            if client.lost:
                raise ConnectionError(f"the daemon is lost: {client.lost}")
        return self.reports

    def report(self) -> None:
        """A path was given up, and another one computed in its pages."""
        turn, at = divmod(self._paths, len(self._rows))
        span = at + 1
        if turn:
            self.pool.words.set_at_least(span, turn)
            self.client.report(Evicted(((span, 0, PATH_PAGES),), ((span, turn),)))
            self.reports += 1
        tokens = self._chance.randbytes(PATH_PAGES * PAGE * KEY.unit_bytes)
        name, written = str(self._paths), self.pool.advance()
        self.client.report(
            Insert(name, 0, KEY, tokens, self._rows[at], span, turn, written, 0, PATH_PAGES)
        )
        self.reports += 1
        self._paths += 1

    def close(self) -> None:
        """End the session."""
        self.client.close()
        self.pool.close()


def main() -> int:
    """Report for so long as each line says; the answer is how often."""
    runtime_dir, name = sys.argv[1:]
    reporter = Reporter(Path(runtime_dir), name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        seconds = msgspec.json.decode(line)[1]
        answers.write(msgspec.json.encode({"reports": reporter.work(seconds)}).decode() + "\n")
    reporter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
