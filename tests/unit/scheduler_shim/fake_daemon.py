"""A daemon inside the test's own process, behind the client's link: real Directory, real engine.

Time stands still unless somebody waits. Frames can be dropped and copies held, so that every
deadline, loss and late answer can be brought about exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from directory.core.actions import (
    Action,
    Answer,
    MoreToClose,
    Refused,
    ReleasePool,
    SubmitCopy,
)
from directory.core.actions import Registered as RegisteredAction
from directory.core.directory import Directory
from directory.core.events import (
    Asked,
    Body,
    CloseMore,
    CopyDone,
    Event,
    Mode,
    MoverLost,
    PoolClosed,
    PoolRegistered,
)
from directory.protocol.codec import decode_envelope, decode_reply, encode
from directory.protocol.messages import (
    Acked,
    Attach,
    Attached,
    DaemonBody,
    Envelope,
    ReplyEnvelope,
)
from directory.protocol.stream import Arrival, ReceiveStream
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.pools import SharedPool
from scheduler_shim.session import Registration
from transfer.device.cpu import CpuDevice
from transfer.engine import Engine, PoolReleased
from transfer.host_tier import HostTierMemory
from transfer.imports import ImportedPool
from transfer.ipc.memory import MemoryHandle, SharedMemoryIPC

EPOCH = 77
SECRET = b"secret"
PAGE_SIZE = 4
BYTES_PER_TOKEN = 24
"""With 2 layers: chunks of 6 bytes a token, 24 bytes a page and buffer."""


class FakeLink:
    """A `Link` to a `FakeDaemon`."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.alive = True
        self.to_daemon: deque[bytes] = deque()
        self.to_client: deque[bytes] = deque()
        self.waits: list[int | None] = []

    def send(self, frame: bytes) -> bool:
        self.to_daemon.append(frame)
        return True

    def receive(self) -> list[bytes]:
        frames = list(self.to_client)
        self.to_client.clear()
        return frames

    def wait(self, timeout_us: int | None, fds: Sequence[int] = ()) -> None:
        self.waits.append(timeout_us)
        self.daemon.run()
        if not self.to_client and timeout_us is not None:
            self.daemon.clock_us += timeout_us

    def silent(self) -> bool:
        """Whether nothing is to be heard; a lane knows it by one look."""
        return self.alive and not self.to_client

    def now_us(self) -> int:
        return self.daemon.clock_us

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self.daemon.close_session(self)


class FakeClient(DaemonClient):
    """A client that may know, as it does by a lane, that nothing is to be said or to be heard."""

    @property
    def silent(self) -> bool:
        assert isinstance(self._link, FakeLink)
        return not self.open_count and self._link.silent()


class _Peer:
    """One registration as the daemon sees it."""

    def __init__(self, link: FakeLink, pool: int) -> None:
        self.link = link
        self.pool = pool
        self.attached = False
        self.stream = ReceiveStream()


