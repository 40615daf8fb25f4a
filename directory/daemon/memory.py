"""How much memory this machine, or the container we run in, can still give.

Owns nothing. Reads the kernel's own figures; where one is missing, the others decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
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
    for line in _read(proc / "spl/kstat/zfs/arcstats").splitlines():
        name, *rest = line.split() or [""]
        if name == "size" and rest:
            return int(rest[-1])
    return 0


def _meminfo(proc: Path, name: str) -> int | None:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    return None


def _groups(proc: Path, cgroups: Path, reclaimed: Sequence[str]) -> list[int]:
    """What each control group that this process is in has left (both versions)."""
    left: list[int] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            root, limit, usage = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / name.lstrip("/")
        # In a container the name may be the host's; the group then lies at the root we see.
        for group in [folder, *folder.parents]:
            amount = _left(group, limit, usage, reclaimed)
            if amount is not None:
                left.append(amount)
            if group == root:
                break
    return left


def _left(group: Path, limit_file: str, usage_file: str, reclaimed: Sequence[str]) -> int | None:
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None
    reclaimable = 0
    for line in _read(group / "memory.stat").splitlines():
        name, _, amount = line.partition(" ")
        if name in reclaimed:
            reclaimable += int(amount)
    return max(0, int(limit) - int(usage) + reclaimable)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
