"""What a scheduler's loop and a request's life cost its thread in the cache and in our hooks.

    PYTHONPATH=tests/sglang/stubs:. .sglang/0.5.23/bin/python -m benchmarks.sglang_turn

Runs inside one of SGLang's environments and does what JSON lines say: `["build", kind, page,
tokens, folder]`, then `["run", case, times]`. A kind is one of SGLang's trees, or "mirrored" or
"thin" with the daemon of the runtime folder. Requests live by tests/sglang/cache/rig.py, which
calls a cache as SGLang's scheduler does; what the rig does besides is not timed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.answering import answer

clock = time.thread_time_ns
"""Processor time: what a thin scheduler sleeps for an answer is not its thread's work."""
EACH: Final = 50
"""Loops of which one figure is made: asking the clock costs some of what one takes."""
SPARE: Final = 2_048
"""Pages for what is published besides the cached prompt."""
FRESH: Final = 1_024
"""Tokens that a request computes behind the cached prompt, in the cases `new`."""
OUTPUT: Final = 20
VOCABULARY: Final = 128_000
CALLED: Final = (
    "match_prefix", "inc_lock_ref", "dec_lock_ref", "lock", "unlock", "cache_unfinished_req",
    "cache_finished_req", "checkpoint", "free_kv_row", "path_device_indices",
    "prefix_device_indices", "evict", "evict_for_alloc",
)  # fmt: skip
STEPS: Final = ("seen", "match", "lock", "store", "end")


class Batch:
    """What the hooks read of a batch of SGLang's."""

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs
        self.batch_is_full = False

    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return not self.reqs


