"""The access log's files: bounded, rotating, and readable after a crash.

Owns the file format (docs/analytics.md describes it byte by byte) and the writer. It must never
raise into the daemon for what a disk does: records that cannot be written are counted, and the
next file says how many are missing. It knows no socket, no clock and no thread: time comes with
the frames, and whoever serves requests hands records to a `Recorder` (recorder.py), which works
when nothing else is to be done.

A file is a magic and then blocks. A block is a header (sync word, packed length, raw length,
number of frames, CRC-32) and zlib-packed frames; it can be read on its own, so that a torn or
damaged block costs only itself. Within a block a path is stored as the part that differs from an
earlier one.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from directory.analytics.record import (
    DIGEST_BYTES,
    Access,
    Began,
    Dropped,
    Frame,
    Named,
    Room,
)

FORMAT_VERSION: Final = 1
MAGIC: Final = b"treecored access log\n"
SYNC: Final = b"\xf5TCB"
HEADER: Final = struct.Struct("<4sIIII")
FRAME_LENGTH: Final = struct.Struct("<I")

BLOCK_BYTES: Final = 256 * 1024
BLOCK_RAW_BYTES_MAX: Final = 64 * 1024 * 1024
BLOCK_FRAMES_MAX: Final = 1 << 20
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
FILES_MAX: Final = 16
STANDING_MAX: Final = 4_096
"""Rooms and names that each new file repeats; the ones that were said last."""
COMPRESSION: Final = 1
PACKED_AT_ONCE: Final = 2_048
"""Bytes that are packed at once: some 40 microseconds."""
PAGES_BITS: Final = 32
SUFFIX: Final = ".tclog"


class Stored(msgspec.Struct, array_like=True, frozen=True):
    """A frame as it stands in a block. An access starts with the first `shared` digests of the
    access that stands `back` accesses before it in the block (0: with none)."""

    frame: Frame
    back: int = 0
    shared: int = 0


_encoder = msgspec.msgpack.Encoder()


class Block:
    """Frames on their way into one block, packed as they come: a whole block at once would be a
    millisecond in which nobody is answered."""

    def __init__(self) -> None:
        self._raw = bytearray()
        self._packer = zlib.compressobj(COMPRESSION)
        self._packed = bytearray()
        # Digest -> number of an access in this block << PAGES_BITS | how many of its pages end
        # with it. (A dictionary of plain numbers is none of the garbage collector's business.)
        self._ends: dict[int, int] = {}
        self.raw_bytes = 0
        """Bytes before packing."""
        self.frames = 0
        self.accesses = 0

    def add(self, frame: Frame) -> None:
        """Append a frame."""
        stored = self._delta(frame) if isinstance(frame, Access) else Stored(frame)
        body = _encoder.encode(stored)
        self._raw += FRAME_LENGTH.pack(len(body))
        self._raw += body
        self.raw_bytes += FRAME_LENGTH.size + len(body)
        self.frames += 1
        if len(self._raw) >= PACKED_AT_ONCE:
            self._pack()

    def seal(self) -> bytes:
        """The block as it goes to disk; nothing can be added to it any more."""
        self._pack()
        packed = bytes(self._packed + self._packer.flush())
        fields = (len(packed), self.raw_bytes, self.frames)
        crc = zlib.crc32(packed, zlib.crc32(struct.pack("<III", *fields)))
        return HEADER.pack(SYNC, *fields, crc) + packed

    def _pack(self) -> None:
        self._packed += self._packer.compress(self._raw)
        self._raw.clear()

    def _delta(self, access: Access) -> Stored:
        path, ends = access.path, self._ends
        # Chained digests: what is known is a prefix, so its length is found by bisection.
        low, high = 0, len(path)
        while low < high:
            middle = (low + high + 1) // 2
            if path[middle - 1] in ends:
                low = middle
            else:
                high = middle - 1
        number = self.accesses
        first = number << PAGES_BITS | low + 1
        ends.update(zip(path[low:], range(first, first + len(path) - low), strict=True))
        self.accesses += 1
        if not low:
            return Stored(access)
        end = ends[path[low - 1]]
        base, shared = end >> PAGES_BITS, end & ((1 << PAGES_BITS) - 1)
        rest = msgspec.structs.replace(access, digests=access.digests[low * DIGEST_BYTES :])
        return Stored(rest, number - base, shared)


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
        return self._block.frames

    def add(self, frame: Frame, now_us: int) -> None:
        """Take a frame; writes a block when enough have come together. Never raises `OSError`."""
        self._now_us = now_us
        if isinstance(frame, Room | Named):
            self._said.append(frame)
        self._block.add(frame)
        if self._block.raw_bytes >= self._block_bytes:
            self.flush(now_us)

    def lose(self, records: int) -> None:
        """Note that records were dropped before they came here."""
        self._missing += records
        self.records_lost += records

    def flush(self, now_us: int) -> None:
        """Write what has been added: afterwards a crash of this process costs none of it."""
        self._now_us = now_us
        if self._missing:
            self._block.add(Dropped(at_us=now_us, records=self._missing))
        if not self._block.frames:
            return
        block, self._block = self._block, Block()
        try:
            if self._fd < 0 or self._file_bytes >= self._file_bytes_max:
                self._begin()
            self._write(block.seal())
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
            self._missing = 0
            self._remove_old()
        for frame in self._said:
            self._stand(frame)
        self._said.clear()

    def close(self, now_us: int) -> None:
        """Write what is left and close the file."""
        self.flush(now_us)
        self._end()

    def _stand(self, frame: Room | Named) -> None:
        """Remember what a reader of the next file has to know, too."""
        key: object
        key = (frame.tier, frame.instance) if isinstance(frame, Room) else frame.namespace
        self._standing.pop(key, None)
        if not (isinstance(frame, Room) and frame.pages == 0):
            self._standing[key] = frame
        if len(self._standing) > STANDING_MAX:
            del self._standing[next(iter(self._standing))]

    def _begin(self) -> None:
        """Start the next file. Where there are too many then, the oldest go only when it has a
        block: a disk that takes nothing must not cost what it has."""
        self._end()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = log_files(self._folder)
        number = _number(files[-1]) + 1 if files else 1
        self._path = self._folder / f"access-{number:08d}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        self._file_bytes = self._file_blocks = 0
        self._old = files[: max(0, len(files) + 1 - self._files_max)]
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
        for frame in self._standing.values():
            head.add(frame)
        self._write(MAGIC + head.seal())
        self.files_begun += 1

    def _write(self, data: bytes) -> None:
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


assert HEADER.size == 20
assert DIGEST_BYTES == 8
