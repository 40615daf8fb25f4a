"""A scheduler's GPU: two streams whose work lands late and in order, whatever the CPU did since.

Owns the queue of launched work and the two timelines. Work that was launched runs, also when the
request behind it was aborted and its pages were freed meanwhile: that is what fences are for. The
two streams wait for one another as SGLang's do, so work runs in the order of its launch; each
stream writes its own timeline when its work has run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from directory.core.ids import CURRENT, FORWARD
from tests.simulation.heap import Heap
from tests.simulation.memory import PoolMemory
from tests.simulation.options import Options

Wrong = Callable[[str], None]


class Launched(Protocol):
    """Work that was launched, on one rank's GPU or on all."""

    @property
    def done(self) -> bool:
        """Whether it has run."""
        ...


class Work:
    """One launch on one stream: pages to read first, then pages to write, then a timeline."""

    __slots__ = ("done", "reads", "stream", "value", "writer", "writes")

    def __init__(
        self,
        stream: int,
        value: int,
        reads: list[tuple[int, int]],
        writes: list[tuple[int, int]],
        writer: str,
    ) -> None:
        self.stream = stream
        self.value = value
        self.reads = reads
        self.writes = writes
        self.writer = writer
        self.done = False


class Streams:
    """The GPU of one process. `wake`: some work has run. `wrong`: a page is not as it must be."""

    def __init__(
        self,
        heap: Heap,
        rng: random.Random,
        options: Options,
        memory: PoolMemory,
        wake: Callable[[], None],
        wrong: Wrong,
    ) -> None:
        self.dead = False
        self.faulty = True
        self.launched = [0, 0]
        self._heap = heap
        self._rng = rng
        self._options = options
        self._memory = memory
        self._wake = wake
        self._wrong = wrong
        self._queue: deque[Work] = deque()

    def launch(
        self,
        stream: int,
        reads: list[tuple[int, int]],
        writes: list[tuple[int, int]],
        writer: str,
    ) -> Work:
        """Queue work: `reads` and `writes` are (page, content)."""
        self.launched[stream] += 1
        work = Work(stream, self.launched[stream], reads, writes, writer)
        self._queue.append(work)
        if len(self._queue) == 1:
            self._start()
        return work

    def launch_on_all(
        self,
        stream: int,
        reads: list[tuple[int, int]],
        writes: list[tuple[int, int]],
        writer: str,
    ) -> Launched:
        """Queue work on every rank of the process; here there is one."""
        return self.launch(stream, reads, writes, writer)

    def fence(self) -> tuple[int, int]:
        """Timeline values (forward, current) that pass once all that was launched has run."""
        return self.launched[FORWARD], self.launched[CURRENT]

    @property
    def idle(self) -> bool:
        """Whether everything launched has run."""
        return not self._queue

    def _start(self) -> None:
        lasts = 1 + int(self._rng.uniform(0.2, 1.8) * self._options.forward_us)
        if self._queue[0].stream == CURRENT:
            lasts = lasts // 4 + 1
        if self.faulty and self._rng.random() < self._options.rate("forward_slow"):
            lasts *= 30
        self._heap.after(lasts, self._run)

    def _run(self) -> None:
        if self.dead:
            return
        work = self._queue.popleft()
        memory = self._memory
        for page, content in work.reads:
            problem = memory.wrong(page, content)
            if problem:
                self._wrong(f"{work.writer} reads a wrong page: {problem}")
        for page, content in work.writes:
            memory.write(page, content, work.writer)
        memory.timelines.write(work.stream, work.value)
        work.done = True
        if self._queue:
            self._start()
        self._wake()
