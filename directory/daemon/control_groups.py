"""The control groups that this process is in, of both versions.

Owns nothing. Reads the kernel's own files; where one is missing there is no limit to be known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of each group that limits this process, and whether it is of version 2."""
    for line in read(proc / "self" / "cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers:
            root = cgroups
        elif controller in controllers.split(","):
            root = cgroups / controller
        else:
            continue
        folder = root / name.lstrip("/")
        # In a container the name may be the host's; the group then lies at the root we see.
        for group in [folder, *folder.parents]:
            yield group, not controllers
            if group == root:
                break


def read(path: Path) -> str:
    """What a file says; nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
