"""Whole pages on the CUDA device: which call carries them, and what the kernel is told."""

import ctypes
import struct
from array import array
from typing import Any

import pytest

from tests.unit.transfer.device.fake_driver import FakeDriver
from transfer.device import cuda_calibrate
from transfer.device.cuda import CudaDevice
from transfer.device.cuda_calibrate import SCRATCH_BYTES, calibrate, scattered
from transfer.device.cuda_kernel import (
    CHUNKS_MAX,
    ENTRIES_KEPT_MAX,
    PageKernel,
    moves,
    page_kernel,
    ptx,
    unroll_of,
)
from transfer.device.cuda_tile import Corner, fill, tile_copy
from transfer.device.protocol import PageDevice, UnknownMemory
from transfer.ipc.cuda_memory import CudaMapping, Physical
from transfer.ipc.memory import SharedMapping, SharedMemoryIPC
from transfer.pages import PageBatch, Pattern
from transfer.plan import Chunk
from transfer.tiles import ASSUMED

OWN, FAR, HOST = 1, 2, -1
KIB = 1024
RANGES_MIN = 32
SIZE = 64 * KIB


class SeeingDriver(FakeDriver):
    """Keeps the bytes of every table that is sent to the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[bytes] = []

    def call(self, function: str, *arguments: Any) -> Any:
        if function == "cuMemcpyHtoDAsync" and arguments[2] < SIZE:
            self.tables.append(ctypes.string_at(arguments[1], arguments[2]))
        if function == "cuMemAlloc":
            super().call(function, *arguments)
            return 0x7000_0000
        return super().call(function, *arguments)


def gpu(number: int, device: str) -> CudaMapping:
    return CudaMapping(Physical(b"", number << 24, SIZE, lambda: None), 0, SIZE, device)


class Scene:
    """A device with two buffers of its own pool, two of a far one, and a host segment."""

    def __init__(self, *, computing: bool = False) -> None:
        self.driver = SeeingDriver()
        self.computing = computing
        self.device = CudaDevice(self.driver, computing=lambda: self.computing)
        for number, (pool, name) in enumerate(((OWN, "GPU-fake"), (FAR, "GPU-far"))):
            for buffer in range(2):
                mapping = gpu(1 + 2 * number + buffer, name)
                self.device.attach((pool, buffer), mapping)
        self.host: SharedMapping = SharedMemoryIPC().create("tier", SIZE)
        self.device.attach((HOST, 0), self.host)

    def launches(self) -> list[tuple[Any, ...]]:
        return self.driver.named("cuLaunchKernel")


def pattern(source: int, target: int, nbytes: int = 2 * KIB) -> Pattern:
    """A chunk of each of two buffers; host pages hold both."""
    ends: dict[int, list[tuple[int, int, int]]] = {
        HOST: [(0, 0, 2 * nbytes), (0, nbytes, 2 * nbytes)],
        OWN: [(0, 0, nbytes), (1, 0, nbytes)],
        FAR: [(0, 0, nbytes), (1, 0, nbytes)],
    }
    pairs = zip(ends[source], ends[target], strict=True)
    return Pattern([Chunk(*left, *right, nbytes) for left, right in pairs])


def batch(source: int, target: int, nbytes: int = 2 * KIB) -> PageBatch:
    return PageBatch(source, target, 0, pattern(source, target, nbytes), [3, 0, 5], [1, 2, 0])


def test_the_device_takes_whole_pages() -> None:
    assert isinstance(Scene().device, PageDevice)


def test_pages_within_a_gpu_go_by_one_launch_that_knows_every_chunk_and_page() -> None:
    scene = Scene(computing=True)
    scene.device.submit_pages([batch(OWN, OWN)])
    (launch,) = scene.launches()
    values, kinds = launch[9]
    table, pages, items, parts, count = values
    assert kinds == (ctypes.c_uint64,) * 2 + (ctypes.c_uint32,) * 3
    assert (items, parts, count) == (6, 1, 2), "a warp moves 2 KiB at once"
    assert pages == table + 64
    (sent,) = scene.driver.tables
    assert struct.unpack("<8Q", sent[:64]) == (
        1 << 24, 2 * KIB, 1 << 24, 2 * KIB, 2 << 24, 2 * KIB, 2 << 24, 2 * KIB,
    )  # fmt: skip
    assert struct.unpack("<6I", sent[64:]) == (3, 1, 0, 2, 5, 0)
    assert scene.driver.named("cuMemcpyAsync") == []


@pytest.mark.parametrize("computing", [False, True])
def test_between_gpus_the_kernel_is_for_when_nobody_computes(computing: bool) -> None:
    scene = Scene(computing=computing)
    scene.device.submit_pages([batch(OWN, FAR)])
    assert len(scene.launches()) == (not computing)
    assert len(scene.driver.named("cuMemcpyAsync")) == 6 * computing


@pytest.mark.parametrize(("source", "target"), [(OWN, HOST), (HOST, OWN)])
def test_no_kernel_ever_touches_the_host(source: int, target: int) -> None:
    scene = Scene(computing=False)
    scene.device.submit_pages([batch(source, target)])
    assert scene.launches() == []
    assert len(scene.driver.named("cuMemcpyAsync")) == 6


def test_chunks_that_the_kernel_cannot_move_go_one_by_one() -> None:
    scene = Scene()
    scene.device.submit_pages([batch(OWN, OWN, 520)])
    assert scene.launches() == []
    assert [call[2] for call in scene.driver.named("cuMemcpyAsync")] == [520] * 6


def test_copies_between_gpu_memories_have_streams_of_their_own() -> None:
    scene = Scene()
    scene.device.submit_pages([batch(OWN, OWN)], urgent=True)
    scene.device.submit_pages([batch(HOST, OWN)], urgent=True)
    kernels, copies = scene.launches()[0][8], scene.driver.named("cuMemcpyAsync")[0][3]
    assert kernels != copies


def test_over_a_link_a_kernel_moves_what_may_be_waited_for_though_the_gpu_computes() -> None:
    scene = Scene(computing=True)
    scene.device.submit_pages([batch(OWN, FAR)], calm=True)
    assert len(scene.driver.named("cuLaunchKernel")) == 1
    scene.device.submit_pages([batch(OWN, FAR)])
    assert len(scene.driver.named("cuLaunchKernel")) == 1


def test_only_what_may_and_goes_to_and_from_the_host_is_handed_to_the_thread() -> None:
    """Kernels have a table a stream: calls of one stream are one thread's."""
    scene = Scene(computing=True)
    scene.device.submit_beside(RANGES_MIN)
    beside = scene.device._beside
    assert beside is not None
    pages = list(range(0, 2 * RANGES_MIN, 2))
    scene.device.submit_pages(
        [batch(OWN, FAR, 256)._replace(source_pages=pages, target_pages=pages)], beside=True
    )
    assert len(scene.driver.named("cuMemcpyAsync")) == 2 * RANGES_MIN
    assert not beside._last
    to_host = batch(OWN, HOST, 256)._replace(source_pages=pages, target_pages=pages)
    scene.device.submit_pages([to_host])
    assert len(scene.driver.named("cuMemcpyAsync")) == 4 * RANGES_MIN
    assert not beside._last
    scene.device.submit_pages([to_host], beside=True)
    assert len(beside._last) == 1
    scene.device.close()
    assert len(scene.driver.named("cuMemcpyAsync")) == 6 * RANGES_MIN


