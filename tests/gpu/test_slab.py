"""A staging slab on a real GPU: pages into rows and back, by the stager's own thread and stream."""

import random
import time
from collections.abc import Iterator

import pytest

from scheduler_shim.staging import Stager
from tests.gpu.memory import DeviceMemory
from transfer.ipc.cuda_driver import Driver
from transfer.ipc.cuda_staging import CudaSlab
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.stage_ring import StageRequest, StageRing, wake
from transfer.layout import BufferLayout, PoolLayout

PAGES, LAYERS, ROWS = 40, 3, 16
DEADLINE_S = 20.0


class Scene:
    """A pool of buffers of `chunk` bytes a page, its slab, and a stager."""

    def __init__(self, uuid: str, chunk: int) -> None:
        self.driver = Driver.open(uuid)
        buffers = 2 * LAYERS
        specs = tuple(
            BufferLayout("v" if n % 2 else "k", n // 2, n, 0, chunk, chunk, "bytes")
            for n in range(buffers)
        )
        self.layout = PoolLayout(1, PAGES, specs, (PAGES * chunk,) * buffers)
        self.chunk = chunk
        self.pool = [DeviceMemory(self.driver, PAGES * chunk) for _ in range(buffers)]
        addresses = [memory.mapping.address for memory in self.pool]
        self.slab = CudaSlab(self.driver, self.layout, addresses, ROWS * self.layout.page_bytes)
        self.ring = StageRing.make(SharedMemoryIPC())
        self.stager = Stager(self.ring, self.slab.packer(self.ring))
        self.posted = 0
        rng = random.Random(chunk)
        for memory in self.pool:
            memory.write(0, rng.randbytes(PAGES * chunk))

    def ask(self, *, pack: bool, pages: list[int], row: int, layers: int = 0) -> bool:
        """Have a request carried out; says whether it was."""
        self.posted += 1
        row_bytes = 2 * self.chunk * (layers or LAYERS)
        first = 1 if layers else 0
        offset = row * self.layout.page_bytes
        self.ring.post(self.posted, StageRequest(pack, first, layers, offset, row_bytes, pages))
        wake(self.stager.fds[1])
        give_up = time.monotonic() + DEADLINE_S
        while self.ring.done < self.posted:
            assert time.monotonic() < give_up
            time.sleep(0.0005)
        return not self.ring.failed(self.posted)

    def page(self, number: int, first: int = 0) -> list[bytes]:
        """What the buffers from one on have of a page."""
        n = self.chunk
        return [memory.read(number * n, (number + 1) * n) for memory in self.pool[first:]]

    def close(self) -> None:
        assert self.stager.close()
        self.slab.close()
        for memory in self.pool:
            memory.close()


@pytest.fixture(params=[512, 1024, 2048, 32768], ids=str)
def scene(request: pytest.FixtureRequest, uuids: list[str]) -> Iterator[Scene]:
    """A scene with chunks of a size."""
    made = Scene(uuids[0], request.param)
    yield made
    made.close()


def test_pages_in_any_order_become_rows_and_rows_become_pages(scene: Scene) -> None:
    rng = random.Random(5)
    source = rng.sample(range(PAGES // 2), 9)
    target = rng.sample(range(PAGES // 2, PAGES), 9)
    before = [scene.page(n) for n in range(PAGES)]
    assert scene.ask(pack=True, pages=source, row=3)
    assert scene.ask(pack=False, pages=target, row=3)
    expected = list(before)
    for start, stop in zip(source, target, strict=True):
        expected[stop] = before[start]
    assert [scene.page(n) for n in range(PAGES)] == expected, "and no other page is touched"


def test_some_layers_go_alone(scene: Scene) -> None:
    before = scene.page(1), scene.page(7)
    assert scene.ask(pack=True, pages=[1], row=0, layers=2)
    assert scene.ask(pack=False, pages=[7], row=0, layers=2)
    assert scene.page(7) == before[1][:2] + before[0][2:]


def test_what_does_not_exist_fails_and_the_context_lives(scene: Scene) -> None:
    for pages, row in (([PAGES], 0), ([0], ROWS)):
        assert not scene.ask(pack=True, pages=pages, row=row)
    scene.posted += 1
    odd = StageRequest(True, 0, 0, 1, scene.layout.page_bytes, [0])
    scene.ring.post(scene.posted, odd)
    wake(scene.stager.fds[1])
    assert scene.ask(pack=True, pages=[0], row=0)
    assert scene.ring.failed(scene.posted - 1)
