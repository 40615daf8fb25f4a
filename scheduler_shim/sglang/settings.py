"""Settings of the SGLang shim: `TREECORED_*` variables of the engine's environment.

Owns the names, defaults and ranges, and the one sentence that a wrong value gets. The engine's own
flags stay SGLang's. It must never read anything but the environment: a plugin is given no flags.
docs/sglang.md has the table, a test holds it to this file.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from directory.core.limits import FENCE_DEADLINE_MS, INSTANCE_CHARS_MAX, RESTORES_PER_POOL_MAX
from directory.protocol.runtime_dir import default_runtime_dir
from directory.protocol.variables import PREFIX, unknown
from scheduler_shim.deadlines import Deadlines

logger = logging.getLogger(__name__)


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one sentence that names it."""


class Settings(BaseSettings):
    """What a user may choose."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    runtime_dir: Path = Field(default_factory=default_runtime_dir)
    """Folder of the daemon's sockets, as `treecored serve` was told."""
    instance: Annotated[str, Field(max_length=INSTANCE_CHARS_MAX - 16)] = ""
    """Name by which the daemon knows this engine; empty: from the process number."""
    mode: Literal["mirrored", "thin"] = "mirrored"
    """Who keeps this pool's tree: the engine, with a mirror of its own, or the daemon."""
    loads: Literal["held", "layerwise", "adaptive", "none"] = "held"
    """What lies beyond the pool is restored while the request is held back; or, where all of it
    comes from the host tier, while its forward pass follows layer by layer: always, or only where
    no running request waits for its next token; or not at all."""
    on_absent: Literal["degrade", "wait", "fail"] = "degrade"
    """Without a daemon at start: serve without and join it later, wait for it, or refuse."""
    wait_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """How long `wait` waits before it refuses."""
    match_ms: Annotated[int, Field(ge=1, le=60_000)] = 20
    """Deadline of a question what lies beyond; a later answer is a miss."""
    call_ms: Annotated[int, Field(ge=1, le=60_000)] = 500
    """Deadline of a thin engine's inserts, locks and evictions; without an answer to one of these
    the daemon is lost."""
    misses_max: Annotated[int, Field(ge=1, le=1_000)] = 10
    """So many questions in a row without any sign of the daemon mean that it is lost."""
    hold_ms_max: Annotated[int, Field(ge=0, le=600_000)] = 2_000
    """A request is held back no longer than this; then it is admitted with what there is."""
    layer_ms: Annotated[int, Field(ge=1, le=60_000)] = 2_000
    """A forward pass waits no longer than this for a layer of a load; its request ends then."""
    restore_min_pages: Annotated[int, Field(ge=1)] = 1
    """Fewer pages than this are computed instead of restored."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Part of the free and evictable pages that restores under way may have as targets. A request
    that is alone may have nine tenths of them."""
    fills_max: Annotated[int, Field(ge=1, le=RESTORES_PER_POOL_MAX // 2)] = 64
    """Restores under way at once."""
    window: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Waiting requests, from the head of the queue on, that are looked at in a tick."""
    asks_max: Annotated[int, Field(ge=1, le=4_096)] = 32
    """Questions in one tick."""
    reask_ms: Annotated[int, Field(ge=1, le=600_000)] = 1_000
    """A request that waits in the queue is asked for again after so long."""
    idle_wait_us: Annotated[int, Field(ge=0, le=20_000)] = 1_000
    """While nothing runs and all that waits is held back, a tick waits so long for the daemon."""
    busy_wait_us: Annotated[int, Field(ge=0, le=20_000)] = 0
    """While something runs, a tick that has asked waits so long for the answers, so that nobody
    waits a whole step for them. Every running decode waits with it: 0 unless an operator asks."""
    flush_wait_ms: Annotated[int, Field(ge=0, le=60_000)] = 2_000
    """How long a flush waits for movers before it leaves their targets out of use."""
    trust_weight_version: bool = False
    """Engines whose weights were updated share again under equal `weight_version` names. Off: an
    updated engine shares with nobody until it is started anew."""
    model_id: str = ""
    """A promise: engines with equal ids have equal weights, wherever their files are. Empty: the
    same files are the same weights."""
    share_versions: bool = False
    """Engines of different SGLang versions share pages."""
    check_digests: Path | None = None
    """Checking mode: digests of all published and all restored pages are written into this folder,
    to be compared. Not for production."""
    staging_mib: Annotated[int, Field(ge=0, le=16_384)] = 0
    """MiB of the device for a slab through which pages with small pieces (less than 64 KiB a layer)
    are backed up and loaded; 256 suffice for a full bus. 0: they go as they lie."""
    stats_file: Path | None = None
    """Counters are written there as JSON, at most once a second."""

    @property
    def by_layers(self) -> bool:
        """Whether a forward pass may follow a load layer by layer."""
        return self.loads in ("layerwise", "adaptive")

    @property
    def deadlines(self) -> Deadlines:
        """As the client has them."""
        return Deadlines(
            call_ms=self.call_ms,
            restore_ms=4 * FENCE_DEADLINE_MS,
            connect_ms=4 * FENCE_DEADLINE_MS,
            misses_max=self.misses_max,
            match_ms=self.match_ms,
        )

    def instance_name(self, rank: int = 0) -> str:
        """This process's name: the process number makes the default unique among the living."""
        base = self.instance or f"sglang-{os.getpid()}"
        return f"{base}-r{rank}" if rank else base


def load_settings() -> Settings:
    """Read the environment. Raises `SettingsError` with one sentence for the first wrong value.

    A name that neither an engine nor the daemon knows is warned of: it is misspelled.
    """
    for name in unknown(os.environ):
        logger.warning("treecored: there is no setting for the variable %s; it is ignored", name)
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + "_".join(str(part) for part in first["loc"]).upper()
        raise SettingsError(f"{name}={first.get('input')!r}: {first['msg']}") from error
