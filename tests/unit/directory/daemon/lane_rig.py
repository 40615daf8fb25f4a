"""A server with a lane of one pool, and the client's side of that."""

import os
from collections import Counter
from pathlib import Path

from directory.core.actions import Done
from directory.core.events import Body, Match, Unlock
from directory.core.ids import PoolId
from directory.core.namespace import NamespaceKey
from directory.daemon.loop import Loop
from directory.daemon.server import Server
from directory.protocol.codec import decode_reply, encode
from directory.protocol.messages import ClientBody, Envelope, Extent, ReplyEnvelope
from transfer.ipc.lane import FrameLane
from transfer.ipc.memory import SharedMemoryIPC

EPOCH, POOL = 42, 3
ARENA_BYTES = 64 * 1024
KEY = NamespaceKey()


class Rig:
    """A server whose pool 3 has a lane, and the client's side of that."""

    def __init__(self, path: Path, arena_bytes: int = ARENA_BYTES) -> None:
        self.arena_bytes = arena_bytes
        self.asked: list[Body] = []
        self.counters: Counter[str] = Counter()
        self.loop = Loop()
        self.server = Server(path, EPOCH, self.ask, self.counters, self.loop)
        self.server.open_pool(POOL, b"s" * 32)
        self.ipc = SharedMemoryIPC()
        self.memory = self.ipc.create("treecored-test", arena_bytes)
        self.lane, other = FrameLane.pair()
        self.fds = other.detach(), os.dup(self.memory.fd)

    def open(self, *, thin: bool = False) -> None:
        self.server.open_lane(POOL, self.fds, self.arena_bytes, thin=thin)

    def ask(self, pool: PoolId, seq: int, body: Body) -> None:
        self.asked.append(body)
        if not isinstance(body, Match | Unlock):
            self.server.answer(pool, seq, Done())

    def say(self, seq: int, body: ClientBody, tokens: Extent = (0, 0, 0)) -> None:
        self.lane.send(encode(Envelope(EPOCH, seq, 0, body, tokens)))

    def another(self, pool: PoolId) -> FrameLane:
        """Another pool's lane."""
        self.server.open_pool(pool, b"s" * 32)
        lane, other = FrameLane.pair()
        fds = other.detach(), os.dup(self.memory.fd)
        self.server.open_lane(pool, fds, self.arena_bytes)
        return lane

    def turn(self) -> list[ReplyEnvelope]:
        """What the server answers to all that was said."""
        self.loop.turn(1)
        return [decode_reply(frame) for frame in self.lane.receive()]

    def match(self, seq: int, tokens: Extent) -> Body | list[ReplyEnvelope]:
        """What the directory is asked, or what the refusal says."""
        self.asked.clear()
        self.say(seq, Match("r", 1, KEY, b""), tokens)
        replies = self.turn()
        return self.asked[0] if self.asked else replies

    def close(self) -> None:
        self.server.close()
        self.loop.close()
        self.lane.close()
        self.ipc.close(self.memory)
