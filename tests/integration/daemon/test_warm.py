"""A host tier that outlives its daemon: what is taken up again, and what is left alone.

The journal's reading is tested at full count in tests/unit/directory/core/test_recovery.py; here a
few of its cases go through the whole daemon, with real files and real bytes.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from directory.core.actions import Matched, Restored
from directory.core.events import Flush, Match
from directory.core.namespace import NamespaceKey
from directory.daemon.tier_folder import file_system
from tests.integration.daemon.support import PAGE_SIZE, DaemonProcess, RawClient, wait_until
from tests.integration.daemon.test_process import DEFECTIVE

PAGES = 12
FOREIGN = range(900, 900 + 2 * PAGE_SIZE)


def keeping(runtime_dir: Path, host_dir: Path, *flags: str, wait: bool = True) -> DaemonProcess:
    """A daemon that keeps its tier in a folder."""
    return DaemonProcess(runtime_dir, "--host-keep", "--host-dir", str(host_dir), *flags, wait=wait)


def tokens(pages: int = PAGES) -> range:
    """The one path that these tests use."""
    return range(100, 100 + pages * PAGE_SIZE)


def fill(runtime_dir: Path, *, singly: bool = False) -> None:
    """Have a scheduler compute the path, page by page, and wait until the host has all of it.

    `singly`: it has each before the next one is computed, so that each has a record of its own.
    """
    with RawClient(runtime_dir, "first") as client:
        for page in range(PAGES):
            client.pool_memory.write(page, b"page %d;" % page)
            client.insert(tokens(page + 1), range(page + 1))
            if singly:
                wait_until(lambda has=page + 1: client.stats()["host_pages"] == has)  # type: ignore[misc]
        wait_until(lambda: client.stats()["host_pages"] == PAGES)


def warm_pages(runtime_dir: Path) -> int:
    """How much of the path another scheduler gets; every page must hold its own bytes."""
    with RawClient(runtime_dir, "second") as client:
        found = client.match(tokens())
        assert isinstance(found, Matched)
        if not found.restorable_pages:
            return 0
        targets = range(20, 20 + found.host_pages)
        answer = client.restore(found.receipt, 0, targets)
        assert isinstance(answer, Restored)
        assert answer.landed, answer.detail
        for page, target in enumerate(targets):
            content = client.pool_memory.read(target)
            chunk = (b"page %d;" % page * len(content))[: len(content) // 4]
            assert content.startswith(chunk), f"page {page} holds {content[:16]!r}"
        client.stats()
        return found.host_pages


def logs(host_dir: Path) -> list[Path]:
    """The journal's logs."""
    return sorted(host_dir.glob("log.*"), key=lambda path: int(path.suffix[1:]))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemons_successor_takes_its_host_tier_up(
    tmp_path: Path, host_dir: Path, how: signal.Signals
) -> None:
    with keeping(tmp_path / "rt", host_dir) as first:
        fill(tmp_path / "rt")
        first.stop(how)
    with keeping(tmp_path / "rt", host_dir) as second:
        assert warm_pages(tmp_path / "rt") == PAGES
        assert "host tier taken up" in second.log()
        second.kill()
    with keeping(tmp_path / "rt", host_dir):
        assert warm_pages(tmp_path / "rt") == PAGES, "what was taken up is written down anew"


def test_a_cold_start_finds_nothing_and_leaves_nothing_of_the_old_tier(
    tmp_path: Path, host_dir: Path
) -> None:
    with keeping(tmp_path / "rt", host_dir):
        fill(tmp_path / "rt")
    with keeping(tmp_path / "rt", host_dir, "--cold"):
        assert warm_pages(tmp_path / "rt") == 0
    with keeping(tmp_path / "rt", host_dir):
        assert warm_pages(tmp_path / "rt") == 0


def test_a_tier_of_another_size_keeps_what_still_lies_in_it(tmp_path: Path, host_dir: Path) -> None:
    with keeping(tmp_path / "rt", host_dir):
        fill(tmp_path / "rt")
    with keeping(tmp_path / "rt", host_dir, "--host-tier", "8MiB"):
        assert warm_pages(tmp_path / "rt") == PAGES
        assert len(list(host_dir.glob("segment.*"))) == 8
    with keeping(tmp_path / "rt", host_dir, "--host-tier", "2MiB"):
        assert warm_pages(tmp_path / "rt") == PAGES
        assert len(list(host_dir.glob("segment.*"))) == 2
    with keeping(tmp_path / "rt", host_dir, "--host-tier", "1KiB", "--segment", "4KiB"):
        assert warm_pages(tmp_path / "rt") == 1, "a page has 1024 bytes here"


def test_five_kills_leave_as_much_shared_memory_as_one_f88(tmp_path: Path, host_dir: Path) -> None:
    used = set()
    for _ in range(5):
        with keeping(tmp_path / "rt", host_dir) as daemon:
            fill(tmp_path / "rt")
            daemon.kill()
        names = sorted(os.listdir(host_dir))
        blocks = sum((host_dir / name).stat().st_blocks for name in names if "log" not in name)
        used.add((tuple(name for name in names if "log" not in name), blocks))
        assert len(logs(host_dir)) == 1
    assert len(used) == 1, used


