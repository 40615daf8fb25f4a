"""How much memory this machine, or the container we run in, can still give.

Owns nothing. Reads the kernel's own figures; where one is missing, the others decide.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
KIB = 1024


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Memory that can be had without swapping, or None where nothing can be learned."""
    found = [amount for amount in (_machine(proc), *_groups(proc, cgroups)) if amount is not None]
    return min(found, default=None)


def _machine(proc: Path) -> int | None:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    return None


def _groups(proc: Path, cgroups: Path) -> list[int]:
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
            amount = _left(group, limit, usage)
            if amount is not None:
                left.append(amount)
            if group == root:
                break
    return left


def _left(group: Path, limit_file: str, usage_file: str) -> int | None:
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None
    reclaimable = 0
    for line in _read(group / "memory.stat").splitlines():
        name, _, amount = line.partition(" ")
        if name == "inactive_file":
            reclaimable = int(amount)
    return max(0, int(limit) - int(usage) + reclaimable)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
