"""The access log's files: bounded, rotating, and readable after a crash.

Owns the files (docs/analytics.md describes them byte by byte) and the writer. It must never
raise into the daemon for what a disk does: records that cannot be written are counted, and the
next file says how many are missing. It knows no socket, no clock and no thread: time comes with
the frames, and whoever serves requests hands records to a `Recorder` (recorder.py), which works
when nothing else is to be done.

A file is a magic and then blocks (block.py), each of which can be read on its own, so that a torn
or damaged one costs only itself. What is long is stored and written piece by piece (`go_on`), so
that whoever asks the daemon something waits for one piece at most.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Final

from directory.analytics.block import Block, Pathed
from directory.analytics.record import Began, Dropped, Frame, Named, Room

FORMAT_VERSION: Final = 1
MAGIC: Final = b"treecored access log\n"

BLOCK_BYTES: Final = 256 * 1024
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
FILES_MAX: Final = 16
STANDING_MAX: Final = 4_096
"""Rooms and names that each new file repeats; the ones that were said last."""
STANDING_AT_ONCE: Final = 32
"""So many of them are repeated in one piece: some 200 microseconds."""
SUFFIX: Final = ".tclog"


class AccessLog:
    """Writes frames into numbered files of one folder; at most `files_max` of `file_bytes_max`.

    Mutated by its owner's thread only. A frame counts as written when its block is: call `flush`
    as often as a crash may cost records. Counters: `frames_written`, `bytes_written`,
    `records_lost`, `files_begun`; `last_error` is the last refusal of the disk, "" if none;
    `unwritten`: frames that a crash would cost now.
    """

    def __init__(
        self,
        folder: Path,
        *,
        epoch: int = 0,
        keyed: bool = False,
        software: str = "",
        file_bytes_max: int = FILE_BYTES_MAX,
        files_max: int = FILES_MAX,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._folder = folder
        self._began = (epoch, keyed, software)
        self._file_bytes_max = file_bytes_max
        self._files_max = max(1, files_max)
        self._block_bytes = block_bytes
        self._block = Block()
        self._going: Block | None = None
        """A block that is being written, ..."""
        self._flushing: Generator[None, None, None] | None = None
        """... and how."""
        # What a file begun now has to repeat: as of the last block, not of the one that is filled.
        self._standing: dict[object, Room | Named] = {}
        self._said: list[Room | Named] = []
        self._fd = -1
        self._path = folder
        """Of the file that is open."""
        self._file_bytes = 0
        self._file_blocks = 0
        """Beside the one that it begins with."""
        self._old: list[Path] = []
        """Files that go once this one has a block."""
        self._missing = 0
        self._now_us = 0
        self.frames_written = 0
        self.bytes_written = 0
        self.records_lost = 0
        self.files_begun = 0
        self.last_error = ""

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._folder

    @property
    def unwritten(self) -> int:
        """Frames that wait for their block to be full."""
        return self._block.frames + (self._going.frames if self._going is not None else 0)

    @property
    def busy(self) -> bool:
        """Whether something is left for `go_on`."""
        return self._flushing is not None or self._block.busy

    def add(self, frame: Frame | Pathed, now_us: int) -> None:
        """Take a frame; writes a block when enough have come together. Never raises `OSError`."""
        self.begin(frame, now_us)
        self._finish(now_us)

    def begin(self, frame: Frame | Pathed, now_us: int) -> None:
        """The same, but what would take long is left to `go_on`."""
        self._finish(now_us)
        self._now_us = now_us
        if isinstance(frame, Room | Named):
            self._said.append(frame)
        self._block.begin(frame)
        self._see_if_full(now_us)

    def go_on(self, now_us: int) -> bool:
        """Do a piece of what was begun; False where there was nothing to do."""
        if self._flushing is not None:
            self._flush_some()
        elif self._block.busy:
            self._block.go_on()
            self._see_if_full(now_us)
        else:
            return False
        return True

    def lose(self, records: int) -> None:
        """Note that records were dropped before they came here."""
        self._missing += records
        self.records_lost += records

    def flush(self, now_us: int) -> None:
        """Write what has been added: afterwards a crash of this process costs none of it."""
        self._finish(now_us)
        self._begin_flush(now_us)
        self._finish(now_us)

    def begin_flush(self, now_us: int) -> None:
        """The same, but what would take long is left to `go_on`."""
        self._finish(now_us)
        self._begin_flush(now_us)

    def close(self, now_us: int) -> None:
        """Write what is left and close the file."""
        self.flush(now_us)
        self._end()

    def _finish(self, now_us: int) -> None:
        while self.go_on(now_us):
            pass

    def _see_if_full(self, now_us: int) -> None:
        if not self._block.busy and self._block.raw_bytes >= self._block_bytes:
            self._begin_flush(now_us)

    def _begin_flush(self, now_us: int) -> None:
        """Write the first piece of what has been added; there is no other where it is not much."""
        self._now_us = now_us
        if self._missing:
            self._block.add(Dropped(at_us=now_us, records=self._missing))
        if self._block.frames:
            self._going, self._block = self._block, Block()
            self._flushing = self._flush(self._going, self._missing)
            self._flush_some()

    def _flush_some(self) -> None:
        if self._flushing is not None and next(self._flushing, self) is self:
            self._going = self._flushing = None

    def _flush(self, block: Block, missing: int) -> Generator[None, None, None]:
        """Write a block, which says how many are `missing`, piece by piece."""
        try:
            if self._fd < 0 or self._file_bytes >= self._file_bytes_max:
                yield from self._begin()
            written = False
            for piece in block.sealed():
                if written or not piece:
                    yield
                self._write(piece)
                written = bool(piece)
        except OSError as error:
            # A half-written block would hide the ones after it from nobody but a strict reader;
            # a new file is simpler to reason about.
            self.last_error = f"{error.strerror or error}"
            self._missing += block.accesses
            self.records_lost += block.accesses
            self._give_up()
        else:
            self._file_blocks += 1
            self.frames_written += block.frames
            self._missing -= missing  # others may have been lost meanwhile
            self._remove_old()
        for frame in self._said:
            self._stand(frame)
        self._said.clear()

    def _stand(self, frame: Room | Named) -> None:
        """Remember what a reader of the next file has to know, too."""
        key: object
        key = (frame.tier, frame.instance) if isinstance(frame, Room) else frame.namespace
        self._standing.pop(key, None)
        if not (isinstance(frame, Room) and frame.pages == 0):
            self._standing[key] = frame
        if len(self._standing) > STANDING_MAX:
            del self._standing[next(iter(self._standing))]

    def _begin(self) -> Generator[None, None, None]:
        """Start the next file, piece by piece; it is there with all that it begins with. Where
        there are too many then, the oldest go only when it has a block: a disk that takes nothing
        must not cost what it has."""
        self._end()
        epoch, keyed, software = self._began
        head = Block()
        head.add(
            Began(
                at_us=self._now_us,
                version=FORMAT_VERSION,
                epoch=epoch,
                keyed=keyed,
                software=software,
            )
        )
        for number, frame in enumerate(list(self._standing.values()), 1):
            head.add(frame)
            if number % STANDING_AT_ONCE == 0:
                yield
        data = bytearray(MAGIC)
        for piece in head.sealed():
            data += piece
            yield
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = log_files(self._folder)
        number = _number(files[-1]) + 1 if files else 1
        self._path = self._folder / f"access-{number:08d}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        self._file_bytes = self._file_blocks = 0
        self._old = files[: max(0, len(files) + 1 - self._files_max)]
        self._write(data)
        self.files_begun += 1
        yield

    def _write(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            view = view[written:]
        self._file_bytes += len(data)
        self.bytes_written += len(data)

    def _give_up(self) -> None:
        """Close a file that could not be written; one without a block says nothing, and goes."""
        begun = self._fd >= 0
        self._end()
        if begun and not self._file_blocks:
            with suppress(OSError):
                self._path.unlink()

    def _remove_old(self) -> None:
        old, self._old = self._old, []
        for path in old:
            with suppress(OSError):  # such files are met again when the next one begins
                path.unlink()

    def _end(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.close(fd)
            except OSError as error:
                self.last_error = f"{error.strerror or error}"

    def __repr__(self) -> str:
        return f"<AccessLog {self._folder} {self.frames_written} frames, {self.records_lost} lost>"


def log_files(folder: Path) -> list[Path]:
    """The log files of a folder, oldest first."""
    return sorted(
        (path for path in folder.glob(f"access-*{SUFFIX}") if _number(path) > 0), key=_number
    )


def _number(path: Path) -> int:
    digits = path.name.removeprefix("access-").removesuffix(SUFFIX)
    return int(digits) if digits.isascii() and digits.isdigit() else 0
