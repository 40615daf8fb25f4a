"""How one scheduler's backend is put together: pool, client, shim, cache, hooks.

Owns the order: whatever may be refused comes before anything is changed, the pool is moved before
anything was written into it, and SGLang is hooked last.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from scheduler_shim.client import DaemonClient
from scheduler_shim.dial import DaemonDial
from scheduler_shim.sglang import compat, hooks
from scheduler_shim.sglang.allocator import NamedAllocator
from scheduler_shim.sglang.buffers import find_tensors
from scheduler_shim.sglang.checking import SUFFIX, Checking
from scheduler_shim.sglang.connecting import connect
from scheduler_shim.sglang.fingerprint import sglang_version
from scheduler_shim.sglang.page_digests import PageDigests
from scheduler_shim.sglang.pools import SglangPool
from scheduler_shim.sglang.settings import Settings, load_settings
from scheduler_shim.sglang.shim import Shim
from transfer.ipc.marks import mark

logger = logging.getLogger(__name__)


def build_cache(context: Any) -> Any:
    """The tree cache of one scheduler. `context`: SGLang's TreeCacheBuildContext.

    Raises with the reason what cannot be served, and the daemon's absence where the settings say
    that it must be there.
    """
    settings = load_settings()
    mark.begin()  # what was imported before the fork had another environment
    compat.check_supported(context)
    pool = SglangPool.of(
        context,
        model_id=settings.model_id,
        share_versions=settings.share_versions,
        landings=settings.fills_max if settings.by_layers else 0,
        staging_bytes=settings.staging_mib << 20,
    )
    try:
        shim = make_shim(context, pool, settings)
    except BaseException:
        pool.close()
        raise
    cache = compat.make_cache(context, shim)
    if settings.check_digests is not None:
        shim.loads.checks = make_checks(context, pool, settings.check_digests, settings)
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
        layers=pool.make_layers() if settings.by_layers else None,
        seed=hash(instance),
    )


def make_checks(context: Any, pool: SglangPool, folder: Path, settings: Settings) -> Checking:
    """What checking mode records of this pool, in a file of its own in `folder`."""
    # Without the overlap schedule forward passes run on the current stream, not on their own one.
    overlap = not context.server_args.disable_overlap_schedule
    stream = context.tp_worker.model_runner.forward_stream if overlap else None
    digests = PageDigests(find_tensors(pool.kvcache), pool.names, stream)
    return Checking(folder / f"{settings.instance_name()}{SUFFIX}", digests)
