"""The simulated device of a mover: asynchronous copies that read and write when they run.

Owns the submissions in flight. A submission is cut into pieces which run at drawn moments in any
order; a piece may read at one moment and write at a later one, as hardware does. A device that is
killed does nothing more, whatever it had begun. Implements `transfer.device.protocol.Device`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.simulation.contents import Cell
from tests.simulation.heap import Heap
from tests.simulation.memory import Cells
from tests.simulation.options import Options
from transfer.device.protocol import Completion, MemoryBusy, Ticket, UnknownMemory
from transfer.ipc.memory import Mapping
from transfer.plan import MemoryKey, RangeBatch

PIECES_MAX = 3
Piece = tuple[list[Cell | None], list[Cell | None], int, int, int]
"""Source cells, target cells, source start, target start, count."""


class SimDevice:
    """One mover's device. `wake` is called when there is something to `poll`."""

    name = "simulated"

    def __init__(
        self, heap: Heap, rng: random.Random, options: Options, wake: Callable[[], None]
    ) -> None:
        self.dead = False
        self.faulty = True
        self.frozen_until_us = 0
        self._heap = heap
        self._rng = rng
        self._options = options
        self._wake = wake
        self._memories: dict[MemoryKey, Cells] = {}
        self._using: dict[Ticket, tuple[MemoryKey, ...]] = {}
        self._finished: list[Completion] = []
        self._left: dict[Ticket, int] = {}
        self._errors: dict[Ticket, str] = {}
        self._last: Ticket = 0

    @property
    def in_flight(self) -> int:
        """Submissions whose completion was not polled yet."""
        return len(self._using) + len(self._finished)

    def attach(self, key: MemoryKey, mapping: Mapping) -> None:
        """Make a memory known."""
        if key in self._memories:
            raise MemoryBusy(f"memory {key} is attached already")
        assert isinstance(mapping, Cells)
        self._memories[key] = mapping

    def detach(self, key: MemoryKey) -> None:
        """Forget a memory."""
        if key not in self._memories:
            raise UnknownMemory(f"memory {key} is not attached")
        if any(key in keys for keys in self._using.values()):
            raise MemoryBusy(f"memory {key} is used by a copy in flight")
        del self._memories[key]

    def submit(self, batches: Sequence[RangeBatch], *, urgent: bool = False) -> Ticket:
        """Start copying."""
        del urgent
        pieces: list[Piece] = []
        keys: dict[MemoryKey, None] = {}
        for batch in batches:
            source = self._cells(batch.source)
            target = self._cells(batch.target)
            keys[batch.source] = keys[batch.target] = None
            for start, stop, count in batch.ranges:
                if start + count > len(source) or stop + count > len(target):
                    raise UnknownMemory(f"range {(start, stop, count)} is beyond {batch}")
                pieces.append((source, target, start, stop, count))
        self._last += 1
        self._using[self._last] = tuple(keys)
        self._plan(self._last, pieces)
        return self._last

    def poll(self) -> list[Completion]:
        """Completions since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def freeze(self, until_us: int) -> None:
        """Nothing of what was begun goes on before this time."""
        self.frozen_until_us = max(self.frozen_until_us, until_us)

    def _later(self, run: Callable[..., None], *arguments: Any) -> bool:
        """Whether a frozen device has put something off."""
        wait_us = self.frozen_until_us - self._heap.now_us
        if wait_us > 0:
            self._heap.after(wait_us + self._rng.randrange(1, 50), run, *arguments)
        return wait_us > 0

    def _cells(self, key: MemoryKey) -> list[Cell | None]:
        memory = self._memories.get(key)
        if memory is None:
            raise UnknownMemory(f"memory {key} is not attached")
        return memory.cells

    def _plan(self, ticket: Ticket, pieces: list[Piece]) -> None:
        rng, options = self._rng, self._options
        lasts = 1 + int(rng.expovariate(1.0) * options.copy_us)
        error = ""
        if self.faulty and rng.random() < options.rate("copy_slow"):
            lasts *= 50
        if self.faulty and rng.random() < options.rate("copy_failure"):
            error = "injected"
            rng.shuffle(pieces)
            del pieces[rng.randrange(len(pieces) + 1) :]
        rng.shuffle(pieces)
        share = -(-len(pieces) // PIECES_MAX) or 1
        self._errors[ticket] = error
        self._left[ticket] = 1
        for at in range(0, len(pieces), share):
            some = pieces[at : at + share]
            begins = rng.randrange(lasts)
            self._left[ticket] += 1
            if rng.random() < 0.5:
                self._heap.after(begins, self._copy, ticket, some)
            else:
                self._heap.after(begins, self._read, ticket, some, rng.randrange(lasts - begins))
        self._heap.after(lasts, self._end, ticket)

    def _copy(self, ticket: Ticket, pieces: list[Piece]) -> None:
        if self.dead or self._later(self._copy, ticket, pieces):
            return
        for source, target, start, stop, count in pieces:
            target[stop : stop + count] = source[start : start + count]
        self._end(ticket)

    def _read(self, ticket: Ticket, pieces: list[Piece], delay_us: int) -> None:
        if self.dead or self._later(self._read, ticket, pieces, delay_us):
            return
        held = [
            (target, stop, source[start : start + n]) for source, target, start, stop, n in pieces
        ]
        self._heap.after(delay_us, self._write, ticket, held)

    def _write(
        self, ticket: Ticket, held: list[tuple[list[Cell | None], int, list[Cell | None]]]
    ) -> None:
        if self.dead or self._later(self._write, ticket, held):
            return
        for target, stop, cells in held:
            target[stop : stop + len(cells)] = cells
        self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        """A part of a submission is over; with the last part it is complete."""
        if self.dead:
            return
        self._left[ticket] -= 1
        if self._left[ticket]:
            return
        del self._left[ticket]
        del self._using[ticket]
        self._finished.append(Completion(ticket, self._errors.pop(ticket)))
        self._wake()
