"""How fast do pages move, and what does a running decode feel of it? `--device auto | cpu | model`

The product's own mover with pools of other processes, against single large copies of the same run:
scattered pages and pages as a real allocator leaves them, small ones through a staging slab, within
a GPU and between two, beside a decode-like CUDA graph, and restores of a long prompt. The rows and
their goals are in copy_rows.py; this file owns the order, the table and the exit status: 0 when
every goal that could be looked at was met. `--device cpu` only shows that all of it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.copy_base import Base, gpus
from benchmarks.copy_bus import bus_rows
from benchmarks.copy_check import check_copies
from benchmarks.copy_loop import processor_rows
from benchmarks.copy_model import NAME as MODEL
from benchmarks.copy_model import Costs, ModelBase
from benchmarks.copy_rows import Bench, Row, Sizes
from benchmarks.copy_slab import loop_rows, staged_rows
from benchmarks.copy_steps import step_rows
from benchmarks.report import heading, table, write_json
from directory.core.errors import TreecoredError

GROUPS = ("plain", "staged", "steps", "restores")
BUS = "bus"
"""Asked for by name, where there is a GPU: no goal hangs on it."""
CHECKED = (64, 16)
COLUMNS = ("row", "figure", "unit", "base", "ratio", "goal", "")
COMMAND = "python -m benchmarks.bench_copy"


def verdict(row: Row) -> str:
    """In a word; a dry run has none."""
    if row.met is None:
        return ""
    return "met" if row.met else "NOT MET"


def line(row: Row) -> list[object]:
    """A row of the table."""
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    base = "" if row.base is None else f"{row.base:,.1f}"
    return [row.name, f"{row.figure:,.1f}", row.unit, base, ratio, row.goal, verdict(row)]


def run(
    device: str, groups: list[str], rounds: int, limits: list[str]
) -> tuple[list[Row], dict[str, object]]:
    """Measure; returns rows and facts of the run."""
    names = gpus() if device == "auto" else []
    sizes = Sizes.of_gpu() if names else Sizes.of_dry_run()
    started = time.monotonic()
    base = Base(names, sizes.base_bytes)
    bench = Bench(names or ["cpu"], sizes, base, rounds, limits)
    rows: list[Row] = []
    facts: dict[str, object] = {
        "gpus": len(names),
        "versions": bench.versions,
        "mover_ready_s": round(bench.rig.ready_s, 3),
        "tier_open_s": round(bench.rig.open_s, 3),
        "setting_up_s": round(time.monotonic() - started, 1),
    }
    parts: dict[str, Iterator[Row]] = {
        "plain": bench.plain_rows(),
        "staged": staged_rows(bench),
        "restores": bench.restore_rows(),
        "steps": step_rows(bench),
        BUS: bus_rows(bench, names[0]) if names else iter(()),
    }
    try:
        for page_size in CHECKED:
            check_copies(bench, page_size)
        for group in groups:
            begun = time.monotonic()
            try:
                for row in parts[group]:
                    rows.append(row)
                    print("|", " | ".join(map(str, line(row))), "|", flush=True)
            except (RuntimeError, OSError, TreecoredError) as error:
                # The time of a machine with GPUs is dear: the other groups are measured.
                rows.append(Row(f"{group}: {error}", 0.0, "", goal="no error", met=False))
                print(f"{group} failed: {error}", flush=True)
            facts[f"{group}_s"] = round(time.monotonic() - begun, 1)
        facts["base_gbps"] = {k: round(v, 2) for k, v in bench.base_gbps.items()}
    finally:
        bench.close()
    return rows, facts


def run_model(costs: Costs, rounds: int, limits: list[str]) -> tuple[list[Row], dict[str, object]]:
    """The staged rows as fast as this machine's processors turn the loop around such a bus, and
    what the loop takes of them."""
    costs.to_environment()
    processor = list(processor_rows(costs, rounds, limits))
    bench = Bench([MODEL], Sizes.of_gpu(), ModelBase(costs), rounds, limits)
    try:
        return [*processor, *loop_rows(bench)], {"costs": vars(costs), "limits": limits}
    finally:
        bench.close()


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", MODEL), default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", nargs="+", choices=(*GROUPS, BUS), default=list(GROUPS))
    parser.add_argument("--limit", action="append", default=[], help="of the mover: NAME=NUMBER")
    parser.add_argument("--bus-gbps", type=float, default=Costs().bus_gbps, help="of the model")
    parser.add_argument("--range-us", type=float, default=Costs().range_us, help="of the model")
    options = parser.parse_args()
    if options.device == MODEL:
        costs = Costs(options.bus_gbps, options.range_us)
        rows, facts = run_model(costs, options.rounds, options.limit)
    else:
        rows, facts = run(options.device, options.groups, options.rounds, options.limit)
    print(table(COLUMNS, [line(row) for row in rows]))
    print(facts)
    document = {**heading(COMMAND), **facts, "rows": [row._asdict() for row in rows]}
    write_json(options.json, document)
    return int(any(row.met is False for row in rows) and options.device == "auto")


if __name__ == "__main__":
    sys.exit(main())
