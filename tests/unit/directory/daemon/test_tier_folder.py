"""Where a host tier is kept, and what becomes of those that nobody wants any more."""

# ruff: noqa: ARG005 - stand-ins take what the real functions take
from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from directory.daemon import tier_folder, warm
from directory.daemon.config import Settings
from directory.daemon.runtime import StartError, take_lock
from directory.daemon.tier_folder import (
    LOCK_NAME,
    OWNER_NAME,
    TierFolder,
    choose,
    defaults,
    discard_others,
    file_system,
    has_room,
)

NBYTES = 1 << 20


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for shared memory; every folder counts as memory unless a test says otherwise."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(tier_folder, "SHARED_MEMORY", folder)
    monkeypatch.setattr(tier_folder, "file_system", lambda path: "tmpfs")
    return folder


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A runtime folder."""
    folder = tmp_path / "rt"
    folder.mkdir(mode=0o700)
    return folder


def left(path: Path, owner: Path) -> Path:
    """A tier that a daemon left behind."""
    folder = TierFolder.take(path, owner)
    (path / "segment.0").write_bytes(bytes(100))
    folder.release()
    folder.release()
    return path


def test_a_folder_in_the_runtime_folder_comes_first_then_shared_memory(
    shared: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = defaults(runtime)
    assert first == runtime / "host"
    assert second.parent == shared / f"treecored-{os.getuid()}"
    assert choose(runtime, None, NBYTES) == first
    monkeypatch.setattr(
        tier_folder, "file_system", lambda path: "ext4" if path == first else "tmpfs"
    )
    assert choose(runtime, None, NBYTES) == second
    assert choose(runtime, None, 1 << 60) is None
    monkeypatch.setattr(tier_folder, "file_system", lambda path: "")
    assert choose(runtime, None, NBYTES) is None


def test_a_chosen_folder_must_be_memory_and_have_room(
    shared: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(runtime, tmp_path / "mine", NBYTES) == tmp_path / "mine"
    with pytest.raises(StartError, match="has no room"):
        choose(runtime, tmp_path / "mine", 1 << 60)
    monkeypatch.setattr(tier_folder, "file_system", lambda path: "ext4")
    with pytest.raises(StartError, match="lies on ext4"):
        choose(runtime, tmp_path / "mine", NBYTES)


def test_the_file_system_of_a_path_is_told_also_before_it_is_there() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/proc/nothing/of/this/name")) == "proc"


def test_what_a_tier_has_already_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "segment.0").write_bytes(b"x" * (64 << 20))
    free = os.statvfs(tmp_path)
    full = os.statvfs_result((*free[:4], 0, *free[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert has_room(tmp_path, 32 << 20)
    assert not has_room(tmp_path, 65 << 20)


def test_a_tier_that_nobody_takes_up_is_removed(shared: Path, runtime: Path) -> None:
    first, second = defaults(runtime)
    left(second, runtime)
    gone = left(second.parent / "0123", runtime.parent / "no such runtime folder")
    other = left(second.parent / "4567", runtime.parent)
    discard_others(runtime, first)
    assert not second.exists()
    assert not gone.exists()
    assert (other / "segment.0").exists(), "its runtime folder is still there"


def test_a_chosen_and_a_locked_folder_are_left_alone(shared: Path, runtime: Path) -> None:
    _, second = defaults(runtime)
    left(second, runtime)
    held = left(second.parent / "0123", runtime.parent / "no such runtime folder")
    with (held / LOCK_NAME).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        discard_others(runtime, second)
    assert (second / "segment.0").exists()
    assert (held / "segment.0").exists()
    discard_others(runtime, second)
    assert not held.exists()


def test_foreign_things_in_a_discarded_folder_stay(shared: Path, runtime: Path) -> None:
    first, second = defaults(runtime)
    left(second, runtime)
    (second / "notes").write_text("precious", encoding="ascii")
    discard_others(runtime, first)
    assert os.listdir(second) == ["notes"]


def test_folders_without_an_owner_and_links_are_left_alone(shared: Path, runtime: Path) -> None:
    first, second = defaults(runtime)
    bare = second.parent / "bare"
    second.parent.mkdir(mode=0o700)
    bare.mkdir()
    linked = second.parent / "link"
    linked.symlink_to(left(second.parent / "0123", runtime.parent / "gone"))
    discard_others(runtime, first)
    assert bare.exists()
    assert linked.is_symlink()


def test_a_folder_of_others_is_refused(shared: Path, runtime: Path) -> None:
    _, second = defaults(runtime)
    second.parent.mkdir(mode=0o755)
    second.parent.chmod(0o755)
    with pytest.raises(StartError, match="chmod 700"):
        TierFolder.take(second, runtime)


def test_a_lock_file_that_was_removed_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = take_lock

    def too_late(file: Path, folder: Path, setting: str) -> int:
        fd = real(file, folder, setting)
        file.unlink()
        return fd

    monkeypatch.setattr(tier_folder, "take_lock", too_late)
    with pytest.raises(StartError, match="removed meanwhile"):
        TierFolder.take(tmp_path / "host", tmp_path)


# Whether a tier is kept at all.


def settings(runtime: Path, **changed: object) -> Settings:
    """Settings of a small tier."""
    given: dict[str, object] = {"runtime_dir": runtime, "host_tier": "1MiB", "segment": "256KiB"}
    return Settings(**{**given, **changed})  # type: ignore[arg-type]


def test_a_tier_is_kept_where_there_is_room_and_its_owner_is_named(
    shared: Path, runtime: Path
) -> None:
    kept, folder = warm.open_kept(settings(runtime), runtime)
    assert kept is not None
    assert folder is not None
    assert (folder.path / OWNER_NAME).read_text(encoding="utf-8") == f"{runtime}\n"
    kept.close()
    folder.release()


def test_a_tier_that_is_not_to_be_kept_leaves_nothing_behind(shared: Path, runtime: Path) -> None:
    left(defaults(runtime)[0], runtime)
    assert warm.open_kept(settings(runtime, host_keep=False), runtime) == (None, None)
    assert not defaults(runtime)[0].exists()
    assert warm.open_kept(settings(runtime, host_tier=0), runtime) == (None, None)


def test_a_tier_for_which_no_place_has_room_ends_with_its_daemon(
    shared: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_folder, "has_room", lambda path, nbytes: False)
    assert warm.open_kept(settings(runtime), runtime) == (None, None)


def test_a_default_place_that_cannot_be_used_is_done_without(shared: Path, runtime: Path) -> None:
    (runtime / "host").write_text("in the way", encoding="ascii")
    assert warm.open_kept(settings(runtime), runtime) == (None, None)
    with pytest.raises(StartError, match="is not a folder"):
        warm.open_kept(settings(runtime, host_dir=runtime / "host"), runtime)
    (runtime / "host").unlink()
    (runtime / "host").mkdir(mode=0o700)
    (runtime / "host" / "words").mkdir()
    assert warm.open_kept(settings(runtime), runtime) == (None, None)
