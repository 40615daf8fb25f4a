"""Which SGLang this is: its dialect, the range that is supported, and what is refused.

Owns every difference between versions that is not a dialect's own file, so that none is asked
about elsewhere. It must never guess: what it does not know is refused at the start with the
reason, and never found out later from wrong answers.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from scheduler_shim.sglang.adapters import adapter_versions
from scheduler_shim.sglang.keys import KeyMaker
from scheduler_shim.sglang.versions import Unsupported, check_version

Dialect = Literal["old", "new"]

ALLOCATORS: Final = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
"""One pool, one kind of slot. The others have several of either."""


class Refusal(NamedTuple):
    """A feature that is refused, and why."""

    flag: str
    reason: str


REFUSED: Final = (
    Refusal("enable_hierarchical_cache", "treecored is the host tier"),
    Refusal("enable_lmcache", "treecored is the host tier"),
    Refusal("enable_flexkv", "treecored is the host tier"),
    Refusal("enable_unified_cache_external_linker", "treecored is the host tier"),
    Refusal("enable_streaming_session", "sessions keep rows outside the tree"),
    Refusal("enable_session_radix_cache", "sessions keep rows outside the tree"),
    Refusal("disaggregation_decode_enable_radix_cache", "disaggregation is not supported yet"),
    Refusal("enable_hisparse", "its pools hold more than one kind of slot"),
    Refusal("dllm_algorithm", "blocks of a diffusion model depend on more than their prefix"),
    Refusal("enable_dp_attention", "rank groups of SGLang are not supported yet"),
)
"""Flags of SGLang's that must not be set."""


def dialect() -> Dialect:
    """Which of the two interfaces SGLang asks its caches for; by what it has, not by its name."""
    from sglang.srt.mem_cache import base_prefix_cache

    return "new" if hasattr(base_prefix_cache, "TreeLock") else "old"


def check_supported(ctx: Any) -> None:
    """Raise `Unsupported` for an engine that treecored cannot serve. `ctx`: SGLang's
    `TreeCacheBuildContext`."""
    import sglang

    check_version(sglang.__version__)
    for refused, what in (
        (ctx.is_hybrid_swa, "a sliding window"),
        (ctx.is_hybrid_ssm, "a state (Mamba and the like)"),
    ):
        if refused:
            raise Unsupported(f"treecored cannot share the cache of a model with {what}: drop it")
    args, params = ctx.server_args, ctx.params
    for flag, reason in REFUSED:
        if getattr(args, flag, None):
            raise Unsupported(f"treecored does not go with --{_dashed(flag)}: {reason}")
    mode = getattr(args, "disaggregation_mode", None)
    if mode not in (None, "null"):
        raise Unsupported("treecored does not go with disaggregation yet: prefill and decode apart")
    policy = str(getattr(args, "radix_eviction_policy", "lru") or "lru").lower()
    if policy != "lru":
        raise Unsupported(
            f"treecored evicts by recency of use: drop --radix-eviction-policy {policy}"
        )
    sizes = {name: getattr(args, name, 1) or 1 for name in ("tp_size", "pp_size", "dcp_size")}
    for name, size in sizes.items():
        if size != 1:
            raise Unsupported(f"treecored serves engines of one rank yet, this has {name} {size}")
    allocator = params.token_to_kv_pool_allocator
    if type(allocator).__name__ not in ALLOCATORS or allocator.page_size != params.page_size:
        raise Unsupported(
            f"treecored knows no pools of a {type(allocator).__name__} with pages of "
            f"{allocator.page_size} tokens in a cache of {params.page_size}"
        )


def make_cache(ctx: Any, shim: Any) -> Any:
    """The cache for this SGLang. `shim`: the engine's `Shim` over an `SglangPool`."""
    params = ctx.params
    keys = KeyMaker(
        params.page_size,
        bigram=bool(params.is_eagle),
        epoch=lambda: shim.key_epoch,
        adapter_version=adapter_versions(ctx.tp_worker),
    )
    return cache_class()(params, shim, shim.pool.names, keys)


def cache_class() -> Any:
    """The cache's class in this SGLang's dialect."""
    if dialect() == "new":
        from scheduler_shim.sglang.cache_new import NewCache

        return NewCache
    from scheduler_shim.sglang.cache_old import OldCache

    return OldCache


def _dashed(flag: str) -> str:
    return flag.replace("_", "-")
