"""What do access log, KV events and metrics cost a match? `python -m benchmarks.bench_recording`

Two daemons that have nothing on beside one that writes an access log, publishes KV events to a
subscriber and is read by Prometheus, under a busy load and a paced one (recording_sides.py has
both). Owns the target: the median of a match with all of it on is less than 2 % above that with
nothing on, and the upper end of its interval says so. Of the log nothing may be lost but what its
queue had no room for, and is counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.recording_sides import COLUMNS, LOADS, PARTS, judged, measure
from benchmarks.report import heading, table, write_json

LIMIT: Final = 1.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and fail where the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_recording")
    parser.add_argument("--starts", type=int, default=3, help="under the busy load")
    parser.add_argument("--paced-starts", type=int, default=6, help="under the paced one")
    parser.add_argument("--rounds", type=int, default=200, help="of a start under the busy load")
    parser.add_argument("--paced-rounds", type=int, default=20, help="under the paced one")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    document: dict[str, Any] = heading("python -m benchmarks.bench_recording")
    failed = False
    for load in options.loads:
        busy = load == "busy"
        rounds = options.rounds if busy else options.paced_rounds
        starts = options.starts if busy else options.paced_starts
        found = [measure(load, rounds, seed, options.parts) for seed in range(starts)]
        document[load], rows, ratio = judged(found)
        failed |= ratio.high > LIMIT or not all(start.kept.whole for start in found)
        print(f"\n{load}, with {', '.join(options.parts)} (at most {LIMIT})\n")
        print(table(COLUMNS, rows))
        for start in found:
            print(start.kept)
    write_json(options.json, document)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
