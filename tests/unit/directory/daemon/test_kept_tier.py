"""The files of a host tier: what is written is read again, and what cannot be written is lost."""

# ruff: noqa: ARG005 - stand-ins take what the real functions take
from __future__ import annotations

import errno
import mmap
import os
import resource
from pathlib import Path

import pytest

from directory.core.actions import CopyPart, Journal, JournalBegin, JournalEnd, SubmitCopy
from directory.core.ids import HOST
from directory.core.tokens import pack_pages
from directory.daemon import kept_tier
from directory.daemon.kept_tier import KeptTier, remove_files
from directory.daemon.runtime import StartError
from tests.descriptors import open_descriptors
from transfer.host_tier import TierShape

SHAPE = TierShape(10 * mmap.PAGESIZE, 4 * mmap.PAGESIZE)
FAR = 2 << 16


def journal(record: bytes, slots: list[int], stamp: int) -> Journal:
    """An action of the journal."""
    return Journal(record, pack_pages(slots), stamp)


def backup(target: int = HOST) -> SubmitCopy:
    """A copy of one page."""
    return SubmitCopy(1, "backup", (CopyPart(1, b"", target, pack_pages([0])),), (), ())


def open_all(folder: Path) -> None:
    """Open every file of a tier."""
    tier = KeptTier(folder, SHAPE)
    tier.logs()
    tier.memory(reserve=False)


def test_words_and_logs_are_there_for_the_next_boot(tmp_path: Path) -> None:
    first = KeptTier(tmp_path, SHAPE)
    first.apply(journal(b"one", [3, 4, FAR], 77))
    first.apply(journal(b"", [4], 0))
    first.apply(journal(b"two", [], 0))
    first.close()
    first.close()
    second = KeptTier(tmp_path, SHAPE)
    assert second.logs() == [b"onetwo"]
    assert [second.word(slot) for slot in (3, 4, FAR, 5)] == [77, 0, 77, 0]
    second.apply(journal(b"three", [5], 78))
    assert second.logs() == [b"onetwo", b"three"], "a log of an earlier boot is not written to"
    second.close()


def test_a_new_log_counts_beside_the_old_one_until_that_is_dropped(tmp_path: Path) -> None:
    tier = KeptTier(tmp_path, SHAPE)
    tier.apply(journal(b"one", [], 0))
    tier.apply(JournalBegin())
    tier.apply(journal(b"two", [], 0))
    assert tier.logs() == [b"one", b"two"]
    tier.apply(JournalEnd())
    tier.apply(journal(b"three", [], 0))
    assert tier.logs() == [b"twothree"]
    tier.close()


def test_words_need_memory_only_where_slots_were_valid(tmp_path: Path) -> None:
    tier = KeptTier(tmp_path, SHAPE)
    tier.apply(journal(b"", list(range(4_000)), 0))
    assert (tmp_path / "words").stat().st_blocks == 0
    tier.apply(journal(b"", [FAR], 5))
    assert (tmp_path / "words").stat().st_blocks * 512 <= 2 * mmap.PAGESIZE
    assert tier.word(10 << 16) == 0, "a slot beyond the tier is not valid"
    tier.close()


def test_segments_get_their_sizes_and_surplus_ones_go(tmp_path: Path) -> None:
    tier = KeptTier(tmp_path, SHAPE)
    assert tier.sizes() == [0, 0, 0]
    memory = tier.memory(reserve=False)
    assert [segment.nbytes for segment in memory.segments] == [16_384, 16_384, 8_192]
    memory.page(FAR, mmap.PAGESIZE)[:4] = b"mine"
    memory.close()
    tier.close()
    smaller = KeptTier(tmp_path, TierShape(5 * mmap.PAGESIZE, 4 * mmap.PAGESIZE))
    assert smaller.sizes() == [16_384, 4_096]
    smaller.memory(reserve=True).close()
    assert sorted(os.listdir(tmp_path)) == ["segment.0", "segment.1", "words"]
    smaller.close()


def test_a_tier_takes_two_descriptors_a_segment_and_never_more(tmp_path: Path) -> None:
    tier = KeptTier(tmp_path, TierShape(40 * mmap.PAGESIZE, mmap.PAGESIZE))
    before = open_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A limit is one of numbers: all that are free below the highest one in use can be had, too.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    needed = 40 * 2 + 1
    free = highest + 1 - before
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + max(0, needed - free), hard))
    try:
        memory = tier.memory(reserve=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_descriptors() == before + 40 * 2
    memory.close()
    assert open_descriptors() == before
    tier.close()


def test_a_record_for_which_there_is_no_room_makes_no_page_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = KeptTier(tmp_path, SHAPE)
    tier.apply(journal(b"one", [3, 4], 77))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, record: _no_room())
        tier.apply(journal(b"two", [4, 5], 78))
    assert [tier.word(slot) for slot in (3, 4, 5)] == [77, 0, 0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda fd, at, size: _no_room())
        tier.apply(journal(b"three", [FAR], 79))
        tier.apply(journal(b"", [3], 0))
    assert tier.word(FAR) == tier.word(3) == 0
    tier.close()


def test_half_a_record_makes_no_page_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = KeptTier(tmp_path, SHAPE)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, record: real(fd, record[:1]))
    tier.apply(journal(b"two", [4], 78))
    assert tier.word(4) == 0
    tier.close()


def test_a_log_that_cannot_be_begun_makes_no_page_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = KeptTier(tmp_path, SHAPE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: _no_room())
        tier.apply(journal(b"two", [4], 78))
    assert tier.word(4) == 0
    tier.apply(journal(b"two", [4], 78))
    assert tier.word(4) == 78
    tier.close()


def test_backups_stop_when_the_file_system_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = KeptTier(tmp_path, SHAPE)
    assert tier.has_room(backup())
    monkeypatch.setattr(kept_tier, "ROOM_LEFT_BYTES_MIN", 1 << 62)
    assert not tier.has_room(backup())
    assert tier.has_room(backup(target=2)), "a restore takes none"
    tier.close()


def test_a_tier_for_which_there_is_no_room_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = KeptTier(tmp_path, SHAPE)
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: _no_room())
    before = open_descriptors()
    with pytest.raises(StartError, match="choose a smaller host_tier"):
        tier.memory(reserve=True)
    assert open_descriptors() == before
    tier.close()


def test_cleared_means_that_nothing_is_valid(tmp_path: Path) -> None:
    tier = KeptTier(tmp_path, SHAPE)
    tier.apply(journal(b"one", [3], 77))
    tier.clear()
    assert tier.logs() == []
    assert tier.word(3) == 0
    tier.apply(journal(b"two", [3], 78))
    assert tier.logs() == [b"two"]
    assert tier.word(3) == 78
    tier.close()


@pytest.mark.parametrize("name", ["words", "segment.1", "log.3"])
def test_what_is_no_file_is_left_alone_and_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(StartError, match="out of the way"):
        open_all(tmp_path)
    assert (tmp_path / name).is_dir()


def test_only_a_tiers_own_files_are_removed(tmp_path: Path) -> None:
    for name in ("segment.0", "log.12", "words", "segment.00", "log", "words.1", "notes"):
        (tmp_path / name).write_text("x", encoding="ascii")
    (tmp_path / "log.1").symlink_to(tmp_path / "notes")
    assert remove_files(tmp_path) == 3
    assert sorted(os.listdir(tmp_path)) == [
        "log",
        "log.1",
        "notes",
        "segment.00",
        "words.1",
    ]


def _no_room() -> int:
    raise OSError(errno.ENOSPC, "No space left on device")
