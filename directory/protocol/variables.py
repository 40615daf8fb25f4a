"""The names of every `TREECORED_*` variable, of the daemon and of an engine.

Owns the two lists alone, so that either side knows a name that is meant for the other from one that
is misspelled; what a name means stands with the settings, and a test holds the lists to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

PREFIX: Final = "TREECORED_"
CONFIG_VARIABLE: Final = "TREECORED_CONFIG"

DAEMON_VARIABLES: Final = frozenset(
    {CONFIG_VARIABLE}
    | {
        f"{PREFIX}{name}"
        for name in (
            "ACCESS_LOG", "ACCESS_LOG_SIZE", "COLD", "COPY_RATE", "DEVICE", "HOST_CHECKSUMS",
            "HOST_DIR", "HOST_KEEP", "HOST_SCRUB", "HOST_TIER", "HOST_UNPINNED", "KV_EVENTS",
            "KV_EVENTS_DETOKENIZER", "KV_EVENTS_FORM", "KV_EVENTS_UNION", "LOG_FORMAT",
            "LOG_LEVEL", "LOOK_US", "METRICS", "MOVER_SILENCE_MS_MAX", "MOVER_START_MS_MAX",
            "READERS_DIR", "RUNTIME_DIR", "SEGMENT", "SESSIONS_MAX",
        )
    }
)  # fmt: skip
"""What `treecored` itself reads (directory/daemon/config.py)."""

ENGINE_VARIABLES: Final = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "ASKS_MAX", "BUSY_WAIT_US", "CALL_MS", "CHECK_DIGESTS", "FILLS_MAX", "FLUSH_WAIT_MS",
        "HOLD_MS_MAX", "IDLE_WAIT_US", "INSTANCE", "LAYER_MS", "LOADS", "MATCH_MS", "MISSES_MAX",
        "MODE", "MODEL_ID", "ON_ABSENT", "REASK_MS", "RESTORE_MIN_PAGES", "RUNTIME_DIR", "SHARE",
        "SHARE_VERSIONS", "STAGING_MIB", "STATS_FILE", "TRUST_WEIGHT_VERSION", "WAIT_S", "WINDOW",
    )
)  # fmt: skip
"""What an engine's plugin reads (scheduler_shim/sglang/settings.py)."""


def unknown(names: Iterable[str]) -> list[str]:
    """Of the names of variables, those that begin like ours and that neither side reads."""
    known = DAEMON_VARIABLES | ENGINE_VARIABLES
    return sorted(
        name for name in names if name.upper().startswith(PREFIX) and name.upper() not in known
    )
