"""Which processes run on which cores: one seat for whichever engine is asked, and the rest.

Owns the division. An eager pass over 8 k cached tokens is bound by the one thread that launches it,
and cores differ, and change from moment to moment: two engines on cores of their own are not
measured by the same clock. Only one engine is asked at a time and the others sleep, so the main
threads of all schedulers share one core, whose other half nobody has; their other threads and
processes share some cores beside it, daemon and mover have others, and this process the rest.
Processes are moved once they serve: importing SGLang wants all cores there are.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CPUS: Final = Path("/sys/devices/system/cpu")
CORES_MIN: Final = 6
"""A machine with fewer is not divided."""
SLOWED: Final = 0.85
"""A CPU that slows another one to less than this is taken for the other half of its core."""
SPIN_S: Final = 0.004
SPINS: Final = 3


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


Rate = Callable[[int, int], float]
"""How fast a CPU is, in whatever unit, while another one is busy."""


def partner_of(cpu: int, others: Collection[int], rate: Rate) -> int | None:
    """The other half of a CPU's core, by what a machine that hides it cannot hide: the CPU that
    slows it, twice in a row; None where none does."""
    rates = {other: rate(cpu, other) for other in others}
    if not rates:
        return None
    usual, slowest = statistics.median(rates.values()), min(rates, key=rates.__getitem__)
    limit = SLOWED * usual
    return slowest if rates[slowest] < limit and rate(cpu, slowest) < limit else None


def measured() -> tuple[Rate, Callable[[], None]]:
    """A rate of this machine's, and what ends its process."""
    here = os.sched_getaffinity(0)
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def rate(cpu: int, other: int) -> float:
        os.sched_setaffinity(spinner.pid, {other})
        os.sched_setaffinity(0, {cpu})
        try:
            return max(_spins() for _ in range(SPINS))
        finally:
            os.sched_setaffinity(0, here)

    def end() -> None:
        spinner.kill()
        spinner.wait()

    return rate, end


def _spins() -> float:
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < SPIN_S:
        count += 1
    return count / took


@dataclass(frozen=True)
class Division:
    """CPUs of the schedulers' main threads, of what their engines have besides, of daemon and
    mover, and of everybody else."""

    seat: frozenset[int]
    beside: frozenset[int]
    movers: frozenset[int]
    rest: frozenset[int]


def divided(cores: Sequence[tuple[int, ...]], partner: int | None = None) -> Division | None:
    """The division of a machine; None where it has too few cores. `partner`: a CPU that is known
    to be the other half of the seat's core, which nobody gets. The first core, which has a
    machine's interrupts, is nobody's who is timed."""
    if len(cores) < CORES_MIN:
        return None
    each = (len(cores) - 2) // 3
    left = [set(core) - {partner} for core in cores]
    return Division(
        frozenset({min(cores[1])}),
        frozenset(cpu for core in left[2 : 2 + each] for cpu in core),
        frozenset(cpu for core in left[2 + each : 2 + 2 * each] for cpu in core),
        frozenset(cpu for core in [left[0], *left[2 + 2 * each :]] for cpu in core),
    )


class Seat:
    """This machine's division, if it has one, and who has been told where to run."""

    def __init__(self, division: Division | None) -> None:
        self.division = division

    @classmethod
    def of_machine(cls, *, look: bool = True) -> Seat:
        """Of the CPUs that this process may use. `look`: find the other half of the seat's core
        out, which takes a second of a machine that is quiet."""
        cpus = sorted(os.sched_getaffinity(0))
        cores = physical(cpus)
        division = divided(cores)
        if division is None or not look:
            return cls(division)
        (seat,) = division.seat
        rate, end = measured()
        try:
            partner = partner_of(seat, [cpu for cpu in cpus if cpu != seat], rate)
        finally:
            end()
        return cls(divided(cores, partner))

    def engine(self, scheduler: int, pids: Iterable[int]) -> None:
        """Move an engine: the scheduler's main thread has the seat, all its other threads and
        processes run beside. Repeatable, as there are new threads."""
        if self.division is not None:
            _move(pids, self.division.beside, but=scheduler)
            with suppress(ProcessLookupError):
                os.sched_setaffinity(scheduler, self.division.seat)

    def movers(self, pids: Iterable[int]) -> None:
        """Move daemon and mover."""
        if self.division is not None:
            _move(pids, self.division.movers)

    def settle(self) -> None:
        """This process, and what it starts, runs on what is left over from now on."""
        if self.division is not None:
            os.sched_setaffinity(0, self.division.rest)

    def as_json(self) -> dict[str, list[int]]:
        """The division, for the result."""
        if self.division is None:
            return {}
        return {name: sorted(cpus) for name, cpus in vars(self.division).items()}


def _move(pids: Iterable[int], cpus: Collection[int], but: int = 0) -> None:
    """Every thread of these processes, but one, runs on these CPUs from now on."""
    for pid in pids:
        with suppress(FileNotFoundError):  # it has just ended
            for task in list(Path(f"/proc/{pid}/task").iterdir()):
                if int(task.name) != but:
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(int(task.name), cpus)
