"""A scheduler's use of its tree cache, in miniature: SGLang's own pools, tables and parameters.

`Engine` does what SGLang's scheduler does between a match and the end of a request, in either
dialect, over any cache. Every slot has a content that follows from the tokens before it, so that a
page which holds something else than its path is noticed by whoever matches it.
"""

from __future__ import annotations

import inspect
from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from directory.core.events import Mode
from scheduler_shim.client import DaemonClient
from scheduler_shim.dial import Dial
from scheduler_shim.sglang.compat import cache_class, dialect
from scheduler_shim.sglang.keys import KeyMaker
from scheduler_shim.sglang.pools import SglangPool
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.shim import Shim

NEW = dialect() == "new"
SALTED = "cache_salt" in inspect.signature(RadixKey.__init__).parameters
MASK = (1 << 62) - 1


class Kv:
    """The newer dialect's record of a request's KV."""

    def __init__(self) -> None:
        self.req_pool_idx: int | None = None
        self.cache_protected_len = 0
        self.cache_inserted_len = 0

    def get_evicted_seqlen(self, _: object) -> int:
        """No sliding window."""
        return 0

    def set_evicted_seqlen(self, _: object, length: int) -> None:
        """No sliding window."""

    def swa_dead_lo(self, _: int) -> int:
        """No sliding window."""
        return self.cache_protected_len


class Req:
    """What caches read of SGLang's `Req`."""

    def __init__(
        self,
        rid: str,
        tokens: list[int],
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.rid = rid
        self.origin_input_ids = array("q", tokens)
        self.output_ids = array("q")
        self.full_untruncated_fill_ids = array("q")
        # As SGLang's constructor glues them.
        self.extra_key = (extra_key or "") + lora_id if lora_id is not None else extra_key
        self.lora_id = lora_id
        self.cache_salt = cache_salt or None
        self.multimodal_inputs: Any = None
        self.skip_radix_cache_insert = False
        self.session = None
        self.session_id = None
        self.priority = 0
        self.kv_rotation_base = None
        self.finished_reason = None
        self.extend_end = 0
        self.prefix_len = 0
        self.prefix_indices = torch.empty(0, dtype=torch.int64)
        self.last_node: Any = None
        self.lock: Any = None
        self.ended = False
        self.contents = array("q")
        if NEW:
            self.kv = Kv()
        else:
            self.req_pool_idx: int | None = None
            self.cache_protected_len = 0

    @property
    def holder(self) -> Any:
        """Who has `cache_protected_len` and `req_pool_idx`."""
        return self.kv if NEW else self

    def finished(self) -> bool:
        """Whether nothing more will be computed."""
        return self.ended

    def refresh(self) -> None:
        """Bring the fill ids up to date, as SGLang does: appended to, never rewritten."""
        have = len(self.full_untruncated_fill_ids) - len(self.origin_input_ids)
        if 0 <= have <= len(self.output_ids):
            self.full_untruncated_fill_ids.extend(self.output_ids[have:])
        else:
            self.full_untruncated_fill_ids = self.origin_input_ids + self.output_ids

    def get_fill_ids(self) -> array[int]:
        """Tokens up to the end of what is being computed."""
        return self.full_untruncated_fill_ids[: self.extend_end]

    @property
    def space(self) -> object:
        """What its content depends on besides its tokens."""
        return (self.extra_key, self.lora_id, self.cache_salt)


def radix_key(req: Req, tokens: array[int], limit: int | None = None) -> Any:
    """A key as SGLang's scheduler makes it."""
    salt = {"cache_salt": req.cache_salt} if SALTED else {}
    return RadixKey(tokens, req.extra_key, limit=limit, **salt)


class Pools:
    """SGLang's pools of `pages` pages, for up to `rows` requests at once."""

    def __init__(self, pages: int, page_size: int, *, rows: int = 64, context: int = 4096) -> None:
        size = pages * page_size
        self.page_size = page_size
        self.kv = MHATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=torch.bfloat16,
            head_num=1,
            head_dim=8,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        if page_size == 1:
            self.allocator: Any = TokenToKVPoolAllocator(
                size, torch.bfloat16, "cpu", self.kv, need_sort=False
            )
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                size, page_size, torch.bfloat16, "cpu", self.kv, need_sort=False
            )
        self.table = ReqToTokenPool(
            size=rows, max_context_len=context, device="cpu", enable_memory_saver=False
        )
        self.free_rows = list(range(rows))
        self.content = torch.zeros(size + page_size, dtype=torch.int64)
        self.size = size

    def params(self, *, is_eagle: bool = False, disable: bool = False) -> Any:
        """SGLang's parameters of a cache."""
        return CacheInitParams(
            disable=disable,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page_size,
            is_eagle=is_eagle,
        )


