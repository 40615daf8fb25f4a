"""The runtime folder: rights, lock, and what may be removed from it."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from directory.daemon import runtime as runtime_module
from directory.daemon.runtime import RuntimeDir, StartError
from directory.protocol.runtime_dir import LOCK_NAME


def make_socket(path: Path) -> None:
    """A socket file whose owner is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(path))


def test_the_folder_is_made_for_this_user_alone_and_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        runtime = RuntimeDir.take(tmp_path / "a" / "rt")
        assert (tmp_path / "a" / "rt").stat().st_mode & 0o777 == 0o700
        runtime.release()
        runtime.release()


def test_a_held_folder_is_refused_naming_the_holder_f83(tmp_path: Path) -> None:
    runtime = RuntimeDir.take(tmp_path / "rt")
    with pytest.raises(StartError, match=f"process id {os.getpid()} serves"):
        RuntimeDir.take(tmp_path / "rt")
    runtime.release()


def test_stale_sockets_are_removed_f83(tmp_path: Path) -> None:
    folder = tmp_path / "rt"
    folder.mkdir(mode=0o700)
    make_socket(folder / "session.sock")
    make_socket(folder / "router.sock")
    runtime = RuntimeDir.take(folder)
    assert os.listdir(folder) == [LOCK_NAME]
    runtime.release()


@pytest.mark.parametrize("name", ["session.sock", "router.sock"])
@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
def test_what_is_not_a_socket_is_kept_and_the_lock_given_back_f83(
    tmp_path: Path, name: str, kind: str
) -> None:
    folder = tmp_path / "rt"
    folder.mkdir(mode=0o700)
    make_socket(tmp_path / "elsewhere.sock")
    place = folder / name
    if kind == "file":
        place.write_text("x", encoding="ascii")
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(tmp_path / ("elsewhere.sock" if kind == "link" else "nowhere"))
    for _ in range(2):  # a kept lock would change the second message
        with pytest.raises(StartError, match="in the way"):
            RuntimeDir.take(folder)
    assert os.path.lexists(place)
    assert (tmp_path / "elsewhere.sock").is_socket()


def test_a_foreign_socket_is_kept_f83(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rt"
    runtime = RuntimeDir.take(folder)
    make_socket(folder / "session.sock")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    runtime.remove_sockets()
    assert (folder / "session.sock").is_socket()
    monkeypatch.undo()
    runtime.remove_sockets()
    assert not (folder / "session.sock").exists()
    runtime.release()


def test_a_foreign_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rt").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(StartError, match="belongs to user"):
        RuntimeDir.take(tmp_path / "rt")


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o770])
def test_a_wider_folder_is_refused_with_the_cure(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "rt"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(StartError, match=f"chmod 700 {folder}"):
        RuntimeDir.take(folder)
    assert os.listdir(folder) == []


def test_a_link_or_a_file_instead_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("x", encoding="ascii")
    for name in ("link", "file"):
        with pytest.raises(StartError, match="not a folder"):
            RuntimeDir.take(tmp_path / name)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="ascii")
    with pytest.raises(StartError, match="cannot be made"):
        RuntimeDir.take(tmp_path / "file" / "rt")


def test_the_longest_possible_socket_path_works_and_the_next_is_refused(tmp_path: Path) -> None:
    room = 107 - len(str(tmp_path)) - len("//session.sock")
    runtime = RuntimeDir.take(tmp_path / ("x" * room))
    make_socket(runtime.session_socket)
    runtime.release()
    with pytest.raises(StartError, match="has 108 bytes"):
        RuntimeDir.take(tmp_path / ("x" * (room + 1)))


def test_a_lock_that_is_no_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "rt"
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / LOCK_NAME, 0o600)
    with pytest.raises(StartError, match="not a regular file"):
        RuntimeDir.take(folder)
    (folder / LOCK_NAME).unlink()
    (folder / LOCK_NAME).symlink_to(tmp_path / "precious")
    with pytest.raises(StartError, match="cannot be opened"):
        RuntimeDir.take(folder)
    assert not (tmp_path / "precious").exists()


def test_its_repr_says_whether_it_is_held(tmp_path: Path) -> None:
    runtime = RuntimeDir.take(tmp_path / "rt")
    assert "held" in repr(runtime)
    runtime.release()
    assert "released" in repr(runtime)


TAKES_AND_LEAVES_AN_ORPHAN = """
import subprocess, sys
from pathlib import Path
from directory.daemon.runtime import RuntimeDir
runtime = RuntimeDir.take(Path(sys.argv[1]))
orphan = subprocess.Popen(
    [sys.executable, "-c", "import sys; sys.stdin.read()"],
    stdin=int(sys.argv[2]), stdout=subprocess.DEVNULL, pass_fds=(runtime.lock_fd,),
)
print(orphan.pid, flush=True)
"""


@pytest.fixture
def orphaned(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A folder whose daemon is gone, but for a process that holds its lock until a pipe ends.

    Yields the folder and the pipe's end."""
    reading, writing = os.pipe()
    command = [sys.executable, "-c", TAKES_AND_LEAVES_AN_ORPHAN, str(tmp_path / "rt"), str(reading)]
    subprocess.run(command, pass_fds=(reading,), check=True, stdout=subprocess.PIPE)
    os.close(reading)
    yield tmp_path / "rt", writing
    with contextlib.suppress(OSError):
        os.close(writing)


def test_a_start_waits_for_the_movers_of_a_dead_daemon(
    orphaned: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "ORPHANS_DEADLINE_US", 60_000_000)
    folder, pipe = orphaned
    let_go = threading.Event()

    def end_it() -> None:
        let_go.set()
        os.close(pipe)

    timer = threading.Timer(0.2, end_it)
    timer.start()
    runtime = RuntimeDir.take(folder)
    assert let_go.is_set(), "it did not wait"
    timer.join()
    runtime.release()


def test_a_start_does_not_wait_for_a_hanging_mover_for_ever(
    orphaned: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = orphaned
    monkeypatch.setattr(runtime_module, "ORPHANS_DEADLINE_US", 50_000)
    with pytest.raises(StartError, match="a mover process of it still holds"):
        RuntimeDir.take(folder)