class Turns:
    """One cache with one cached prompt, and a scheduler that uses it."""

    def __init__(self, kind: str, page: int, tokens: int, folder: str) -> None:
        from scheduler_shim.sglang import hooks
        from tests.sglang.cache import rig

        self._rig, self._hooks = rig, hooks
        pages = (tokens + FRESH + OUTPUT) // page + SPARE
        self.pools = rig.Pools(pages, page, rows=512, context=tokens + FRESH + 2 * OUTPUT)
        self.ours = kind in ("mirrored", "thin")
        self.client: Any = None
        if self.ours:
            from scheduler_shim.client import DaemonClient

            pool = rig.our_pool(self.pools)
            self.client = DaemonClient.connect(Path(folder), pool, instance=kind, mode=kind)  # type: ignore[arg-type]
            self.cache = rig.our_cache(self.pools, client=self.client, pool=pool, mode=kind)  # type: ignore[arg-type]
        else:
            self.cache = rig.stock_cache(self.pools, kind)
        self.engine = rig.Engine(self.cache, self.pools)
        self.scheduler = SimpleNamespace(
            tree_cache=self.cache,
            running_batch=Batch([]),
            last_batch=None,
            chunked_req=None,
            waiting_queue=[],
            page_size=page,
        )
        self.adder = SimpleNamespace(
            tree_cache=self.cache, can_run_list=[], rem_total_tokens=1 << 30, page_size=page
        )
        self.taken = 0
        self._inside = False
        for name in CALLED:
            if hasattr(self.cache, name):
                setattr(self.cache, name, self._timed(getattr(self.cache, name)))
        self.prompt = Random(0).choices(range(VOCABULARY), k=tokens)
        self._numbers = 0
        self.live(self.prompt)

    # A request's life, step by step; each returns nanoseconds of cache and hooks.

    def live(self, tokens: list[int]) -> dict[str, int]:
        """From the queue to the end."""
        self._numbers += 1
        req = self.request(f"turn {self._numbers}", tokens)
        req.refresh()
        found = {
            "seen": self._took(lambda: self._see(req)),
            "match": self._took(lambda: self.engine.match(req)),
            "lock": self._took(lambda: self._admit(req)),
            "store": self._took(lambda: self._step([req], lambda: self.engine.checkpoint(req))),
        }
        self.loop([req])
        assert self.engine.decode(req, [1] * OUTPUT)
        self.loop([req])
        found["end"] = self._took(lambda: self._step([req], lambda: self.engine.end(req)))
        self.loop([])
        return found

    def request(self, name: str, tokens: list[int]) -> Any:
        """With what the hooks read of it besides."""
        req: Any = self._rig.Req(name, tokens)
        req.sampling_params = SimpleNamespace(max_new_tokens=OUTPUT)
        req.cached_tokens = 0
        req._cache_breakdown_computed = True
        return req

    def loop(self, reqs: list[Any]) -> None:
        """A step in which nothing of ours happens."""
        self.scheduler.last_batch = self.scheduler.running_batch = Batch(reqs)
        self._input()
        self._step(reqs, _nothing)

    def _see(self, req: Any) -> None:
        """The loops until it may be admitted."""
        self.scheduler.waiting_queue = [req]
        self._input()
        while self.ours and self.cache.shim.held(req.rid):
            self._input()

    def _admit(self, req: Any) -> None:
        self.adder.can_run_list = []
        if self.ours:
            self._timed(self._hooks.around_add_one_req)(self._can_run, self.adder, req)
        self.scheduler.waiting_queue = []
        assert self.engine.admit(req)

    def _input(self) -> None:
        if self.ours:
            self._timed(self._hooks.after_input)(None, self.scheduler)

    def _step(self, reqs: list[Any], work: Callable[[], object]) -> None:
        """The results of a batch; what is done with them is timed by its own calls."""
        if not self.ours:
            work()
            return
        spent = 0

        def original(*_: Any) -> None:
            nonlocal spent
            start = clock()
            work()
            spent = clock() - start

        began = clock()
        self._hooks.around_results(original, self.scheduler, Batch(reqs), None)
        self.taken += clock() - began - spent

    def _can_run(self, adder: Any, req: Any) -> None:
        adder.can_run_list.append(req)

    def _took(self, work: Callable[[], object]) -> int:
        before = self.taken
        work()
        return self.taken - before

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            began = clock()
            try:
                return original(*args, **kwargs)
            finally:
                self.taken += clock() - began
                self._inside = False

        return call

    # Cases.

    def run(self, case: str, times: int) -> list[float]:
        """Microseconds of so many times; of a request's life those of each of its steps (`STEPS`),
        one life after the other."""
        kind, _, what = case.partition(" ")
        if kind == "loop":
            return self.loops(int(what), times)
        if kind == "queue":
            return self.queued(int(what), times)
        taken: list[float] = []
        for _ in range(times):
            fresh = Random(self._numbers).choices(range(VOCABULARY), k=FRESH)
            life = self.live(self.prompt + fresh if kind == "new" else self.prompt)
            taken += [life[step] / 1e3 for step in STEPS]
            if kind == "new":
                self.make_room()
        return taken

    def loops(self, running: int, times: int) -> list[float]:
        """Loops beside so many running requests: nothing waits, nothing is new."""
        reqs = [self.request(f"running {at}", [at]) for at in range(running)]
        self.scheduler.last_batch = self.scheduler.running_batch = batch = Batch(reqs)
        before, results = self._hooks.after_input, self._hooks.around_results

        def loop() -> None:
            before(None, self.scheduler)
            results(_nothing, self.scheduler, batch, None)

        return self._each(times, loop)

    def queued(self, count: int, times: int) -> list[float]:
        """Turns of ours beside so many requests that wait for room: their answers are there."""
        waiting = [self.request(f"waiting {at}", [*self.prompt[:-1], at]) for at in range(count)]
        for req in waiting:
            req.refresh()
        self.scheduler.running_batch = Batch([self.request("running", [1])])
        self.scheduler.waiting_queue = waiting
        self._input()
        while self.ours and any(self.cache.shim.held(req.rid) for req in waiting):
            self._input()
        before = self._hooks.after_input
        taken = self._each(times, lambda: before(None, self.scheduler))
        self.scheduler.waiting_queue = []
        self.loop([])
        return taken

    def _each(self, times: int, work: Callable[[], object]) -> list[float]:
        for _ in range(20):  # what was said before is acknowledged by then
            work()
            time.sleep(0.001)
        taken: list[float] = []
        for _ in range(times):
            began = clock()
            for _ in range(EACH):
                work()
            taken.append((clock() - began) / EACH / 1e3)
        return taken

    def make_room(self) -> None:
        """Give the coldest pages up again, by the ordinary way; not timed."""
        spare = self.pools.allocator.available_size() - SPARE * self.pools.page_size // 2
        if spare < 0:
            self.engine.make_room(self.pools.allocator.available_size() + FRESH)


def _nothing(*_: object) -> None:
    """Instead of SGLang's own work."""


def main() -> None:
    """Do what the lines say until they end."""
    warnings.simplefilter("ignore")
    built: list[Turns] = []

    def carry_out(verb: str, arguments: list[Any]) -> list[float] | None:
        if verb == "build":
            built[:] = [Turns(*arguments)]
            return None
        turns = built[0]
        taken = turns.run(*arguments)
        if turns.ours:
            assert not turns.cache.shim.check()
            assert turns.cache.shim.client is not None
        return taken

    answer(carry_out)


if __name__ == "__main__":
    main()
