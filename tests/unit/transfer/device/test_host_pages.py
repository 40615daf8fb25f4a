"""Wishes for host memory: what is not granted is said once, with the cure, and costs nothing."""

import logging
import mmap
import os
import platform
import random
import re
import tempfile
from pathlib import Path

import pytest

from tests.unit.transfer.device.fake_driver import RESULTS, FakeDriver
from transfer.device import cuda, host_pages
from transfer.device.cuda import CudaDevice
from transfer.device.cuda_calibrate import calibrate
from transfer.device.host_pages import (
    MADV_COLLAPSE,
    MADV_POPULATE_READ,
    SHMEM_HUGE,
    HostPages,
    chosen,
    collapse,
    huge_pages,
    node_of_gpu,
)
from transfer.host_tier import HostTierMemory, TierShape
from transfer.ipc.aligned import LARGE_BYTES
from transfer.ipc.memory import SharedMapping

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
    ],
)
def test_large_pages_are_there_if_the_kernel_says_so_and_else_the_setting_is_named(
    tmp_path: Path, text: str, granted: bool
) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text(text)
    why = huge_pages(setting)
    assert bool(why) is not granted
    if why:
        assert str(setting) in why
        assert "'advise'" in why


def test_a_kernel_without_the_setting_has_no_large_pages(tmp_path: Path) -> None:
    assert "no large pages" in huge_pages(tmp_path / "missing")


@pytest.mark.parametrize(
    ("content", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("x", None), ("99", None)]
)
def test_the_node_of_a_gpu_is_what_the_bus_says_or_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, node: int | None
) -> None:
    monkeypatch.setitem(RESULTS, "cuDeviceGetPCIBusId", b"0000:1B:00.0\0\0\0")
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "numa_node").write_text(content)
    assert node_of_gpu(FakeDriver(), 0, tmp_path) == node


def test_a_gpu_that_is_on_no_bus_has_no_node(tmp_path: Path) -> None:
    driver = FakeDriver()
    driver.fail("cuDeviceGetPCIBusId", "CUDA_ERROR_NOT_SUPPORTED")
    assert node_of_gpu(driver, 0, tmp_path) is None


def memory_of(kind: str, nbytes: int) -> tuple[HostTierMemory, SharedMapping]:
    """A segment of a host tier, as a mover opens it: a memfd, or a file in memory."""
    shape = TierShape(nbytes, nbytes)
    if kind == "memfd":
        tier = HostTierMemory.create(nbytes, nbytes)
    else:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(nbytes)
            tier = HostTierMemory.of_files(shape, [file.fileno()])
    return tier, tier.segments[0]


def large_bytes(mapping: SharedMapping) -> int:
    """How much of a mapping the kernel has in large pages, as it says itself."""
    begin = f"{mapping.address:x}-"
    text = Path("/proc/self/smaps").read_text(encoding="ascii")
    fields = text[text.index(f"\n{begin}") + 1 :].split("VmFlags:")[0]
    found = re.findall(r"(?:Shmem|File)PmdMapped: +(\d+) kB", fields)
    assert len(found) == 2
    return 1024 * sum(map(int, found))


def collapses() -> bool:
    """Whether this kernel makes large pages of shared memory at all, as its own setting says."""
    fields = platform.release().split(".")
    new = (int(fields[0]), int(re.match(r"\d+", fields[1])[0])) >= (6, 1)  # type: ignore[index]
    return new and SHMEM_HUGE.exists() and chosen(SHMEM_HUGE.read_text()) != "deny"


@pytest.fixture
def never(tmp_path: Path) -> Path:
    """A kernel's setting that grants no large pages."""
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size advise [never] deny force")
    return setting


