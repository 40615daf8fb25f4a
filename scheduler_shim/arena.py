"""The token arena: where a client writes a request's tokens and page lists, once, for its daemon.

Owns the memory and what lies where. A message then names an extent of it, so that its size does not
grow with the prompt. It must never write over anything that a message names which the daemon has
not acknowledged: the daemon would take other tokens for the message's.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from directory.protocol.messages import NOWHERE, Extent
from transfer.ipc.memory import SharedMemoryIPC

ARENA_BYTES: Final = 16 * 1024 * 1024
PLACED_BYTES_MIN: Final = 1024
"""What is shorter travels in its message."""
ALIGNMENT: Final = 64
BEGUN_BYTES: Final = 2 * 1024 * 1024
"""So much of it is used at first: what is written over and over again stays in the cores' caches.
More, where that does not hold what is named again or not acknowledged."""


class _Placed(msgspec.Struct, gc=False):
    """Something that lies in the arena. `seq`: the last message that names it; `again`: it is not
    the first one. Python's collector need not know of it: it leads to no object but its bytes."""

    data: bytes
    number: int
    offset: int
    seq: int
    again: bool = False


class TokenArena:
    """A ring: the oldest goes first, when its room is wanted and its messages are acknowledged."""

    def __init__(self, nbytes: int = ARENA_BYTES, *, warm: bool = True) -> None:
        """`warm`: no page of what is used at first is new when it is wanted, which takes some
        milliseconds now. Raises `ImportFailed` when there is no memory for it."""
        self._ipc = SharedMemoryIPC()
        self._mapping = self._ipc.create("treecored-arena", nbytes)
        self._view = self._mapping.view
        self._size = nbytes
        self._used = min(BEGUN_BYTES, nbytes)
        if warm:
            self._view[: self._used] = bytes(self._used)
        self._head = 0
        self._numbers = 0
        self._ring: deque[_Placed] = deque()
        self._known: dict[int, _Placed] = {}

    @property
    def fd(self) -> int:
        """The memory's descriptor."""
        return self._mapping.fd

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self._size

    def place(self, data: bytes, seq: int, acked: int) -> Extent:
        """Where the data lies for message `seq`; written now, unless this very object lies there.

        `NOWHERE` where it is short, or there is no room: it travels in the message then.
        """
        length = len(data)
        if length < PLACED_BYTES_MIN:
            return NOWHERE
        known = self._known.get(id(data))
        if known is not None and known.data is data:
            known.again |= seq > known.seq
            known.seq = max(known.seq, seq)
            return known.offset, length, known.number
        offset = self._room(-(-length // ALIGNMENT) * ALIGNMENT, acked)
        if offset < 0:
            return NOWHERE
        self._view[offset : offset + length] = data
        self._numbers += 1
        placed = _Placed(data, self._numbers, offset, seq)
        self._ring.append(placed)
        self._known[id(data)] = placed
        return offset, length, placed.number

    def close(self) -> None:
        """Give the memory back. Repeatable."""
        if not self._mapping.closed:
            self._ring.clear()
            self._known.clear()
            self._ipc.close(self._mapping)

    def _room(self, wanted: int, acked: int) -> int:
        """Take so many bytes at the head; their offset, or -1."""
        if wanted > self._size:
            return -1
        while self._ring:
            oldest = self._ring[0]
            if self._head > oldest.offset:  # free: from the head to the end, and up to the oldest
                if self._head + wanted <= self._used:
                    break
                if oldest.again and self._grow():
                    continue
                if wanted <= oldest.offset:
                    self._head = 0
                    break
            elif self._head + wanted <= oldest.offset:
                break
            if oldest.seq > acked:
                # More room can be made only at the end, not in the middle of a ring.
                if self._head > oldest.offset and self._grow():
                    continue
                return -1
            self._forget(self._ring.popleft())
        else:
            self._head = 0
            while wanted > self._used:
                self._grow()
        offset = self._head
        self._head += wanted
        return offset

    def _grow(self) -> bool:
        """Use twice as much of the arena; False where all of it is used."""
        if self._used == self._size:
            return False
        self._used = min(2 * self._used, self._size)
        return True

    def _forget(self, gone: _Placed) -> None:
        if self._known.get(id(gone.data)) is gone:
            del self._known[id(gone.data)]

    def __repr__(self) -> str:
        return f"<TokenArena {len(self._ring)} things in {self._size} bytes>"
