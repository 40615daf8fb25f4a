"""Where does a restore's time go in the mover, out of another pool and from the host by layers?

    python -m benchmarks.bench_restore --device cuda | model [--json FILE] [--limit NAME=NUMBER]

One request of 8,192 tokens at a time (128 pages of 64 tokens, 32 layers of an 8B model, 1 GiB),
with a pause before each, so that the mover sleeps as it does between requests. `expected`: it was
told 0.7 ms before, as a daemon tells it with the answer to a match. The mover's own marks say when
it had what; microseconds after the copy was handed over, medians. `model`: the product's mover on a
made-up driver and memory (restore_model.py), which shows this machine's share of the time alone.

Then the whole way through a daemon, of pages of a few bytes (restore_whole.py): a match, and a
restore 0.9 ms later, where daemon and mover sleep between requests and where they look for them.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import copy_messages as m
from benchmarks.copy_base import gpus
from benchmarks.copy_layouts import TOKEN_BYTES, pool_layout
from benchmarks.copy_model import NAME as MODEL
from benchmarks.copy_model import Costs
from benchmarks.copy_pages import allocated, scattered, slots_of
from benchmarks.copy_rig import MoverRig, SchedulerProcess
from benchmarks.report import heading, table, write_json
from benchmarks.restore_model import ANNOUNCED
from benchmarks.restore_whole import whole_way
from directory.core.actions import Fence, Landing
from directory.core.ids import CURRENT, FORWARD, HOST, LANDINGS
from directory.core.limits import MIB
from transfer.ipc.marks import SUFFIX, VARIABLE
from transfer.ipc.memory import MemoryHandle

PAGE_SIZE: Final = 64
PAGES: Final = 128
BUFFERS: Final = 64
POOL_PAGES: Final = 576
SEGMENT_BYTES: Final = 256 * MIB
PAUSE_S: Final = 0.02
AHEAD_S: Final = 0.0007
COMMAND: Final = "python -m benchmarks.bench_restore"
STEPS: Final = ("taken", "fenced", "started", "first slice", "first layer", "last slice", "done")
Submit = Callable[[], int]
SLICES: Final = "slices"
COLUMNS: Final = ("restore", *STEPS, "answered", "mover's CPU", SLICES)


def marks_of(path: Path) -> dict[str, dict[str, int]]:
    """When each copy came to each step, by its number, as the mover has marked it."""
    found: dict[str, dict[str, int]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        at, what, op, *_ = [*line.split(), ""]
        steps = found.setdefault(op, {})
        if what in ("slice", "landed"):
            steps.setdefault("first slice" if what == "slice" else "first layer", int(at))
            if what == "slice":
                steps["last slice"] = int(at)
                steps[SLICES] = steps.get(SLICES, 0) + 1
        else:
            steps[what] = int(at)
    return found


def cpu_us(pid: int) -> float:
    """Processor time that a process's first thread has had."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1000


def _of_gpu(handle: MemoryHandle) -> MemoryHandle:
    """The same memory as if it were the made-up GPU's."""
    return msgspec.structs.replace(handle, device=ANNOUNCED)


