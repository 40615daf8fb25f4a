"""Rest: whether a turn of the shim would find anything to do, told by a few looks.

Most loops of a scheduler are decode steps: nobody waits, or only who waited before and is only
waiting for room; nothing was asked, nothing has changed.
Owns the question whether this is one, and until when that holds by the clock alone. It costs one
look at the lane, never more. It must never call anything rest that is not plainly so: whatever is
open, wanted, under way or due has its turn. What the last turn has seen of who waits counts only as
long as the look-ups have not changed: they do so between two turns as well, when a request is
admitted, its row published or the weights are changed. With nobody left in the queue, and nobody
looked up, none of that is about anybody, so the step after an admission has no turn for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler_shim.client import DaemonClient
from scheduler_shim.room import Room
from scheduler_shim.sglang.held import HeldBack
from scheduler_shim.sglang.layerwise import Layerwise
from scheduler_shim.sglang.waiting import Waiting


class AroundRest(Protocol):
    """What is looked at of the shim."""

    room: Room

    @property
    def client(self) -> DaemonClient | None:
        """The daemon's, while there is one."""
        ...


class Rest:
    """One engine's. Mutated by its scheduler's thread alone."""

    def __init__(self, around: AroundRest, held: HeldBack, loads: Layerwise) -> None:
        self.turns = 0
        """So many turns were left out."""
        self._around = around
        self._held = held
        self._loads = loads
        self._client: DaemonClient | None = None  # by the end of the last turn
        self._due_us = 0
        self._idle_us = 0
        self._changes = 0  # of the look-ups, by the end of the last turn
        self._names: list[str] = []  # by which those are known whom the last turn has seen

    def until(self, due_us: int, idle_us: int, waiting: Sequence[Waiting]) -> None:
        """A turn is over that has looked at the head of this queue; by the clock alone the next one
        is due then, if not sooner, and at `idle_us` if nothing is going on. Of a daemon that has
        come in this turn nobody was looked up."""
        client, before = self._around.client, self._client
        self._client, self._due_us = client, 0
        if client is not None and client is before:
            self._due_us = min(due_us, client.live_us, self._held.due_us)
        self._idle_us = idle_us
        self._changes = self._held.changes
        self._names = [req.rid for req in waiting]

    def holds(self, waiting: Sequence[Waiting], busy: Callable[[], bool]) -> bool:
        """Whether a turn would find nothing to do. `waiting`: the head of the queue, as far as a
        turn looks at it.

        `busy`: whether anything runs; asked only where it matters: leases that nobody is left to
        release are told of at once.
        """
        client = self._around.client
        if client is None or not client.at_rest or client.now_us() >= self._due_us:
            return False
        held, loads = self._held, self._loads
        if len(held.fills) or loads.rows or loads.has_turns or self._around.room.late:
            return False
        if waiting:
            if held.changes != self._changes or [req.rid for req in waiting] != self._names:
                return False
        elif held.alive:
            return False
        else:
            self._names = []  # whoever comes back is seen anew
        due = not waiting and client.now_us() >= self._idle_us
        if (client.leases_out or due) and not busy():
            return False
        self.turns += 1
        return True

    def __repr__(self) -> str:
        return f"<Rest, {self.turns} turns left out>"
