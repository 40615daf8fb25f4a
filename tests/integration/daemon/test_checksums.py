"""A bit that flips in the host tier is never served: with real files, movers and restarts."""

import os
import signal
from pathlib import Path

import pytest

from directory.core.actions import Matched, Restored
from tests.integration.daemon.support import DaemonProcess, RawClient, wait_until
from tests.integration.daemon.test_warm import PAGES, fill, keeping, tokens, warm_pages

VERIFIED = ("--host-checksums", "verified")
SCRUBBED = ("--host-checksums", "kept", "--host-scrub", "1GiB")


def flip(host_dir: Path, page: int, *, bit: int = 0) -> None:
    """Flip one bit of a page of the path, in the file that it lies in."""
    path = host_dir / "segment.0"
    with path.open("r+b", buffering=0) as file:
        content = file.read()
        start = content.index(b"page %d;" % page) + bit // 8
        os.pwrite(file.fileno(), bytes([content[start] ^ 1 << bit % 8]), start)


def restore(client: RawClient, targets: range) -> Restored:
    """One try to restore as much as these pages of the path hold."""
    found = client.match(tokens(len(targets)))
    assert isinstance(found, Matched)
    answer = client.restore(found.receipt, 0, targets)
    assert isinstance(answer, Restored)
    return answer


@pytest.mark.parametrize("damaged", [0, 5, PAGES - 1])
def test_a_bit_that_flips_while_the_daemon_runs_costs_its_page_and_is_never_served(
    tmp_path: Path, host_dir: Path, damaged: int
) -> None:
    with keeping(tmp_path / "rt", host_dir, *VERIFIED) as daemon:
        fill(tmp_path / "rt")
        flip(host_dir, damaged, bit=3)
        with RawClient(tmp_path / "rt", "reader") as client:
            answer = restore(client, range(20, 20 + PAGES))
            assert not answer.landed
            assert "differ from their checksums" in answer.detail
            figures = client.stats()
            assert figures["host_pages_quarantined"] == 1
            assert figures["host_pages_damaged"] == 1
        assert warm_pages(tmp_path / "rt") == damaged
        assert "differ from their checksums" in daemon.log()
        # It is computed again, and kept in another slot.
        fill(tmp_path / "rt")
        assert warm_pages(tmp_path / "rt") == PAGES


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_bit_that_flips_between_two_daemons_is_found_when_its_page_is_wanted(
    tmp_path: Path, host_dir: Path, how: signal.Signals
) -> None:
    with keeping(tmp_path / "rt", host_dir, *VERIFIED) as first:
        fill(tmp_path / "rt")
        first.stop(how)
    flip(host_dir, 7)
    with keeping(tmp_path / "rt", host_dir, *VERIFIED):
        with RawClient(tmp_path / "rt", "reader") as client:
            assert client.stats()["host_pages"] == PAGES, "nothing is read before it is wanted"
            assert restore(client, range(7)).landed
            assert not restore(client, range(20, 20 + PAGES)).landed
        assert warm_pages(tmp_path / "rt") == 7


def test_the_scrubber_finds_a_bit_that_flipped_before_anybody_asks(
    tmp_path: Path, host_dir: Path
) -> None:
    with keeping(tmp_path / "rt", host_dir, *SCRUBBED):
        fill(tmp_path / "rt")
    flip(host_dir, 9)
    with (
        keeping(tmp_path / "rt", host_dir, *SCRUBBED) as daemon,
        RawClient(tmp_path / "rt", "reader") as client,
    ):
        wait_until(lambda: client.stats()["host_pages_quarantined"])
        assert client.stats()["host_pages"] == 9
        assert "found_by=scrub" in daemon.log()
        flip(host_dir, 4)
        wait_until(lambda: client.stats()["host_pages_quarantined"] == 2)
        assert warm_pages(tmp_path / "rt") == 4


def test_a_mover_that_takes_over_goes_on_with_the_checksums(tmp_path: Path) -> None:
    flags = ("--host-checksums", "verified", "--host-scrub", "1GiB")
    with (
        DaemonProcess(tmp_path / "rt", *flags) as daemon,
        RawClient(tmp_path / "rt", "a") as client,
    ):
        fill(tmp_path / "rt")
        mover = client.stats()["daemon_mover_pid"]
        os.kill(mover, signal.SIGKILL)
        wait_until(lambda: client.stats()["daemon_mover_pid"] not in (0, mover))
        wait_until(lambda: restore(client, range(20, 20 + PAGES)).landed)
        assert warm_pages(tmp_path / "rt") == PAGES
        assert "differ" not in daemon.log()


def test_a_boot_without_checksums_leaves_none_that_could_be_wrong_later(
    tmp_path: Path, host_dir: Path
) -> None:
    with keeping(tmp_path / "rt", host_dir, *VERIFIED):
        fill(tmp_path / "rt")
    assert (host_dir / "sums").exists()
    with keeping(tmp_path / "rt", host_dir):
        assert not (host_dir / "sums").exists()
        assert warm_pages(tmp_path / "rt") == PAGES
    with keeping(tmp_path / "rt", host_dir, *VERIFIED):
        assert warm_pages(tmp_path / "rt") == PAGES, "what has no checksum is believed"


def test_a_scrubber_without_checksums_is_refused_in_words(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "rt", "--host-scrub", "1MiB", wait=False) as daemon:
        assert daemon.process.wait(60) == 2
        assert "host_checksums" in daemon.log()
