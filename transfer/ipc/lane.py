"""FrameLane: frames over a connected AF_UNIX stream socket, as few system calls a frame as can be.

Owns the socket, the framing and the queues of both directions. It knows nothing of what frames
mean, carries no descriptors, and never blocks. Frames arrive whole and in order or the lane is
over: what was on its way then is lost, and the numbered stream above says it again.

A frame is its length (u32, little-endian) and its bytes.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
from collections import deque
from typing import Final

from directory.core.errors import ProtocolError
from directory.core.limits import MESSAGE_BYTES_MAX

HEADER: Final = struct.Struct("<I")
_length = HEADER.unpack_from
BUFFER_BYTES: Final = 256 * 1024
QUEUED_BYTES_MAX: Final = 4 * MESSAGE_BYTES_MAX
HELD_BYTES_MAX: Final = 64 * 1024


class LaneOver(ProtocolError):
    """The peer has closed its end, or has broken the framing."""


class FrameLane:
    """One end. Not thread-safe; the owner polls `fileno` and calls in."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected AF_UNIX stream socket and make it non-blocking."""
        sock.setblocking(False)
        self._sock = sock
        self._send = sock.send
        self._receive_into = sock.recv_into
        self._look = select.poll()  # cheaper than a read that finds nothing
        self._look.register(sock, select.POLLIN)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._filled = 0
        self.more = False
        """Whether frames that have arrived were left for the next `receive`."""
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.held_lost = 0
        """Frames that were to be sent together with others and could not be."""

    @classmethod
    def pair(cls) -> tuple[FrameLane, socket.socket]:
        """A lane in this process and the socket of its other end."""
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(mine), other

    def fileno(self) -> int:
        """The descriptor to poll; -1 once closed."""
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        """Whether this end was closed."""
        return self._sock.fileno() < 0

    @property
    def want_write(self) -> bool:
        """Whether to poll for writing, too, and call `flush` when it is possible."""
        return bool(self._unsent)

    @property
    def holds(self) -> bool:
        """Whether a frame is held, or was and could not be sent."""
        return bool(self._held) or self.held_lost > 0

    def hold(self, frame: bytes) -> bool:
        """Send together with what comes next; False where it cannot be sent.

        The peer is woken once for all of it. `send_held` sends what nothing came after.
        """
        length = len(frame)
        if length > MESSAGE_BYTES_MAX or self._held_bytes + length > HELD_BYTES_MAX:
            return self.send(frame)
        self._held.append(HEADER.pack(length))
        self._held.append(frame)
        self._held_bytes += length
        return True

    def send_held(self) -> bool:
        """Send what is held; False where it cannot be, and all of it is lost."""
        if not self._held:
            return True
        data, held = b"".join(self._held), len(self._held) // 2
        self._held.clear()
        self._held_bytes = 0
        sent = self._send_data(data)
        if not sent:
            self.held_lost += held
        return sent

    def send(self, frame: bytes) -> bool:
        """Send now, or as soon as the peer reads; False where it cannot be, and nothing was sent.

        That is: the lane is over, the frame is larger than any, or the peer reads nothing.
        """
        length = len(frame)
        if length > MESSAGE_BYTES_MAX:
            return False
        data = HEADER.pack(length) + frame
        if self._held:
            self._held.append(data)
            return self.send_held()
        return self._send_data(data)

    def _send_data(self, data: bytes) -> bool:
        sent = 0
        if self._unsent:
            if self._unsent_bytes + len(data) > QUEUED_BYTES_MAX:
                return False
        else:
            try:
                sent = self._send(data)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                return False
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
            self._unsent_bytes += len(data) - sent
        return True

    def silent(self) -> bool:
        """Whether nothing is left to send or to hand out, and nothing has come: one system call."""
        if self._held or self._unsent or self._filled or self.more:
            return False
        return not self._look.poll(0)

    def flush(self) -> bool:
        """Send what is queued as far as the peer takes it; say whether all is gone."""
        while self._unsent:
            data = self._unsent[0]
            try:
                sent = self._send(data)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                self._unsent.clear()  # whoever reads next learns that it is over
                break
            self._unsent_bytes -= sent
            if sent < len(data):
                self._unsent[0] = data[sent:]
            else:
                self._unsent.popleft()
        return True

    def receive(self, most: int = sys.maxsize) -> list[bytes]:
        """Frames that have arrived, by one read: there may be more. Raises `LaneOver`.

        With `most`, those beyond it stay here (`more`): polling does not tell of them, and the next
        call hands out of them and reads nothing.
        """
        filled = self._filled
        if self.more:
            return self._cut(filled, most)
        try:
            count = self._receive_into(self._buffer[filled:] if filled else self._buffer)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise LaneOver(f"the lane cannot be read: {error}") from None
        if not count:
            raise LaneOver("the peer has closed the lane")
        if not filled and count > HEADER.size:
            end = HEADER.size + _length(self._buffer)[0]
            if end == count:  # one frame, and nothing else, as nearly always
                return [bytes(self._buffer[HEADER.size : end])]
        return self._cut(filled + count, most)

    def close(self) -> None:
        """Close the socket; what is queued is lost. Repeatable."""
        self._sock.close()
        self.more = False
        self._unsent.clear()
        self._unsent_bytes = 0

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd {self.fileno()}"
        return f"<FrameLane {state}, {self._unsent_bytes} bytes unsent>"

    def _cut(self, filled: int, most: int) -> list[bytes]:
        frames: list[bytes] = []
        buffer, start = self._buffer, 0
        self.more = False
        while filled - start >= HEADER.size:
            if len(frames) >= most:
                self.more = True
                break
            (length,) = _length(buffer, start)
            if length > MESSAGE_BYTES_MAX:
                raise LaneOver(f"a frame of {length} bytes, at most {MESSAGE_BYTES_MAX}")
            end = start + HEADER.size + length
            if end > filled:
                if end - start > len(buffer):
                    self._buffer = memoryview(bytearray(end - start))
                break
            frames.append(bytes(buffer[start + HEADER.size : end]))
            start = end
        left = filled - start
        if left:
            # Copied first: the two places may overlap.
            self._buffer[:left] = bytes(buffer[start:filled])
        elif len(self._buffer) > BUFFER_BYTES:
            self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._filled = left
        return frames
