"""The runtime folder: where the daemon's sockets lie when nobody says otherwise.

Daemon, command line and shims find one another here without a setting. It decides on a path and
touches no file.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def default_runtime_dir() -> Path:
    """`$XDG_RUNTIME_DIR/treecored`, else a folder of this user's in the temporary folder."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return Path(base) / "treecored"
    return Path(tempfile.gettempdir()) / f"treecored-{os.getuid()}"
