"""FdChannel: frames with file descriptors over a connected AF_UNIX stream socket.

Owns the framing, the queues of both directions and every descriptor until it is delivered: one
that cannot be delivered is closed, never leaked. It knows nothing of what frames mean and never
blocks, except in the `call` and `wait_*` helpers, which are for clients and take a deadline.

A frame is a little-endian header (payload length u32, descriptor count u8) and the payload.
Descriptors ride on the frame's first byte. The kernel keeps them in order and never lets one read
span two frames' descriptors, so a queue matches them to frames again.
"""

import array
import errno
import os
import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from directory.core.errors import BadMessage, CapacityError, ProtocolError, TooLarge, TooMany
from directory.core.limits import FDS_PER_FRAME_MAX, MESSAGE_BYTES_MAX

HEADER = struct.Struct("<IB")
RECEIVE_BYTES = 256 * 1024
RECEIVES_PER_CALL_MAX = 64
QUEUED_BYTES_MAX = 4 * MESSAGE_BYTES_MAX
SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h, Linux 6.5

Frame = tuple[bytes, list[int]]


class ChannelClosed(ProtocolError):
    """The peer has closed its end or is dead."""


class ChannelDeadline(ProtocolError):
    """No answer came before the deadline."""


class OutOfDescriptors(TooMany, ProtocolError):
    """This process has no room for the descriptors of a frame; the peer did nothing wrong.

    Some of them are lost, and with them the order of the channel: it is of no more use.
    """


