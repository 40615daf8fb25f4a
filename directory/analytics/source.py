"""Opening any file that analytics can read, and saying what it is.

Owns the guess at the format: from the first bytes, never from the name. An access log is read
where a cache stood and has hits; a trace is only what was asked of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Literal

import msgspec

from directory.analytics.conversations import CLOSED_LOOP, LoopOptions, play, read_conversations
from directory.analytics.log import MAGIC, log_files
from directory.analytics.reader import LogError, LogHealth, LogReader
from directory.analytics.record import Access, Frame
from directory.analytics.traces import (
    AS_LISTED,
    DAMAGE,
    SNIFF_BYTES,
    BlockOptions,
    SourceError,
    TraceKind,
    opened,
    read_bailian,
    read_mooncake,
)

SourceKind = Literal["access log"] | TraceKind
KINDS: Final[tuple[SourceKind, ...]] = ("access log", "mooncake", "bailian", "kv-cache-tester")


class Source:
    """A file of records. `kind` says which format; `observed` whether it says what hit."""

    def __init__(
        self,
        path: Path,
        *,
        kind: SourceKind | None = None,
        options: BlockOptions = AS_LISTED,
        loop: LoopOptions = CLOSED_LOOP,
    ) -> None:
        """Raises `SourceError` when the file is missing or of no known format."""
        self.path = path
        self.kind: SourceKind = kind or guess(path)
        self._options = options
        self._loop = loop
        self._reader: LogReader | None = None

    @property
    def observed(self) -> bool:
        """Whether the records say what a real cache did."""
        return self.kind == "access log"

    @property
    def every_block(self) -> bool:
        """Whether every listed block, a partial last one too, may be a hit."""
        return self._options.every_block and not self.observed

    @property
    def health(self) -> LogHealth | None:
        """What could be read of an access log, once it has been read."""
        return self._reader.health if self._reader else None

    def frames(self) -> Iterator[Frame]:
        """Read it from the start. Raises `SourceError` on the way where a line is not right."""
        limit = self._options.limit
        if self.kind == "access log":
            yield from self._log(limit)
        elif self.kind == "mooncake":
            yield from read_mooncake(self.path, self._options)
        elif self.kind == "bailian":
            yield from read_bailian(self.path, self._options)
        else:
            yield from play(read_conversations(self.path), self._loop, self._options)

    def _log(self, limit: int | None) -> Iterator[Frame]:
        try:
            self._reader = LogReader(self.path)
            accesses = 0
            for frame in self._reader:
                yield frame
                accesses += isinstance(frame, Access)
                if accesses == limit:
                    return
        except LogError as error:
            raise SourceError(str(error)) from None


def guess(path: Path) -> SourceKind:
    """Say which format a file or folder has. Raises `SourceError`."""
    if path.is_dir():
        if log_files(path):
            return "access log"
        if next(path.glob("*.json"), None) is not None:
            return "kv-cache-tester"
        raise SourceError(f"{path} has neither access log files nor *.json conversations")
    try:
        with opened(path) as file:
            head = file.read(SNIFF_BYTES)
    except DAMAGE as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    if not head.strip():
        raise SourceError(f"{path} is empty")
    if head.startswith(MAGIC):
        return "access log"
    first = next(line for line in head.splitlines() if line.strip())
    if b'"conv"' in first[:64] or (b'"block_size"' in head and b'"requests"' in head):
        return "kv-cache-tester"
    keys = _keys(first)
    if "chat_id" in keys:
        return "bailian"
    if first.lstrip().startswith(b"{"):
        # Also a line that is broken: the reader says what is wrong with it.
        return "mooncake"
    raise SourceError(
        f"{path} is neither an access log nor a trace of a known format ({', '.join(KINDS[1:])})"
    )


def _keys(line: bytes) -> set[str]:
    try:
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {key for key in ("chat_id",) if f'"{key}"'.encode() in line}
    return set(islice(found, 64))
