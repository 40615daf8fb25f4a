"""SGLang's own trees as a contestant: runs inside one of SGLang's environments, told what to do.

    PYTHONPATH=tests/sglang/stubs:. .sglang/0.5.23/bin/python -m benchmarks.stock

Reads one JSON list a line (`["build", core, page, tokens]`, `["run", case, times]`) and answers
each with one line: null, or microseconds. So rounds of several processes can be interleaved. What
is timed is what SGLang's scheduler calls; the same cases as in `trees.py`. It never imports
treecored.
"""

from __future__ import annotations

import logging
import time
import warnings
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.answering import answer

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

CHAIN = 8
"""Nodes of the path: it was published in so many steps."""


class StockTree:
    """One of SGLang's caches over its own pools on the CPU, with one cached path of `tokens`."""

    def __init__(self, core: str, page: int, tokens: int) -> None:
        import torch
        from sglang.srt.mem_cache.allocator import (
            PagedTokenToKVPoolAllocator,
            TokenToKVPoolAllocator,
        )
        from sglang.srt.mem_cache.base_prefix_cache import (
            EvictParams,
            InsertParams,
            MatchPrefixParams,
        )
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixKey

        torch.set_num_threads(1)
        self._cat = torch.cat
        self._evict_params, self._insert_params = EvictParams, InsertParams
        self._match_params, self._key = MatchPrefixParams, RadixKey
        size = 2 * tokens + 64 * page
        common: dict[str, Any] = {"device": "cpu", "enable_memory_saver": False}
        kv = MHATokenToKVPool(
            size=size,
            page_size=page,
            dtype=torch.bfloat16,
            head_num=1,
            head_dim=8,
            layer_num=1,
            **common,
        )
        if page == 1:
            self.allocator: Any = TokenToKVPoolAllocator(
                size, torch.bfloat16, "cpu", kv, need_sort=False
            )
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                size, page, torch.bfloat16, "cpu", kv, need_sort=False
            )
        table = ReqToTokenPool(size=8, max_context_len=64, **common)
        params: Any = CacheInitParams(
            disable=False,
            req_to_token_pool=table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
        )
        self.cache: Any = _cache(core, params)
        self.page, self.count = page, tokens
        self.tokens = random_tokens(tokens, 0)
        for part in range(1, CHAIN + 1):
            begun, end = tokens * (part - 1) // CHAIN, tokens * part // CHAIN
            held = self._slots(self._match(self.tokens[:begun])) if begun else None
            new = self.allocator.alloc(end - begun)
            value = new if held is None else self._cat([held, new])
            self._insert(self.tokens[:end], value)
        self.slots = self._slots(self._match(self.tokens))
        assert len(self.slots) == tokens

    # Cases: each returns microseconds.

    def case_match(self, times: int) -> list[float]:
        """Look the path up. In 0.5.16 the answer has the slots, in 0.5.23 only their number."""
        return timed(lambda: self._match(self.tokens), times)

    def case_acquire(self, times: int) -> list[float]:
        """Look the path up, get its slots and lock it."""
        taken: list[float] = []
        for _ in range(times):
            begin = time.perf_counter_ns()
            found = self._match(self.tokens)
            self._slots(found)
            lock = self._lock(found.last_device_node)
            taken.append((time.perf_counter_ns() - begin) / 1e3)
            self._unlock(found.last_device_node, lock)
        return taken

    def case_reinsert(self, times: int) -> list[float]:
        """Publish the path once more; all of it is there. (The slots are the tree's own.)"""
        free, self.allocator.free = self.allocator.free, _nothing
        try:
            return timed(lambda: self._insert(self.tokens, self.slots, self.count), times)
        finally:
            self.allocator.free = free

    def case_leaf(self, times: int) -> list[float]:
        """Publish the path and 4 more pages."""
        return self._added(times, 4 * self.page, evict=False)

    def case_evict_leaf(self, times: int) -> list[float]:
        """Give these 4 pages up again."""
        return self._added(times, 4 * self.page, evict=True)

    def case_new(self, times: int) -> list[float]:
        """Publish another path of as many tokens."""
        taken: list[float] = []
        for number in range(times):
            value = self.allocator.alloc(self.count)
            tokens = random_tokens(self.count, 5_000 + number)
            begin = time.perf_counter_ns()
            self._insert(tokens, value)
            taken.append((time.perf_counter_ns() - begin) / 1e3)
            node = self._match(self.tokens).last_device_node
            lock = self._lock(node)
            self._evict(self.count)
            self._unlock(node, lock)
        return taken

    # Private.

    def _added(self, times: int, more: int, *, evict: bool) -> list[float]:
        taken: list[float] = []
        for number in range(times):
            tokens = self.tokens + random_tokens(more, 1_000 + number)
            value = self._cat([self.slots, self.allocator.alloc(more)])
            begin = time.perf_counter_ns()
            self._insert(tokens, value, self.count)
            middle = time.perf_counter_ns()
            self._evict(more)
            end = time.perf_counter_ns()
            taken.append(((end - middle) if evict else (middle - begin)) / 1e3)
        return taken

    def _match(self, tokens: array[int]) -> Any:
        return self.cache.match_prefix(self._match_params(key=self._key(tokens, None)))

    def _slots(self, found: Any) -> Any:
        if hasattr(found, "device_indices"):
            return found.device_indices
        return self.cache.path_device_indices(found.last_device_node)

    def _insert(self, tokens: array[int], value: Any, held: int = 0) -> None:
        key = self._key(tokens, None)
        self.cache.insert(self._insert_params(key=key, value=value, prev_prefix_len=held))

    def _evict(self, tokens: int) -> None:
        self.cache.evict(self._evict_params(num_tokens=tokens))

    def _lock(self, node: Any) -> Any:
        if hasattr(self.cache, "lock"):
            return self.cache.lock(node)
        return self.cache.inc_lock_ref(node).to_dec_params()

    def _unlock(self, node: Any, lock: Any) -> None:
        if hasattr(self.cache, "lock"):
            self.cache.unlock(lock)
        else:
            self.cache.dec_lock_ref(node, lock)


def random_tokens(count: int, seed: int) -> array[int]:
    """Token ids, as SGLang holds them."""
    draw = Random(seed)
    return array("q", draw.choices(range(128_000), k=count))


def timed(work: Callable[[], object], times: int) -> list[float]:
    """Microseconds of each of so many calls."""
    clock = time.perf_counter_ns
    taken: list[float] = []
    for _ in range(times):
        begin = clock()
        work()
        taken.append((clock() - begin) / 1e3)
    return taken


def _cache(core: str, params: Any) -> Any:
    if core == "radix":
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(params)
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params.tree_core_backend = core
    params.tree_components = (ComponentType.FULL,)
    return UnifiedRadixCache(params)


def _nothing(*_: object, **__: object) -> None:
    """Instead of a free that must not happen."""


def main() -> None:
    """Do what the lines say until they end."""
    trees: list[StockTree] = []

    def carry_out(verb: str, arguments: list[Any]) -> list[float] | None:
        if verb == "build":
            trees[:] = [StockTree(*arguments)]
            return None
        case, times = arguments
        taken: list[float] = getattr(trees[0], f"case_{case}")(times)
        return taken

    answer(carry_out)


if __name__ == "__main__":
    main()
