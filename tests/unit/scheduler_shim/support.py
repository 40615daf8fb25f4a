"""A daemon inside the test's own process, behind the client's link: real Directory, real engine.

Time stands still unless somebody waits. Frames can be dropped and copies held, so that every
deadline, loss and late answer can be brought about exactly.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from directory.core.actions import Action, Answer, ReleasePool, SubmitCopy
from directory.core.actions import Registered as RegisteredAction
from directory.core.directory import Directory
from directory.core.events import Asked, Body, CopyDone, Event, Mode, PoolClosed, PoolRegistered
from directory.core.namespace import NamespaceKey
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
from scheduler_shim.client import DaemonClient, Deadlines
from scheduler_shim.pools import SharedPool
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.session import Registration
from scheduler_shim.worker_messages import Finished
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

    def now_us(self) -> int:
        return self.daemon.clock_us

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self.daemon.close_session(self)


class _Peer:
    """One registration as the daemon sees it."""

    def __init__(self, link: FakeLink, pool: int) -> None:
        self.link = link
        self.pool = pool
        self.attached = False
        self.stream = ReceiveStream()


class FakeDaemon:
    """`drop_request`, `drop_reply`: say which bodies get lost. `hold_copies`: none progresses."""

    def __init__(self, *, host_pages: int = 64, page_bytes: int = BYTES_PER_TOKEN * 4) -> None:
        self.clock_us = 1_000_000
        self.directory = Directory(
            host_bytes=host_pages * page_bytes, segment_bytes=max(8, host_pages) * page_bytes
        )
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
        self.heard: list[Body] = []
        self.said: list[DaemonBody] = []
        self.copies: list[SubmitCopy] = []
        self.fail_copies: Callable[[SubmitCopy], bool] = lambda _: False
        self._peers: dict[int, _Peer] = {}
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
            )
        )
        link = FakeLink(self)
        self._peers[registered.pool] = _Peer(link, registered.pool)
        client = DaemonClient(
            link,
            Registration(registered.pool, registered.generation, EPOCH, SECRET, "nowhere"),
            deadlines,
        )
        client.attach()
        return client, link

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
            for event in self.engine.step():
                if not isinstance(event, PoolReleased):
                    self.tell(event)
            if self.engine.only_fences:
                break

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

    def close(self) -> None:
        """Give the memory back."""
        for pool in list(self._peers):
            self.engine.release_pool(pool)
        self.hold_copies = False
        while not self.engine.idle:
            self.engine.step()
        self.engine.close()
        self.tier.close()

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
            elif isinstance(action, ReleasePool):
                self.engine.release_pool(action.pool)


class Node:
    """One scheduler with its pool, client and link, on a daemon."""

    def __init__(
        self,
        daemon: FakeDaemon | None,
        *,
        instance: str = "a",
        mode: Mode = "mirrored",
        page_count: int = 16,
        page_size: int = PAGE_SIZE,
        concurrency: int = 1,
        key: NamespaceKey | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.pool = SharedPool(
            page_size=page_size, page_count=page_count, bytes_per_token=BYTES_PER_TOKEN
        )
        self.daemon = daemon
        client = None
        if daemon is not None:
            client, self.link = daemon.connect(
                self.pool, instance=instance, mode=mode, deadlines=deadlines
            )
        self.client = client
        self.scheduler = ReferenceScheduler(
            self.pool,
            client,
            instance=instance,
            thin=mode == "thin",
            key=key,
            concurrency=concurrency,
        )
        self.finished: dict[int, Finished] = {}

    def tick(self, times: int = 1) -> None:
        """Tick, and look at everything after each."""
        for _ in range(times):
            for record in self.scheduler.tick():
                assert record.number not in self.finished
                self.finished[record.number] = record
            self.check()

    def settle(self, limit: int = 10_000) -> None:
        """Go on until nothing is in progress and nothing is left to be said."""
        for _ in range(limit):
            self.tick()
            client = self.scheduler.client
            if self.scheduler.idle and (client is None or not client.open_count):
                return
            if not self.scheduler.moved and client is not None:
                client.wait(None if client.open_count else 1_000)
        raise AssertionError(f"{self.scheduler!r} does not come to rest: {self.client!r}")

    def serve(self, number: int, tokens: bytes, output: bytes = b"") -> Finished:
        """Run one request to its end."""
        self.scheduler.submit(number, tokens, output)
        self.settle()
        return self.finished[number]

    def check(self) -> None:
        """Assert every invariant, here and at the daemon."""
        assert self.scheduler.check() == []
        if self.daemon is not None:
            assert self.daemon.check() == []

    def close(self) -> None:
        """End the session and give the memory back."""
        if self.scheduler.client is not None:
            self.scheduler.client.close()
        if self.daemon is not None:
            self.daemon.run_copies()
        self.pool.close()


def tokens(*ids: int, size: int = PAGE_SIZE) -> bytes:
    """A whole page of equal tokens for each id."""
    return array("I", [i for i in ids for _ in range(size)]).tobytes()
