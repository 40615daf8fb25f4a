"""How many cores this process, or the container that it runs in, may use.

Owns nothing. Who looks for something instead of sleeping needs a core for that: one that a control
group's quota takes away again is none.
"""

from __future__ import annotations

import os
from pathlib import Path

from directory.daemon.control_groups import CGROUPS, PROC, groups, read


def cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Whole cores by affinity and by the quotas of all control groups we are in; at least 1."""
    found = [float(len(os.sched_getaffinity(0)))]
    for group, unified in groups("cpu", proc, cgroups):
        if unified:
            said = read(group / "cpu.max").split()
        else:
            said = [read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        # "max" or -1: as much as there is.
        if len(said) == 2 and all(part.isdecimal() and int(part) for part in said):
            found.append(int(said[0]) / int(said[1]))
    return max(1, int(min(found)))
