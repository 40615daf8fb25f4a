"""The connection: a scheduler's daemon while there is one, and the way back while there is none.

Owns the client, why the last one was lost, and the return under way. It moves the room between its
modes, because the tree's client is this one. It must never wait, never raise over a daemon that is
gone, and never let a loss pass without telling whoever waits for answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from scheduler_shim.client import DaemonClient
from scheduler_shim.dial import Dial
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.request import Request
from scheduler_shim.returning import Returning
from scheduler_shim.room import Room


class Connection:
    """One scheduler's. `bind` it to its room before anything else is called.

    `client` None: no daemon, from the start. `dial`: how to register again (None: never).
    `rows`: gives every request that may hold a row; `on_lost`: nobody's answer will come any more,
    called while the tree is still the old one.
    """

    def __init__(
        self,
        client: DaemonClient | None,
        *,
        dial: Dial | None,
        thin: bool,
        seed: int,
        rows: Callable[[], Collection[Request]],
        on_lost: Callable[[], None],
        count: Callable[[str, int], None],
    ) -> None:
        self.client = client
        self.degraded = ""
        """Why there is no daemon any more; empty while there is (or never was) one."""
        self.last_loss = ""  # the same, but it stays when there is a daemon again
        self._dial = dial
        self._thin = thin
        self._seed = seed
        self._rows = rows
        self._on_lost = on_lost
        self._count = count
        self._room: Room | None = None
        self._returning: Returning | None = None

    def bind(self, room: Room) -> None:
        """Whose modes move with the daemon's coming and going."""
        self._room = room
        if self.client is None:
            self.begin_return()

    def look_for_loss(self) -> bool:
        """Go on without the daemon if it is lost; says whether it was lost just now."""
        client = self.client
        if client is None or not client.lost:
            return False
        self.client = None
        self.degraded = self.last_loss = client.lost
        self._count("degraded", 1)
        self._on_lost()
        assert self._room is not None
        self._room.lose_daemon(self._rows())
        self.begin_return()
        return True

    def begin_return(self) -> None:
        """Start to look for the next daemon, if there is a way to."""
        if self._dial is None or self._room is None or self._returning is not None:
            return
        tree = self._room.tree
        if isinstance(tree, MirroredTree):
            self._returning = Returning(
                self._dial,
                self._room,
                tree,
                self._rows,
                mode="thin" if self._thin else "mirrored",
                seed=self._seed,
                count=self._count,
            )

    def end_return(self) -> None:
        """Look for no daemon any more. Repeatable."""
        if self._returning is not None:
            self._returning.close()
            self._returning = None

    def step(self) -> bool:
        """Go on with the way back; says whether there is a daemon again that knows all."""
        if self._returning is None:
            if self._room is not None and (pages := self._room.release_late()):
                self._count("quarantine_released", pages)
            return False
        return self._come_home(self._returning.step())

    def before_giving_up(self) -> bool:
        """The tree is about to give pages up (returning.py has why); says what `step` says."""
        if self._returning is None:
            return False
        return self._come_home(self._returning.before_giving_up())

    def close(self) -> None:
        """End the session, or the way to the next one. Repeatable."""
        if self.client is not None:
            self.client.close()
        if self._returning is not None:
            self._returning.close()

    @property
    def wake_us(self) -> int | None:
        """When `step` has something to do, by the clock of the dial; None: never."""
        return self._returning.wake_us if self._returning is not None else None

    @property
    def failure(self) -> str:
        """What ended the last try to return; empty when there was none."""
        return self._returning.why if self._returning is not None else ""

    def _come_home(self, client: DaemonClient | None) -> bool:
        if client is None:
            return False
        self.client, self._returning = client, None
        self.degraded = ""
        self._count("returned", 1)
        return True

    def __repr__(self) -> str:
        return f"<Connection {self.client or self._returning or self.degraded or 'none'}>"
