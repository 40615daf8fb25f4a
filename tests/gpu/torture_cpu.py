"""The torture's pool without a GPU: two threads play the streams, memory is shared memory.

It lets the torture itself be tried anywhere; what it finds about a GPU is nothing.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from directory.core.ids import CURRENT, FORWARD
from scheduler_shim.staging import SharedSlab
from tests.gpu.torture_messages import LANDING_COUNTERS, Position, word_of
from transfer.ipc.memory import MemoryHandle, SharedMapping, SharedMemoryIPC
from transfer.ipc.sync import TimelineTable, WordTable
from transfer.layout import PoolLayout

Work = Callable[[], None]


class CpuPool:
    """Implements what torture_scheduler.py needs of a pool."""

    def __init__(self, layout: PoolLayout, word_count: int, start: Position) -> None:
        self.layout = layout
        self._ipc = SharedMemoryIPC()
        self._memory: list[SharedMapping] = [
            self._ipc.create("torture", nbytes) for nbytes in layout.allocation_bytes
        ]
        self.timelines = TimelineTable.create(self._ipc, "timelines", landings=LANDING_COUNTERS)
        self.words = WordTable.create(self._ipc, "words", word_count)
        self._lanes: list[queue.SimpleQueue[Work | None]] = [queue.SimpleQueue() for _ in range(2)]
        self._threads = [
            threading.Thread(target=_run, args=(lane,), daemon=True) for lane in self._lanes
        ]
        for thread in self._threads:
            thread.start()
        self._values = list(start)
        for index, value in enumerate(start):
            self.timelines.write(index, value)
        self._checks: list[tuple[int, Position, Sequence[int], Sequence[int]]] = []

    @property
    def handles(self) -> tuple[MemoryHandle, ...]:
        """One an allocation."""
        return tuple(self._ipc.export(mapping)[0] for mapping in self._memory)

    @property
    def fds(self) -> list[int]:
        """Descriptors of an import."""
        return [*(mapping.fd for mapping in self._memory), self.timelines.fd, self.words.fd]

    def write(
        self, lane: int, pages: Sequence[int], contents: Sequence[int], sleep_us: int
    ) -> None:
        """Queue a sleep and a write on a lane."""
        self._lanes[lane].put(lambda: self._write(pages, contents, sleep_us))

    def order(self, first: int, then: int) -> None:
        """Let one lane wait for what is queued on the other now."""
        reached = threading.Event()
        self._lanes[first].put(reached.set)

        def wait() -> None:
            assert reached.wait(30), "the other lane hangs"

        self._lanes[then].put(wait)

    def signal(self) -> Position:
        """Queue the next value of each timeline on its lane."""
        for lane in (FORWARD, CURRENT):
            self._values[lane] += 1
            value = self._values[lane]
            self._lanes[lane].put(lambda lane=lane, value=value: self.timelines.write(lane, value))  # type: ignore[misc]
        return self._values[0], self._values[1]

    def check(self, token: int, pages: Sequence[int], contents: Sequence[int]) -> None:
        """Look at pages once all that is queued now is done; `checked` tells."""
        self._checks.append((token, self.signal(), pages, contents))

    def checked(self) -> list[tuple[int, int, int]]:
        """(token, pages, wrong pages) of checks that are over."""
        done = [c for c in self._checks if all(self.timelines.read(i) >= c[1][i] for i in (0, 1))]
        self._checks = [c for c in self._checks if c not in done]
        return [(token, len(p), self._wrong(p, c)) for token, _, p, c in done]

    def make_slab(self, nbytes: int) -> SharedSlab:
        """A staging slab for the pool."""
        return SharedSlab(self._ipc, self.layout, self._memory, nbytes)

    def close(self) -> None:
        """Wait for the lanes and free everything."""
        for lane in self._lanes:
            lane.put(None)
        for thread in self._threads:
            thread.join()
        self.timelines.close()
        self.words.close()
        for mapping in self._memory:
            self._ipc.close(mapping)

    def _write(self, pages: Sequence[int], contents: Sequence[int], sleep_us: int) -> None:
        if sleep_us:
            time.sleep(sleep_us / 1e6)
        for number, b in enumerate(self.layout.buffers):
            view = self._memory[b.allocation].view
            for page, content in zip(pages, contents, strict=True):
                at = b.offset + page * b.page_stride
                word = word_of(content, number).to_bytes(8, "little")
                view[at : at + b.chunk_bytes] = word * (b.chunk_bytes // 8)

    def _wrong(self, pages: Sequence[int], contents: Sequence[int]) -> int:
        wrong = set()
        for number, b in enumerate(self.layout.buffers):
            view = self._memory[b.allocation].view
            for page, content in zip(pages, contents, strict=True):
                at = b.offset + page * b.page_stride
                word = word_of(content, number).to_bytes(8, "little")
                if bytes(view[at : at + b.chunk_bytes]) != word * (b.chunk_bytes // 8):
                    wrong.add(page)
        return len(wrong)


def _run(lane: "queue.SimpleQueue[Work | None]") -> None:
    while (work := lane.get()) is not None:
        work()
