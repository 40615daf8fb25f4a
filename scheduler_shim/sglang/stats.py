"""The stats file: the shim's counters as JSON, for whoever cannot ask the engine's process.

Owns when and how it is written: at most once a second, whole or not at all. It must never cost the
engine more than that, and a file that cannot be written is no reason to stop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

EVERY_US: Final = 1_000_000
NEVER_US: Final = 1 << 62


class StatsFile:
    """One file, or none (`path` None)."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._due_us = 0

    @property
    def due_us(self) -> int:
        """When it is written next."""
        return self._due_us if self._path is not None else NEVER_US

    def offer(self, now_us: int, stats: Callable[[], Mapping[str, object]]) -> None:
        """Write when it is time."""
        if self._path is not None and now_us >= self._due_us:
            self._due_us = now_us + EVERY_US
            self.write(stats())

    def write(self, stats: Mapping[str, object]) -> None:
        """Write now; readers see the old content or the new one."""
        if self._path is None:
            return
        # Several processes of one engine may be told the same name.
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            beside.write_bytes(msgspec.json.format(msgspec.json.encode(stats)))
            beside.replace(self._path)
        except OSError:
            pass  # nobody is served worse without it

    def __repr__(self) -> str:
        return f"<StatsFile {self._path}>"