@pytest.mark.parametrize(("source", "asked"), [(OWN, 5), (HOST, 1)])
def test_beside_a_call_only_copies_whose_time_says_something_are_asked_for(
    source: int, asked: int
) -> None:
    scene = Scene(computing=True)
    scene.device.submit_beside(RANGES_MIN)
    beside = scene.device._beside
    assert beside is not None
    scene.driver.reached = False
    scene.device.submit_pages([batch(source, OWN)])
    assert scene.device.poll() == []
    beside.calling = True  # as while the driver has a list of the thread's
    for _ in range(4):
        assert scene.device.poll() == []
    assert len(scene.driver.named("cuEventQuery")) == asked
    beside.calling = False
    scene.driver.reached = True
    assert len(scene.device.poll()) == 1
    scene.device.close()


def test_a_page_beyond_its_memory_reaches_no_driver_and_holds_no_memory() -> None:
    scene = Scene()
    beyond = batch(OWN, OWN)._replace(source_pages=[0, 1, 32])
    with pytest.raises(UnknownMemory):
        scene.device.submit_pages([beyond])
    assert scene.device.in_flight == 0
    scene.device.detach((OWN, 0))


def test_a_memory_that_comes_back_elsewhere_is_not_mistaken_for_the_old_one() -> None:
    scene = Scene()
    pages = batch(OWN, OWN)
    scene.device.submit_pages([pages])
    scene.driver.reached = True
    scene.device.poll()
    scene.device.detach((OWN, 1))
    scene.device.attach((OWN, 1), gpu(9, "GPU-fake"))
    scene.device.submit_pages([pages])
    assert struct.unpack("<8Q", scene.driver.tables[1][:64])[4] == 9 << 24


