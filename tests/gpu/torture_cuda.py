"""The torture's pool on a GPU: torch tensors, two streams, kernels that are late on purpose."""

from collections.abc import Sequence
from typing import Any

import torch

from directory.core.ids import CURRENT, FORWARD
from tests.gpu.peer_pool import export
from tests.gpu.torture_messages import LANDING_COUNTERS, Position, word_of
from transfer.ipc.cuda_driver import Driver, load_api, visible_devices
from transfer.ipc.cuda_staging import CudaSlab
from transfer.ipc.cuda_sync import CudaTimelines
from transfer.ipc.memory import MemoryHandle, SharedMemoryIPC
from transfer.ipc.sync import TimelineTable, WordTable
from transfer.layout import PoolLayout

CYCLES_PER_US = 1_980
SIGN = 1 << 63


class CudaPool:
    """Implements what torture_scheduler.py needs of a pool."""

    def __init__(self, layout: PoolLayout, word_count: int, start: Position) -> None:
        torch.zeros(1, device="cuda:0")
        uuid = next(u for u, ordinal in visible_devices(load_api()).items() if ordinal == 0)
        self._driver = Driver.open(uuid)
        self.layout = layout
        self._tensors = [
            torch.zeros(nbytes // 8, dtype=torch.int64, device="cuda:0")
            for nbytes in layout.allocation_bytes
        ]
        self._views = [
            self._tensors[b.allocation].as_strided(
                (layout.page_count, b.chunk_bytes // 8), (b.page_stride // 8, 1), b.offset // 8
            )
            for b in layout.buffers
        ]
        self.handles: tuple[MemoryHandle, ...] = tuple(
            export(self._driver, tensor).handle for tensor in self._tensors
        )
        ipc = SharedMemoryIPC()
        self.timelines = TimelineTable.create(ipc, "timelines", landings=LANDING_COUNTERS)
        self.words = WordTable.create(ipc, "words", word_count)
        self._signals = CudaTimelines(self._driver, self.timelines)
        self._lanes = [torch.cuda.Stream(), torch.cuda.Stream()]
        self._checker = torch.cuda.Stream()
        self._values = list(start)
        for index, value in enumerate(start):
            self.timelines.write(index, value)
        self._checks: list[tuple[int, int, Any, Any]] = []
        torch.cuda.synchronize()

    @property
    def fds(self) -> list[int]:
        """Descriptors of an import; the memory needs none."""
        return [self.timelines.fd, self.words.fd]

    def write(
        self, lane: int, pages: Sequence[int], contents: Sequence[int], sleep_us: int
    ) -> None:
        """Queue a sleep and a write on a lane; the host runs ahead."""
        table = self._table(pages, contents)
        with torch.cuda.stream(self._lanes[lane]):
            on_device = table.to("cuda:0", non_blocking=True)
            if sleep_us:
                torch.cuda._sleep(sleep_us * CYCLES_PER_US)
            rows = on_device[:, 0]
            for number, view in enumerate(self._views):
                words = on_device[:, number + 1 : number + 2].expand(-1, view.shape[1])
                view.index_copy_(0, rows, words)

    def order(self, first: int, then: int) -> None:
        """Let one lane wait for what is queued on the other now."""
        self._lanes[then].wait_stream(self._lanes[first])

    def signal(self) -> Position:
        """Queue the next value of each timeline on its lane."""
        for lane in (FORWARD, CURRENT):
            self._values[lane] += 1
            self._signals.signal(self._lanes[lane].cuda_stream, lane, self._values[lane])
        return self._values[0], self._values[1]

    def check(self, token: int, pages: Sequence[int], contents: Sequence[int]) -> None:
        """Look at pages once all that is queued now is done; `checked` tells."""
        table = self._table(pages, contents)
        for lane in self._lanes:
            self._checker.wait_stream(lane)
        with torch.cuda.stream(self._checker):
            on_device = table.to("cuda:0", non_blocking=True)
            rows = on_device[:, 0]
            wrong = torch.zeros(len(pages), dtype=torch.bool, device="cuda:0")
            for number, view in enumerate(self._views):
                differs = view.index_select(0, rows) != on_device[:, number + 1 : number + 2]
                wrong |= differs.any(dim=1)
            found = torch.empty(1, dtype=torch.int64, pin_memory=True)
            found.copy_(wrong.sum().reshape(1), non_blocking=True)
            over = torch.cuda.Event()
            over.record(self._checker)
        self._checks.append((token, len(pages), found, over))

    def checked(self) -> list[tuple[int, int, int]]:
        """(token, pages, wrong pages) of checks that are over."""
        done: list[tuple[int, int, Any, Any]] = []
        left: list[tuple[int, int, Any, Any]] = []
        for check in self._checks:
            (done if check[3].query() else left).append(check)
        self._checks = left
        return [(token, pages, int(found[0])) for token, pages, found, _ in done]

    def make_slab(self, nbytes: int) -> CudaSlab:
        """A staging slab for the pool."""
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        return CudaSlab(self._driver, self.layout, addresses, nbytes)

    def close(self) -> None:
        """Wait for the lanes and free everything."""
        torch.cuda.synchronize()
        self._signals.close()
        self._views.clear()
        self._tensors.clear()
        self.timelines.close()
        self.words.close()

    def _table(self, pages: Sequence[int], contents: Sequence[int]) -> Any:
        """Pinned rows of (page, word of each buffer)."""
        rows = [
            [page, *(_signed(word_of(content, n)) for n in range(len(self._views)))]
            for page, content in zip(pages, contents, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64, pin_memory=True)


def _signed(word: int) -> int:
    return word - (1 << 64) if word & SIGN else word
