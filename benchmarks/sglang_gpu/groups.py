"""The groups of rows by name: what each runs, and for how long at most.

Owns the table. A group is a process of its own with a folder of its own, so that several can run at
a time and one that fails takes nothing with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.sglang_gpu import busy_wait, exact, ids, kills, loaded, own, rows, ttft
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.scales import Scale

Group = Callable[[Place, Scale, Path | str], dict[str, Any]]

GROUPS: Final[dict[str, Group]] = {
    **{
        f"exact-{loads}-{page}-{'overlap' if overlap else 'serial'}": partial(
            exact.run, loads=loads, page=page, overlap=overlap
        )
        for loads in ("held", "layerwise")
        for page in (1, 16, 64)
        for overlap in (True, False)
    },
    "exact-held-16-graphs": partial(exact.run, loads="held", page=16, overlap=True, graphs=True),
    "exact-layerwise-16-graphs": partial(
        exact.run, loads="layerwise", page=16, overlap=True, graphs=True
    ),
    "exact-thin-16-overlap": partial(exact.run, loads="held", page=16, overlap=True, mode="thin"),
    "fence-removed": partial(exact.run, loads="held", page=16, overlap=True, fenced=False),
    "ids-deterministic": partial(ids.run, deterministic=True),
    "ids-deterministic-layerwise": partial(ids.run, deterministic=True, loads="layerwise"),
    "ids": partial(ids.run, deterministic=False),
    "ids-again": partial(ids.run, deterministic=False, seed=12),
    "kills-held": partial(kills.run, loads="held"),
    "kills-layerwise": partial(kills.run, loads="layerwise"),
    "two-gpus-held": partial(exact.run, loads="held", page=16, overlap=True, gpus=(0, 1)),
    "two-gpus-layerwise": partial(exact.run, loads="layerwise", page=64, overlap=True, gpus=(0, 1)),
    "rows": rows.run,
    "rows-checked": partial(rows.run, pairs=1, checked=True),
    "loaded": loaded.run,
    "loaded-checked": partial(loaded.run, checked=True),
    "turns": partial(loaded.run, parts=("turns",)),
    "gaps": partial(loaded.run, parts=("gaps",)),
    "profile": partial(rows.run, pairs=4, marks=True, dummy=True),
    "ttft": ttft.run,
    "ttft-direct": partial(ttft.run, hicache=("direct", "page_first_direct")),
    "exact-adaptive-16-overlap": partial(exact.run, loads="adaptive", page=16, overlap=True),
    "busy-wait": busy_wait.run,
    "kills-adaptive": partial(kills.run, loads="adaptive"),
    "own": own.run,
}
