"""Returning: from a lost daemon to the next one, while requests go on without.

Owns the waits between tries, the try under way and the republication. Waits grow up to a cap and
are jittered, so that the schedulers of a node do not all come at once. A thin scheduler is thin
again once the daemon knows what its mirror holds; an eviction before that has the rest said at
once, because a thin registration cannot be told what a mirror gives up.

Quarantined pages are let go when a registration has been answered: a daemon answers only after its
mover has let go of every earlier pool of the instance, and it does not serve a new epoch before the
movers of earlier ones are dead. Where no daemon comes, they are let go once nobody has held the
lock of its folder for a while, which every mover does as long as it lives. What this process still
has to write for a dead mover is not waited for: those pages are let go when that is over.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Final

from directory.core.errors import TreecoredError
from directory.core.events import Mode
from scheduler_shim.client import DaemonClient
from scheduler_shim.dial import Attempt, Dial
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.republish import Republisher
from scheduler_shim.request import Request
from scheduler_shim.room import Room
from scheduler_shim.session import DaemonAbsent, NobodyListens

WAIT_MS_MIN: Final = 50
WAIT_MS_MAX: Final = 5_000
WAIT_ABSENT_MS_MAX: Final = 250
"""The cap while nobody listens at all: such a try costs a system call and disturbs nobody, and the
sooner a daemon that was started again is found, the fewer pages are computed twice."""
DESERTED_US: Final = 1_000_000
"""So long must a folder have been deserted: the lock of a process that dies is free before its
device has stopped writing (80 ms on a GPU)."""
STEP_US: Final = 200
"""While a try or a republication is under way, this is how soon to look again. Not at once: whoever
sleeps between its steps is not made to wait by the daemon that takes them in."""


class Returning:
    """One loss and the way back from it. Step until there is a client.

    `tree`: the room's, in charge until then. `rows`: gives every request that may hold a row.
    """

    def __init__(
        self,
        dial: Dial,
        room: Room,
        tree: MirroredTree,
        rows: Callable[[], Collection[Request]],
        *,
        mode: Mode,
        seed: int,
        count: Callable[[str, int], None],
    ) -> None:
        self._dial = dial
        self._room = room
        self._tree = tree
        self._rows = rows
        self._mode = mode
        self._random = random.Random(seed)  # spreads tries, guards nothing
        self._count = count
        self._tries = 0
        self._due_us = 0
        self._attempt: Attempt | None = None
        self._client: DaemonClient | None = None
        """Attached, and told of nothing yet."""
        self._deserted_us = 0
        """Since when it is known that no mover lives; 0: it is not."""
        self._republisher: Republisher | None = None
        self.why = ""
        """What ended the last try."""
        self._wait()

    @property
    def wake_us(self) -> int:
        """When `step` has something to do."""
        if self._attempt is None and self._client is None and self._republisher is None:
            return self._due_us
        return self._dial.now_us() + STEP_US

    def step(self) -> DaemonClient | None:
        """Go on as far as is possible at once; the client of a daemon that knows all."""
        if self._republisher is None:
            if self._client is None:
                self._try()
            else:
                self._begin(self._client)
            return None
        self._republisher.step()
        return self._come_home(self._republisher)

    def before_giving_up(self) -> DaemonClient | None:
        """The tree is about to give pages up. A thin registration cannot be told what a mirror
        gives up, so the rest is said now and the daemon is asked."""
        if self._republisher is None or self._mode != "thin":
            return None
        self._republisher.finish()
        return self._come_home(self._republisher)

    def close(self) -> None:
        """Give up what is under way. Repeatable."""
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._republisher is not None:
            self._republisher.client.close()
            self._republisher = self._tree.returning = None

    def _try(self) -> None:
        try:
            if self._attempt is None:
                if self._dial.now_us() < self._due_us:
                    return
                try:
                    self._attempt = self._dial.begin(self._mode)
                except DaemonAbsent as error:
                    raise NobodyListens(str(error)) from error
            self._client = self._attempt.step()
        except NobodyListens as error:
            self._look_for_movers()
            self._fail(str(error), WAIT_ABSENT_MS_MAX)
            return
        except TreecoredError as error:
            self._fail(str(error))
            return
        if self._client is not None:
            self._attempt = None

    def _begin(self, client: DaemonClient) -> None:
        """Registered: what a mover may have written into is quiet, and the rest is to be said."""
        self._client = None
        self._count("quarantine_released", self._room.release_quarantine())
        thin = self._mode == "thin"
        self._republisher = Republisher(self._tree.mirror, client, thin=thin)
        self._tree.returning = self._republisher

    def _look_for_movers(self) -> None:
        """Let the quarantine go if nobody is left who could write into it."""
        if not len(self._room.quarantined) or not self._dial.deserted():
            self._deserted_us = 0
            return
        now = self._dial.now_us()
        self._deserted_us = self._deserted_us or now
        if now - self._deserted_us >= DESERTED_US:
            self._count("quarantine_released", self._room.release_quarantine())

    def _come_home(self, at: Republisher) -> DaemonClient | None:
        client, thin = at.client, self._mode == "thin"
        if not client.lost and not at.done:
            return None
        if client.lost or not self._room.return_to(client, self._rows(), thin=thin):
            self._fail(client.lost)
            return None
        self._republisher = None
        self._count("spans_republished", at.spans_said)
        return client

    def _fail(self, why: str, wait_ms_max: int = WAIT_MS_MAX) -> None:
        self.why = why
        self.close()
        self._wait(wait_ms_max)

    def _wait(self, wait_ms_max: int = WAIT_MS_MAX) -> None:
        """Half of the wait is certain, the other half is drawn."""
        wait_ms = min(WAIT_MS_MIN << min(self._tries, 16), wait_ms_max)
        wait_ms = wait_ms // 2 + self._random.randrange(wait_ms // 2 + 1)
        self._tries += 1
        self._due_us = self._dial.now_us() + wait_ms * 1_000

    def __repr__(self) -> str:
        doing = self._republisher or self._attempt or f"waits until {self._due_us}"
        return f"<Returning as {self._mode}, {self._tries} tries, {doing!r}>"
