"""What does a tick over 16 waiting 8,192-token requests cost, with SGLang's trees and with ours?

    python -m benchmarks.bench_tick --json FILE

Everything that waits is matched, as SGLang's scheduler does before it makes a batch; all prompts
are cached in the own pool. Before some ticks nothing has changed (`tick`), before others another
prompt was published (`changed`). `mirrored` and `thin` have a daemon in another process. Ratios
are to the Python tree of the same version of SGLang. Needs its environments (`make sglang-envs`).
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contestants import (
    ENVIRONMENTS,
    ROOT,
    STOCK,
    Contestant,
    ContestantEnded,
    stock_versions,
)
from benchmarks.node import Daemon
from benchmarks.report import Measure, heading, interleaved, ratio, table, write_json

PAGE, TOKENS, REQUESTS = 16, 8_192, 16
OURS = ("mirrored", "thin")
CASES = ("tick", "changed")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_tick")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--times", type=int, default=5, help="ticks a round")
    parser.add_argument("--versions", nargs="*", default=None)
    options = parser.parse_args()
    document: dict[str, Any] = heading("python -m benchmarks.bench_tick")
    document |= {"page": PAGE, "tokens": TOKENS, "requests": REQUESTS, "unit": "us", "ticks": {}}
    document["unable"] = {}
    rows: list[list[object]] = []
    unable: dict[str, str] = document["unable"]
    for version in options.versions or stock_versions():
        kinds = [*STOCK[version], *OURS]
        with ExitStack() as stack:
            daemon = stack.enter_context(Daemon())
            cases: dict[str, Measure] = {}
            folder = str(daemon.runtime_dir)
            for kind in list(kinds):
                contestant = stack.enter_context(_contestant(version))
                try:
                    contestant.tell("build", kind, PAGE, TOKENS, REQUESTS, folder)
                except ContestantEnded as error:
                    if kind in (*OURS, STOCK[version][0]):
                        raise
                    kinds.remove(kind)
                    unable[f"{version} {kind}"] = str(error)
                    continue
                for case in CASES:
                    cases[f"{kind} {case}"] = partial(contestant.tell, "run", case)
            found = interleaved(cases, rounds=options.rounds, times=options.times)
        document["ticks"][version] = {}
        for kind in kinds:
            row: list[object] = [version, kind]
            document["ticks"][version][kind] = {}
            for case in CASES:
                figure = found[f"{kind} {case}"]
                against = ratio(figure, found[f"{STOCK[version][0]} {case}"])
                document["ticks"][version][kind][case] = {**figure.as_json(), "ratio": against}
                row += [figure.median, figure.low, figure.high, f"{against:.3f}"]
            rows.append(row)
    columns = ["sglang", "tree", "us", "lowest", "highest", "ratio"]
    columns += ["after a change: us", "lowest", "highest", "ratio"]
    print(table(columns, rows))
    for name, reason in unable.items():
        print(f"SGLang {name}: cannot be measured here: {reason}")
    write_json(options.json, document)


def _contestant(version: str) -> Contestant:
    stubs = ROOT / "tests" / "sglang" / "stubs"
    return Contestant(
        [str(ENVIRONMENTS / version / "bin" / "python"), "-m", "benchmarks.sglang_tick"],
        {"PYTHONPATH": os.pathsep.join([str(stubs), str(ROOT)])},
    )


if __name__ == "__main__":
    main()
