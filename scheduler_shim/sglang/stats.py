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
LATE_US: Final = 1_000_000
"""So long it waits for an idle moment: to replace a file takes longer than a turn."""
NEVER_US: Final = 1 << 62


class StatsFile:
    """One file, or none (`path` None)."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._due_us = 0

    @property
    def dues_us(self) -> tuple[int, int]:
        """When it is written next, if somebody waits or anything runs, and if not."""
        if self._path is None:
            return NEVER_US, NEVER_US
        return self._due_us + LATE_US, self._due_us

    def offer(
        self, now_us: int, stats: Callable[[], Mapping[str, object]], *, idle: bool = True
    ) -> None:
        """Write when it is time. `idle`: nobody waits for the turn that does."""
        if self._path is not None and now_us >= self.dues_us[idle]:
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