def our_cache(
    pools: Pools,
    *,
    is_eagle: bool = False,
    disable: bool = False,
    client: DaemonClient | None = None,
    pool: SglangPool | None = None,
    mode: Mode = "mirrored",
    dial: Dial | None = None,
) -> Any:
    """Our cache over a shim; without a client it is mirrored and nobody is told."""
    pool = pool or our_pool(pools)
    allocator: Any = pool.make_allocator()
    shim = Shim(
        pool,
        allocator,
        client,
        Settings(mode=mode),
        dial=dial,
        unnamed=lambda: allocator.unnamed_count,
    )
    keys = KeyMaker(pools.page_size, bigram=is_eagle, epoch=lambda: shim.key_epoch)
    params = pools.params(is_eagle=is_eagle, disable=disable)
    return cache_class()(params, shim, pool.names, keys)


def our_pool(pools: Pools, fingerprint: bytes = b"cache tests") -> SglangPool:
    """SGLang's pool in shared memory, as a registration wants it."""
    pool = SglangPool.over(pools.allocator)
    pool._fingerprint = fingerprint
    return pool


def stock_cache(pools: Pools, core: str) -> Any:
    """One of SGLang's own: radix, unified (older dialect), python, rust (newer dialect)."""
    params = pools.params()
    if core == "radix":
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(params)
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    if NEW:
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        params.tree_core_backend = core
    else:
        from sglang.srt.mem_cache.unified_cache_components import ComponentType
    params.tree_components = (ComponentType.FULL,)
    return UnifiedRadixCache(params)


