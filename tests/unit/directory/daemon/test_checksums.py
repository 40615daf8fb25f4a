"""The table of checksums: made where it is wanted, removed where it would go stale."""

import os
from pathlib import Path

import pytest

from directory.daemon import checksums
from directory.daemon.checksums import open_table
from directory.daemon.config import Settings
from directory.daemon.kept_tier import KeptTier
from directory.daemon.runtime import StartError
from transfer.checksum import table_bytes
from transfer.host_tier import TierShape

SHAPE = TierShape(1 << 20, 1 << 18)


def settings(**more: object) -> Settings:
    """Settings of a small tier."""
    return Settings(host_tier=SHAPE.total_bytes, segment=SHAPE.segment_bytes, **more)  # type: ignore[arg-type]


@pytest.fixture
def kept(tmp_path: Path) -> KeptTier:
    """The files of a tier."""
    return KeptTier(tmp_path, SHAPE)


def test_a_tier_that_is_not_kept_has_its_table_in_memory() -> None:
    table = open_table(settings(host_checksums="verified", host_scrub=5), None)
    assert table is not None
    assert (table.verify, table.scrub_bytes_s) == (True, 5)
    assert os.fstat(table.fd).st_size == table_bytes(SHAPE)
    os.close(table.fd)


def test_a_kept_tier_has_its_table_among_its_files_and_finds_it_again(
    kept: KeptTier, tmp_path: Path
) -> None:
    for boot in range(2):
        table = open_table(settings(host_checksums="kept"), kept)
        assert table is not None
        assert not table.verify
        assert os.pread(table.fd, 1, 7) == (b"\0" if boot == 0 else b"x")
        os.pwrite(table.fd, b"x", 7)
        os.close(table.fd)
    assert (tmp_path / "sums").stat().st_size == table_bytes(SHAPE)


@pytest.mark.parametrize("more", [{}, {"host_tier": 0, "host_checksums": "kept"}])
def test_without_checksums_an_old_table_is_removed(
    kept: KeptTier, tmp_path: Path, more: dict[str, object]
) -> None:
    (tmp_path / "sums").write_bytes(b"old")
    assert open_table(settings().model_copy(update=more), kept) is None
    assert not (tmp_path / "sums").exists()
    assert open_table(settings(), None) is None


def test_without_the_library_the_setting_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksums, "available", lambda: False)
    with pytest.raises(StartError, match=r"pip install 'treecored\[checksum\]'"):
        open_table(settings(host_checksums="kept"), None)
    assert open_table(settings(), None) is None


def test_what_is_no_file_of_the_daemons_is_left_alone(kept: KeptTier, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (tmp_path / "sums").symlink_to(target)
    for checksums_ in ("off", "kept"):
        with pytest.raises(StartError, match="move it out of the way"):
            open_table(settings(host_checksums=checksums_), kept)
    assert target.read_bytes() == b"precious"


def test_a_table_for_which_there_is_no_memory_is_a_start_error(
    kept: KeptTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("directory.daemon.checksums.os.memfd_create", full)
    with pytest.raises(StartError, match="No space left"):
        open_table(settings(host_checksums="kept"), None)
