"""The cache in the newer dialect, SGLang 0.5.22 and 0.5.23: the caller frees what is left.

Owns the translation of `checkpoint` and of what only this dialect asks, and nothing else. A match
brings a length; the slots are read off the locked handle when they are wanted. It must leave
SGLang's fields exactly as SGLang's own cache does: whoever schedules reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, MatchResult, TreeLock

from scheduler_shim.sglang.cache_loads import LoadingCache
from scheduler_shim.sglang.load import without


class NewCache(LoadingCache):
    """SGLang's `BasePrefixCache` of 0.5.22 and 0.5.23."""

    def match_prefix(self, params: Any) -> Any:
        """The longest prefix of whole pages that the pool has, as a length and a handle."""
        handle, beyond = self.match(params.key, params.req)
        return MatchResult(
            device_prefix_len=handle.pages * self.page_size,
            last_device_node=handle,
            last_host_node=handle,
            best_match_node=handle,
            host_hit_length=beyond,
        )

    def touch_prefix(self, key: Any) -> None:
        """A waiting request's path is wanted soon."""
        path = self.keys.of_key(key)
        if path.tokens and not self.disable:
            self.shim.tree.touch(path.key, path.tokens)

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        """Store what a request has computed; its row is the tree's as far as that goes.

        The same for a running request and for one that has finished: what is left of the row and
        the lock are the caller's to give back.
        """
        ended = req.finished()
        if ended:
            self.shim.ended.append(req)
        if self.disable or (ended and not self._finished_insert):
            return
        if self.loads.ready(req.rid, last=ended):
            tokens = req.full_untruncated_fill_ids
            count = min(up_to, len(tokens))
            anchor = req.lock.node if ended and req.lock is not None else None
            if not self.adds_nothing(anchor, self.keys.of_prefix(req, tokens, count)):
                self._advance(req, tokens, count)

    def _advance(self, req: Any, tokens: Any, count: int) -> None:
        """Publish the first `count` tokens of a request's row."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx][:count]
        path = self.keys.of_prefix(req, tokens, count)
        anchor = req.lock.node if req.lock is not None else None
        handle = self.advance(anchor, path, row)
        if handle is not anchor and handle.pages:
            req.lock = TreeLock(handle, DecLockRefParams())
            req.last_node = handle
            req.kv.cache_protected_len = handle.pages * self.page_size
            req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, req.kv.cache_protected_len)

    def publish_loaded(self, req: Any, pages: int) -> None:
        """What has landed behind the locked part is published as if it had been computed; not of
        a request that SGLang keeps out of the tree (beams share rows that must stay as they are).
        """
        kept_out = getattr(req, "skip_radix_cache_insert", False)
        if req.kv.req_pool_idx is not None and not kept_out:
            tokens = req.full_untruncated_fill_ids
            self._advance(req, tokens, self.tokens_of(pages, tokens))

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Give ranges of a row back, but for pages that a mover may still write into."""
        held = self.loads.release_kv(kv)
        super().free_kv_row(kv, without(ranges, held, self.page_size))

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """A row was given back; one that was kept its end is known of (`checkpoint`)."""
        if not checkpointed:
            self.shim.ended.append(req)

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """Where the prefix of a request lies that has no row yet: matched pages and loaded ones."""
        slots = self.slots_of(req.last_node)
        loaded = self.loads.targets_of(req.rid)
        if loaded:
            slots = torch.cat([slots, self.names.slots(loaded)])
        return slots[: req.prefix_len]

    def path_device_indices(self, node: Any) -> torch.Tensor:
        """Where a locked path's pages lie."""
        return self.slots_of(node)

    def init_load_back(self, params: Any) -> tuple[int, Any]:
        """Tokens that are being loaded of what the match has offered."""
        return len(self.load_back(params)) // 4 * self.page_size, params.req.last_node

    def load_back_is_cache_owned(self) -> bool:
        """What is loaded is the request's own until it is published."""
        return False

    def supports_prefix_sharing(self) -> bool:
        """Not without a tree."""
        return not self.disable

    def root_node_handle(self, extra_key: str | None = None) -> Any:  # noqa: ARG002 - one for all
        """The empty path."""
        return self._root
