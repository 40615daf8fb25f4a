"""The host tier as files: memory and journal that outlive the daemon, in a folder it has locked.

Owns the files of one folder: `segment.N` (pages), `words` (one 64-bit word a slot), `log.N` (the
records), `sums` (the checksums, which only movers write). It writes down what the directory says,
in the order said, and hands all of it to the next boot's directory. It must never decide which slot
is valid, follow a link, or touch a file of another name. What cannot be written (no room) is lost
for the next boot and never made up.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from directory.core.actions import Journal, JournalBegin, JournalEnd, SubmitCopy
from directory.core.ids import HOST
from directory.core.limits import MIB, SLOTS_PER_SEGMENT_MAX
from directory.core.records import SlotWord
from directory.core.tokens import unpack_pages
from directory.daemon.runtime import StartError
from transfer.host_tier import HostTierMemory, TierShape
from transfer.ipc.memory import SharedMemoryIPC

WORD_BYTES: Final = 8
WORDS_PER_PAGE: Final = mmap.PAGESIZE // WORD_BYTES
ROOM_LEFT_BYTES_MIN: Final = 4 * MIB
"""Room on the file system that backups leave alone: a page that finds none kills who writes it."""
FILES: Final = re.compile(r"(segment|log)\.(0|[1-9][0-9]{0,8})|words|sums")
OPEN_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

log = structlog.get_logger("tier")


class SlotWords:
    """The words of all slots, in a sparse file that is mapped. A word never written is 0."""

    def __init__(self, fd: int, segments: int) -> None:
        """`segments`: how many segments the tier has. Raises `OSError`."""
        self._fd = fd
        nbytes = segments * SLOTS_PER_SEGMENT_MAX * WORD_BYTES
        if os.fstat(fd).st_size < nbytes:
            os.ftruncate(fd, nbytes)
        self._map = mmap.mmap(fd, nbytes)
        self._words = memoryview(self._map).cast("Q")
        self._there = _pages_there(fd, nbytes)

    def read(self, slot: int) -> int:
        """The word of a slot; a page that is not there is not touched, for there may be no room."""
        if slot // WORDS_PER_PAGE not in self._there or slot >= len(self._words):
            return 0
        return self._words[slot]

    def store(self, slots: Sequence[int], word: int) -> bool:
        """Let the words of slots be `word`; says whether there was room (0 needs none)."""
        words, there = self._words, self._there
        for slot in slots:
            page = slot // WORDS_PER_PAGE
            if page not in there:
                if not word:
                    continue
                try:
                    os.posix_fallocate(self._fd, page * mmap.PAGESIZE, mmap.PAGESIZE)
                except OSError:
                    return False
                there.add(page)
            words[slot] = word
        return True

    def close(self) -> None:
        """Unmap and close."""
        self._words.release()
        self._map.close()
        os.close(self._fd)


class KeptTier:
    """The files of one tier. `folder` is this user's alone, and locked by this process."""

    def __init__(self, folder: Path, shape: TierShape) -> None:
        """Open what is there; make nothing yet but the words. Raises `StartError`."""
        shape.check()
        self.folder = folder
        self._shape = shape
        self._failed = False
        self._log_fd = -1
        self._log_number = max(self._numbers("log"), default=0)
        self._words = SlotWords(self._open("words"), shape.segment_count)

    # The tier is taken up again.

    def sizes(self) -> list[int]:
        """Bytes that there are of every segment."""
        found = []
        for segment in range(self._shape.segment_count):
            try:
                size = (self.folder / f"segment.{segment}").lstat().st_size
            except FileNotFoundError:
                size = 0
            found.append(min(size, self._shape.bytes_of(segment)))
        return found

    def logs(self) -> list[bytes]:
        """Contents of all logs, the older first."""
        contents = []
        for number in self._numbers("log"):
            fd = self._open(f"log.{number}")
            with os.fdopen(fd, "rb") as file:
                contents.append(file.read())
        return contents

    @property
    def word(self) -> SlotWord:
        """Reads the word of a slot."""
        return self._words.read

    def memory(self, *, reserve: bool) -> HostTierMemory:
        """Give every segment its size and map it; surplus ones are removed.

        To be called when the directory has said what it took up: until then a segment that is to
        shrink may hold valid pages. `reserve`: take all memory now. Raises `StartError`.
        """
        count = self._shape.segment_count
        for segment in self._numbers("segment"):
            if segment >= count:
                (self.folder / f"segment.{segment}").unlink()
        tier = HostTierMemory(SharedMemoryIPC(), self._shape)
        try:
            for segment in range(count):
                # One at a time: mapped memory has a descriptor of its own.
                fd = self._open(f"segment.{segment}")
                try:
                    nbytes = self._shape.bytes_of(segment)
                    if os.fstat(fd).st_size != nbytes:
                        os.ftruncate(fd, nbytes)
                    if reserve:
                        os.posix_fallocate(fd, 0, nbytes)
                    tier.open_segments(segment, (fd,))
                finally:
                    os.close(fd)
        except OSError as error:
            tier.close()
            raise StartError(
                f"the host tier of {self._shape.total_bytes} bytes cannot be had in {self.folder}: "
                f"{error.strerror}; choose a smaller host_tier or another host_dir"
            ) from None
        except BaseException:
            tier.close()
            raise
        return tier

    def open_sums(self, nbytes: int) -> int:
        """Open the table of checksums, which has at least so many bytes then; the caller closes it.

        Raises `OSError`, or `StartError` for what is no file of this daemon's.
        """
        fd = self._open("sums")
        if os.fstat(fd).st_size < nbytes:
            os.ftruncate(fd, nbytes)
        return fd

    def remove_sums(self) -> None:
        """Have no checksums any more."""
        os.close(self._open("sums"))  # never something of another kind or user
        (self.folder / "sums").unlink()

    # While the daemon serves.

    def apply(self, action: Journal | JournalBegin | JournalEnd) -> None:
        """Write down what the directory says."""
        match action:
            case Journal():
                written = not action.record or self._append(action.record)
                if action.slots and not (
                    self._words.store(unpack_pages(action.slots), action.stamp if written else 0)
                ):
                    self._fail("its words")
            case JournalBegin():
                self._begin_log()
            case JournalEnd():
                for number in self._numbers("log"):
                    if number != self._log_number:
                        (self.folder / f"log.{number}").unlink()

    def has_room(self, copy: SubmitCopy) -> bool:
        """Whether a backup's pages can be written without taking the file system's last room."""
        if all(part.target != HOST for part in copy.parts):
            return True
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize >= ROOM_LEFT_BYTES_MIN

    def clear(self) -> None:
        """Forget everything that was written down: nothing of it can be trusted any more."""
        for number in self._numbers("log"):
            (self.folder / f"log.{number}").unlink()
        self._close_log()
        self._words.close()
        (self.folder / "words").unlink()
        self._words = SlotWords(self._open("words"), self._shape.segment_count)

    def close(self) -> None:
        """Let go of the files; they stay for the next boot. Repeatable."""
        if self._log_number >= 0:
            self._close_log()
            self._words.close()
            self._log_number = -1

    # Files.

    def _append(self, record: bytes) -> bool:
        if self._log_fd < 0:
            self._begin_log()
        try:
            written = os.write(self._log_fd, record) if self._log_fd >= 0 else 0
        except OSError:
            written = 0
        if written != len(record):
            # Half a record is passed over by the reader, as any damage.
            self._fail("a record")
        return written == len(record)

    def _begin_log(self) -> None:
        self._close_log()
        self._log_number += 1
        try:
            flags = OPEN_FLAGS | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._log_fd = os.open(self.folder / f"log.{self._log_number}", flags, 0o600)
        except OSError:
            self._fail("a new log")

    def _close_log(self) -> None:
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def _fail(self, what: str) -> None:
        if not self._failed:
            self._failed = True
            log.error(
                "no room for the host tier's journal: pages are served, but not all outlive this "
                "daemon",
                folder=str(self.folder),
                lost=what,
            )

    def _numbers(self, kind: str) -> list[int]:
        return file_numbers(self.folder, kind)

    def _open(self, name: str) -> int:
        path = self.folder / name
        try:
            fd = os.open(path, OPEN_FLAGS | os.O_CREAT, 0o600)
        except OSError as error:
            raise StartError(
                f"{path} cannot be opened: {error.strerror}; move it out of the way"
            ) from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            os.close(fd)
            raise StartError(f"{path} is not a file of this daemon's; move it out of the way")
        return fd

    def __repr__(self) -> str:
        return f"<KeptTier {self.folder}>"


def file_numbers(folder: Path, kind: str) -> list[int]:
    """Numbers of the files of a kind in a folder, ascending."""
    found = (FILES.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[2]) for match in found if match and match[1] == kind)


def remove_files(folder: Path) -> int:
    """Remove a tier's files, and nothing else, from a folder that is locked; returns how many."""
    count = 0
    for name in os.listdir(folder):
        path = folder / name
        if FILES.fullmatch(name) and stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
            count += 1
    return count


def _pages_there(fd: int, nbytes: int) -> set[int]:
    """Which pages of a sparse file have memory behind them."""
    there: set[int] = set()
    at = 0
    with suppress(OSError):  # ENXIO: no data beyond
        while at < nbytes:
            begin = os.lseek(fd, at, os.SEEK_DATA)
            at = min(os.lseek(fd, begin, os.SEEK_HOLE), nbytes)
            there.update(range(begin // mmap.PAGESIZE, -(-at // mmap.PAGESIZE)))
    return there
