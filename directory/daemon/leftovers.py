"""Host tiers that daemons have left in memory: which there are, whose, and their removal.

Owns the search. It looks only where daemons of this user keep tiers, and at the folder that it is
given. It must never remove a tier that a living daemon or its mover holds, another user's, a file
that is not a tier's, or follow a link.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from directory.daemon.kept_tier import FILES
from directory.daemon.runtime import is_free
from directory.daemon.tier_folder import LOCK_NAME, OWNER_NAME, defaults, discard, tiers


class Leftover(NamedTuple):
    """A tier's folder. `owner`: runtime folder of the daemon that made it (empty: unknown).

    `holder`: process id of the daemon that holds it now, or "unknown"; empty: nobody does.
    """

    path: Path
    owner: str
    files: int
    nbytes: int
    holder: str

    @property
    def orphan(self) -> bool:
        """Whether no daemon will take it up: its runtime folder is gone."""
        return bool(self.owner) and not os.path.lexists(self.owner)


def find(runtime_dirs: Iterable[Path], host_dirs: Iterable[Path], *, all_: bool) -> list[Leftover]:
    """Find the tiers of daemons with these runtime folders, in these folders and, with `all_`,
    everywhere that daemons of this user keep one by default. Changes nothing."""
    places = [place for path in runtime_dirs for place in defaults(path)]
    places += [Path(os.path.abspath(path)) for path in host_dirs]
    if all_:
        places += tiers()
    found = (_look(path) for path in dict.fromkeys(places))
    return sorted(leftover for leftover in found if leftover is not None)


def remove(leftover: Leftover) -> bool:
    """Remove a tier's files, and its folder if nothing else is in it; says whether they are gone.

    Whether it is held is looked at again, under its lock.
    """
    return not leftover.holder and discard(leftover.path)


def _look(path: Path) -> Leftover | None:
    """What a folder holds of a tier; None where it is none of this user's tiers."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return None
        names = os.listdir(path)
        if LOCK_NAME not in names:
            return None
        files = [path / name for name in names if FILES.fullmatch(name)]
        statuses = [file.lstat() for file in files]
        holder = "" if is_free(path / LOCK_NAME) else _holder(path)
    except OSError:
        return None
    own = [status for status in statuses if stat.S_ISREG(status.st_mode)]
    nbytes = sum(status.st_blocks * 512 for status in own)
    return Leftover(path, _read(path / OWNER_NAME), len(own), nbytes, holder)


def _holder(path: Path) -> str:
    return _read(path / LOCK_NAME) or "unknown"


def _read(file: Path) -> str:
    """The first line of a small file, or nothing."""
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096).decode().partition("\n")[0]
        finally:
            os.close(fd)
    return text
