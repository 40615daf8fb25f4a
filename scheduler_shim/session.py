"""Registration: how a scheduler's pool becomes known to a daemon.

Owns the handshake on the session socket and nothing after it: the open session belongs to the
link, because its end is the end of the registration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace

from directory.core.errors import ProtocolError, TreecoredError, error_classes
from directory.core.events import Mode
from directory.core.ids import PoolId
from directory.protocol.codec import decode_session_reply, encode
from directory.protocol.ended import Wanted
from directory.protocol.messages import (
    Hello,
    Register,
    Registered,
    SessionRefused,
    SessionReply,
    Welcome,
)
from directory.protocol.version import VERSION_MAX, VERSION_MIN
from scheduler_shim.pools import Pool
from transfer.ipc.channel import FdChannel, close_fds

SESSION_NAME: Final = "session.sock"
SOFTWARE: Final = "treecored reference scheduler"


class DaemonAbsent(ProtocolError):
    """No daemon listens in the runtime folder, or it went away while it was spoken to.

    It never travels on the wire, so it has no code of its own.
    """


class NobodyListens(DaemonAbsent):
    """Nobody listens in the runtime folder at all."""


class Registration(NamedTuple):
    """What a daemon gave a pool. `epoch`: the daemon's boot; `secret` proves the connection;
    `ended`: what it wants to hear of ended requests; `lane`: whether it takes a lane."""

    pool: PoolId
    generation: int
    epoch: int
    secret: bytes
    endpoint: str
    ended: Wanted = ""
    lane: bool = False


def register(
    runtime_dir: Path,
    pool: Pool,
    *,
    instance: str,
    mode: Mode,
    deadline_s: float,
    world_size: int = 1,
    rank: int = 0,
    software: str = SOFTWARE,
) -> tuple[FdChannel, Registration]:
    """Say hello and hand the pool over; returns the open session.

    Raises `DaemonAbsent`, or the typed error with which the daemon refused. Each of the three
    steps has the deadline.
    """
    path = runtime_dir / SESSION_NAME
    try:
        channel = FdChannel.connect(str(path), deadline_s)
    except OSError as error:
        raise DaemonAbsent(f"no daemon listens at {path}: {error}; start one there") from error
    try:
        welcome = _ask(channel, hello(software), (), deadline_s)
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"the daemon answered Hello with {type(welcome).__name__}")
        message = register_message(
            pool, instance=instance, mode=mode, world_size=world_size, rank=rank
        )
        message, fds = answer_welcome(message, pool, welcome)
        answer = _ask(channel, encode(message), fds, deadline_s)
        if not isinstance(answer, Registered):
            raise ProtocolError(f"the daemon answered Register with {type(answer).__name__}")
    except BaseException:
        channel.close()
        raise
    registration = Registration(
        answer.pool,
        answer.generation,
        welcome.epoch,
        answer.secret,
        answer.endpoint,
        answer.ended,
        answer.lane,
    )
    return channel, registration


def hello(software: str = SOFTWARE) -> bytes:
    """The first frame of a session. `software` is for the daemon's log."""
    return encode(Hello(VERSION_MIN, VERSION_MAX, software))


def register_message(
    pool: Pool, *, instance: str, mode: Mode, world_size: int = 1, rank: int = 0
) -> Register:
    """The message that hands a pool over; its descriptors are `pool.fds`.

    `pool` is the memory of rank `rank`, one of the `world_size` that make up the instance.
    """
    return Register(
        instance,
        pool.fingerprint,
        mode,
        pool.packed_layout(),
        pool.packed_handles(),
        world_size,
        rank,
        pool.packed_sync(),
        pool.named,
    )


def answer_welcome(message: Register, pool: Pool, welcome: Welcome) -> tuple[Register, list[int]]:
    """What is said to a daemon that has welcomed: the registration and its descriptors, with a
    staging slab where the daemon stages and the pool has one."""
    staging = pool.begin_staging(welcome.staging_below)
    # Not the message's own: those were made while the last registration's slab was still offered.
    layout, handles = pool.packed_layout(), pool.packed_handles()
    return replace(message, layout=layout, handles=handles, staging=staging), pool.fds


def raise_refusal(code: str, message: str) -> None:
    """Raise a wire error as the class that has its code (`TreecoredError` for an unknown one)."""
    raise error_classes().get(code, TreecoredError)(message)


def _ask(
    channel: FdChannel, message: bytes, fds: list[int] | tuple[()], deadline_s: float
) -> SessionReply:
    try:
        payload, received = channel.call(message, fds, deadline_s=deadline_s)
    except (ProtocolError, OSError) as error:
        raise DaemonAbsent(f"the daemon did not answer in a session: {error}") from error
    close_fds(received)
    reply = decode_session_reply(payload)
    if isinstance(reply, SessionRefused):
        raise_refusal(reply.code, reply.message)
    return reply
