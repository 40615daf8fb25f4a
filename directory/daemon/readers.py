"""Readers: a socket of its own for other users of a group, who may ask and change nothing.

Owns the folder, the socket and the listener. The folder's rights decide who may connect: mode 0750
and its group, nobody else. What comes from here is marked as a reader's for as long as it lives;
whoever wants more needs the daemon's own socket, which is the daemon's user's alone.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from directory.daemon.loop import Loop
from directory.daemon.runtime import SESSION_NAME, SOCKET_PATH_BYTES_MAX, StartError
from transfer.ipc.channel import FdChannel

FOLDER_MODE: Final = 0o750
SOCKET_MODE: Final = 0o660
BACKLOG: Final = 16
ACCEPTS_PER_WAKE_MAX: Final = 16
READERS_MAX: Final = 16
"""Readers at once: they share the descriptors and the time of those whom the daemon is for."""

log = structlog.get_logger("session")


class Readers:
    """The listener. `greet` takes a connection over. Raises `StartError` where it cannot be had."""

    def __init__(self, loop: Loop, folder: Path, greet: Callable[[FdChannel], None]) -> None:
        self._loop = loop
        self._greet = greet
        folder = Path(os.path.abspath(folder))
        _check_folder(folder)
        self._path = folder / SESSION_NAME
        if len(os.fsencode(self._path)) > SOCKET_PATH_BYTES_MAX:
            raise StartError(f"readers_dir: {self._path} is too long for a socket")
        _make_free(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(self._path))
            os.chmod(self._path, SOCKET_MODE)
            os.chown(self._path, -1, folder.stat().st_gid)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise StartError(
                f"readers_dir: {self._path} cannot be opened: {error.strerror}"
            ) from None
        listener.setblocking(False)
        self._listener = listener
        loop.watch(listener.fileno(), self._accept)
        log.info("readers", socket=str(self._path), group=folder.stat().st_gid)

    def close(self) -> None:
        """Take the socket away."""
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        with suppress(OSError):
            self._path.unlink()

    def _accept(self, _: int) -> None:
        for _ in range(ACCEPTS_PER_WAKE_MAX):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # nobody waits, or there is no descriptor left for readers
            self._greet(FdChannel(sock))


def _check_folder(folder: Path) -> None:
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=FOLDER_MODE)
            folder.chmod(FOLDER_MODE)
        status = folder.lstat()
    except OSError as error:
        raise StartError(f"readers_dir: {folder} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise StartError(f"readers_dir: {folder} is no folder of this user's")
    if stat.S_IMODE(status.st_mode) & 0o027:
        raise StartError(
            f"readers_dir: {folder} has mode {stat.S_IMODE(status.st_mode):04o}; run: chmod 750 "
            f"{folder}"
        )


def _make_free(path: Path) -> None:
    """Remove a dead daemon's socket, and nothing else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise StartError(f"readers_dir: {path} is there and no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise StartError(f"readers_dir: another daemon answers at {path}; choose another folder")
