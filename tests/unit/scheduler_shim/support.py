"""Schedulers on a daemon in the same process, and how their tests drive them."""

from __future__ import annotations

from array import array

from directory.core.actions import Totals
from directory.core.errors import TreecoredError
from directory.core.events import Mode
from directory.core.namespace import NamespaceKey
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.pools import SharedPool
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.renamed import RenamedPool
from scheduler_shim.request import Phase
from scheduler_shim.session import DaemonAbsent
from scheduler_shim.worker_messages import Finished
from tests.unit.scheduler_shim.fake_daemon import (
    BYTES_PER_TOKEN,
    EPOCH,
    PAGE_SIZE,
    FakeDaemon,
    FakeLink,
)

__all__ = [
    "BYTES_PER_TOKEN",
    "EPOCH",
    "MODES",
    "PAGE_SIZE",
    "Cluster",
    "FakeDaemon",
    "FakeDial",
    "FakeLink",
    "Node",
    "phase_of",
    "run_until",
    "tokens",
]

MODES: tuple[Mode, ...] = ("mirrored", "thin")


class FakeDial:
    """Registers again, unless the daemon is absent; `refusal`: what it says instead."""

    def __init__(self, daemon: FakeDaemon, node: Node, mode: Mode, instance: str) -> None:
        self._daemon = daemon
        self._node = node
        self._instance = instance
        self.mode = mode
        self.tries_us: list[int] = []
        self.refusal: TreecoredError | None = None
        self.movers_gone = False

    def begin(self, mode: Mode) -> FakeDial:
        assert mode == self.mode
        self.tries_us.append(self._daemon.clock_us)
        if self._daemon.absent:
            raise DaemonAbsent("nobody is there")
        return self

    def step(self) -> DaemonClient | None:
        if self.refusal is not None:
            raise self.refusal
        if self._daemon.mapped_still(self._instance):
            return None  # it registers, and has no answer yet
        client, self._node.link = self._daemon.connect(
            self._node.pool,
            instance=self._instance,
            mode=self.mode,
            deadlines=self._node.deadlines,
        )
        return client

    def close(self) -> None:
        """Nothing stays open here."""

    def deserted(self) -> bool:
        return self.movers_gone and self._daemon.absent

    def now_us(self) -> int:
        return self._daemon.clock_us


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
        chunk_pages: int = 0,
        renamed: bool = False,
    ) -> None:
        self.deadlines = deadlines
        self.pool = (RenamedPool if renamed else SharedPool)(
            page_size=page_size, page_count=page_count, bytes_per_token=BYTES_PER_TOKEN
        )
        self.daemon = daemon
        client = None
        if daemon is not None:
            client, self.link = daemon.connect(
                self.pool, instance=instance, mode=mode, deadlines=deadlines
            )
            self.dial = FakeDial(daemon, self, mode, instance)
        self.client = client
        self.scheduler = ReferenceScheduler(
            self.pool,
            client,
            instance=instance,
            thin=mode == "thin",
            key=key,
            concurrency=concurrency,
            chunk_pages=chunk_pages,
            dial=self.dial if daemon is not None else None,
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

    @property
    def totals(self) -> Totals:
        """Evictable and protected pages of the mirror."""
        tree = self.scheduler.room.tree
        assert isinstance(tree, MirroredTree)
        return tree.mirror.totals

    @property
    def link_pool(self) -> int:
        """The number of the present registration."""
        client = self.scheduler.client
        assert client is not None
        return client.registration.pool

    def check(self) -> None:
        """Assert every invariant, here and at the daemon."""
        assert self.scheduler.check() == []
        if self.daemon is not None:
            assert self.daemon.check() == []

    def close(self) -> None:
        """End the session and give the memory back."""
        self.scheduler.close()
        if self.daemon is not None:
            self.daemon.run_copies()
        self.pool.close()


class Cluster:
    """Nodes that are closed at the end of a test."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.nodes: list[Node] = []

    def add(self, name: str, mode: Mode, **options: int | NamespaceKey) -> Node:
        """Register a scheduler under a name."""
        node = Node(self.daemon, instance=name, mode=mode, **options)  # type: ignore[arg-type]
        self.nodes.append(node)
        return node

    def close(self) -> None:
        """End every session."""
        for node in self.nodes:
            node.close()


def phase_of(node: Node, number: int) -> Phase:
    """Where a request in progress is."""
    return node.scheduler.requests[number].phase


def run_until(node: Node, number: int, phase: Phase) -> None:
    """Tick until a request is in a phase; the daemon answers, copies as it is set."""
    for _ in range(100):
        if number in node.scheduler.requests and phase_of(node, number) is phase:
            return
        node.tick()
        assert node.daemon is not None
        node.daemon.run()
    raise AssertionError(f"request {number} does not get to {phase}")


def tokens(*ids: int, size: int = PAGE_SIZE) -> bytes:
    """A whole page of equal tokens for each id."""
    return array("I", [i for i in ids for _ in range(size)]).tobytes()