class PeerCredentials(NamedTuple):
    """Who connected, as the kernel saw it at that time."""

    pid: int
    uid: int
    gid: int


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors that nobody will take."""
    for fd in fds:
        os.close(fd)


class FdChannel:
    """One end of a channel. Not thread-safe; the owner polls `fileno` and calls in."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        frame_bytes_max: int = MESSAGE_BYTES_MAX,
        queued_bytes_max: int = QUEUED_BYTES_MAX,
    ) -> None:
        """Take over a connected AF_UNIX stream socket and make it non-blocking."""
        sock.setblocking(False)
        self._sock = sock
        self._frame_bytes_max = frame_bytes_max
        self._queued_bytes_max = queued_bytes_max
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()  # fds here are our own dups
        self._unsent_bytes = 0
        self._received = bytearray()
        self._received_fds: deque[int] = deque()
        self._ready: deque[Frame] = deque()  # frames that `call` received beyond its answer
        self._end: ProtocolError | None = None

    @classmethod
    def pair(cls) -> "tuple[FdChannel, FdChannel]":
        """Two connected ends in this process."""
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(left), cls(right)

    @classmethod
    def connect(cls, path: str, deadline_s: float) -> "FdChannel":
        """Connect to a listening socket; raises `OSError` when nobody listens there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline_s)
            sock.connect(path)
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        """The descriptor to poll; -1 once closed."""
        return self._sock.fileno()

    @property
    def want_write(self) -> bool:
        """Whether to poll for writing, too, and call `flush` when it is possible."""
        return bool(self._unsent)

    @property
    def closed(self) -> bool:
        """Whether this end was closed."""
        return self._sock.fileno() < 0

    def peer_credentials(self) -> PeerCredentials:
        """Process, user and group of the peer at the time when it connected."""
        layout = struct.Struct("3i")
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
        return PeerCredentials(*layout.unpack(raw))

    def peer_pidfd(self) -> int:
        """A new pidfd of the peer; the caller closes it. `ChannelClosed` if it is gone.

        Older kernels (before 6.5) go by the peer's pid, which is safe while the peer, which holds
        the other end, lives; the caller watches for the end of the channel anyway.
        """
        try:
            raw = self._sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
            return int.from_bytes(raw, "little")
        except OSError:
            try:
                return os.pidfd_open(self.peer_credentials().pid)
            except OSError as error:
                raise ChannelClosed(f"the peer's process is gone: {error}") from error

    def send(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame now or as soon as the peer reads; the caller keeps its descriptors.

        Raises `TooLarge` for a frame beyond the limits, `CapacityError` when the peer has not
        read for so long that the queue is full, and `ChannelClosed`. Nothing is sent then.
        """
        if len(payload) > self._frame_bytes_max:
            raise TooLarge(f"frame of {len(payload)} bytes; at most {self._frame_bytes_max}")
        if len(fds) > FDS_PER_FRAME_MAX:
            raise TooLarge(f"frame with {len(fds)} descriptors; at most {FDS_PER_FRAME_MAX}")
        if self.closed:
            raise ChannelClosed("this end of the channel was closed")
        data = memoryview(HEADER.pack(len(payload), len(fds)) + payload)
        if self._unsent:
            if self._unsent_bytes + len(data) > self._queued_bytes_max:
                raise CapacityError(f"the peer has not read {self._unsent_bytes} queued bytes")
            sent = 0
        else:
            sent = self._send_some(data, fds)
        if sent < len(data):
            kept = [] if sent else [os.dup(fd) for fd in fds]
            self._unsent.append((data[sent:], kept))
            self._unsent_bytes += len(data) - sent

    def flush(self) -> bool:
        """Send what is queued as far as the peer takes it; say whether all is gone."""
        while self._unsent:
            data, fds = self._unsent[0]
            sent = self._send_some(data, fds)
            if not sent:
                return False
            self._unsent_bytes -= sent
            close_fds(fds)
            if sent < len(data):
                self._unsent[0] = (data[sent:], [])
            else:
                self._unsent.popleft()
        return True

    def receive(self) -> list[Frame]:
        """Return the frames that have arrived; the caller owns their descriptors from then on.

        Raises `ChannelClosed` at the end of the channel, `BadMessage`/`TooLarge` on a broken
        frame and `OutOfDescriptors`, each after everything that came before it has been delivered;
        after a broken frame the channel is of no more use.
        """
        frames = list(self._ready)
        self._ready.clear()
        if self._end is None:
            try:
                self._receive_into(frames)
            except ProtocolError as error:
                self._end = error
                self._drop_received()
                # Keep the descriptor readable, so that whoever polls comes back for the error.
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RD)
        if not frames and self._end is not None:
            raise self._end
        return frames

    def call(self, payload: bytes, fds: Sequence[int] = (), *, deadline_s: float) -> Frame:
        """Send a frame and return the next one; raises `ChannelDeadline` when none came.

        Frames that arrive beside the answer are kept for `receive`, which no poll announces. A
        peer that has closed its end may have said why before: that is returned as the answer.
        """
        give_up = time.monotonic() + deadline_s
        try:
            self.send(payload, fds)
            self.wait_sent(give_up - time.monotonic())
        except ChannelClosed:
            # With nothing left to read this raises the same.
            self._ready.extend(self.receive())
            if not self._ready:
                raise
        return self.wait_frame(give_up - time.monotonic())

    def wait_sent(self, deadline_s: float) -> None:
        """Block until all queued bytes are sent; raises `ChannelDeadline`."""
        self._wait(self.flush, select.POLLOUT, deadline_s)

    def wait_frame(self, deadline_s: float) -> Frame:
        """Block until a frame is here and return it; raises `ChannelDeadline`."""

        def look() -> bool:
            if not self._ready:
                self._ready.extend(self.receive())
            return bool(self._ready)

        self._wait(look, select.POLLIN, deadline_s)
        return self._ready.popleft()

    def close(self) -> None:
        """Close the socket and every descriptor that was not delivered or sent. Repeatable."""
        self._sock.close()
        for _, fds in self._unsent:
            close_fds(fds)
        self._unsent.clear()
        self._unsent_bytes = 0
        self._drop_received()
        for _, fds in self._ready:
            close_fds(fds)
        self._ready.clear()
        self._end = ChannelClosed("this end of the channel was closed")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd {self.fileno()}"
        return f"<FdChannel {state}, {self._unsent_bytes} bytes unsent>"

    def _send_some(self, data: memoryview, fds: Sequence[int]) -> int:
        control = []
        if fds:
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        try:
            return self._sock.sendmsg([data], control, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed("the peer has closed the channel") from error

    def _receive_into(self, frames: list[Frame]) -> None:
        room = socket.CMSG_SPACE(FDS_PER_FRAME_MAX * array.array("i").itemsize)
        for _ in range(RECEIVES_PER_CALL_MAX):
            try:
                data, control, flags, _ = self._sock.recvmsg(
                    RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                data, control, flags = b"", [], 0
            for level, kind, raw in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds = array.array("i")
                    fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                    self._received_fds.extend(fds)
            if flags & socket.MSG_CTRUNC:
                why = _why_truncated(self._sock.fileno())
                if isinstance(why, OutOfDescriptors):
                    # Whole frames may have come in the same read, before the one that is lost.
                    self._received += data
                    with suppress(ProtocolError):
                        self._cut_frames(frames)
                raise why
            if not data:
                raise ChannelClosed("the peer has closed the channel")
            self._received += data
            self._cut_frames(frames)
            if len(data) < RECEIVE_BYTES and not control:
                return

    def _cut_frames(self, frames: list[Frame]) -> None:
        start = 0
        buffer = self._received
        declared = 0
        try:
            while len(buffer) - start >= HEADER.size:
                length, declared = HEADER.unpack_from(buffer, start)
                if length > self._frame_bytes_max or declared > FDS_PER_FRAME_MAX:
                    raise TooLarge(f"frame of {length} bytes with {declared} descriptors")
                end = start + HEADER.size + length
                if len(buffer) < end:
                    break
                if declared > len(self._received_fds):
                    raise BadMessage(f"frame without the {declared} descriptors it announces")
                payload = bytes(memoryview(buffer)[start + HEADER.size : end])
                frames.append((payload, [self._received_fds.popleft() for _ in range(declared)]))
                start = end
                declared = 0
        finally:
            del buffer[:start]
        # What is left is at most the beginning of one frame; only its descriptors may be here.
        partial = HEADER.size > len(buffer) > 0
        if len(self._received_fds) > (FDS_PER_FRAME_MAX if partial else declared):
            raise BadMessage("descriptors came that no frame announces")

    def _drop_received(self) -> None:
        close_fds(self._received_fds)
        self._received_fds.clear()
        self._received.clear()

    def _wait(self, done: Callable[[], bool], event: int, deadline_s: float) -> None:
        give_up = time.monotonic() + deadline_s
        poller = select.poll()
        poller.register(self, event)
        while not done():
            left_s = give_up - time.monotonic()
            if left_s <= 0:
                raise ChannelDeadline("the peer did not answer before the deadline")
            poller.poll(left_s * 1000 + 1)


def _why_truncated(fd: int) -> ProtocolError:
    """Why the kernel has thrown descriptors away: it says only that it has.

    It hands over as many as the process has room for; whether there is room is asked of it again.
    """
    try:
        os.close(os.dup(fd))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return OutOfDescriptors(
            f"descriptors came with a frame for which this process has no room (limit {soft}): "
            f"{error.strerror}; raise its limit of open files"
        )
    return BadMessage("more descriptors came with a frame than the channel takes")