class FakeDaemon:
    """`drop_request`, `drop_reply`: say which bodies get lost. `gone`: whose answers are lost and
    kept no longer when they are asked for again. `hold_copies`: none progresses."""

    def __init__(self, *, host_pages: int = 64, page_bytes: int = BYTES_PER_TOKEN * 4) -> None:
        self.clock_us = 1_000_000
        self._sizes = host_pages * page_bytes, max(8, host_pages) * page_bytes
        self.directory = Directory(host_bytes=self._sizes[0], segment_bytes=self._sizes[1])
        self.absent = False
        self.tier = HostTierMemory.create(
            max(1, host_pages) * page_bytes, max(8, host_pages) * page_bytes
        )
        self.engine = Engine(CpuDevice(), lambda: self.clock_us)
        self.engine.open_tier(self.tier)
        self.ipc = SharedMemoryIPC()
        self.epoch = EPOCH
        self.hold_copies = False
        self.drop_request: Callable[[Body], bool] = lambda _: False
        self.drop_reply: Callable[[DaemonBody], bool] = lambda _: False
        self.gone: Callable[[Body], bool] = lambda _: False
        self.heard: list[Body] = []
        self.said: list[DaemonBody] = []
        self.copies: list[SubmitCopy] = []
        self.fail_copies: Callable[[SubmitCopy], bool] = lambda _: False
        self._peers: dict[int, _Peer] = {}
        self._instances: dict[int, str] = {}
        self._mapped_still: dict[int, str] = {}
        self._gone: set[tuple[int, int]] = set()
        self._tokens = 0

    def connect(
        self,
        pool: SharedPool,
        *,
        instance: str = "a",
        mode: Mode = "mirrored",
        deadlines: Deadlines | None = None,
    ) -> tuple[DaemonClient, FakeLink]:
        """Register and attach a pool."""
        self._tokens += 1
        actions = self.directory.handle(
            PoolRegistered(
                self._tokens,
                self.clock_us,
                instance,
                pool.fingerprint,
                pool.page_size,
                pool.page_count,
                pool.page_bytes,
                mode,
            )
        )
        (registered,) = actions
        assert isinstance(registered, RegisteredAction), registered
        handles = msgspec.msgpack.decode(pool.packed_handles(), type=tuple[MemoryHandle, ...])
        self.engine.add_pool(
            ImportedPool.open(
                registered.pool,
                pool.layout,
                handles,
                pool.fds,
                memory=self.ipc,
                tables=self.ipc,
                page_table=pool.named,
            )
        )
        self._instances[registered.pool] = instance
        link = FakeLink(self)
        self._peers[registered.pool] = _Peer(link, registered.pool)
        client = FakeClient(
            link,
            Registration(registered.pool, registered.generation, self.epoch, SECRET, "nowhere"),
            deadlines,
        )
        client.attach()
        return client, link

    def mapped_still(self, instance: str) -> bool:
        """Whether the mover may still write into an earlier pool of the instance; as long as it
        does, a daemon does not answer its next registration."""
        return instance in self._mapped_still.values()

    def run(self) -> None:
        """Carry out every message that has arrived and every copy that is not held."""
        for peer in list(self._peers.values()):
            while peer.link.to_daemon and peer.link.alive:
                self._take(peer, decode_envelope(peer.link.to_daemon.popleft()))
        if not self.hold_copies:
            self.run_copies()

    def run_copies(self) -> None:
        """Let every copy end."""
        while not self.engine.idle:
            events = self.engine.step()
            for event in events:
                if isinstance(event, PoolReleased):
                    self._mapped_still.pop(event.pool, None)
                else:
                    self.tell(event)
            if not events and self.engine.only_fences:
                break

    def lose_mover(self) -> None:
        """The mover dies; the next one knows the pools and none of the copies."""
        while not self.engine.idle:
            for event in self.engine.step():
                if isinstance(event, PoolReleased):  # what is mapped dies with it
                    self._mapped_still.pop(event.pool, None)
        self.tell(MoverLost(self.clock_us, "killed by the test"))

    def tell(self, event: Event) -> None:
        """Hand an event to the directory and do what it says."""
        self._do(self.directory.handle(event))

    def say(self, pool: int, seq: int, body: DaemonBody, *, epoch: int = 0) -> None:
        """Send anything to a pool's client."""
        peer = self._peers[pool]
        peer.link.to_client.append(
            encode(ReplyEnvelope(epoch or self.epoch, peer.stream.acked, seq, body))
        )

    def close_session(self, link: FakeLink) -> None:
        """A client is gone."""
        for pool, peer in list(self._peers.items()):
            if peer.link is link:
                del self._peers[pool]
                self.tell(PoolClosed(pool, self.clock_us))

    def die(self) -> None:
        """The daemon and its mover are gone; nobody answers until `restart`."""
        for peer in self._peers.values():
            peer.link.alive = False
        self._close_engine()
        self._peers.clear()
        self._mapped_still.clear()
        self.absent = True

    def restart(self) -> None:
        """Another boot: an empty directory, a new mover, the same host memory."""
        self.directory = Directory(host_bytes=self._sizes[0], segment_bytes=self._sizes[1])
        self.engine = Engine(CpuDevice(), lambda: self.clock_us)
        self.engine.open_tier(self.tier)
        self.epoch += 1
        self.absent = False

    def close(self) -> None:
        """Give the memory back."""
        self.hold_copies = False
        self._close_engine()
        self.tier.close()

    def _close_engine(self) -> None:
        for pool in list(self._peers):
            self.engine.release_pool(pool)
        while not self.engine.idle:
            self.engine.step()
        self.engine.close()

    def check(self) -> list[str]:
        """The directory's own check."""
        return self.directory.check()

    def _take(self, peer: _Peer, envelope: Envelope) -> None:
        body = envelope.body
        if isinstance(body, Attach):
            assert body.secret == SECRET
            peer.attached = True
            self._reply(peer, 0, Attached())
            return
        if self.drop_request(body):
            return
        arrival = peer.stream.arrive(envelope.seq, envelope.answered)
        if arrival is Arrival.NEW:
            self.heard.append(body)
            before = len(peer.link.to_client)
            if self.gone(body):
                self._gone.add((peer.pool, envelope.seq))
            self.tell(Asked(peer.pool, envelope.seq, self.clock_us, body))
            if len(peer.link.to_client) == before:
                self._reply(peer, 0, Acked())
            return
        kept = peer.stream.again(envelope.seq)
        if kept is not None:
            if not self.drop_reply(decode_reply(kept).body):
                peer.link.to_client.append(kept)
        else:
            self._reply(peer, 0, Acked())

    def _reply(self, peer: _Peer, seq: int, body: DaemonBody) -> None:
        if (peer.pool, seq) in self._gone:
            body = Refused("answer_gone", "dropped by a limit")
        frame = encode(ReplyEnvelope(self.epoch, peer.stream.acked, seq, body))
        if seq:
            peer.stream.keep(seq, frame)
            self.said.append(body)
        if not self.drop_reply(body):
            peer.link.to_client.append(frame)

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Answer):
                peer = self._peers.get(action.pool)
                if peer is not None:
                    self._reply(peer, action.seq, action.body)
            elif isinstance(action, SubmitCopy):
                self.copies.append(action)
                if self.fail_copies(action):
                    self.tell(CopyDone(action.op, "failed", "made to fail"))
                else:
                    self.engine.submit(action)
            elif isinstance(action, MoreToClose):
                self.tell(CloseMore())
            elif isinstance(action, ReleasePool):
                self._mapped_still[action.pool] = self._instances[action.pool]
                self.engine.release_pool(action.pool)
