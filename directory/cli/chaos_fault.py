"""A fault: what chaos can do to a fleet, and how it is told when it is over.

Owns what all kinds have in common. A fault claims what it is done to, so that no other is done to
the same at the same time; it ends by itself, and then the daemon's own account says whether what it
hit is as before. It must never touch a process outside the fleet.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from directory.cli.chaos_fleet import Fleet, Scheduler
from directory.protocol.admin import AdminReport
from scheduler_shim.worker_messages import Prompt

DAEMON, MOVER = "daemon", "mover"

Ask = Callable[[list[Prompt]], None]
"""Takes what a dead scheduler had under way, to ask it again."""


class Fault(ABC):
    """One fault. `begin` does it, `step` undoes it in time, `recovered` looks at the outcome."""

    kind: ClassVar[str]
    does: ClassVar[str]
    """What it does, for the table and the documents."""
    on_scheduler: ClassVar[bool] = False
    claims: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, fleet: Fleet, chance: random.Random, target: Scheduler, ask: Ask) -> None:
        self.fleet = fleet
        self.chance = chance
        self.target = target
        self.ask = ask
        self.began_s = 0.0
        self.due_s = 0.0
        self.before: AdminReport | None = None

    @property
    def claimed(self) -> frozenset[str]:
        """Names of what nothing else may be done to meanwhile."""
        return self.claims | {self.target.name} if self.on_scheduler else self.claims

    def ready(self) -> bool:
        """Whether it can be done now: only whole things are broken."""
        self.before = self.fleet.report()
        return self.before is not None and (
            not self.on_scheduler or (self.target.configured and self.generation(self.before) > 0)
        )

    @abstractmethod
    def begin(self, now_s: float) -> None:
        """Do it."""

    def step(self, now_s: float) -> bool:
        """Undo what is to be undone by now; says whether nothing is left to do."""
        return now_s >= self.due_s

    def recovered(self, report: AdminReport) -> bool:
        """Whether all that was hit works again, by the daemon's account."""
        return mover_of(report) > 0

    def generation(self, report: AdminReport | None) -> int:
        """Generation of the target's live registration; 0 when it has none."""
        for pool in report.pools if report is not None else ():
            if pool.instance == self.target.name and pool.phase == "live":
                return pool.generation
        return 0

    def __repr__(self) -> str:
        return f"<{self.kind} {self.target.name if self.on_scheduler else ''}>"


def mover_of(report: AdminReport) -> int:
    """Process id of the mover; 0 while there is none."""
    return report.counters.get("daemon_mover_pid", 0)
