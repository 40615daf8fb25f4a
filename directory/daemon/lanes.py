"""Lanes: the fast way of the numbered stream's frames, one a client that has opened it.

Owns the sockets and the arenas that came with them. A lane is no session: its end ends nothing,
its client goes on by ZeroMQ. What a frame means is the endpoint's to say; here is said which of
them are questions, answered as they come, and which wait for their turn (turns.py) with all that
their client has sent behind them: a client's messages never overtake one another. It must never
block, and never believe anything that a client has written into its arena but the bytes themselves.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Sequence
from functools import partial
from time import monotonic_ns
from typing import Final

import structlog

from directory.core import limits
from directory.core.errors import BadMessage, TooLarge
from directory.core.events import (
    Evict,
    Evicted,
    Flush,
    Insert,
    Live,
    Lock,
    Match,
    Restore,
    Unlock,
)
from directory.core.ids import PoolId
from directory.daemon.loop import Loop
from directory.daemon.turns import Rank
from directory.protocol.ended import Ended
from directory.protocol.endpoint import Endpoint
from directory.protocol.messages import ClientBody, Envelope, Extent
from transfer.ipc.lane import FrameLane, LaneOver
from transfer.ipc.memory import SharedMemoryIPC

EXTENT_BYTES_MAX: Final = max(limits.TOKENS_BYTES_MAX, limits.PAGES_BYTES_MAX)
KNOWN_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of one client's arena, remembered by number: who waits in a queue is matched again and again."""
KNOWN_LENGTH_MIN: Final = 1024
"""What is shorter is copied each time: remembering it costs more memory than it has bytes."""
FRAMES_PER_TURN_MAX: Final = 256
"""Read out of one lane at once; they are carried out before more is read."""
PIECE_NS: Final = 200_000
"""So long messages of one lane are carried out before others have their turn, and one more."""
ACK_AFTER_US: Final = limits.RESEND_AFTER_MS * 1000 // 20
"""A release waits so long for an answer that acknowledges it, too: a message less."""
QUESTIONS: Final = frozenset({Match, Lock, Unlock, Ended})
"""They take a few microseconds to some hundred, and somebody waits for most of them."""
REPORTS: Final[frozenset[type[ClientBody]]] = frozenset({Insert, Evicted, Flush, Live})
"""A mirrored scheduler has done what it says, and waits for nothing."""
TOLD: Final[frozenset[type[ClientBody]]] = REPORTS | {Unlock, Ended}
"""Nobody waits for these, if the scheduler is a mirrored one..."""
TOLD_THIN: Final[frozenset[type[ClientBody]]] = TOLD - {Insert, Flush}
"""...or a thin one."""
COPIED_PER_TURN_MAX: Final = limits.MESSAGE_BYTES_MAX
"""Out of one arena, too, but for the message that reaches it: its frame is small, it is not."""
TOUCHED_BYTES: Final = 2 * 1024 * 1024
LANE_FDS: Final = 2
"""Descriptors of an `OpenLane`: one end of the socket pair, the arena's memory."""

log = structlog.get_logger("lanes")


