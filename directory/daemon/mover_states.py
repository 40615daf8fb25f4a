"""The life of a mover as a table, and what its supervision needs of the daemon around it.

Owns the states and the seam; decides nothing.
"""

from enum import StrEnum
from typing import Final, Protocol

from directory.core.events import Event
from directory.core.ids import PoolId
from directory.core.states import Table


class MoverState(StrEnum):
    """State of the one mover."""

    NONE = "none"
    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"


class MoverEvent(StrEnum):
    """What happens to the mover."""

    SPAWN = "spawn"
    READY = "ready"
    DEATH = "death"
    CLOSE = "close"


_S, _E = MoverState, MoverEvent
MOVER: Final[Table] = {
    (_S.NONE, _E.SPAWN): _S.STARTING,
    (_S.STARTING, _E.READY): _S.SERVING,
    (_S.STARTING, _E.DEATH): _S.NONE,
    (_S.SERVING, _E.DEATH): _S.NONE,
    (_S.NONE, _E.CLOSE): _S.ENDED,
    (_S.STARTING, _E.CLOSE): _S.ENDED,
    (_S.SERVING, _E.CLOSE): _S.ENDED,
}


class MoverHost(Protocol):
    """What supervision needs of the daemon around it."""

    def tell(self, event: Event) -> None:
        """Hand an event to the directory and do what it answers."""
        ...

    def on_imported(self, pool: PoolId, ok: bool, code: str, detail: str) -> None:
        """A pool was imported, or not."""
        ...

    def on_unmapped(self, pool: PoolId) -> None:
        """No mover touches a released pool any more."""
        ...

    def on_serving(self) -> None:
        """A mover is up, with the host tier open."""
        ...
