"""Whole pages on a real GPU: every shape that a copy can take moves the same bytes."""

import random
from collections.abc import Iterator
from itertools import product
from math import isfinite

import pytest

from directory.core.ids import HOST
from tests.contract.test_device import HostMemory
from tests.gpu.memory import DeviceMemory
from transfer.device.cuda import CudaDevice
from transfer.device.cuda_calibrate import SIZES, calibrate
from transfer.ipc.cuda_driver import Driver
from transfer.ipc.cuda_memory import CudaMapping, Physical
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.pages import PageBatch, Pattern, page_slices
from transfer.plan import Chunk
from transfer.tiles import ASSUMED, Direction, Method, Rates

PAGES, ROWS = 24, 8
WAYS: tuple[Direction, ...] = ("to_host", "from_host", "within", "peer")
A, B, TIER = (1, 0), (2, 0), (HOST, 0)


class Scene:
    """Two pools of one allocation each, and a tier whose registrations end within pages."""

    def __init__(self, uuid: str, nbytes: int, method: Method, *, kernel: bool) -> None:
        self.driver = Driver.open(uuid)
        self.nbytes, self.size = nbytes, PAGES * ROWS * nbytes
        border = max(4096, self.size // 3 // 4096 * 4096)
        other: Method = "tile" if method == "batch" else "batch"
        rates = Rates({(d, m, 0): float(m == method) for d in WAYS for m in (method, other)})
        self.device = CudaDevice(self.driver, chunk_bytes=border, rates=rates)
        if not kernel:
            self.device._kernel = None
        self.pools = {key: DeviceMemory(self.driver, self.size) for key in (A, B)}
        self.tier = HostMemory.ipc.create("tier", -(-self.size // 4096) * 4096)
        for key, memory in self.pools.items():
            self.device.attach(key, memory.mapping)
        self.device.attach(TIER, self.tier)

    def pattern(self, source: int, target: int) -> Pattern:
        """Chunks of a page: rows far apart in a pool, together in a host page."""
        n = self.nbytes
        ends = {
            HOST: [(0, row * n, ROWS * n) for row in range(ROWS)],
            1: [(0, row * PAGES * n, n) for row in range(ROWS)],
            2: [(0, row * PAGES * n, n) for row in range(ROWS)],
        }
        return Pattern([Chunk(*a, *b, n) for a, b in zip(ends[source], ends[target], strict=True)])

    def copy(self, source: int, target: int, starts: list[int], stops: list[int]) -> None:
        batch = PageBatch(source, target, 0, self.pattern(source, target), starts, stops)
        for piece in page_slices([batch], 5 * ROWS * self.nbytes):
            self.device.submit_pages(piece)
        while self.device.in_flight:
            assert all(not error for _, error in self.device.poll())

    def page(self, place: int, page: int) -> bytes:
        n = self.nbytes
        if place == HOST:
            return bytes(self.tier.view[page * ROWS * n : (page + 1) * ROWS * n])
        memory = self.pools[place, 0]
        starts = [(row * PAGES + page) * n for row in range(ROWS)]
        return b"".join(memory.read(at, at + n) for at in starts)

    def close(self) -> None:
        for key in (A, B, TIER):
            self.device.detach(key)
        for memory in self.pools.values():
            memory.close()
        HostMemory.ipc.close(self.tier)


@pytest.fixture(
    params=[
        (nbytes, method, kernel)
        for nbytes in (2048, 512, 1536, 520, 131072)
        for method in ("batch", "tile")
        for kernel in (False, True)
    ],
    ids=str,
)
def scene(request: pytest.FixtureRequest, uuids: list[str]) -> Iterator[Scene]:
    """A scene for each size of chunk and each shape."""
    nbytes, method, kernel = request.param
    made = Scene(uuids[0], nbytes, method, kernel=kernel)
    yield made
    made.close()


@pytest.mark.parametrize("ordered", [False, True], ids=["scattered", "runs"])
def test_pages_go_out_over_and_back_unchanged_and_no_others_do(scene: Scene, ordered: bool) -> None:
    rng = random.Random(5)
    for memory in scene.pools.values():
        memory.write(0, rng.randbytes(scene.size))
    before = {place: [scene.page(place, p) for p in range(PAGES)] for place in (1, 2)}
    count = PAGES // 2
    first, slots, second = (rng.sample(range(PAGES), count) for _ in range(3))
    if ordered:
        first, slots, second = (list(range(n, n + count)) for n in (1, 4, 7))
    scene.copy(1, HOST, first, slots)
    assert [scene.page(HOST, s) for s in slots] == [before[1][p] for p in first]
    scene.copy(HOST, 2, slots, second)
    expected = list(before[2])
    for page, source in zip(second, first, strict=True):
        expected[page] = before[1][source]
    assert [scene.page(2, p) for p in range(PAGES)] == expected
    scene.copy(2, 1, second, first)
    assert [scene.page(1, p) for p in range(PAGES)] == before[1]
    rest = [p for p in range(PAGES) if p not in second]
    scene.copy(1, 2, rest[:count], rest[:count])
    for page in rest[:count]:
        expected[page] = before[1][page]
    assert [scene.page(2, p) for p in range(PAGES)] == expected


def test_a_rectangle_over_two_allocations_is_never_asked_for(uuids: list[str]) -> None:
    driver = Driver.open(uuids[0])
    device = CudaDevice(driver, rates=Rates({("to_host", "tile", 0): 1.0}))
    nbytes = 2 << 20
    addresses = [int(driver.call("cuMemAlloc", nbytes)) for _ in range(ROWS)]
    ipc = SharedMemoryIPC()
    tier: SharedMapping = ipc.create("tier", ROWS * nbytes)
    for row, address in enumerate(addresses):
        physical = Physical(b"", address, nbytes, lambda: None)
        device.attach((1, row), CudaMapping(physical, 0, nbytes, driver.uuid))
    device.attach(TIER, tier)
    chunks = [Chunk(row, 0, 65536, 0, row * 65536, ROWS * 65536, 65536) for row in range(ROWS)]
    device.submit_pages([PageBatch(1, HOST, 0, Pattern(chunks), [0, 3], [2, 1])])
    while device.in_flight:
        assert [error for _, error in device.poll() if error] == []
    # What is unmapped while it is registered is registered for whatever is mapped there next.
    device.detach(TIER)
    ipc.close(tier)
    for address in addresses:
        driver.call("cuMemFree", address)


def test_calibration_finds_a_rate_for_every_way(uuids: list[str]) -> None:
    driver = Driver.open(uuids[0])
    rates = calibrate(CudaDevice(driver), driver)
    assert rates is not ASSUMED, "it was measured"
    rows = rates.as_rows()
    ways = {(direction, method, nbytes) for direction, method, nbytes, _ in rows}
    assert ways == set(product(("to_host", "from_host"), ("batch", "tile"), SIZES))
    # How fast is another question: beside other work it may be slow, and is found all the same.
    assert all(rate > 0 and isfinite(rate) for *_, rate in rows)