class ClientLane:
    """One lane with its arena, whose memory cannot shrink: it can be read whatever it holds."""

    def __init__(
        self,
        loop: Loop,
        ipc: SharedMemoryIPC,
        pool: PoolId,
        fds: Sequence[int],
        nbytes: int,
        thin: bool,
    ) -> None:
        """Take the descriptors over; raises a typed error, and then they stay the caller's."""
        if len(fds) != LANE_FDS:
            raise BadMessage(f"a lane comes with {LANE_FDS} descriptors, not with {len(fds)}")
        if not 0 < nbytes <= limits.ARENA_BYTES_MAX:
            raise BadMessage(f"an arena has 1 to {limits.ARENA_BYTES_MAX} bytes, got {nbytes}")
        sock = _stream_socket(fds[0])
        try:
            self._mapping = ipc.import_fd(fds[1], nbytes)
        except BaseException:
            sock.detach()
            raise
        socket.close(fds[1])  # the mapping has its own
        # A client begins at the start: no page of that is new when it is wanted.
        bytes(self._mapping.view[: min(nbytes, TOUCHED_BYTES) : 4096])
        self.pool = pool
        self.thin = thin
        self.told = TOLD_THIN if thin else TOLD
        self._loop = loop
        self._ipc = ipc
        self._nbytes = nbytes
        self.frames = FrameLane(sock)
        self.serving = self.closed = False
        self.head: Envelope | None = None
        """The oldest message that was received and is not carried out, once it was looked at."""
        self.left: deque[bytes] = deque()
        """Frames that were received behind it."""
        self.put_off = False
        """The oldest is no question, and waits for its turn."""
        self.last: type[ClientBody] | None = None
        """What was carried out last."""
        self.follows = False
        """After the last match a release came by itself."""
        self.copied = 0
        """Bytes that this turn's messages had copied out of the arena."""
        self._known: dict[int, bytes] = {}
        self._known_bytes = 0

    def read(self, extent: Extent) -> bytes:
        """Copy a part of the arena out; raises `BadMessage` for one that is not all in it, and
        `TooLarge` for one that is longer than any message's, before anything is copied.

        What has a number is copied once, as long as there is room to remember it.
        """
        offset, length, number = extent
        known = self._known.get(number)
        if known is not None and len(known) == length:
            return known
        end = offset + length
        if offset < 0 or length < 0 or end > self._nbytes:
            raise BadMessage(f"bytes {offset} to {end} of an arena of {self._nbytes} bytes")
        if length > EXTENT_BYTES_MAX:
            raise TooLarge(f"{length} bytes of an arena, at most {EXTENT_BYTES_MAX}")
        data = bytes(self._mapping.view[offset:end])
        self.copied += length
        if number and length >= KNOWN_LENGTH_MIN and number not in self._known:
            self._known[number] = data
            self._known_bytes += length
            while self._known_bytes > KNOWN_BYTES_MAX:
                oldest = next(iter(self._known))
                self._known_bytes -= len(self._known.pop(oldest))
        return data

    def send(self, frame: bytes) -> bool:
        """Send a reply; False where the client reads nothing, or is gone."""
        frames = self.frames
        if self.serving:
            return frames.hold(frame)
        sent = frames.send(frame)
        if frames.want_write:
            self._loop.want_write(frames.fileno(), True)
        return sent

    def send_held(self) -> None:
        """Send what was answered while its frames were carried out."""
        frames = self.frames
        frames.send_held()
        if frames.want_write:
            self._loop.want_write(frames.fileno(), True)

    def close(self) -> None:
        """Let go of socket and memory."""
        self.closed = True
        self._loop.unwatch(self.frames.fileno())
        self.frames.close()
        self._ipc.close(self._mapping)


