"""What do access log, KV events and metrics cost a match? `python -m benchmarks.bench_recording`

An access log, KV events with a subscriber, and Prometheus. *busy*: two daemons that have nothing on
beside one that has all of it on, without a pause between questions (recording_sides.py). *paced*:
one daemon with and without, a match up to 5 ms after a request has ended, while log and events are
being written, before or after (recording_switch.py). Owns the target: the median of a match with
all of it on is less than 2 % above that with nothing on, and the upper end of its interval says so.
Of the log nothing may be lost but what its queue had no room for, and is counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import recording_sides, recording_switch
from benchmarks.alternating import compare
from benchmarks.recording_sides import COLUMNS, PARTS, Found, judged
from benchmarks.recording_switch import compare_by_round
from benchmarks.report import heading, table, write_json

LIMIT: Final = 1.02
LOADS: Final = ("busy", "paced")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and fail where the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_recording")
    parser.add_argument("--starts", type=int, default=3, help="under the busy load")
    parser.add_argument("--paced-starts", type=int, default=5, help="under the paced one")
    parser.add_argument("--rounds", type=int, default=200, help="of a start under the busy load")
    parser.add_argument("--paced-rounds", type=int, default=12, help="under the paced one")
    parser.add_argument(
        "--seconds", type=float, default=600, help="a load begins no start that would end later"
    )
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
        measure = recording_sides.measure if busy else recording_switch.measure
        found: list[Found] = []
        began = time.monotonic()
        for seed in range(starts):
            found.append(measure(rounds, seed, options.parts))
            each_s = (time.monotonic() - began) / len(found)
            if each_s * (len(found) + 1) > options.seconds:
                break
        document[load], rows, ratio = judged(found, compare if busy else compare_by_round)
        failed |= ratio.high > LIMIT or not all(start.kept.whole for start in found)
        parts = ", ".join(options.parts)
        print(f"\n{load}, {len(found)} starts, with {parts} (at most {LIMIT})\n")
        print(table(COLUMNS, rows))
        if not busy:
            print(
                "{per_second:.0f} matches a second, {after_work:.1%} right after other work, which "
                "puts the median {shift:.2%} above that of the others".format_map(document[load])
            )
        for start in found:
            print(start.kept)
    write_json(options.json, document)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