def test_a_second_daemon_is_refused_the_folder_of_a_living_one_f88(
    tmp_path: Path, host_dir: Path
) -> None:
    with keeping(tmp_path / "rt", host_dir) as first:
        fill(tmp_path / "rt")
        with keeping(tmp_path / "other", host_dir, wait=False) as second:
            assert second.process.wait(60) == 1
            assert f"process id {first.process.pid} " in second.log()
            assert "host_dir" in second.log()
        assert warm_pages(tmp_path / "rt") == PAGES


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path, host_dir: Path) -> None:
    host_dir.mkdir(mode=0o700)
    for name in ("segment", "log.x", "words.bak", "segment.01"):
        (host_dir / name).write_text("precious", encoding="ascii")
    with keeping(tmp_path / "rt", host_dir, "--cold"):
        fill(tmp_path / "rt")
    with keeping(tmp_path / "rt", host_dir):
        assert warm_pages(tmp_path / "rt") == PAGES
    for name in ("segment", "log.x", "words.bak", "segment.01"):
        assert (host_dir / name).read_text(encoding="ascii") == "precious"


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, host_dir: Path) -> None:
    host_dir.mkdir(mode=0o700)
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (host_dir / "segment.0").symlink_to(target)
    with keeping(tmp_path / "rt", host_dir, wait=False) as daemon:
        assert daemon.process.wait(60) == 1
        assert "move it out of the way" in daemon.log()
    assert target.read_bytes() == b"precious"


def test_a_folder_that_is_not_memory_is_refused_with_the_cure(tmp_path: Path) -> None:
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("temporary files are in memory here")
    with keeping(tmp_path / "rt", tmp_path / "host", wait=False) as daemon:
        assert daemon.process.wait(60) == 1
        assert "choose a folder on tmpfs" in daemon.log()


@pytest.mark.parametrize("lost", [1, 100, 333, 1000])
def test_a_journal_that_lost_its_end_costs_pages_and_makes_no_wrong_one(
    tmp_path: Path, host_dir: Path, lost: int
) -> None:
    with keeping(tmp_path / "rt", host_dir) as daemon:
        fill(tmp_path / "rt", singly=True)
        daemon.kill()
    (log,) = logs(host_dir)
    os.truncate(log, log.stat().st_size - lost)
    with keeping(tmp_path / "rt", host_dir):
        found = warm_pages(tmp_path / "rt")
        assert found < PAGES
        assert found or lost > 500
        # What was lost is computed and kept again, in slots that were valid before.
        fill(tmp_path / "rt")
    with keeping(tmp_path / "rt", host_dir):
        assert warm_pages(tmp_path / "rt") == PAGES


@pytest.mark.parametrize("at", [0.2, 0.5, 0.9])
def test_a_flipped_bit_in_the_journal_costs_pages_and_makes_no_wrong_one(
    tmp_path: Path, host_dir: Path, at: float
) -> None:
    with keeping(tmp_path / "rt", host_dir) as daemon:
        fill(tmp_path / "rt", singly=True)
        daemon.kill()
    (log,) = logs(host_dir)
    content = bytearray(log.read_bytes())
    content[int(len(content) * at)] ^= 0x10
    log.write_bytes(content)
    with keeping(tmp_path / "rt", host_dir):
        assert warm_pages(tmp_path / "rt") < PAGES


def test_without_its_journal_a_tier_is_empty_memory(tmp_path: Path, host_dir: Path) -> None:
    with keeping(tmp_path / "rt", host_dir):
        fill(tmp_path / "rt")
    for log in logs(host_dir):
        log.unlink()
    with keeping(tmp_path / "rt", host_dir):
        assert warm_pages(tmp_path / "rt") == 0
        fill(tmp_path / "rt")
        assert warm_pages(tmp_path / "rt") == PAGES


def test_a_flushed_tier_stays_flushed(tmp_path: Path, host_dir: Path) -> None:
    with keeping(tmp_path / "rt", host_dir):
        fill(tmp_path / "rt")
        with RawClient(tmp_path / "rt", "a") as client:
            client.ask(Flush("host"))
            assert client.stats()["host_pages"] == 0
    with keeping(tmp_path / "rt", host_dir):
        assert warm_pages(tmp_path / "rt") == 0


def test_what_a_directory_with_a_defect_wrote_is_not_believed(
    tmp_path: Path, host_dir: Path
) -> None:
    program = (sys.executable, "-c", DEFECTIVE, "serve")
    flags = ("--host-keep", "--host-dir", str(host_dir))
    with DaemonProcess(tmp_path / "rt", *flags, program=program) as daemon:
        fill(tmp_path / "rt")
        with RawClient(tmp_path / "rt", "a") as client:
            client.ask(Match("break it", 0, NamespaceKey(), b""))
        assert warm_pages(tmp_path / "rt") == 0
        with RawClient(tmp_path / "rt", "b") as client:
            client.pool_memory.write(0, b"page 0;")
            client.insert(tokens(1), [0])
            wait_until(lambda: client.stats()["host_pages"] == 1)
        daemon.kill()
    with keeping(tmp_path / "rt", host_dir):
        assert warm_pages(tmp_path / "rt") == 1