class Engine:
    """A scheduler's way with one cache."""

    def __init__(self, cache: Any, pools: Pools) -> None:
        self.cache = cache
        self.pools = pools
        self.page = pools.page_size
        self.evicted = 0
        """Tokens that the last allocation had evicted."""

    # A request's life.

    def match(self, req: Req) -> int:
        """What is cached of all tokens but the last; SGLang's fields are set as it sets them."""
        req.refresh()
        tokens = req.full_untruncated_fill_ids
        limit = max(len(tokens) - 1, 0)
        result = self.cache.match_prefix(
            MatchPrefixParams(key=radix_key(req, tokens, limit), req=req)
        )
        req.last_node = result.last_device_node
        if NEW:
            req.prefix_len = result.device_prefix_len
            slots = self.cache.path_device_indices(req.last_node)[: req.prefix_len]
        else:
            req.prefix_indices = slots = result.device_indices
            req.prefix_len = len(req.prefix_indices)
        req.holder.cache_protected_len = req.prefix_len
        self.verify(req, slots)
        return int(req.prefix_len)

    def admit(self, req: Req, count: int | None = None) -> bool:
        """Lock what was matched, and compute up to `count` tokens; False where no room is."""
        cache = self.cache
        if NEW:
            around = cache.lock(req.last_node)
            req.lock = cache.lock(req.last_node)
            cache.unlock(around)
        else:
            receipt = cache.inc_lock_ref(req.last_node).to_dec_params()
            cache.inc_lock_ref(req.last_node)
            cache.dec_lock_ref(req.last_node, receipt)
        req.holder.req_pool_idx = self.pools.free_rows.pop()
        if NEW:
            slots = cache.prefix_device_indices(req) if req.prefix_len else torch.empty(0)
        else:
            slots = req.prefix_indices
        self.row(req)[: req.prefix_len] = slots.to(torch.int32)
        if self.compute(req, count or len(req.full_untruncated_fill_ids)):
            return True
        self.end(req, insert=False, computed=req.prefix_len)
        return False

    def compute(self, req: Req, count: int) -> bool:
        """Allocate and write the tokens from the prefix on up to `count`."""
        slots = self.allocate(req, req.prefix_len, count)
        if slots is None:
            return False
        self.row(req)[req.prefix_len : count] = slots.to(torch.int32)
        self.pools.content[slots] = self.contents(req)[req.prefix_len : count]
        req.extend_end = count
        return True

    def checkpoint(self, req: Req, *, chunked: bool = False) -> None:
        """Store what was computed of a running request."""
        if NEW:
            self.cache.checkpoint(req, up_to=req.extend_end)
        else:
            self.cache.cache_unfinished_req(req, chunked=chunked)
        req.prefix_len = req.extend_end
        self.verify(req, self.row(req)[: req.extend_end].to(torch.int64))

    def decode(self, req: Req, tokens: list[int]) -> bool:
        """Append output tokens; the KV of the last one is not computed yet."""
        req.output_ids.extend(tokens)
        req.refresh()
        if not self.compute(req, len(req.full_untruncated_fill_ids) - 1):
            del req.output_ids[-len(tokens) :]
            del req.contents[len(req.origin_input_ids) + len(req.output_ids) :]
            req.full_untruncated_fill_ids = req.origin_input_ids + req.output_ids
            return False
        req.prefix_len = req.extend_end
        return True

    def end(self, req: Req, *, insert: bool = True, computed: int | None = None) -> None:
        """Store (or not) and give everything back, as SGLang's `release_kv_cache`."""
        cache, count = self.cache, req.extend_end if computed is None else computed
        req.ended = insert
        if NEW:
            if insert:
                req.refresh()
                cache.checkpoint(req, up_to=count)
            cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, count)])
            cache.unlock(req.lock)
            req.lock = None
        else:
            cache.cache_finished_req(req, is_insert=insert, kv_len_to_handle=count)
        self.pools.free_rows.append(req.holder.req_pool_idx)
        req.holder.req_pool_idx = None

    # Pieces.

    def row(self, req: Req) -> torch.Tensor:
        """The request's row of SGLang's table."""
        row: torch.Tensor = self.pools.table.req_to_token[req.holder.req_pool_idx]
        return row

    def allocate(self, req: Req, first: int, count: int) -> torch.Tensor | None:
        """Slots of the positions [first, count) of a row: the rest of its last page first."""
        page, allocator = self.page, self.pools.allocator
        tail = min(-first % page, count - first)
        pages = -(-(count - first - tail) // page)
        self.evicted = 0
        if not self.make_room(pages * page):
            return None
        begun = self.row(req)[first - 1].to(torch.int64) + 1 + torch.arange(tail)
        fresh = allocator.alloc(pages * page) if pages else torch.empty(0, dtype=torch.int64)
        assert fresh is not None
        return torch.cat([begun, fresh[: count - first - tail]])

    def make_room(self, tokens: int) -> bool:
        """Evict where too little is free, as either dialect asks for it."""
        allocator = self.pools.allocator
        short = tokens - allocator.available_size()
        if short > 0:
            wanted = short if NEW else tokens
            evict = self.cache.evict_for_alloc if NEW else self.cache.evict
            self.evicted = evict(EvictParams(num_tokens=wanted)).num_tokens_evicted
        return bool(allocator.available_size() >= tokens)

    def contents(self, req: Req) -> torch.Tensor:
        """What each position's slot has to hold: it follows from all tokens up to there."""
        tokens, held = req.full_untruncated_fill_ids, req.contents
        del held[len(tokens) :]
        at = held[-1] if held else hash(req.space) & MASK
        for token in tokens[len(held) :]:
            at = (at * 1_000_003 + token + 1) & MASK
            held.append(at)
        if not held:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(held, dtype=torch.int64).clone()

    def verify(self, req: Req, slots: torch.Tensor) -> None:
        """Every slot holds what its position demands."""
        wanted = self.contents(req)[: len(slots)]
        assert torch.equal(self.pools.content[slots], wanted), f"{req.rid} reads another's pages"

    def accounts(self) -> tuple[int, int, int]:
        """Tokens that are free, evictable and protected."""
        cache = self.cache
        return (
            int(self.pools.allocator.available_size()),
            int(cache.evictable_size()),
            int(cache.protected_size()),
        )
