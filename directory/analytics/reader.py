"""Reading access logs, whatever state a crash has left them in.

Owns the checks: nothing of a block is believed before its checksum and its limits hold. It must
never raise for damage: a block that does not hold is skipped and counted, and the next one is
looked for by its sync word.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from directory.analytics.block import (
    BLOCK_FRAMES_MAX,
    BLOCK_RAW_BYTES_MAX,
    FRAME_LENGTH,
    HEADER,
    SYNC,
    Stored,
)
from directory.analytics.log import FORMAT_VERSION, MAGIC, log_files
from directory.analytics.record import DIGEST_BYTES, PAGES_MAX, Access, Began, Frame

_decoder = msgspec.msgpack.Decoder(Stored)


class LogError(Exception):
    """The file is no access log that this version reads; one sentence for the user."""


class LogHealth(msgspec.Struct):
    """What was read and what could not be. Bytes are of damaged or torn blocks."""

    files: int = 0
    blocks: int = 0
    frames: int = 0
    damaged_blocks: int = 0
    damaged_bytes: int = 0
    torn_bytes: int = 0


class LogReader:
    """The frames of a log file, or of all log files of a folder in order."""

    def __init__(self, path: Path) -> None:
        self.paths = log_files(path) if path.is_dir() else [path]
        self.health = LogHealth()
        if not self.paths:
            raise LogError(f"{path} has no access log files")

    def __iter__(self) -> Iterator[Frame]:
        """Read everything once more from the start; a file that rotation took away is skipped."""
        self.health = LogHealth()
        for path in self.paths:
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise LogError(f"{path} cannot be read: {error.strerror}") from error
            yield from self._file(path, data)

    def _file(self, path: Path, data: bytes) -> Iterator[Frame]:
        self.health.files += 1
        if not data.startswith(MAGIC):
            if MAGIC.startswith(data):
                self.health.torn_bytes += len(data)
                return
            raise LogError(f"{path} is not an access log")
        at = len(MAGIC)
        while at < len(data):
            block = _block(data, at)
            frames = None if block is None else _frames(block)
            if block is None or frames is None:
                found = data.find(SYNC, at + 1)
                if found < 0:
                    self.health.torn_bytes += len(data) - at
                    return
                self.health.damaged_blocks += 1
                self.health.damaged_bytes += found - at
                at = found
                continue
            self.health.blocks += 1
            self.health.frames += len(frames)
            for frame in frames:
                if isinstance(frame, Began) and frame.version > FORMAT_VERSION:
                    raise LogError(
                        f"{path} has format version {frame.version}, this reads up to "
                        f"{FORMAT_VERSION}: use a newer treecored"
                    )
                yield frame
            at = block.end


class _Block(NamedTuple):
    raw: bytes
    frames: int
    end: int


def _block(data: bytes, at: int) -> _Block | None:
    """The block at an offset, unpacked; None where there is none that holds."""
    if len(data) - at < HEADER.size:
        return None
    sync, packed_bytes, raw_bytes, frames, crc = HEADER.unpack_from(data, at)
    start, end = at + HEADER.size, at + HEADER.size + packed_bytes
    if (
        sync != SYNC
        or end > len(data)
        or raw_bytes > BLOCK_RAW_BYTES_MAX
        or frames > BLOCK_FRAMES_MAX
    ):
        return None
    packed = data[start:end]
    if zlib.crc32(packed, zlib.crc32(struct.pack("<III", packed_bytes, raw_bytes, frames))) != crc:
        return None
    try:
        # One byte more than promised is asked for, so that a bomb is seen and never unpacked.
        raw = zlib.decompressobj().decompress(packed, raw_bytes + 1)
    except zlib.error:
        return None
    return _Block(raw, frames, end) if len(raw) == raw_bytes else None


def _frames(block: _Block) -> list[Frame] | None:
    """The frames of a block with whole paths; None when it is not what its header says."""
    frames: list[Frame] = []
    paths: list[bytes] = []
    at = 0
    for _ in range(block.frames):
        if len(block.raw) - at < FRAME_LENGTH.size:
            return None
        (length,) = FRAME_LENGTH.unpack_from(block.raw, at)
        at += FRAME_LENGTH.size
        try:
            stored = _decoder.decode(block.raw[at : at + length])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        at += length
        frame = stored.frame
        if isinstance(frame, Access):
            whole = _whole(frame, stored, paths)
            if whole is None:
                return None
            paths.append(whole)
            frame = msgspec.structs.replace(frame, digests=whole) if stored.shared else frame
        frames.append(frame)
    return frames


def _whole(access: Access, stored: Stored, paths: list[bytes]) -> bytes | None:
    digests = access.digests
    if stored.shared:
        if not 0 < stored.back <= len(paths):
            return None
        base = paths[-stored.back]
        if not 0 < stored.shared * DIGEST_BYTES <= len(base):
            return None
        digests = base[: stored.shared * DIGEST_BYTES] + digests
    if len(digests) % DIGEST_BYTES or len(digests) > PAGES_MAX * DIGEST_BYTES:
        return None
    return digests if access.page_tokens > 0 and access.tokens >= 0 else None
