"""The simulated network between clients and the daemon: frames that get lost, doubled and late.

Owns the frames under way. `SimLink` is a client's end and implements `scheduler_shim.link.Link`;
the other end is the daemon's `on_frame`. It interprets no frame. With `faulty` off every frame
arrives once, in order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from directory.protocol.codec import decode_envelope
from tests.simulation.heap import Heap
from tests.simulation.options import Options


class Host(Protocol):
    """The daemon's end."""

    alive: bool

    def on_frame(self, link: SimLink, identity: bytes, frame: bytes) -> None:
        """A frame has arrived from a connection."""
        ...

    def on_session_end(self, link: SimLink) -> None:
        """The client's process has closed the session, or is dead."""
        ...


class Network:
    """Carries frames both ways."""

    def __init__(self, heap: Heap, rng: random.Random, options: Options) -> None:
        self.faulty = True
        self.frames = 0
        self.lost = 0
        self._heap = heap
        self._rng = rng
        self._options = options
        self._identities = 0
        self.heir: Callable[[], Host | None] = lambda: None
        """The boot that listens now."""
        self.links: dict[object, SimLink] = {}
        """Every process's latest connection."""

    def identity(self) -> bytes:
        """A connection's identity, never used twice."""
        self._identities += 1
        return b"%d" % self._identities

    def happens(self, fault: str) -> bool:
        """Whether a fault strikes at this occasion."""
        return self.faulty and self._rng.random() < self._options.rate(fault)

    def to_daemon(self, link: SimLink, frame: bytes) -> None:
        """Carry a frame to the daemon of a link."""
        for delay_us in self._delays(link, 0):
            self._heap.after(delay_us, self._at_daemon, link, link.identity, frame)

    def to_client(self, link: SimLink, identity: bytes, frame: bytes) -> None:
        """Carry a frame to the client of a link."""
        for delay_us in self._delays(link, 1):
            self._heap.after(delay_us, self._at_client, link, identity, frame)

    def delay_us(self) -> int:
        """How long something small takes."""
        return 1 + int(self._rng.expovariate(1.0) * self._options.network_us)

    def _delays(self, link: SimLink, way: int) -> list[int]:
        self.frames += 1
        if self.happens("loss"):
            self.lost += 1
            return []
        delays = []
        for _ in range(2 if self.happens("duplicate") else 1):
            delay_us = self.delay_us()
            if self.happens("late"):
                delay_us += int(self._rng.expovariate(1.0) * 300_000)
            else:
                # A connection keeps its order, unless a fault breaks it.
                at = max(self._heap.now_us + delay_us, link.latest_us[way])
                link.latest_us[way] = at
                delay_us = at - self._heap.now_us
            delays.append(delay_us)
        return delays

    def _at_daemon(self, link: SimLink, identity: bytes, frame: bytes) -> None:
        if identity != link.identity:
            return
        if link.host.alive:
            link.host.on_frame(link, identity, frame)
        elif self._outlives(link):
            # ZeroMQ connects to an address: what a dead boot did not take goes to the next one.
            heir = self.heir()
            if heir is not None:
                heir.on_frame(link, identity, frame)

    def _at_client(self, link: SimLink, identity: bytes, frame: bytes) -> None:
        if link.open and identity == link.identity:
            link.inbox.append(frame)
            link.wake()
        elif self._outlives(link):
            # What a dead boot has said reaches its client when that belongs to the next one.
            latest = self.links[link.owner]
            if latest.open and latest.host is not link.host:
                latest.inbox.append(frame)
                latest.wake()

    def _outlives(self, link: SimLink) -> bool:
        """Whether a frame outlives the boot that it was for, or from."""
        if link.host.alive or not self._options.rate("dead_boot"):
            return False
        return self.happens("dead_boot")


class SimLink:
    """One session and connection of one process with one boot of the daemon."""

    def __init__(
        self, network: Network, heap: Heap, host: Host, wake: Callable[[], None], owner: object
    ) -> None:
        self.host = host
        self.owner = owner
        self.pool = 0
        self.identity = network.identity()
        self.inbox: list[bytes] = []
        self.open = True
        self.latest_us = [0, 0]
        self.wake = wake
        self.sent: dict[int, tuple[int, int]] = {}
        """When a message was said first, and how often."""
        self._alive = True
        network.links[owner] = self
        self._network = network
        self._heap = heap

    def send(self, frame: bytes) -> bool:
        """Send now or not at all."""
        seq = decode_envelope(frame).seq
        first_us, times = self.sent.get(seq, (self._heap.now_us, 0))
        self.sent[seq] = (first_us, times + 1)
        if not self.open or self._network.happens("full"):
            return False
        self._network.to_daemon(self, frame)
        return True

    def receive(self) -> list[bytes]:
        """Frames that have arrived."""
        frames, self.inbox = self.inbox, []
        return frames

    def wait(self, timeout_us: int | None, fds: Sequence[int] = ()) -> None:
        """Nothing blocks here: the model scheduler gives way to the heap instead."""
        raise AssertionError("a simulated process must not block")

    def now_us(self) -> int:
        """The simulated clock."""
        return self._heap.now_us

    @property
    def alive(self) -> bool:
        """Whether no end of file has been seen on the session."""
        return self._alive

    def close(self) -> None:
        """End the session; the daemon sees it a little later."""
        if self.open:
            self.open = False
            self._heap.after(self._network.delay_us(), self._tell_end)

    def reconnect(self) -> None:
        """The connection is made anew beneath: another identity, and what was under way is lost."""
        self.identity = self._network.identity()

    def end_of_file(self) -> None:
        """The daemon's process is gone."""
        self._alive = False
        self.wake()

    def _tell_end(self) -> None:
        if self.host.alive:
            self.host.on_session_end(self)