class Rig:
    """A mover with two pools on one GPU, and one on another where there is one."""

    def __init__(self, names: list[str], limits: list[str], folder: str) -> None:
        made_up = names == [MODEL]
        os.environ[VARIABLE] = folder
        program = "benchmarks.restore_model" if made_up else "transfer.mover"
        device = MODEL if made_up else f"cuda:{names[0]}"
        page_bytes = PAGE_SIZE * TOKEN_BYTES * BUFFERS
        self.schedulers = [SchedulerProcess(name) for name in names[:2]]
        tier = -(-PAGES * page_bytes // SEGMENT_BYTES) * SEGMENT_BYTES
        self.rig = MoverRig(device, tier, SEGMENT_BYTES, limits, program)
        self.per_segment = SEGMENT_BYTES // page_bytes
        self.marks = Path(folder) / f"{self.rig.mover.pid}{SUFFIX}"
        nbytes = POOL_PAGES * PAGE_SIZE * TOKEN_BYTES
        self.pools: dict[int, tuple[SchedulerProcess, str]] = {}
        places = [(0, "A"), (0, "B"), *[(1, "C")] * (len(names) > 1)]
        for scheduler in self.schedulers:
            scheduler.ready()
        for number, (at, name) in enumerate(places, 1):
            scheduler = self.schedulers[at]
            scheduler.make(m.MakeMemory(name, BUFFERS, nbytes))
            if made_up:
                handles = scheduler.memory[name].handles
                scheduler.memory[name] = m.Memory(tuple(map(_of_gpu, handles)))
            self.rig.add(number, scheduler, name, pool_layout(BUFFERS, nbytes, PAGE_SIZE))
            self.pools[number] = (scheduler, name)
        self._tables = {n: s.timelines(name) for n, (s, name) in self.pools.items()}
        self.rng = random.Random(7)

    def fences(self, *pools: int) -> list[Fence]:
        """Of every stream of these pools; all have passed."""
        return [Fence(pool, line, 0) for pool in pools for line in (FORWARD, CURRENT)]

    def peer(self, target: int) -> Submit:
        """A restore out of the first pool, ready to be handed over."""
        pages = allocated(POOL_PAGES, PAGES, self.rng)
        onto = scattered(POOL_PAGES, PAGES, self.rng)
        fences = self.fences(1, target)
        return partial(self.rig.submit, "peer_copy", 1, pages, target, onto, fences=fences)

    def load(self) -> Submit:
        """A load by layers."""
        slots = slots_of(range(PAGES), self.per_segment)
        onto = scattered(POOL_PAGES, PAGES, self.rng)
        landing = Landing(2, LANDINGS, self._tables[2].read(LANDINGS))
        fences = self.fences(2)
        return partial(
            self.rig.submit, "load_back", HOST, slots, 2, onto, fences=fences, landing=landing
        )

    def measure(self, make: Callable[[], Submit], times: int, *, ahead: bool) -> dict[str, float]:
        """Medians of so many, the first one left out; microseconds from handing it over."""
        asked: dict[int, tuple[int, int]] = {}
        used: list[float] = []
        for _ in range(times + 1):
            submit = make()
            time.sleep(PAUSE_S)
            before = cpu_us(self.rig.mover.pid)
            if ahead:
                self.rig.mover.expect(2)
                time.sleep(AHEAD_S)
            began = time.monotonic_ns()
            op = submit()
            self.rig.done(op)
            asked[op] = began, time.monotonic_ns()
            time.sleep(0.005)  # until it sleeps again: what it has spun away is counted, too
            used.append(cpu_us(self.rig.mover.pid) - before)
        marks = marks_of(self.marks)
        found: dict[str, float] = {}
        for step in STEPS:
            at = [
                (marks[str(op)][step] - began) / 1000
                for op, (began, _) in list(asked.items())[1:]
                if step in marks.get(str(op), {})
            ]
            if at:
                found[step] = round(statistics.median(at), 1)
        ends = [(ended - began) / 1000 for began, ended in list(asked.values())[1:]]
        found["answered"] = round(statistics.median(ends), 1)
        found["mover's CPU"] = round(statistics.median(used[1:]), 1)
        found[SLICES] = statistics.median(marks[str(op)][SLICES] for op in list(asked)[1:])
        return found

    def close(self) -> None:
        """End every process."""
        self.rig.close()
        for scheduler in self.schedulers:
            scheduler.close()


def run(
    names: list[str], limits: list[str], times: int, *, brief: bool
) -> dict[str, dict[str, float]]:
    """All rows, or those within a GPU alone."""
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(names, limits, folder)
        rows: dict[str, Callable[[], Submit]] = {
            "out of a pool of the same GPU": partial(rig.peer, 2)
        }
        if 3 in rig.pools and not brief:
            rows["onto another GPU"] = partial(rig.peer, 3)
        if not brief:
            rows["from the host by layers"] = rig.load
        found: dict[str, dict[str, float]] = {}
        try:
            for name, make in rows.items():
                for ahead in (False, True):
                    if ahead and not hasattr(rig.rig.mover, "expect"):
                        continue  # a checkout that stands beside
                    row = f"{name}, expected" if ahead else name
                    found[row] = rig.measure(make, times, ahead=ahead)
                    print(row, found[row], flush=True)
        finally:
            rig.close()
    return found


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", MODEL), default=MODEL)
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", action="append", default=[], help="of the mover: NAME=NUMBER")
    parser.add_argument("--brief", action="store_true", help="only what goes within a GPU")
    options = parser.parse_args()
    names = [MODEL] if options.device == MODEL else gpus()
    Costs().to_environment()
    rows = run(names, options.limit, options.times, brief=options.brief)
    printed: list[list[Any]] = [
        [name, *(row.get(column, "") for column in COLUMNS[1:])] for name, row in rows.items()
    ]
    print(table(COLUMNS, printed))
    ways = () if options.brief else (("they sleep", False), ("they look", True))
    whole = {name: whole_way(options.times, spins=spins) for name, spins in ways}
    parts = ("match", "restore", "daemon's CPU")
    printed = [[name, *(row[part] for part in parts)] for name, row in whole.items()]
    if printed:
        print(table(("the whole way, us", *parts), printed))
    facts = {"times": options.times, "limits": options.limit, "gpus": len(names)}
    write_json(options.json, {**heading(COMMAND), **facts, "rows": rows, "whole": whole})
    return 0


if __name__ == "__main__":
    sys.exit(main())
