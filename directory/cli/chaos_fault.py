"""A fault: what chaos can do to a fleet, and how it is told when it is over.

Owns what all kinds have in common. A fault claims what it is done to, so that no other is done to
the same at the same time, and names what must stay as it is, because its outcome is judged by that;
all others overlap. It ends by itself, and then the daemon's own account says whether what it hit is
as before. It must never touch a process outside the fleet.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from directory.cli.chaos_fleet import Fleet, Look, Scheduler
from scheduler_shim.worker_messages import Prompt

DAEMON, MOVER, RETURN = "daemon", "mover", "return"
NOTHING: frozenset[str] = frozenset()

Ask = Callable[[list[Prompt]], None]
"""Takes what a dead scheduler had under way, to ask it again."""


class Fault(ABC):
    """One fault. `begin` does it, `step` undoes it in time, `recovered` looks at the outcome."""

    kind: ClassVar[str]
    does: ClassVar[str]
    """What it does, for the table and the documents."""
    on_scheduler: ClassVar[bool] = False
    claims: ClassVar[frozenset[str]] = NOTHING
    """What nothing else may be done to meanwhile, beside the target."""
    keeps: ClassVar[frozenset[str]] = NOTHING
    """What must stay as it is until all is whole again; others may need the same."""
    until_whole: ClassVar[bool] = True
    """Whether all claims last until all is whole again; else only RETURN does."""

    def __init__(self, fleet: Fleet, chance: random.Random, target: Scheduler, ask: Ask) -> None:
        self.fleet = fleet
        self.chance = chance
        self.target = target
        self.ask = ask
        self.over = False
        """Whether nothing is left to be undone."""
        self.began_s = 0.0
        self.due_s = 0.0
        self.before: Look | None = None

    @property
    def claimed(self) -> frozenset[str]:
        """Names of what nothing else may be done to now."""
        claims = self.claims if self.until_whole or not self.over else self.claims & {RETURN}
        return claims | {self.target.name} if self.on_scheduler else claims

    def bars(self, other: Fault) -> bool:
        """Whether the other one must not begin while this one lasts."""
        return bool(self.claimed & (other.claimed | other.keeps) or self.keeps & other.claimed)

    def ready(self, look: Look | None) -> bool:
        """Whether it can be done now: only whole things are broken."""
        self.before = look
        return look is not None and (
            not self.on_scheduler or (self.target.configured and self.generation(look) > 0)
        )

    @abstractmethod
    def begin(self, now_s: float) -> None:
        """Do it."""

    def step(self, now_s: float) -> bool:
        """Undo what is to be undone by now; says whether nothing is left to do."""
        return now_s >= self.due_s

    def recovered(self, look: Look) -> bool:
        """Whether all that was hit works again, by the daemon's account."""
        return mover_of(look) > 0

    def generation(self, look: Look | None) -> int:
        """Generation of the target's live registration; 0 when it has none."""
        for pool in look.pools if look is not None else ():
            if pool.instance == self.target.name and pool.phase == "live":
                return pool.generation
        return 0

    def __repr__(self) -> str:
        return f"<{self.kind} {self.target.name if self.on_scheduler else ''}>"


def mover_of(look: Look) -> int:
    """Process id of the mover; 0 while there is none."""
    return look.counters.get("daemon_mover_pid", 0)
