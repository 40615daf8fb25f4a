"""Moments: how long a scheduler's turn waits for the daemon, so that nobody waits a step longer.

Owns the two waits at the end of a tick. Both are bounded by a setting, and both end with what was
left to be said sent: a forward pass may come next, and what it asks is timed already. It must never
wait for somebody else's answer: while anything runs only for what this tick has asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_shim.sglang.held import HeldBack
from scheduler_shim.sglang.load import AroundLoads
from scheduler_shim.sglang.settings import Settings
from scheduler_shim.sglang.waiting import Waiting


class Moments:
    """One engine's; used by its scheduler's thread alone."""

    def __init__(self, around: AroundLoads, held: HeldBack, settings: Settings) -> None:
        self._around = around
        self._held = held
        self._settings = settings

    def wait(self, waiting: Sequence[Waiting], *, busy: bool, asked_us: int | None) -> None:
        """At the end of a tick. `busy`: whether anything runs; `asked_us`: when this tick has begun
        to ask the daemon what lies beyond the pool, None where it has not."""
        wait_us = self._settings.busy_wait_us if busy else self._settings.idle_wait_us
        if wait_us and (asked_us is not None if busy else self._nobody_is_admissible(waiting)):
            self._wait(wait_us, asked_us, busy=busy)

    def _nobody_is_admissible(self, waiting: Sequence[Waiting]) -> bool:
        window = waiting[: self._settings.window]
        return bool(window) and all(self._held.held(req.rid) for req in window)

    def _wait(self, wait_us: int, asked_us: int | None, *, busy: bool) -> None:
        """Sleep until a frame comes; `busy`: until nobody is held any more for an answer to what
        was asked from `asked_us` on. Who has asked and has nothing else to do looks for the answer
        before it sleeps: it is on its way, and being woken would take longer than what is left."""
        around = self._around
        give_up_us = around.now_us() + wait_us
        left_us = wait_us
        while around.client is not None and left_us > 0:
            if not busy:
                if asked_us is not None:
                    around.client.wait(left_us)
                else:
                    around.client.sleep(left_us)
                around.take_answers()
                break
            if asked_us is None or not self._held.asking(asked_us):
                break
            around.client.sleep(left_us)
            around.take_answers()
            left_us = give_up_us - around.now_us()
        if around.client is not None:
            around.client.send_held()

    def __repr__(self) -> str:
        return f"<Moments of {self._held!r}>"