class Lanes:
    """All lanes, by pool."""

    def __init__(self, loop: Loop, endpoint: Endpoint) -> None:
        self._loop = loop
        self._endpoint = endpoint
        self._ipc = SharedMemoryIPC()
        self._lanes: dict[PoolId, ClientLane] = {}
        self.due_us: int | None = None
        """When what nobody waits for is to be acknowledged at the latest, or None."""

    def open(self, pool: PoolId, fds: Sequence[int], arena_bytes: int, *, thin: bool) -> None:
        """Take a lane into use; the descriptors are the lane's from here on.

        Raises a typed error, and then they stay the caller's.
        """
        if pool in self._lanes:
            raise BadMessage("this session has opened its lane already")
        lane = ClientLane(self._loop, self._ipc, pool, fds, arena_bytes, thin)
        self._lanes[pool] = lane
        self._endpoint.open_lane(pool, lane)
        self._loop.watch(lane.frames.fileno(), partial(self._serve, lane))

    def close(self, pool: PoolId) -> None:
        """Let go of a lane. Repeatable."""
        lane = self._lanes.pop(pool, None)
        if lane is not None:
            self._endpoint.close_lane(pool)
            lane.close()

    def close_all(self) -> None:
        """Let go of every lane."""
        for pool in list(self._lanes):
            self.close(pool)

    def on_time(self, now_us: int) -> None:
        """Acknowledge what has not come to be by an answer."""
        if self.due_us is not None and now_us >= self.due_us:
            self.due_us = None
            self._endpoint.acknowledge()

    def __len__(self) -> int:
        return len(self._lanes)

    def _serve(self, lane: ClientLane, events: int) -> None:
        """Answer the questions that have come, a bounded part of them, as far as nothing before
        them waits for its turn. Who sends what is no message at all goes on by ZeroMQ."""
        frames = lane.frames
        if events & select.EPOLLOUT and frames.flush():
            self._loop.want_write(frames.fileno(), False)
        if lane.put_off:
            return
        if not (lane.head or lane.left) and not self._receive(lane):
            return
        self._carry_out(lane, questions_only=True)
        if lane.follows and lane.last is Match and not (lane.closed or lane.head or lane.left):
            # What is released is said behind the match, and has come meanwhile: so it is no turn of
            # its own. Where it has not it is not looked for again before it was one.
            if self._receive(lane) and lane.left:
                self._carry_out(lane, questions_only=True)
            else:
                lane.follows = False

    def _receive(self, lane: ClientLane) -> bool:
        """Read what has come; False where the lane is over."""
        try:
            lane.left.extend(lane.frames.receive(FRAMES_PER_TURN_MAX))
        except LaneOver as over:
            log.debug("lane over", pool=lane.pool, reason=str(over))
            self.close(lane.pool)
            return False
        return True

    def _turn(self, lane: ClientLane) -> None:
        """Its turn has come: carry out what was put off, and what came behind it."""
        lane.put_off = False
        self._carry_out(lane, questions_only=False)

    def _carry_out(self, lane: ClientLane, *, questions_only: bool) -> None:
        endpoint, pool, left = self._endpoint, lane.pool, lane.left
        begun, taken, broken = monotonic_ns(), 0, False
        reports = not (questions_only or lane.thin)
        lane.copied = 0
        # What is answered to reports goes back in one piece: it wakes the client once.
        lane.serving = True
        while lane.head is not None or left:
            envelope = lane.head
            if envelope is None:
                lane.head = envelope = endpoint.read_lane(pool, left.popleft())
                if envelope is None:
                    broken = True
                    break
            if questions_only and type(envelope.body) not in QUESTIONS:
                break
            if taken and (lane.copied >= COPIED_PER_TURN_MAX or monotonic_ns() - begun >= PIECE_NS):
                break
            lane.head = None
            kind = type(envelope.body)
            if kind is Unlock and lane.last is Match and not taken:
                lane.follows = True
            lane.last = kind
            taken += 1
            reports = reports and kind in REPORTS
            waits = endpoint.take_lane(pool, envelope)
            if lane.closed:
                return  # its registration has ended over this message
            if waits:
                self._loop.asked = True
                lane.send_held()
            elif kind not in lane.told:
                self._loop.waited_for = True
        if taken:
            self._loop.reported = self._loop.reported or reports
            endpoint.acknowledge_soon(pool)
            if endpoint.owing and self.due_us is None:
                self.due_us = begun // 1000 + ACK_AFTER_US
        lane.serving = False
        lane.send_held()
        if broken:
            log.debug("lane over", pool=pool, reason="a frame that is no message")
            self.close(pool)
        else:
            self._come_back(lane)

    def _come_back(self, lane: ClientLane) -> None:
        """See that what is left is carried out, though nothing more may come."""
        frames = lane.frames
        if lane.head is not None and type(lane.head.body) not in QUESTIONS:
            lane.put_off = True
            rank = _rank(lane.head.body, thin=lane.thin)
            self._loop.later(frames.fileno(), rank, partial(self._turn, lane))
        elif lane.head is not None or lane.left or frames.more:
            self._loop.call_again(frames.fileno())


def _rank(body: ClientBody, *, thin: bool) -> Rank:
    """What a message that is no question has. A thin pool's scheduler does nothing before it has
    the answer; a mirrored one has done what it reports."""
    waits = isinstance(body, Restore | Evict) or (thin and isinstance(body, Insert | Flush))
    return Rank.RESTORES if waits else Rank.REPORTS


def _stream_socket(fd: int) -> socket.socket:
    """The descriptor as a socket, if it is one of the right kind."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise BadMessage(f"the lane's descriptor is no socket: {error}") from None
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        sock.detach()
        raise BadMessage("a lane is one end of a pair of unix stream sockets")
    return sock
