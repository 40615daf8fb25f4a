"""Wishes for host memory: what is not granted is said once, with the cure, and costs nothing."""

import logging
from pathlib import Path

import pytest

from tests.unit.transfer.device.fake_driver import RESULTS, FakeDriver
from transfer.device import host_pages
from transfer.device.host_pages import HostPages, huge_pages, node_of_gpu, prepare
from transfer.ipc.memory import SharedMemoryIPC

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


def test_real_memory_can_be_wished_for_and_used_whatever_comes_of_it() -> None:
    ipc = SharedMemoryIPC()
    memory = ipc.create("wish", 4 * MIB)
    refused = prepare(memory.address, memory.nbytes, 0)
    assert all("no large pages" in why or "no preferred node" in why for why in refused)
    memory.view[:] = b"\x5a" * memory.nbytes
    assert memory.view[-1] == 0x5A
    ipc.close(memory)


def test_what_is_refused_is_said_once_not_for_every_segment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_pages, "prepare", lambda *_: ["no large pages: because"])
    pages = HostPages(None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            pages.prepare(0, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "host tier: no large pages: because"
    ]
