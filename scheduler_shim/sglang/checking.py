"""Checking mode: what every page held when it was published, and when it was restored.

Owns the file that says so, one an engine (`TREECORED_CHECK_DIGESTS`): a record for pages that were
computed here and published, and one for pages that a mover has brought. Whoever compares the files
of all engines of a node (`benchmarks/sglang_gpu/compare.py`) finds each restored page's digest
among those of the computed pages with the same tokens before them, or has found a wrong page. The
digests themselves are somebody else's (page_digests.py). It must never wait for a device: what a
stream has not computed yet is written in a later tick.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Final, Literal, Protocol

import msgspec

from directory.core.actions import AnyReply, Restored
from directory.core.namespace import NamespaceKey
from scheduler_shim.fills import Fill
from scheduler_shim.own_tree import Published
from scheduler_shim.sglang.load import Load

logger = logging.getLogger(__name__)

SUFFIX: Final = ".digests"
DIGEST_BYTES: Final = 16
LENGTH_BYTES: Final = 4


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Digests of pages [start, start + n) of one path, `DIGEST_BYTES` each.

    `key`, `tokens`: the path's namespace and its packed tokens up to the last of these pages, of
    which each page has `page_key` bytes. `at`: seconds of the machine's monotonic clock.
    `host_pages`, `peer_pages`: where restored ones came from; of one record both may be there.
    `begun` has no digests yet: computed pages that an engine that is killed may leave so.
    """

    kind: Literal["computed", "restored", "begun"]
    at: float
    key: NamespaceKey
    tokens: bytes
    page_key: int
    start: int
    digests: bytes
    host_pages: int = 0
    peer_pages: int = 0
    layerwise: bool = False


class Pending(Protocol):
    """Digests that a device computes."""

    def ready(self) -> bool:
        """Whether they are there; never waits."""
        ...

    def take(self) -> bytes:
        """Them; waits where they are not ready."""
        ...


Digests = Callable[[bytes], Pending]
"""Begins the digests of named pages (packed names), of their bytes after all that is queued now."""


class Unchecked:
    """Nothing is recorded."""

    has_turns = False
    """Whether `tick` may have something to do."""

    def about(self, load: Load | None) -> None:
        """The next row that is published has this load's pages, if any."""

    def computed(self, key: NamespaceKey, tokens: bytes, first: int, published: Published) -> None:
        """A row was published from page `first` on: what is new in the tree was computed here."""

    def restored(self, fill: Fill, reply: AnyReply | None, *, layerwise: bool = False) -> None:
        """A fill has landed; its targets are named, and nobody has written them since."""

    def tick(self) -> None:
        """Write what is ready."""

    def close(self) -> None:
        """Write everything."""


class Checking(Unchecked):
    """Records of one engine; used by its scheduler's thread alone."""

    has_turns = True

    def __init__(self, path: FilePath, digests: Digests) -> None:
        self._file = path.open("ab")
        self._digests = digests
        self._pending: deque[tuple[Record, Pending]] = deque()
        self._loaded = (0, 0)

    def about(self, load: Load | None) -> None:
        """A load's own pages were recorded when it landed: they are not computed ones."""
        self._loaded = (load.fill.start, load.fill.end) if load is not None else (0, 0)

    def computed(self, key: NamespaceKey, tokens: bytes, first: int, published: Published) -> None:
        """Record what is new: duplicates of what the tree had come before it in every path."""
        pages = published.accepted_pages
        fresh = pages - first - len(published.duplicates) // 4
        page_key = len(tokens) // pages if pages else 0
        loaded_from, loaded_to = self._loaded
        for begin, end in (
            (pages - fresh, min(pages, loaded_from)),
            (max(pages - fresh, loaded_to), pages),
        ):
            if begin < end:
                at = time.monotonic()
                record = Record("computed", at, key, tokens[: end * page_key], page_key, begin, b"")
                self._begin(record, published.canonical[4 * begin : 4 * end])

    def restored(self, fill: Fill, reply: AnyReply | None, *, layerwise: bool = False) -> None:
        """Record all of it, also what the tree turns out to have already."""
        if isinstance(reply, Restored) and reply.landed:
            record = Record(
                "restored", time.monotonic(), fill.key, fill.tokens, fill.page_key, fill.start,
                b"", reply.host_pages, reply.peer_pages, layerwise,
            )  # fmt: skip
            self._begin(record, fill.targets.tobytes())

    def _begin(self, record: Record, names: bytes) -> None:
        self._pending.append((record, self._digests(names)))
        self.tick()
        if self._pending and record.kind == "computed":
            self._append(msgspec.structs.replace(record, kind="begun"))

    def tick(self) -> None:
        """Write what is ready, in order."""
        while self._pending and self._pending[0][1].ready():
            self._write()

    def close(self) -> None:
        """Wait for the rest and write it. Repeatable."""
        while self._pending:
            self._write()
        self._file.close()

    def _write(self) -> None:
        record, pending = self._pending.popleft()
        self._append(msgspec.structs.replace(record, digests=pending.take()))

    def _append(self, record: Record) -> None:
        frame = msgspec.msgpack.encode(record)
        self._file.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
        self._file.flush()  # the process may be killed at any moment

    def __repr__(self) -> str:
        return f"<Checking into {self._file.name}, {len(self._pending)} pending>"


def read_records(path: FilePath) -> Iterator[Record]:
    """The records of one file; a last one that its writer did not finish is left out."""
    decoder = msgspec.msgpack.Decoder(Record)
    with path.open("rb") as file:
        while len(length := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
            frame = file.read(int.from_bytes(length, "little"))
            if len(frame) < int.from_bytes(length, "little"):
                return
            yield decoder.decode(frame)
