"""One incarnation of a scheduler's process: its memory, its GPU, its client and its turns.

Owns what every step of a scheduler needs: pages and their allocator, the conversation with the
daemon, registration and degraded operation. What it does with them stands in `scheduler.py`. It
repeats what the reference scheduler does, with one addition: it registers again after a loss and
republishes what its pool holds.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Generator

from directory.core.actions import AnyReply
from directory.core.events import Lock, Match, Request
from directory.core.ids import NO_LEASE
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.mirror import Mirror
from scheduler_shim.pools import PageAllocator
from scheduler_shim.session import DaemonAbsent, Registration
from scheduler_shim.spans import SpanTable
from tests.simulation.daemon import SimDaemon
from tests.simulation.lockstep import Shadow
from tests.simulation.memory import PoolMemory, make_layout
from tests.simulation.network import SimLink
from tests.simulation.own import MirroredOwn, Own, ThinOwn, Wait
from tests.simulation.ranks import Follower, GroupStreams, GroupWords, LeadingClient
from tests.simulation.republish import reports
from tests.simulation.request import ModelRequest, Phase
from tests.simulation.streams import Streams
from tests.simulation.world import World

TIMER_US = 50_000
SAID_AGAIN_US = 800_000
CONNECT_AGAIN_US = 30_000


class Process:
    """One incarnation."""

    def __init__(self, world: World, index: int, incarnation: int, rng: random.Random) -> None:
        options = world.options
        self.world = world
        self.index = index
        self.name = f"s{index}.{incarnation}"
        self.instance = f"s{index}"
        self.rng = rng
        self.dead = False
        self.stopped_until_us = 0
        variant = options.fingerprints[index]
        ranks = options.world_size(index)
        self.fingerprint = (
            b"model %d of %d" % (variant, ranks) if ranks > 1 else b"model %d" % variant
        )
        layout = make_layout(
            options.layouts[index],
            page_size=options.page_size,
            page_count=options.pool_pages[index],
            layers=options.layers + variant,
        )
        self.memory = PoolMemory(layout)
        self.followers: list[Follower] = []
        self.streams = Streams(world.heap, rng, options, self.memory, self.wake, self.wrong)
        if ranks > 1:
            self._make_group(ranks, rng)
        self.allocator = PageAllocator(layout.page_count)
        self.spans = SpanTable(self.memory.words, layout.page_count)
        self.client: DaemonClient | None = None
        self.link: SimLink | None = None
        self.own: Own | None = None
        self.thin = options.modes[index] == "thin"
        self.active: dict[int, ModelRequest] = {}
        self.replies: dict[int, AnyReply | None] = {}
        self.asked_as: dict[int, tuple[str, int]] = {}
        self.asking: dict[int, ModelRequest] = {}
        self.landing: dict[int, tuple[array[int], ModelRequest, int, int]] = {}
        self.landed: list[tuple[int, AnyReply]] = []
        self.quarantined: list[int] = []
        self.connecting: DaemonClient | None = None
        self.losses: list[str] = []
        self.registrations = 0
        self._link: SimLink | None = None
        self._awake = False
        self._timer = False
        self._again = False
        self._turns = self._life()
        self.connect()
        if self.thin:
            world.heap.after(rng.randrange(100_000, 400_000), self._begin_without)
        else:
            self.own = self._new_mirrored()
            self.wake()

    # Ranks.

    def _make_group(self, ranks: int, rng: random.Random) -> None:
        layout = self.memory.layout
        self.followers += [
            Follower(self, rank, layout, random.Random(f"{rng.random()}/{rank}"))
            for rank in range(1, ranks)
        ]
        self.memory.words = GroupWords(layout.page_count + 1, self.followers)
        heap, options = self.world.heap, self.world.options
        self.streams = GroupStreams(
            self.followers, heap, rng, options, self.memory, self.wake, self.wrong
        )

    def all_streams(self) -> list[Streams]:
        """Every rank's GPU."""
        return [self.streams, *(follower.streams for follower in self.followers)]

    @property
    def idle(self) -> bool:
        """Whether everything launched has run, on every rank."""
        return all(streams.idle for streams in self.all_streams())

    # Turns.

    def wake(self) -> None:
        """Take a turn soon."""
        if not self._awake and not self.dead:
            self._awake = True
            self.world.heap.after(self.rng.randrange(1, 100), self._woken)

    def _woken(self) -> None:
        if self.dead:
            return
        now = self.world.heap.now_us
        if now < self.stopped_until_us:
            self.world.heap.after(self.stopped_until_us - now, self._woken)
            return
        self._awake = False
        next(self._turns)
        if not self._timer and self.needs_timer():
            self._timer = True
            self.world.heap.after(TIMER_US, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = False
        self.wake()

    def needs_timer(self) -> bool:
        """Whether something may be due without anything arriving."""
        waiting = self.client is not None and self.client.open_count > 0
        return waiting or self.connecting is not None or bool(self.active)

    def _life(self) -> Wait:
        while True:
            if self.own is not None:
                yield from self.tick()
            else:
                self.take_answers()
            yield

    def tick(self) -> Wait:
        """One batch of work."""
        yield from ()
        raise NotImplementedError

    # Pages.

    def free(self, pages: bytes | array[int] | list[int]) -> None:
        """Give pages back to the allocator."""
        if pages:
            self.allocator.free(array("I", pages) if isinstance(pages, list) else pages)

    def _new_mirrored(self) -> MirroredOwn:
        layout = self.memory.layout
        mirror = Mirror(
            self.spans,
            fingerprint=self.fingerprint,
            page_size=layout.page_size,
            page_count=layout.page_count,
            page_bytes=layout.page_bytes,
        )
        return MirroredOwn(self, mirror)

    # The conversation.

    def call(self, body: Request) -> Generator[None, None, AnyReply | None]:
        """Ask and wait; the process does nothing else meanwhile."""
        client = self.client
        seq = client.ask(body) if client is not None else 0
        if isinstance(body, Match | Lock):
            self.asked_as[seq] = (body.request, body.attempt)
        while seq and self.client is client:
            self.take_answers()
            if seq in self.replies:
                return self.replies.pop(seq)
            yield
        return None

    def take_answers(self) -> None:
        """Take in what has arrived, and look whether the daemon is lost."""
        self._finish_connecting()
        client = self.client
        if client is None:
            return
        for seq, reply in client.poll():
            if seq not in self.landing:
                self.replies[seq] = reply
            elif reply is not None:
                self.landed.append((seq, reply))
            else:
                # Its targets stay in use until the answer comes; the request does without.
                request = self.landing[seq][1]
                if request.seq == seq:
                    request.seq = 0
                    request.phase = Phase.READY
        for refused in client.refused:
            self.wrong(f"a report was refused: {refused.code}: {refused.message}")
        client.refused.clear()
        self.look_for_loss()

    def look_for_loss(self) -> bool:
        """Go on without the daemon if it is lost."""
        client = self.client
        if client is None or not client.lost:
            return False
        self.losses.append(client.lost)
        self._check_resending(client)
        self.world.heap.note(f"{self.name} lost the daemon: {client.lost}")
        self.client = None
        for targets, _, _, _ in self.landing.values():
            self.quarantined.extend(targets)
        self.landing.clear()
        self.landed.clear()
        self.asking.clear()
        self.asked_as.clear()
        self.replies.clear()
        for request in self.active.values():
            request.seq, request.receipt = 0, NO_LEASE
            if request.phase in (Phase.MATCHING, Phase.RESTORING):
                request.phase = Phase.READY
        if not isinstance(self.own, MirroredOwn):
            self._take_tree_over()
        self.world.heap.after(self.rng.randrange(1, CONNECT_AGAIN_US), self.connect)
        return True

    def _check_resending(self, client: DaemonClient) -> None:
        """A message without acknowledgement was said again before the daemon was given up."""
        if "in a row" not in client.lost or self.link is None:
            return
        first_us, times = self.link.sent.get(client._stream.acked + 1, (self.world.heap.now_us, 0))
        waited_us = self.world.heap.now_us - max(first_us, self.stopped_until_us)
        if times == 1 and waited_us > SAID_AGAIN_US:
            self.wrong(f"message {client._stream.acked + 1} was said once and never again")

    def _take_tree_over(self) -> None:
        """Thin without a daemon: void all reads, keep what rows use, free the rest."""
        self.spans.give_up_all()
        self.own = own = self._new_mirrored()
        used = set(self.quarantined)
        for request in self.active.values():
            used.update(request.row)
            if request.tree_pages:
                own.insert(request, request.tree_pages, self.streams.fence(), keep=True)
        used.update(own.tree_pages())
        self.free([page for page in self.allocator.used() if page not in used])

    # Registration.

    def connect(self) -> None:
        """Try to register the pool with whichever daemon listens now."""
        if self.dead or self.client is not None or self.connecting is not None:
            return
        daemon = self.world.daemon
        if daemon is None or not daemon.alive:
            self._later()
            return
        network, heap = self.world.network, self.world.heap
        link = SimLink(network, heap, daemon, self.wake, self)
        self._link = link
        heap.after(network.delay_us(), self._register, daemon, link, self._mode())
        for follower in self.followers:
            follower.disconnect()
            rank_link = SimLink(network, heap, daemon, self.wake, follower)
            follower.link = rank_link
            heap.after(network.delay_us(), follower.register, daemon, rank_link, self._mode())

    def _mode(self) -> str:
        return "thin" if self.thin and self.own is None else "mirrored"

    def _register(self, daemon: SimDaemon, link: SimLink, mode: str) -> None:
        if self.dead:
            return
        daemon.register(
            link,
            self.memory,
            instance=self.instance,
            fingerprint=self.fingerprint,
            mode="thin" if mode == "thin" else "mirrored",
            answer=lambda link, registration: self._registered(link, registration, mode),
            refuse=self._refused,
            world_size=1 + len(self.followers),
        )
        self.world.heap.after(2_000_000, self._give_up_registering, link)

    def _refused(self, code: str) -> None:
        self.world.heap.note(f"{self.name} was refused: {code}")
        self._link = None
        self._later()

    def _give_up_registering(self, link: SimLink) -> None:
        if self._link is link and self.connecting is None and self.client is None:
            link.close()
            self._link = None
            self._later()

    def _later(self) -> None:
        if not self._again:
            self._again = True
            self.world.heap.after(CONNECT_AGAIN_US, self._connect_again)

    def _connect_again(self) -> None:
        self._again = False
        if self._link is None or not self._link.open or not self._link.alive:
            self.connect()

    def _registered(self, link: SimLink, registration: Registration, mode: str) -> None:
        if self.dead or link is not self._link or not link.open:
            link.close()
            return
        if mode == "thin" and self.own is not None:
            link.close()
            self._later()
            return
        options = self.world.options
        deadlines = Deadlines(options.call_ms, options.restore_ms, 5_000, options.misses_max)
        if self.rng.random() < options.rate("tight_deadlines") and self.world.faulty:
            deadlines = deadlines._replace(call_ms=20, restore_ms=30)
        if self.followers:
            self.connecting = LeadingClient(
                link, registration, deadlines, self.followers, self.wrong
            )
        else:
            self.connecting = DaemonClient(link, registration, deadlines)
        self.wake()

    def _finish_connecting(self) -> None:
        """Take the client into use once the daemon knows its connection."""
        client = self.connecting
        if client is None:
            return
        try:
            if not client.try_attach():
                return
        except DaemonAbsent:
            self.connecting = None
            self.losses.append(client.lost)
            self._later()
            return
        self.connecting = None
        self.client = client
        self.link = self._link
        self.registrations += 1
        # The answer to a registration says that no mover writes any more into memory that this
        # process registered before.
        self.free(self.quarantined)
        self.quarantined = []
        if self.own is None:
            self.own = ThinOwn(self, self.spans, Shadow(self.memory, self.fingerprint))
        elif isinstance(self.own, MirroredOwn):
            for report in reports(self.own.mirror, self.spans.word(0)):
                client.report(report)
        self.wake()

    def _begin_without(self) -> None:
        """No daemon took a thin scheduler in: it begins mirrored."""
        if self.own is None and not self.dead and self.connecting is None:
            self.own = self._new_mirrored()
            self.wake()

    # Ends.

    def die(self) -> None:
        """The process is gone at once, and its GPU work with it."""
        self.dead = True
        self.streams.dead = True
        for follower in self.followers:
            follower.die()
        for link in (self._link, self.link):
            if link is not None:
                link.close()

    def wrong(self, problem: str) -> None:
        """Something that must never happen did."""
        self.world.wrong(self.name, problem)

    def describe(self) -> str:
        """State in a line."""
        mode = self.own.mode if self.own is not None else "none"
        return (
            f"{self.name}: {mode}, client {self.client}, connecting {self.connecting}, "
            f"landing {self.landing}, active {list(self.active.values())}"
        )