@pytest.mark.skipif(not collapses(), reason="this kernel makes no large pages of shared memory")
@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_where_none_are_granted_large_pages_are_made_and_no_byte_changes(
    kind: str, never: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, memory = memory_of(kind, 5 * MIB)  # the last one is not whole
    memory.view[MIB : MIB + 9] = b"was there"
    with caplog.at_level(logging.INFO):
        HostPages(None, never).prepare(memory.address, memory.nbytes)
    assert large_bytes(memory) == 4 * MIB
    assert bytes(memory.view[MIB : MIB + 9]) == b"was there"
    assert not any(memory.view[:MIB]), "what nobody wrote is zero"
    assert [r.getMessage() for r in caplog.records] == [
        "host tier: 4 of 5 MiB lie in large pages, made at once"
    ]
    memory.view[:] = b"\x5a" * memory.nbytes
    assert memory.view[-1] == 0x5A
    tier.close()


@pytest.mark.skipif(not collapses(), reason="this kernel makes no large pages of shared memory")
def test_what_was_attached_before_at_no_border_does_not_end_the_making(
    never: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, memory = memory_of("memfd", 4 * MIB)
    pages = HostPages(None, never)
    pages.prepare(memory.address + 4096, LARGE_BYTES)
    assert large_bytes(memory) == 0
    pages.prepare(memory.address, memory.nbytes)
    assert large_bytes(memory) == 4 * MIB
    assert ["'never'" in record.getMessage() for record in caplog.records] == [True]
    tier.close()


@pytest.mark.skipif(not collapses(), reason="this kernel makes no large pages of shared memory")
def test_a_device_that_was_calibrated_has_the_tier_in_large_pages(
    never: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "HostPages", lambda node: HostPages(node, never))
    driver = FakeDriver()
    driver.reached = True
    device = CudaDevice(driver)
    calibrate(device, driver)
    tier = HostTierMemory.create(64 * MIB, 32 * MIB)
    for number, segment in enumerate(tier.segments):
        device.attach((-1, number), segment)
    assert [large_bytes(segment) for segment in tier.segments] == [32 * MIB, 32 * MIB]
    device.close()
    tier.close()


def test_what_cannot_be_made_is_said_once_and_not_tried_again(
    never: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def refuse(address: int, nbytes: int, advice: int) -> str:
        tried.append(advice)
        return "" if advice == MADV_POPULATE_READ else f"madvise {advice}: errno 12"

    monkeypatch.setattr(host_pages, "_advise", refuse)
    pages = HostPages(None, never)
    for number in range(3):
        pages.prepare(number * LARGE_BYTES, LARGE_BYTES)
    assert tried == [MADV_POPULATE_READ, MADV_COLLAPSE]
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "0 of 2 MiB lie in large pages, then madvise 25: errno 12" in texts[0]
    assert all("'never'; write 'advise'" in text for text in texts)


def test_memory_that_there_is_no_room_for_ends_the_making_and_nothing_else(never: Path) -> None:
    """Beyond the end of a file nobody can put a page: a touch would end this process."""
    tier, memory = memory_of("file", 3 * LARGE_BYTES)
    os.ftruncate(memory.fd, LARGE_BYTES)
    made, why = collapse(memory.address, memory.nbytes)
    assert (made, why.partition(":")[0]) == (0, f"madvise {MADV_POPULATE_READ}")
    HostPages(None, never).prepare(memory.address, memory.nbytes)
    tier.close()


def test_memory_that_begins_at_no_border_is_left_as_it_is() -> None:
    assert collapse(LARGE_BYTES + 4096, LARGE_BYTES)[0] == 0


@pytest.mark.parametrize("nbytes", [LARGE_BYTES, 3 * LARGE_BYTES + 4096 + 1, 4096])
def test_a_large_mapping_begins_at_a_border_and_its_room_is_given_back(nbytes: int) -> None:
    def mapped_kib() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0])

    tier, memory = memory_of("memfd", nbytes)
    tier.close()
    before = mapped_kib()
    for _ in range(4):
        tier, memory = memory_of("memfd", nbytes)
        assert nbytes < LARGE_BYTES or memory.address % LARGE_BYTES == 0
        tier.close()
    assert mapped_kib() == before


def test_it_begins_at_a_border_though_there_is_room_for_it_elsewhere() -> None:
    draw = random.Random(3)
    others = [mmap.mmap(-1, draw.choice((1, 2, 3, 5, 8)) * MIB) for _ in range(40)]
    for other in draw.sample(others, 25):
        other.close()
    tiers = [memory_of("memfd", LARGE_BYTES) for _ in range(20)]
    assert not any(memory.address % LARGE_BYTES for _, memory in tiers)
    for tier, _ in tiers:
        tier.close()


def test_real_memory_can_be_wished_for_and_used_whatever_comes_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier, memory = memory_of("memfd", 4 * MIB)
    HostPages(0).prepare(memory.address, memory.nbytes)
    texts = [record.getMessage() for record in caplog.records]
    assert all("no large pages" in why or "no preferred node" in why for why in texts)
    memory.view[:] = b"\x5a" * memory.nbytes
    assert memory.view[-1] == 0x5A
    tier.close()
