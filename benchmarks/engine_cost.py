"""What a cache costs the scheduler of a real engine, in either dialect: counted in its own thread.

Owns the entry of a scheduler process that counts (tests/sglang/driver.py begins there when told
to), and the list of what SGLang's scheduler asks its cache. How it is counted is
`sglang_gpu/cache_cost.py`: processor time of the outermost call, while a request is there. Runs in
SGLang's environment.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Final

from benchmarks.sglang_gpu.cache_cost import FILE_VARIABLE, HOOKS, Cost

METHODS: Final = (
    "match_prefix", "touch_prefix", "inc_lock_ref", "dec_lock_ref", "lock", "unlock",
    "cache_unfinished_req", "cache_finished_req", "checkpoint", "free_kv_row",
    "path_device_indices", "prefix_device_indices", "evict", "evict_for_alloc", "init_load_back",
    "check_hicache_events", "ready_to_load_host_cache", "claim_kv_row", "on_release",
)  # fmt: skip
EVERY_S: Final = 0.1


def run(*args: Any, **kwargs: Any) -> Any:
    """A scheduler process from here on."""
    module = importlib.import_module("sglang.srt.managers.scheduler")
    cost = Cost(Path(os.environ[FILE_VARIABLE]))
    begin = module.Scheduler.__init__

    def begun(scheduler: Any, *given: Any, **more: Any) -> None:
        begin(scheduler, *given, **more)
        watch(cost, scheduler)

    module.Scheduler.__init__ = begun
    return module.run_scheduler_process(*args, **kwargs)


def watch(cost: Cost, scheduler: Any) -> None:
    """Count whatever this scheduler asks its cache from now on."""
    cost.scheduler = scheduler
    cache = scheduler.tree_cache
    for name in METHODS:
        method = getattr(cache, name, None)
        if method is not None:
            ends = name in ("cache_finished_req", "on_release")
            setattr(cache, name, cost.counted(method, ends=ends))
    shim = getattr(cache, "shim", None)
    if shim is not None:
        hooks = importlib.import_module("scheduler_shim.sglang.hooks")
        for name in HOOKS:
            setattr(hooks, name, cost.counted(getattr(hooks, name)))
        shim.held = cost.counted(shim.held)
        shim.loads.results = cost.counted(shim.loads.results)
