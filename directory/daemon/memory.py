"""How much memory this machine, or the container we run in, can still give.

Owns nothing. Reads the kernel's own figures; where one is missing, the others decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from directory.daemon.control_groups import CGROUPS, PROC, groups, read

KIB = 1024
RECLAIMED_FIRST: Final = ("inactive_file",)
RECLAIMED_AT_ALL: Final = ("inactive_file", "active_file", "slab_reclaimable")
"""Parts of a group's use that the kernel gives back (memory.stat)."""


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Memory that can be had without swapping, or None where nothing can be learned."""
    found = [_meminfo(proc, "MemAvailable"), *_groups(proc, cgroups, RECLAIMED_FIRST)]
    return min((amount for amount in found if amount is not None), default=None)


def obtainable_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Memory that could be had if all that can be dropped or swapped out were; None: unknown.

    What is larger than this cannot be locked: whoever tries is ended by the kernel.
    """
    machine = _meminfo(proc, "MemAvailable")
    if machine is not None:
        machine += _zfs_cache(proc)
    found = [machine, *_groups(proc, cgroups, RECLAIMED_AT_ALL)]
    least = min((amount for amount in found if amount is not None), default=None)
    return None if least is None else least + (_meminfo(proc, "SwapFree") or 0)


def _zfs_cache(proc: Path) -> int:
    """Bytes of ZFS's cache, which it gives back and the kernel does not count as available."""
    for line in read(proc / "spl/kstat/zfs/arcstats").splitlines():
        name, *rest = line.split() or [""]
        if name == "size" and rest:
            return int(rest[-1])
    return 0


def _meminfo(proc: Path, name: str) -> int | None:
    for line in read(proc / "meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    return None


def _groups(proc: Path, cgroups: Path, reclaimed: Sequence[str]) -> list[int]:
    """What each control group that this process is in has left (both versions)."""
    left: list[int] = []
    for group, unified in groups("memory", proc, cgroups):
        if unified:
            limit, usage = "memory.max", "memory.current"
        else:
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        amount = _left(group, limit, usage, reclaimed)
        if amount is not None:
            left.append(amount)
    return left


def _left(group: Path, limit_file: str, usage_file: str, reclaimed: Sequence[str]) -> int | None:
    limit, usage = read(group / limit_file).strip(), read(group / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None
    reclaimable = 0
    for line in read(group / "memory.stat").splitlines():
        name, _, amount = line.partition(" ")
        if name in reclaimed:
            reclaimable += int(amount)
    return max(0, int(limit) - int(usage) + reclaimable)
