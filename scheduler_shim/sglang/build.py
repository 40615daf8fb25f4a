"""How one scheduler's backend is put together: pool, client, shim, cache, hooks.

Owns the order: whatever may be refused comes before anything is changed, the pool is moved before
anything was written into it, and SGLang is hooked last.
"""

from __future__ import annotations

import logging
from typing import Any

from scheduler_shim.client import DaemonClient
from scheduler_shim.dial import DaemonDial
from scheduler_shim.sglang import compat, hooks
from scheduler_shim.sglang.allocator import NamedAllocator
from scheduler_shim.sglang.connecting import connect
from scheduler_shim.sglang.fingerprint import sglang_version
from scheduler_shim.sglang.pools import SglangPool
from scheduler_shim.sglang.settings import Settings, load_settings
from scheduler_shim.sglang.shim import Shim

logger = logging.getLogger(__name__)


def build_cache(context: Any) -> Any:
    """The tree cache of one scheduler. `context`: SGLang's TreeCacheBuildContext.

    Raises with the reason what cannot be served, and the daemon's absence where the settings say
    that it must be there.
    """
    settings = load_settings()
    compat.check_supported(context)
    pool = SglangPool.of(
        context,
        model_id=settings.model_id,
        share_versions=settings.share_versions,
        landings=settings.fills_max if settings.loads == "layerwise" else 0,
    )
    try:
        shim = make_shim(context, pool, settings)
    except BaseException:
        pool.close()
        raise
    cache = compat.make_cache(context, shim)
    if shim.loads.enabled:
        pool.kvcache.register_layer_transfer_counter(shim.loads.counter)
    hooks.install()
    logger.info("treecored: %s, %r", shim.mode, pool)
    return cache


def make_shim(context: Any, pool: SglangPool, settings: Settings) -> Shim:
    """Register with the daemon, and make the shim over what came of it."""
    instance = settings.instance_name(int(context.tp_rank))
    software = f"treecored in SGLang {sglang_version()}"

    def attempt() -> DaemonClient:
        return DaemonClient.connect(
            settings.runtime_dir,
            pool,
            instance=instance,
            mode=settings.mode,
            deadlines=settings.deadlines,
            software=software,
        )

    allocator = NamedAllocator(pool.names, context.params.token_to_kv_pool_allocator)
    return Shim(
        pool,
        allocator,
        connect(attempt, settings),
        settings,
        dial=DaemonDial(
            settings.runtime_dir,
            pool,
            instance=instance,
            deadlines=settings.deadlines,
            software=software,
        ),
        unnamed=lambda: allocator.unnamed_count,
        start_over=allocator.start_over,
        layers=pool.make_layers() if settings.loads == "layerwise" else None,
        seed=hash(instance),
    )
