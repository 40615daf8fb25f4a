"""Blocks of the access log: frames packed as they come, paths stored as what differs.

Owns the form of a block (docs/analytics.md describes it byte by byte) and what of paths it has
stored. A block is a header (sync word, packed length, raw length, number of frames, CRC-32) and
zlib-packed frames; it can be read on its own. Within it a path is stored as the part that differs
from an earlier one. It must never do much at once: what is long is stored, packed and sealed piece
by piece.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from directory.analytics.paths import shared_pages
from directory.analytics.record import DIGEST_BYTES, PAGES_MAX, Access, Digests, Frame

SYNC: Final = b"\xf5TCB"
HEADER: Final = struct.Struct("<4sIIII")
FRAME_LENGTH: Final = struct.Struct("<I")

BLOCK_RAW_BYTES_MAX: Final = 64 * 1024 * 1024
BLOCK_FRAMES_MAX: Final = 1 << 20
COMPRESSION: Final = 1
PACKED_AT_ONCE: Final = 2_048
"""Bytes that are packed at once: some 40 microseconds."""
WRITTEN_AT_ONCE: Final = 64 * 1024
"""Packed bytes from which on those that follow are another piece of the sealed block."""
STRETCH_PAGES_MAX: Final = 4_096
"""A stretch that has so many pages gets no more of them."""
HOPS_MAX: Final = PAGES_MAX // STRETCH_PAGES_MAX + 64
"""Stretches of a path that are looked for in a block; what follows them is stored again."""


class Stored(msgspec.Struct, array_like=True, frozen=True):
    """A frame as it stands in a block. An access starts with the first `shared` digests of the
    access that stands `back` accesses before it in the block (0: with none)."""

    frame: Frame
    back: int = 0
    shared: int = 0


class Pathed(NamedTuple):
    """An access whose digests are left out of it, and stand beside it."""

    access: Access
    path: Digests


_encoder = msgspec.msgpack.Encoder()


class _Stretch:
    """Pages of a path that no access before it had. `number`: of an access in the block that has
    all of them. (Digests are chained: whoever has the last one of them has the whole path.)"""

    __slots__ = ("edge", "number")

    def __init__(self, edge: Digests, number: int) -> None:
        self.edge = edge
        self.number = number


class Block:
    """Frames on their way into one block, packed as they come: a whole block at once would be a
    millisecond in which nobody is answered."""

    def __init__(self) -> None:
        self._raw = bytearray()
        self._packer = zlib.compressobj(COMPRESSION)
        self._pieces = [bytearray()]
        # By the digest of a stretch's first page.
        self._stretches: dict[int, _Stretch] = {}
        # Of the access that is being stored: its path, how far it is stored, the stretch that its
        # pages are put to, and what follows upon its digests.
        self._path: Digests | None = None
        self._at = 0
        self._last: _Stretch | None = None
        self._tail = b""
        self.raw_bytes = 0
        """Bytes before packing, those that are still to come from `go_on` included."""
        self.frames = 0
        self.accesses = 0

    @property
    def busy(self) -> bool:
        """Whether a frame is not yet stored to its end."""
        return self._path is not None

    def add(self, frame: Frame | Pathed) -> None:
        """Append a frame."""
        self.begin(frame)
        self.finish()

    def begin(self, frame: Frame | Pathed) -> None:
        """Append a frame of which the end may be left to `go_on`."""
        self.finish()
        self.frames += 1
        if isinstance(frame, Access):
            frame = Pathed(frame, frame.path)
        if isinstance(frame, Pathed):
            self._begin(*frame)
            self.go_on()
        else:
            self._append(_encoder.encode(Stored(frame)))

    def go_on(self) -> None:
        """Store some more pages of the access that was begun."""
        path = self._path
        if path is None:
            return
        end = min(len(path), self._at + PACKED_AT_ONCE // DIGEST_BYTES)
        if end > self._at:
            piece = path[self._at : end]
            last = self._last
            if last is None or len(last.edge) >= STRETCH_PAGES_MAX:
                self._last = self._stretches[piece[0]] = _Stretch(piece, self.accesses)
            else:
                last.edge.extend(piece)
            self._raw += piece.tobytes()
            self._at = end
        if end == len(path):
            self._raw += self._tail
            self._path, self._last = None, None
            self.accesses += 1
        if len(self._raw) >= PACKED_AT_ONCE:
            self._pack()

    def finish(self) -> None:
        """Store all that is left."""
        while self.busy:
            self.go_on()

    def seal(self) -> bytes:
        """The block as it goes to disk; nothing can be added to it any more."""
        return b"".join(self.sealed())

    def sealed(self) -> Iterator[bytes | bytearray]:
        """The same in pieces, of which one may be empty: then there was something else to do."""
        self.finish()
        self._pack()
        pieces = self._pieces
        pieces[-1] += self._packer.flush()
        fields = (sum(map(len, pieces)), self.raw_bytes, self.frames)
        crc = zlib.crc32(struct.pack("<III", *fields))
        for number, piece in enumerate(pieces):
            if number:
                yield b""
            crc = zlib.crc32(piece, crc)
        yield HEADER.pack(SYNC, *fields, crc) + pieces[0]
        yield from pieces[1:]

    def _append(self, body: bytes) -> None:
        self._raw += FRAME_LENGTH.pack(len(body))
        self._raw += body
        self.raw_bytes += FRAME_LENGTH.size + len(body)
        if len(self._raw) >= PACKED_AT_ONCE:
            self._pack()

    def _pack(self) -> None:
        if len(self._pieces[-1]) >= WRITTEN_AT_ONCE:
            self._pieces.append(bytearray())
        self._pieces[-1] += self._packer.compress(self._raw)
        self._raw.clear()

    def _begin(self, access: Access, path: Digests) -> None:
        """Store what stands before the digests of an access, and see which of them are left."""
        number = self.accesses
        last, shared, ends = self._known(path)
        back = number - last.number if last is not None else 0
        rest_bytes = (len(path) - shared) * DIGEST_BYTES
        head, tail = parted(access, back, shared, rest_bytes)
        nbytes = len(head) + rest_bytes + len(tail)
        self._raw += FRAME_LENGTH.pack(nbytes)
        self._raw += head
        self.raw_bytes += FRAME_LENGTH.size + nbytes
        self._path, self._at, self._tail = path, shared, tail
        if last is not None and ends and shared < len(path):
            last.number = number  # it goes on where the stretch ends, so it has all of that, too
            self._last = last

    def _known(self, path: Digests) -> tuple[_Stretch | None, int, bool]:
        """The last stretch that a path shares, up to where, and whether that is its end."""
        last: _Stretch | None = None
        at, length, ends = 0, len(path), False
        for _ in range(HOPS_MAX):
            stretch = self._stretches.get(path[at]) if at < length else None
            if stretch is None:
                break
            edge, last = stretch.edge, stretch
            shared = shared_pages(edge, path, at)
            at += shared
            ends = shared == len(edge)
        return last, at, ends


def parted(access: Access, back: int, shared: int, nbytes: int) -> tuple[bytes, bytes]:
    """A `Stored` access as msgpack: what stands before and after digests of `nbytes` bytes."""
    fields = (access.__struct_config__.tag, access.at_us, access.tokens, access.page_tokens)
    before = _encoder.encode(fields)[1:]
    if access.digests:
        access = msgspec.structs.replace(access, digests=b"")
    whole = _encoder.encode(Stored(access, back, shared))
    at = whole.index(before) + len(before)
    assert whole[at : at + 2] == b"\xc4\x00", "no bytes where the digests belong"
    if nbytes < 1 << 8:
        length = struct.pack(">BB", 0xC4, nbytes)
    elif nbytes < 1 << 16:
        length = struct.pack(">BH", 0xC5, nbytes)
    else:
        length = struct.pack(">BI", 0xC6, nbytes)
    return whole[:at] + length, whole[at + 2 :]


assert HEADER.size == 20
assert DIGEST_BYTES == 8
