"""Which processes run on which cores: each engine on cores of its own, siblings included.

Owns the division. An idle scheduler of SGLang spins, and one that spins on the other half of a core
makes the engine there half as fast (an eager prefill of 8 k cached tokens: 41 or 77 ms). So engines
that are timed share no core. They are moved once they serve: importing SGLang wants all there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

CPUS: Final = Path("/sys/devices/system/cpu")


def physical(cpus: Sequence[int], root: Path = CPUS) -> list[tuple[int, ...]]:
    """The logical CPUs of each core: as the kernel tells, and always with its neighbour (2n and
    2n + 1), because a virtual machine may hide which of its CPUs are halves of one core."""
    left, found = set(cpus), []
    for cpu in sorted(cpus):
        if cpu in left:
            alike = (_siblings(cpu, root) | {cpu, cpu ^ 1}) & left
            left -= alike
            found.append(tuple(sorted(alike)))
    return found


def _siblings(cpu: int, root: Path) -> set[int]:
    try:
        text = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="utf-8")
    except OSError:
        return set()
    siblings: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        siblings.update(range(int(first), int(last or first) + 1))
    return siblings


class Cores:
    """The division of a machine's cores among so many. What is left over is everybody else's."""

    def __init__(self, shares: int, cores: Sequence[tuple[int, ...]]) -> None:
        """`shares`: so many get cores of their own; one more share stays free."""
        each = len(cores) // (shares + 1)
        self._shares = [
            {cpu for core in cores[n * each : (n + 1) * each] for cpu in core}
            for n in range(shares)
        ]
        self._rest = {cpu for core in cores[shares * each :] for cpu in core}

    @classmethod
    def of_machine(cls, shares: int) -> Cores:
        """Of the CPUs that this process may use."""
        return cls(shares, physical(sorted(os.sched_getaffinity(0))))

    def settle(self) -> None:
        """This process, and what it starts, runs on what is left over from now on."""
        os.sched_setaffinity(0, self._rest)

    def move(self, share: int | None, pids: Iterable[int]) -> None:
        """Processes, with all of their threads, run on the cores of a share from now on: on the
        rest where it is None. Where there are fewer cores than shares they stay where they are."""
        cpus = self._rest if share is None else self._shares[share]
        for pid in pids if cpus else ():
            with suppress(FileNotFoundError):  # it has just ended
                for task in list(Path(f"/proc/{pid}/task").iterdir()):
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(int(task.name), cpus)
