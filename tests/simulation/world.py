"""What a simulated process sees of the rest.

Owns the names alone: `simulation.py` and `trouble.py` fill them in.
"""

from __future__ import annotations

from tests.simulation.contents import Contents
from tests.simulation.daemon import SimDaemon
from tests.simulation.heap import Heap
from tests.simulation.network import Network
from tests.simulation.options import Options


class World:
    """What a process sees of the rest. `daemon` is the boot that listens now, if one does."""

    heap: Heap
    options: Options
    contents: Contents
    network: Network
    daemon: SimDaemon | None
    faulty: bool

    def wrong(self, who: str, problem: str) -> None:
        """Something that must never happen did."""
        raise NotImplementedError
