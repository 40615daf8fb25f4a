"""Where the access log is kept, and how much of it.

Owns the choice of the folder and the bounds. A folder that cannot be used stops the start: who
asked for a log wants to know at once that there is none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from directory.analytics.log import FILES_MAX, AccessLog
from directory.core.limits import MIB
from directory.daemon.admin import software_version
from directory.daemon.config import Settings
from directory.daemon.recording import Recording
from directory.daemon.runtime import StartError

FOLDER_NAME: Final = "access"
BLOCK_BYTES: Final = 64 * 1024
"""What a frame fills beyond that is written in further pieces of work."""
SIZE_IN_RUNTIME_DIR: Final = 64 * MIB
SIZE_ELSEWHERE: Final = 1024 * MIB
OFF, ON = "off", "on"


def open_recording(settings: Settings, runtime_dir: Path, *, epoch: int, now_us: int) -> Recording:
    """What the daemon keeps of requests, with an access log if the settings want one.

    Raises `StartError` where its folder cannot be written to.
    """
    log = None
    if settings.access_log != OFF:
        here = settings.access_log == ON
        folder = runtime_dir / FOLDER_NAME if here else Path(settings.access_log)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"access_log: {folder} cannot be made: {error.strerror}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StartError(f"access_log: {folder} cannot be written to")
        size = settings.access_log_size or (SIZE_IN_RUNTIME_DIR if here else SIZE_ELSEWHERE)
        log = AccessLog(
            folder.absolute(),
            epoch=epoch,
            software=f"treecored {software_version()}",
            file_bytes_max=max(BLOCK_BYTES, int(size) // FILES_MAX),
            block_bytes=BLOCK_BYTES,
        )
    return Recording(log, host_bytes=int(settings.host_tier), now_us=now_us)
