"""The runtime folder: where the daemon's sockets lie when nobody says otherwise, and its lock.

Daemon, command line and shims find one another here without a setting. It decides on a path and
changes no file.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Final

LOCK_NAME: Final = "daemon.lock"
"""Held by the daemon and by each of its movers as long as it lives."""


def default_runtime_dir() -> Path:
    """`$XDG_RUNTIME_DIR/treecored`, else a folder of this user's in the temporary folder."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return Path(base) / "treecored"
    return Path(tempfile.gettempdir()) / f"treecored-{os.getuid()}"


def deserted(runtime_dir: Path) -> bool:
    """Whether neither a daemon nor a mover of one lives, by the lock of the folder.

    The lock is tried for a moment and shared, so that several may ask at once; a daemon that starts
    at that moment tries again. What cannot be found out is not so.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(runtime_dir / LOCK_NAME, flags)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
