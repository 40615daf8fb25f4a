"""The dry run's side of the copy benchmark's scheduler: shared memory, and steps of host copies.

Owns shared memory in the place of a GPU's. Its figures say that the benchmark runs, not how fast
anything is.
"""

from __future__ import annotations

import hashlib
import random
import time
from array import array

from benchmarks import copy_messages as m
from benchmarks.copy_layouts import pool_layout
from benchmarks.copy_scheduler import LANDINGS_MADE, WORDS
from scheduler_shim.staging import SharedSlab, Staging
from transfer.ipc.memory import MemoryHandle, SharedMapping, SharedMemoryIPC
from transfer.ipc.stage_ring import STAGE_BELOW_BYTES
from transfer.ipc.sync import TimelineTable, WordTable

STEP_BYTES = 4 << 20


class HostSubstrate:
    """Implements `Substrate` without a GPU."""

    device = "cpu"
    versions = ""

    def __init__(self) -> None:
        self._ipc = SharedMemoryIPC()
        self._mappings: dict[str, list[SharedMapping]] = {}
        self._tables: dict[str, tuple[TimelineTable, WordTable]] = {}
        self._stagings: list[Staging] = []
        self._source, self._target = bytearray(STEP_BYTES), bytearray(STEP_BYTES)
        self._times = array("f")

    def make(self, request: m.MakeMemory) -> tuple[tuple[MemoryHandle, ...], list[int]]:
        """One memfd a buffer."""
        count, nbytes = request.buffers, request.nbytes
        mappings = [self._ipc.create(request.name, nbytes) for _ in range(count)]
        self._mappings[request.name] = mappings
        self._tables[request.name] = (
            TimelineTable.create(self._ipc, "timelines", landings=LANDINGS_MADE),
            WordTable.create(self._ipc, "words", WORDS),
        )
        exported = [self._ipc.export(mapping) for mapping in mappings]
        return tuple(handle for handle, _ in exported), [fd for _, fds in exported for fd in fds]

    def tables(self, name: str) -> tuple[TimelineTable, WordTable]:
        """The tables of a memory."""
        return self._tables[name]

    def fill(self, name: str, seed: int) -> None:
        """Random bytes."""
        rng = random.Random(seed)
        for mapping in self._mappings[name]:
            mapping.view[:] = rng.randbytes(mapping.nbytes)

    def digest(self, request: m.Digest) -> bytes:
        """Read directly."""
        found = hashlib.sha256()
        size = request.chunk_bytes
        for row in array("I", request.rows):
            for mapping in self._mappings[request.name]:
                found.update(mapping.view[row * size : (row + 1) * size])
        return found.digest()

    def make_slab(self, request: m.MakeSlab) -> Staging:
        """As a scheduler's shim does, in its stager's thread."""
        mappings = self._mappings[request.name]
        layout = pool_layout(len(mappings), mappings[0].nbytes, request.page_size)
        staging = Staging(layout, SharedSlab(self._ipc, layout, mappings, request.nbytes))
        self._stagings.append(staging)
        staging.begin(STAGE_BELOW_BYTES)
        return staging

    def step(self) -> None:
        """A copy within this process."""
        started = time.perf_counter_ns()
        self._target[:] = self._source
        self._times.append((time.perf_counter_ns() - started) / 1000)

    def step_times_us(self) -> array[float]:
        """What was measured since the last call."""
        times, self._times = self._times, array("f")
        return times
