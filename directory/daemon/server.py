"""The server: the streams' endpoint over one ROUTER socket, and over a lane each client may open.

Owns the socket and the lanes. It must never block and never let a frame raise out of `drain`; what
a frame means is the endpoint's to say (directory/protocol/endpoint.py).
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Final

import structlog
import zmq

from directory.core import limits
from directory.core.actions import AnyReply
from directory.core.errors import TreecoredError
from directory.core.ids import PoolId
from directory.daemon.lanes import Lanes
from directory.daemon.loop import Loop
from directory.daemon.runtime import StartError
from directory.protocol.endpoint import Ask, Endpoint

MESSAGES_PER_WAKE_MAX: Final = 256
EPOCH_BITS: Final = 63
PIECE_NS: Final = 200_000
"""So long messages of the router are carried out before others have their turn, and one more."""
QUEUED_PER_CLIENT_MAX: Final = min(4_096, limits.UNACKED_MESSAGES_MAX)
"""High-water mark of each client's pipe in both directions; what is beyond is sent again."""

log = structlog.get_logger("server")


class Server:
    """The ROUTER. `ask` carries out one new message; its answer comes through `answer`."""

    def __init__(
        self, path: Path, epoch: int, ask: Ask, counters: Counter[str], loop: Loop
    ) -> None:
        self._endpoint = Endpoint(epoch, ask, self._send, counters, _log_refusal)
        self._lanes = Lanes(loop, self._endpoint)
        self._unsure = True  # whether something waits at the router
        self._context = zmq.Context(io_threads=1)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, limits.MESSAGE_BYTES_MAX)
        self._router.setsockopt(zmq.SNDHWM, QUEUED_PER_CLIENT_MAX)
        self._router.setsockopt(zmq.RCVHWM, QUEUED_PER_CLIENT_MAX)
        try:
            self._router.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise StartError(f"the ZeroMQ socket {path} cannot be bound: {error}") from None

    # Registrations.

    @property
    def epoch(self) -> int:
        """The daemon's boot epoch, which every message must name."""
        return self._endpoint.epoch

    def open_pool(self, pool: PoolId, secret: bytes) -> None:
        """Let whoever has the secret speak for the pool."""
        self._endpoint.open_pool(pool, secret)

    def close_pool(self, pool: PoolId) -> None:
        """Forget a pool with its stream and its lane. Repeatable."""
        self._endpoint.close_pool(pool)
        self._lanes.close(pool)

    def open_lane(
        self, pool: PoolId, fds: Sequence[int], arena_bytes: int, *, thin: bool = False
    ) -> None:
        """Listen to a pool by a lane, too; the descriptors are taken over. `thin`: its mode.

        Raises a typed error, and then they stay the caller's.
        """
        self._lanes.open(pool, fds, arena_bytes, thin=thin)

    def begin_epoch(self, epoch: int) -> None:
        """Forget everything; messages of the epoch before are refused from now on."""
        self._endpoint.begin_epoch(epoch)
        self._lanes.close_all()

    def due_us(self) -> int | None:
        """When `on_time` has something to do next, or None."""
        return self._lanes.due_us

    def on_time(self, now_us: int) -> None:
        """Acknowledge what has waited for it long enough."""
        self._lanes.on_time(now_us)

    def answer(self, pool: PoolId, seq: int, body: AnyReply) -> None:
        """Send an answer and keep it until the client has said that it has it."""
        self._endpoint.answer(pool, seq, body)

    # The loop's side.

    def fileno(self) -> int:
        """The descriptor that announces changes (edge-triggered)."""
        return int(self._router.getsockopt(zmq.FD))

    def woken(self) -> None:
        """The descriptor has announced something."""
        self._unsure = True

    def pending(self) -> bool:
        """Whether a message waits to be read.

        The descriptor announces only what comes while nothing is sent or received; after that the
        socket itself has to be asked.
        """
        if self._unsure:
            # What waits goes on waiting until it is drained, however often somebody asks.
            self._unsure = bool(int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        return self._unsure

    def drain(self) -> None:
        """Carry out what has arrived, a bounded part of it, then acknowledge reports."""
        self._unsure = True
        begun = monotonic_ns()
        for _ in range(MESSAGES_PER_WAKE_MAX):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._endpoint.take(*frames)
            if monotonic_ns() - begun >= PIECE_NS:
                break
        self._endpoint.acknowledge()

    def close(self) -> None:
        """Close socket and lanes; unsent replies are dropped. Repeatable."""
        self._lanes.close_all()
        self._router.close(linger=0)
        self._context.term()

    def _send(self, identity: bytes, frame: bytes) -> bool:
        """Send if the pipe takes it; the client asks again for what it did not get."""
        self._unsure = True
        try:
            self._router.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EAGAIN: its pipe is full; EHOSTUNREACH: it is gone. Others are as little our end.
            log.debug("reply dropped", reason=zmq.strerror(error.errno or 0))
            return False
        return True


def new_epoch() -> int:
    """A number that no other boot has had, never 0."""
    return secrets.randbits(EPOCH_BITS) or 1


def _log_refusal(error: TreecoredError) -> None:
    log.debug("frame refused", code=error.code, reason=str(error))