def test_many_pages_take_several_launches_none_with_more_than_its_table_holds() -> None:
    driver = SeeingDriver()
    kernel = PageKernel(driver)
    chunks = [Chunk(0, 0, 512, 0, 1 << 30, 512, 512)]
    count = 20_000
    kernel.copy(chunks, range(count), range(count), 5)
    launches = driver.named("cuLaunchKernel")
    assert sum(launch[9][0][2] for launch in launches) == count
    assert all(len(table) <= 64 * KIB for table in driver.tables)
    assert len(launches) == 3


def test_a_list_of_chunks_that_is_dropped_leaves_its_table_to_no_other() -> None:
    """Lists are known by their id, and a new one often has the id of one that is gone."""
    driver = SeeingDriver()
    kernel = PageKernel(driver)
    for number in range(3 * ENTRIES_KEPT_MAX):
        count = CHUNKS_MAX + 3 if number % 16 == 0 else 1 + number % 3
        chunks = [
            Chunk(0, (number << 16) + (n << 5), 512, 0, 1 << 30, 512, 512) for n in range(count)
        ]
        del driver.tables[:]
        kernel.copy(chunks, [0], [0], 5)
        sources = [
            word
            for at, table in zip(range(0, count, CHUNKS_MAX), driver.tables, strict=True)
            for word in array("Q", table)[: 4 * min(CHUNKS_MAX, count - at) : 4]
        ]
        assert sources == [chunk.source_offset for chunk in chunks]
        del chunks


@pytest.mark.parametrize(
    ("nbytes", "unroll"), [(2048, 4), (131072, 4), (1024, 2), (512, 1), (1536, 1), (256, 0)]
)
def test_a_thread_moves_as_much_at_once_as_chunks_allow(nbytes: int, unroll: int) -> None:
    assert unroll_of(nbytes) == unroll
    assert moves([Chunk(0, 0, nbytes, 0, 0, nbytes, nbytes)]) is bool(unroll)
    assert not moves([Chunk(0, 8, 4096, 0, 0, 4096, 512)]), "addresses are aligned"


def test_the_kernels_are_one_module_of_plain_text() -> None:
    text = ptx().decode()
    assert text.endswith("\0")
    assert [f"copy_pages_{n}(" in text for n in (1, 2, 4)] == [True] * 3
    assert "{{" not in text


def test_without_a_kernel_or_rectangles_the_device_goes_on() -> None:
    driver = FakeDriver()
    driver.fail("cuModuleLoadData", "CUDA_ERROR_INVALID_PTX")
    assert page_kernel(driver) is None
    assert tile_copy(driver) is None


def test_a_rectangle_is_described_by_its_memories_pitches_and_extent() -> None:
    words = array("Q", bytes(128))
    fill(words, Corner(0x1000, 64, host=False), Corner(0x2000, 32, host=True), 16, 3)
    assert (words[2], words[4], words[6]) == (2, 0x1000, 64)
    assert (words[9], words[10], words[13]) == (1, 0x2000, 32)
    assert (words[14], words[15]) == (16, 3)


def test_calibration_covers_every_byte_of_its_memory_once_and_leaves_nothing() -> None:
    for direction in ("to_host", "from_host"):
        pages = scattered(direction, 32 * KIB)
        assert pages.nbytes == SCRATCH_BYTES
        runs = [b for a, b in zip(pages.source_pages, pages.source_pages[1:], strict=False)
                if b == a + 1]  # fmt: skip
        assert not runs
    driver = SeeingDriver()
    driver.reached = True
    device = CudaDevice(driver)
    rates = calibrate(device, driver, repeats=1)
    assert {row[:2] for row in rates.as_rows()} == {
        (d, m) for d in ("to_host", "from_host") for m in ("batch", "tile")
    }
    assert len(driver.named("cuMemFree")) == 1
    assert len(driver.named("cuMemHostRegister")) == len(driver.named("cuMemHostUnregister"))


def test_a_gpu_without_room_is_left_with_what_is_assumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FakeDriver()
    device = CudaDevice(driver)
    driver.fail("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    assert calibrate(device, driver) is ASSUMED
    assert "OUT_OF_MEMORY" in caplog.text
    assert cuda_calibrate.SCRATCH_BYTES == SCRATCH_BYTES
