"""Landing counters of one pool: loads whose layers can be used while the rest still moves.

Owns which counter serves which load, and what its scheduler knows of it. A load begins here, its
counter and value travel in `Restore.landing`, and the answer to that message ends it; until then
the counter is the mover's. Whoever computes waits layer by layer: on the CPU with `wait_until`, on
a GPU by a stream (`wait_in_stream`). It must never let a wait end as landed when the load is lost,
and never give a counter to another load before the first one has been answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from directory.core.errors import BadMessage, InternalError, TransferError
from directory.core.ids import LANDINGS
from directory.core.limits import LANDING_COUNTERS_MAX
from transfer.ipc.sync import TimelineTable

WAIT_POLL_S: Final = 50e-6


class LoadLost(TransferError):
    """A layer will not come: end what was to be computed from it. It never travels on the wire."""


class Streams(Protocol):
    """What a GPU's streams need: `transfer.ipc.cuda_sync.StreamWaiter`."""

    def wait(self, stream: int, index: int, value: int, deadline_s: float) -> None:
        """Let a stream wait for a counter, until a deadline at the latest."""
        ...

    def answered(self, index: int, value: int, *, landed: bool) -> None:
        """Nobody else writes the counter any more; release whoever still waits for it."""
        ...

    def lost(self, index: int, value: int) -> bool:
        """Whether the wait for this value ended without what it waited for."""
        ...


class Landing:
    """One load. Threads may wait for it while its scheduler's own thread takes the answer."""

    def __init__(
        self,
        table: TimelineTable,
        counter: int,
        layers: int,
        end: Callable[[Landing], None],
        streams: Streams | None,
    ) -> None:
        self.counter = counter
        self.first = table.read(counter)
        self.layers = layers
        self.lost = ""
        """Why the load is lost; empty while it is not."""
        self.answered = False
        self._table = table
        self._end = end
        self._streams = streams

    @property
    def wire(self) -> tuple[int, int]:
        """`Restore.landing` of this load."""
        return self.counter, self.first

    @property
    def landed_layers(self) -> int:
        """Layers whose pages are in place: the first so many. None counts once the load is lost."""
        reached = self._table.read(self.counter) - self.first
        # Only now: a counter is raised to release whoever waits after the load was called lost.
        return 0 if self.lost else min(max(reached, 0), self.layers)

    def wait_until(self, layer: int, deadline_s: float) -> None:
        """Block until layer number `layer` (from 0 up) has landed.

        Raises `LoadLost` when it will not, or the deadline is over: the load is given up then.
        """
        give_up = time.monotonic() + deadline_s
        while self.landed_layers <= layer:
            if self.lost:
                raise LoadLost(f"layer {layer} has not landed: {self.lost}")
            if time.monotonic() >= give_up:
                self.give_up(f"layer {layer} was not there after {deadline_s} s")
            time.sleep(WAIT_POLL_S)

    def wait_in_stream(self, stream: int, layer: int, deadline_s: float) -> None:
        """Let a GPU's stream wait for a layer; returns at once.

        Whether it came is known by `stream_lost`, after the stream has gone on.
        """
        if self._streams is None:
            raise InternalError("this pool has no streams that can wait")
        if self.lost:
            raise LoadLost(f"layer {layer} has not landed: {self.lost}")
        self._streams.wait(stream, self.counter, self.first + layer + 1, deadline_s)

    def stream_lost(self, layer: int) -> bool:
        """Whether a stream that waited for this layer went on without it."""
        lost = self._streams is not None and self._streams.lost(
            self.counter, self.first + layer + 1
        )
        return lost or bool(self.lost)

    def give_up(self, reason: str) -> None:
        """Wait no more, and let nobody else wait: the mover notices and drops the rest.

        The pages and the counter stay the mover's until the restore is answered.
        """
        if not self.lost:
            self.lost = reason
            if self._table.read(self.counter) < self.first + self.layers:
                self._table.write(self.counter, self.first + self.layers)

    def take_answer(self, *, landed: bool, detail: str = "") -> bool:
        """The restore was answered. Says whether its pages may be used as landed.

        Not, although they have all come, when somebody was let go without them before.
        """
        if landed and not self.lost:
            # Pages of other pools come without a layer being told: all of them are here now.
            self._bring_to_end()
        else:
            self.lost = self.lost or detail or "the restore is lost"
        if self._streams is not None:
            self._streams.answered(self.counter, self.first + self.layers, landed=not self.lost)
        self._bring_to_end()
        self.answered = True
        self._end(self)
        return not self.lost

    def _bring_to_end(self) -> None:
        if self._table.read(self.counter) < self.first + self.layers:
            self._table.write(self.counter, self.first + self.layers)

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"{self.landed_layers} of {self.layers}"
        return f"<Landing on counter {self.counter}, {state}>"


class Landings:
    """The counters of one pool's table; used from its scheduler's thread."""

    def __init__(self, table: TimelineTable, streams: Streams | None = None) -> None:
        self._table = table
        self._streams = streams
        count = min(max(0, len(table) - LANDINGS), LANDING_COUNTERS_MAX)
        self._spare = list(range(LANDINGS + count - 1, LANDINGS - 1, -1))
        self._counters = frozenset(self._spare)
        self._open: dict[int, Landing] = {}
        self._unanswered: list[Landing] = []  # those that were open when the daemon was lost

    def begin(self, layers: int) -> Landing | None:
        """A counter for a load of so many layers; None while all serve other loads."""
        if layers < 1:
            raise BadMessage(f"a load has at least one layer, not {layers}")
        if not self._spare:
            return None
        counter = self._spare.pop()
        landing = Landing(self._table, counter, layers, self._ended, self._streams)
        self._open[counter] = landing
        return landing

    def lose_all(self, detail: str) -> None:
        """No answer will come (the daemon is lost): all loads are, but their counters stay taken.

        A mover may still write them; `settle` once that is over.
        """
        self._unanswered = list(self._open.values())
        for landing in self._unanswered:
            landing.give_up(detail)

    def settle(self) -> None:
        """No mover of the daemon that is lost has this pool any more: the counters of its loads are
        free. What has begun since, with the next daemon, is that one's."""
        unanswered, self._unanswered = self._unanswered, []
        for landing in unanswered:
            if not landing.answered:
                landing.take_answer(landed=False)

    @property
    def open(self) -> list[Landing]:
        """Loads whose counters are theirs yet."""
        return list(self._open.values())

    def check(self) -> list[str]:
        """What does not hold: a counter is spare or one load's, and never both or twice."""
        found: list[str] = []
        counters = [*self._spare, *self._open]
        if len(counters) != len(set(counters)) or set(counters) != self._counters:
            found.append(f"landings: {self._spare} are spare, and {list(self._open)} are open")
        for counter, landing in self._open.items():
            if landing.counter != counter or landing.answered:
                found.append(f"landings: counter {counter} is not that of {landing!r}")
        return found

    def _ended(self, landing: Landing) -> None:
        if self._open.get(landing.counter) is landing:
            del self._open[landing.counter]
            self._spare.append(landing.counter)

    def __repr__(self) -> str:
        return f"<Landings {len(self._open)} open, {len(self._spare)} spare>"
