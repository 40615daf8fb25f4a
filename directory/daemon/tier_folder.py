"""Where the host tier's files live: a folder in memory, this user's alone, locked by one daemon.

Owns the choice of the folder, its lock, and the removal of what nobody will take up again. It must
never touch a folder that another process has locked, another user's, or a file whose name is not
a tier's. A folder is found again by the runtime folder of the daemon that made it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

import structlog

from directory.daemon.kept_tier import KeptTier, file_numbers, remove_files
from directory.daemon.runtime import StartError, is_free, make_folder, take_lock
from transfer.host_tier import TierShape

LOCK_NAME: Final = "tier.lock"
OWNER_NAME: Final = "owner"
SHARED_MEMORY: Final = Path("/dev/shm")
MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs", "hugetlbfs")
ROOM_SPARE_BYTES: Final = 8 << 20

log = structlog.get_logger("tier")


class TierFolder:
    """A folder that this process holds the lock of, until `release`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd

    @classmethod
    def take(cls, path: Path, runtime_dir: Path) -> TierFolder:
        """Make or check the folder and lock it. Raises `StartError`; nothing is held then."""
        if path.parent == _users_folder():
            make_folder(path.parent, "host_dir")
        make_folder(path, "host_dir")
        lock_fd = take_lock(path / LOCK_NAME, path, "host_dir")
        try:
            if os.fstat(lock_fd).st_ino != (path / LOCK_NAME).lstat().st_ino:
                raise FileNotFoundError
            (path / OWNER_NAME).write_text(f"{runtime_dir}\n", encoding="utf-8")
        except OSError:
            os.close(lock_fd)
            raise StartError(f"the folder {path} was removed meanwhile; start again") from None
        return cls(path, lock_fd)

    def open(self, shape: TierShape, *, cold: bool) -> KeptTier:
        """Open the tier's files, after removing what is there if it is to start cold."""
        if cold:
            remove_files(self.path)
        return KeptTier(self.path, shape)

    def release(self) -> None:
        """Give the lock back; the files stay. Repeatable."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1

    def __repr__(self) -> str:
        return f"<TierFolder {self.path} {'held' if self.lock_fd >= 0 else 'released'}>"


def choose(runtime_dir: Path, host_dir: Path | None, nbytes: int) -> Path | None:
    """Return where a tier of so many bytes can be kept, or None where there is no such place.

    Raises `StartError` when the place that the user chose cannot serve.
    """
    if host_dir is not None:
        path = Path(os.path.abspath(host_dir))
        kind = file_system(path)
        if kind not in MEMORY_FILE_SYSTEMS:
            raise StartError(
                f"host_dir {path} lies on {kind or 'an unknown file system'}; the host tier is "
                f"memory: choose a folder on {' or '.join(MEMORY_FILE_SYSTEMS)}, such as one "
                f"below {SHARED_MEMORY}"
            )
        if not has_room(path, nbytes):
            raise StartError(
                f"host_dir {path} has no room for a host tier of {nbytes} bytes; choose a smaller "
                "host_tier or another host_dir"
            )
        return path
    for path in defaults(runtime_dir):
        if file_system(path) in MEMORY_FILE_SYSTEMS and has_room(path, nbytes):
            return path
    return None


def defaults(runtime_dir: Path) -> list[Path]:
    """The places that are tried where the user chose none, in order."""
    runtime_dir = Path(os.path.abspath(runtime_dir))  # as the daemon that makes them has it
    name = blake2b(os.fsencode(runtime_dir), digest_size=8).hexdigest()
    return [runtime_dir / "host", _users_folder() / name]


def discard_others(runtime_dir: Path, chosen: Path | None) -> None:
    """Remove tiers that nobody will take up: ours at another default place, and those of daemons
    that are dead and whose runtime folder is gone."""
    for path in [*defaults(runtime_dir), *_orphans()]:
        if path != chosen and path.is_dir() and not path.is_symlink():
            discard(path)


def file_system(path: Path) -> str:
    """Kind of the file system that a path is on, or will be; empty where it cannot be told."""
    place = _existing(path)
    best, kind = -1, ""
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            point = fields[4].encode().decode("unicode_escape")
            inside = place == Path(point) or Path(point) in place.parents
            if inside and len(point) >= best:
                best, kind = len(point), fields[fields.index("-") + 1]
    return kind


def has_room(path: Path, nbytes: int) -> bool:
    """Whether a tier of so many bytes fits, counting what it has there already as its own."""
    found = os.statvfs(_existing(path))
    # 1/32: the words and the log of pages that are not tiny.
    wanted = nbytes + nbytes // 32 + ROOM_SPARE_BYTES
    return found.f_bavail * found.f_frsize + bytes_there(path) >= wanted


def bytes_there(path: Path) -> int:
    """Memory that a tier's segments in a folder take now."""
    own = 0
    if path.is_dir():
        with suppress(OSError):
            for segment in file_numbers(path, "segment"):
                own += (path / f"segment.{segment}").lstat().st_blocks * 512
    return own


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path.resolve()


def _users_folder() -> Path:
    return SHARED_MEMORY / f"treecored-{os.getuid()}"


def tiers() -> list[Path]:
    """Folders in shared memory where daemons of this user keep, or kept, a tier."""
    folder = _users_folder()
    try:
        names = os.listdir(folder) if folder.lstat().st_uid == os.getuid() else []
    except OSError:
        return []
    return [folder / name for name in names]


def _orphans() -> Iterator[Path]:
    for path in tiers():
        try:
            owner = (path / OWNER_NAME).read_text(encoding="utf-8").rstrip("\n")
        except (OSError, UnicodeDecodeError):
            continue
        if owner and not os.path.lexists(owner):
            yield path


def discard(path: Path) -> bool:
    """Remove a tier that nobody holds, and its folder if it is empty then; says whether its files
    are gone. What is another user's or none of a tier's files stays."""
    try:
        if path.lstat().st_uid != os.getuid() or not is_free(path / LOCK_NAME):
            return False
        folder = TierFolder.take(path, Path())
        try:
            count = remove_files(path)
            for name in (OWNER_NAME, LOCK_NAME):
                (path / name).unlink(missing_ok=True)
            with suppress(OSError):  # something foreign lies there: it stays
                path.rmdir()
        finally:
            folder.release()
    except (OSError, StartError) as error:
        log.warning("a host tier that nobody uses stays", folder=str(path), reason=str(error))
        return False
    log.info("a host tier that nobody uses was removed", folder=str(path), files=count)
    return True
