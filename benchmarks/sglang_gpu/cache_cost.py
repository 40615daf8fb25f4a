"""What the cache costs a scheduler's thread: its processor time in the tree cache, a request.

Owns the entry of a scheduler process that counts (tests/sglang/driver.py begins there when told
to), whichever cache it has: SGLang's own, HiCache or treecored's with its hooks. Only the outermost
call counts. What is called for a request always does; what is called in every loop does only while
a request is there, because an idle scheduler asks as often as it can. Runs in SGLang's environment.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

FILE_VARIABLE: Final = "TESTS_CACHE_COST"
EVERY_S: Final = 0.5
METHODS: Final = (
    "match_prefix", "touch_prefix", "inc_lock_ref", "dec_lock_ref", "lock", "unlock",
    "cache_unfinished_req", "cache_finished_req", "checkpoint", "free_kv_row",
    "path_device_indices", "prefix_device_indices", "evict", "evict_for_alloc", "init_load_back",
    "check_hicache_events", "ready_to_load_host_cache", "claim_kv_row", "on_release",
)  # fmt: skip
EVERY_LOOP: Final = ("check_hicache_events", "ready_to_load_host_cache", "tick")
HOOKS: Final = ("tick", "stays", "admitted", "crowded", "results_used")
"""Of treecored's, in scheduler_shim.sglang.hooks."""


class Cost:
    """Nanoseconds of the scheduler's thread, also by what it called; how many requests ended."""

    def __init__(self, path: Path) -> None:
        self.scheduler: Any = None
        self.ns = 0
        self.by: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.ended = 0
        self._path = path
        self._inside = False
        self._due = 0.0

    def counted(
        self, original: Callable[..., Any], *, ends: bool = False, always: bool = True
    ) -> Callable[..., Any]:
        """The same function, counted. `ends`: a call is a request's end; `always`: it is made for
        some request, and not in every loop."""

        name = getattr(original, "__name__", type(original).__name__)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not (always or self._busy()):
                return original(*args, **kwargs)
            self._inside = True
            began = time.thread_time_ns()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.thread_time_ns() - began
                self.ns += took
                self.by[name] = self.by.get(name, 0) + took
                self.calls[name] = self.calls.get(name, 0) + 1
                self._inside = False
                self.ended += ends
                if time.monotonic() >= self._due:
                    self._save()

        return call

    def left_out(self, wait: Callable[[], object]) -> Callable[[], object]:
        """The same wait, taken off again what the call counts that it is in."""

        def call() -> object:
            began = time.thread_time_ns()
            try:
                return wait()
            finally:
                took = time.thread_time_ns() - began
                self.ns -= took
                self.by["waits"] = self.by.get("waits", 0) - took

        return call

    def _busy(self) -> bool:
        scheduler = self.scheduler
        last = getattr(scheduler, "last_batch", None)
        return scheduler is not None and bool(
            scheduler.waiting_queue
            or scheduler.chunked_req is not None
            or not scheduler.running_batch.is_empty()
            or (last is not None and not last.is_empty())
        )

    def _save(self) -> None:
        self._due = time.monotonic() + EVERY_S
        beside = self._path.with_suffix(".new")
        found = {"ns": self.ns, "ended": self.ended, "by": self.by, "calls": self.calls}
        beside.write_text(json.dumps(found), encoding="utf-8")
        beside.replace(self._path)


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
            setattr(cache, name, cost.counted(method, ends=ends, always=name not in EVERY_LOOP))
    shim = getattr(cache, "shim", None)
    if shim is not None:
        hooks = importlib.import_module("scheduler_shim.sglang.hooks")
        for name in HOOKS:
            function = getattr(hooks, name)
            setattr(hooks, name, cost.counted(function, always=name not in EVERY_LOOP))
        results = shim.loads.results

        def ended(reqs: Any, synchronize: Callable[[], object]) -> None:
            """What waits for the batch SGLang would wait for itself, right after."""
            cost.counted(results)(reqs, cost.left_out(synchronize))

        shim.loads.results = ended


def read(path: Path) -> dict[str, Any]:
    """What was counted: microseconds a request, in all and by call, and how many requests."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    ended = max(1, found["ended"])
    by = {name: round(ns / 1e3 / ended, 1) for name, ns in found["by"].items()}
    return {
        "us_a_request": round(found["ns"] / 1e3 / ended, 1), "requests": found["ended"],
        "us_a_request_by": dict(sorted(by.items(), key=lambda item: -item[1])),
    }  # fmt: skip
