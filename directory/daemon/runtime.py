"""The runtime folder: its rights, the lock that makes the daemon the only one, stale sockets.

Owns the folder, the lock file and the paths of the two sockets. It must never remove anything but
a socket of this user's, and it removes one only while it holds the lock: then its maker is dead.
The daemon's movers hold the lock open too: a successor starts only when they can write nothing
more, whatever became of the daemon that started them.
"""

import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Final

from directory.daemon.clock import now_us
from directory.protocol.runtime_dir import LOCK_NAME

ORPHANS_DEADLINE_US: Final = 2_000_000
"""How long a start waits for the movers of a dead daemon: they die with it, within milliseconds."""
SESSION_NAME: Final = "session.sock"
ROUTER_NAME: Final = "router.sock"
SOCKET_PATH_BYTES_MAX: Final = 107
"""sun_path of sockaddr_un holds 108 bytes with the final zero (unix(7))."""


class StartError(Exception):
    """The daemon cannot start here; the message says why and what to do."""


class RuntimeDir:
    """A runtime folder that this process holds the lock of, until `release`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.session_socket = path / SESSION_NAME
        self.router_socket = path / ROUTER_NAME
        self._lock_fd = lock_fd

    @property
    def lock_fd(self) -> int:
        """The descriptor whose last holder's end frees the folder."""
        return self._lock_fd

    @classmethod
    def take(cls, path: Path) -> "RuntimeDir":
        """Create or check the folder, lock it and clear a dead daemon's sockets away.

        Raises `StartError`; nothing is held then and nothing foreign was touched.
        """
        path = Path(os.path.abspath(path))
        _check_lengths(path)
        make_folder(path, "runtime_dir")
        lock_fd = take_lock(path / LOCK_NAME, path, "runtime_dir")
        runtime = cls(path, lock_fd)
        try:
            for place in (runtime.session_socket, runtime.router_socket):
                remove_stale_socket(place)
        except StartError:
            runtime.release()
            raise
        return runtime

    @property
    def endpoint(self) -> str:
        """Where the ZeroMQ ROUTER is bound."""
        return f"ipc://{self.router_socket}"

    def remove_sockets(self) -> None:
        """Remove our own sockets at the end; what is not a socket of ours stays."""
        for place in (self.session_socket, self.router_socket):
            if _is_own_socket(place):
                place.unlink(missing_ok=True)

    def release(self) -> None:
        """Give the lock back. Repeatable. The lock file stays: removing it would race."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __repr__(self) -> str:
        return f"<RuntimeDir {self.path} {'held' if self._lock_fd >= 0 else 'released'}>"


def _check_lengths(path: Path) -> None:
    longest = len(os.fsencode(path / SESSION_NAME))
    if longest > SOCKET_PATH_BYTES_MAX:
        raise StartError(
            f"the socket path {path / SESSION_NAME} has {longest} bytes, a socket can have "
            f"{SOCKET_PATH_BYTES_MAX}; choose a shorter runtime_dir"
        )


def make_folder(path: Path, setting: str) -> None:
    """Make a folder of this user's alone, or check that it is one; raises `StartError`.

    `setting`: what the user changes to choose another.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        status = path.lstat()
    except OSError as error:
        raise StartError(
            f"the folder {path} cannot be made: {error.strerror}; choose another {setting}"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise StartError(
            f"{path} is not a folder (a link to one is not followed); give {setting} the path "
            "of a folder"
        )
    if status.st_uid != os.getuid():
        raise StartError(
            f"the folder {path} belongs to user {status.st_uid}, this daemon runs as "
            f"{os.getuid()}; choose another {setting}"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StartError(
            f"the folder {path} has mode {stat.S_IMODE(status.st_mode):04o}, others could reach "
            f"what is in it; run: chmod 700 {path}"
        )


def is_free(file: Path) -> bool:
    """Whether nobody holds a lock file now (or there is none)."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        return _try_lock(fd)
    finally:
        os.close(fd)


def take_lock(file: Path, folder: Path, setting: str) -> int:
    """Lock a folder by a file in it and note who holds it; returns the descriptor.

    Raises `StartError` while a living process holds it, and when a dead one's movers go on to.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(file, flags, 0o600)
    except OSError as error:
        raise StartError(
            f"the lock file {file} cannot be opened: {error.strerror}; move it out of the way"
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StartError(f"{file} is not a regular file; move it out of the way")
        give_up_us = now_us() + ORPHANS_DEADLINE_US
        while not _try_lock(fd):
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            if _is_alive(holder):
                raise StartError(
                    f"a daemon with process id {holder} serves {folder} already; stop it or "
                    f"choose another {setting}"
                )
            if now_us() >= give_up_us:
                raise StartError(
                    f"the daemon with process id {holder} is gone, but a mover process of it still "
                    f"holds {folder}; end it (it may hang in a driver call) and start again"
                )
            time.sleep(0.01)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except (StartError, OSError):
        os.close(fd)
        raise
    return fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(process: str) -> bool:
    """Whether a process id is that of a running process (one that cannot be told counts as it)."""
    if not process.isdigit():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    # A killed daemon that its parent has not waited for yet is dead all the same.
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def _is_own_socket(place: Path) -> bool:
    try:
        status = place.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()


def remove_stale_socket(place: Path) -> None:
    """Remove a dead daemon's socket, its lock being ours; raises `StartError` for what is none."""
    if not os.path.lexists(place):
        return
    if not _is_own_socket(place):
        raise StartError(
            f"{place} is in the way and is not a socket of this user; it was left alone: move it "
            "away or choose another runtime_dir"
        )
    place.unlink()
