"""The cache in the older dialect, SGLang 0.5.13 to 0.5.20: the tree frees what a request leaves.

Owns the translation of `cache_unfinished_req` and `cache_finished_req`, and nothing else. A match
brings the slots themselves, and a request's `prefix_indices` is its row so far, tail included. It
must leave SGLang's fields exactly as SGLang's own cache does: whoever schedules reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from scheduler_shim.sglang.allocator import give_back
from scheduler_shim.sglang.cache_loads import LoadingCache, LoadingShim
from scheduler_shim.sglang.keys import KeyMaker
from scheduler_shim.sglang.load import without
from scheduler_shim.sglang.names import PageNames


class OldCache(LoadingCache):
    """SGLang's `BasePrefixCache` of 0.5.13 to 0.5.20."""

    def __init__(self, params: Any, shim: LoadingShim, names: PageNames, keys: KeyMaker) -> None:
        super().__init__(params, shim, names, keys)
        # This dialect calls everything protected that was loaded, though only the tree's pages are.
        shim.loads.on_launch = self._protect_anchor

    def match_prefix(self, params: Any) -> Any:
        """The longest prefix of whole pages that the pool has, as slots and a handle."""
        handle, beyond = self.match(params.key, getattr(params, "req", None))
        return MatchResult(
            device_indices=self.slots_of(handle),
            last_device_node=handle,
            last_host_node=handle,
            best_match_node=handle,
            host_hit_length=beyond,
        )

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **_: Any) -> None:  # noqa: ARG002 - SGLang counts hits by it
        """Store what a running request has computed; its row is the tree's as far as that goes."""
        tokens = req.get_fill_ids()
        row = self._row(req)[: len(tokens)]
        if not self.disable and self.loads.ready(req.rid):
            self._advance(req, tokens, len(tokens))
        req.prefix_indices = row.to(torch.int64, copy=True)

    def _advance(self, req: Any, tokens: Any, count: int) -> None:
        """Publish the first `count` tokens of a request's row."""
        path = self.keys.of_prefix(req, tokens, count)
        handle = self.advance(req.last_node, path, self._row(req)[:count])
        if handle is not req.last_node:
            req.last_node = handle
            self._protect_anchor(req)

    def _protect_anchor(self, req: Any) -> None:
        """What a request has locked is the tree's, all behind it is its own."""
        _holder(req).cache_protected_len = req.last_node.pages * self.page_size

    def publish_loaded(self, req: Any, pages: int) -> None:
        """What has landed behind the locked part is published as if it had been computed."""
        if _holder_of_row(req).req_pool_idx is not None:
            tokens = req.origin_input_ids + req.output_ids
            self._advance(req, tokens, self.tokens_of(pages, tokens))

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int | None = None, **_: Any
    ) -> None:
        """Store a finished request, unless it was aborted or retracted; free the rest of it.

        `kv_len_to_handle`: slots of its row that hold what was computed; up to 0.5.15 the request
        is asked for it.
        """
        if kv_len_to_handle is None:
            kv_len_to_handle = req.pop_committed_kv_cache()
        count: int = kv_len_to_handle
        row = self._row(req)[:count]
        kept: int = _holder(req).cache_protected_len
        wanted = is_insert and self._finished_insert and not self.disable
        if wanted and self.loads.ready(req.rid, last=True):
            tokens = req.origin_input_ids + req.output_ids
            path = self.keys.of_prefix(req, tokens, min(count, len(tokens)))
            kept = max(kept, self.store(req.last_node, path, row))
        held = self.loads.release(req.rid)
        for start, end in without([(kept, count)], held, self.page_size):
            self._free(row[start:end], start)
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        self.shim.ended.append(req)

    def _row(self, req: Any) -> torch.Tensor:
        """The request's row of SGLang's table, as a view."""
        row: torch.Tensor = self.req_to_token_pool.req_to_token[_holder_of_row(req).req_pool_idx]
        return row

    def _free(self, slots: torch.Tensor, start: int) -> None:
        """Give SGLang's own slots back; `start`: where in the row they stand, a whole page."""
        if not slots.numel():
            return
        allocator = self.token_to_kv_pool_allocator
        if hasattr(allocator, "free_segment"):  # finds the pages without a search, from 0.5.18 on
            allocator.free_segment(slots, start_pos=start)
        else:
            give_back(allocator, slots[:: self.page_size].to(torch.int64) // self.page_size)

    def init_load_back(self, params: Any) -> tuple[torch.Tensor, Any]:
        """The slots into which what the match has offered is being loaded."""
        names = self.load_back(params)
        slots = self.names.slots(names) if names else self._no_slots
        return slots, params.req.last_node

    def is_chunk_cache(self) -> bool:
        """Without a tree nothing can be evicted."""
        return self.disable

    # From 0.5.18 on.

    def root_node_handle(self, extra_key: str | None = None) -> Any:  # noqa: ARG002 - one for all
        """The empty path."""
        return self._root

    def is_root(self, node: Any) -> bool:
        """Whether a handle has no pages."""
        return not node.pages

    def is_backuped(self, node: Any) -> bool:  # noqa: ARG002 - the same for all
        """SGLang's own host tier has nothing."""
        return False


def _holder(req: Any) -> Any:
    """Who has `cache_protected_len`: the request, from 0.5.20 on its record of KV."""
    return req if hasattr(req, "cache_protected_len") else req.kv


def _holder_of_row(req: Any) -> Any:
    """Who has `req_pool_idx`: the request, from 0.5.20 on its record of KV."""
    return req if hasattr(req, "req_pool_idx") else req.kv
