"""What the tests and an engine's process say to one another: JSON, one message a packet.

Owns the messages. They pass over a socket pair of type SOCK_SEQPACKET, so that a message is a
packet and the end of either side is an end of file. Both sides run this file, the tests in the
project's environment and the engine in SGLang's, so it needs msgspec alone.
"""

import socket

import msgspec

BYTES_MAX = 160_000
"""A packet must fit into a socket's default send buffer (208 KiB)."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """Make an engine. Sent to a nursery together with the engine's end of a new socket pair."""

    environ: dict[str, str]
    arguments: dict[str, object]
    log: str


class Started(msgspec.Struct, tag=True, frozen=True):
    """The nursery's answer: the process, which is the leader of its own session."""

    pid: int


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Compute one request. `id` names it for the answer and, as SGLang's rid, for an abort."""

    id: str
    tokens: list[int]
    new: int
    """Output tokens, exactly: the end-of-sequence token is ignored, the most likely one taken."""
    extra_key: str | None = None
    cache_salt: str | None = None
    lora: str | None = None
    stream: bool = False
    """Say when each token came."""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Give a request up, wherever it is. It is answered all the same."""

    id: str


class Flush(msgspec.Struct, tag=True, frozen=True):
    """Empty the cache, as `/flush_cache` does."""

    id: str


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Load other weights of the same shape from a folder."""

    id: str
    path: str


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load a LoRA adapter from a folder and name it. Answered with SGLang's id for it."""

    id: str
    name: str
    path: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End in an orderly way."""


Command = Generate | Abort | Flush | UpdateWeights | LoadAdapter | Stop


class Up(msgspec.Struct, tag=True, frozen=True):
    """The engine serves; or, from a nursery, it can start engines."""

    version: str
    pids: tuple[int, ...] = ()
    """The scheduler processes."""


class Output(msgspec.Struct, tag=True, frozen=True):
    """A request has ended."""

    id: str
    tokens: list[int]
    cached: int
    """Prompt tokens that were not computed."""
    details: dict[str, object] | None = None
    """SGLang's split of `cached` by tier, where it gives one."""
    finish: str = ""
    """Why it ended: "length", "abort" and so on."""
    came: tuple[float, ...] = ()
    """Seconds from the order's arrival to each piece of output, if the order wanted to know."""


class Done(msgspec.Struct, tag=True, frozen=True):
    """Another command has ended."""

    id: str
    success: bool
    text: str = ""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A command raised."""

    id: str
    error: str


Report = Up | Output | Done | Failed

_COMMANDS: "msgspec.json.Decoder[Command]" = msgspec.json.Decoder(Command)
_REPORTS: "msgspec.json.Decoder[Report]" = msgspec.json.Decoder(Report)
_STARTS = msgspec.json.Decoder(Start)
_STARTEDS = msgspec.json.Decoder(Started)


def packed(message: msgspec.Struct) -> bytes:
    """The packet of a message."""
    packet = msgspec.json.encode(message)
    if len(packet) > BYTES_MAX:
        raise ValueError(f"{type(message).__name__} of {len(packet)} bytes")
    return packet


def send(sock: socket.socket, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
    """Send one message, whole."""
    packet = packed(message)
    if fds:
        socket.send_fds(sock, [packet], list(fds))
    else:
        sock.send(packet)


def command(packet: bytes) -> Command:
    """The command in a packet."""
    return _COMMANDS.decode(packet)


def report(packet: bytes) -> Report:
    """The report in a packet."""
    return _REPORTS.decode(packet)


def start(packet: bytes) -> Start:
    """The order to a nursery, or to a driver that was started alone."""
    return _STARTS.decode(packet)


def started(packet: bytes) -> Started:
    """A nursery's answer to it."""
    return _STARTEDS.decode(packet)
