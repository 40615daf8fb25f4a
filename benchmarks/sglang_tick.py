"""A scheduler's tick over its waiting requests, with SGLang's own trees and with ours.

    PYTHONPATH=tests/sglang/stubs:. .sglang/0.5.23/bin/python -m benchmarks.sglang_tick

Runs inside one of SGLang's environments and does what JSON lines say: `["build", kind, page,
tokens, requests, folder]`, then `["run", case, times]`. A kind is one of SGLang's trees, or
"mirrored" or "thin" with the daemon of the runtime folder. The calls are those of SGLang's
scheduler (tests/sglang/cache/rig.py): what it does with a waiting queue before each batch.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.answering import answer

clock = time.perf_counter_ns
SPARE = 4_096
"""Pages for what is published between ticks."""


class Queue:
    """A cache with all the requests' prompts cached, and the requests that wait."""

    def __init__(self, kind: str, page: int, tokens: int, count: int, folder: str) -> None:
        from tests.sglang.cache import rig

        self._rig = rig
        self._page = page
        self._others = 128_000
        pages = count * (tokens // page) + SPARE
        self.pools = rig.Pools(pages, page, rows=count + 1, context=tokens + 64)
        self.client: Any = None
        if kind in ("mirrored", "thin"):
            from scheduler_shim.client import DaemonClient

            pool = rig.our_pool(self.pools)
            self.client = DaemonClient.connect(Path(folder), pool, instance=kind, mode=kind)  # type: ignore[arg-type]
            self.cache = rig.our_cache(self.pools, client=self.client, pool=pool, mode=kind)  # type: ignore[arg-type]
        else:
            self.cache = rig.stock_cache(self.pools, kind)
        self.engine = rig.Engine(self.cache, self.pools)
        prompts = [Random(at).choices(range(128_000), k=tokens) for at in range(count)]
        for at, prompt in enumerate(prompts):
            request = rig.Req(f"first {at}", prompt)
            self.engine.match(request)
            assert self.engine.admit(request)
            self.engine.checkpoint(request)
            self.engine.end(request)
        self.waiting = [rig.Req(f"waiting {at}", prompt) for at, prompt in enumerate(prompts)]
        for request in self.waiting:
            request.refresh()
        assert self.tick() >= count * (tokens - page)

    def tick(self) -> int:
        """Match every waiting request; tokens that are cached of them."""
        rig, found = self._rig, 0
        for request in self.waiting:
            tokens = request.full_untruncated_fill_ids
            key = rig.radix_key(request, tokens, len(tokens) - 1)
            result = self.cache.match_prefix(rig.MatchPrefixParams(key=key, req=request))
            request.last_node = result.last_device_node
            found += result.device_prefix_len if rig.NEW else len(result.device_indices)
        return found

    def case_tick(self, times: int) -> list[float]:
        """Microseconds of whole ticks."""
        taken: list[float] = []
        for _ in range(times):
            begin = clock()
            self.tick()
            taken.append((clock() - begin) / 1e3)
            if self.client is not None:
                self.cache.shim.take_answers()
        return taken

    def case_changed(self, times: int) -> list[float]:
        """Microseconds of ticks before each of which another prompt has been published."""
        taken: list[float] = []
        for _ in range(times):
            self._others += 1
            other = self._rig.Req(f"other {self._others}", [self._others] * self._page)
            self.engine.match(other)
            assert self.engine.admit(other)
            self.engine.checkpoint(other)
            self.engine.end(other)
            taken += self.case_tick(1)
        return taken


def main() -> None:
    """Do what the lines say until they end."""
    warnings.simplefilter("ignore")
    queues: list[Queue] = []

    def carry_out(verb: str, arguments: list[Any]) -> list[float] | None:
        if verb == "build":
            queues[:] = [Queue(*arguments)]
            return None
        case, times = arguments
        taken: list[float] = getattr(queues[0], f"case_{case}")(times)
        return taken

    answer(carry_out)


if __name__ == "__main__":
    main()
