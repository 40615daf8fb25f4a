"""The first registration of an engine: tried, waited for or gone without, as the settings say.

Owns nothing. It runs before the scheduler's loop does, so it is the one place that may wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from directory.core.errors import TreecoredError
from scheduler_shim.client import DaemonClient
from scheduler_shim.sglang.settings import Settings

logger = logging.getLogger(__name__)


def connect(
    attempt: Callable[[], DaemonClient], settings: Settings, *, sleep_s: float = 0.2
) -> DaemonClient | None:
    """The first registration, as the settings want it. None: degraded from the start.

    Raises the typed error of the last try where the settings say `fail`, or `wait` and it is over.
    """
    give_up = time.monotonic() + settings.wait_s
    while True:
        try:
            return attempt()
        except TreecoredError as error:
            waits = settings.on_absent == "wait" and time.monotonic() < give_up
            if settings.on_absent == "degrade":
                logger.warning("treecored: starting without a daemon: %s", error)
                return None
            if not waits:
                raise
        time.sleep(sleep_s)
