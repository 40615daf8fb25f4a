"""One boot of the simulated daemon: the real Directory and the streams, in a shell of plain calls.

Owns the directory, the endpoint, the sessions and the mover of one boot. It repeats what the
daemon's shell must do, in particular: a mover is lost only once it is dead; a registration is
answered only once nothing of the same instance's earlier pools is touched by the mover any more;
a boot does not serve before the movers of all earlier boots are dead.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from directory.core import limits
from directory.core.actions import (
    Action,
    Answer,
    Locked,
    Matched,
    MoreToClose,
    Registered,
    RegistrationRefused,
    ReleasePool,
    SubmitCopy,
)
from directory.core.directory import Directory
from directory.core.errors import InternalError
from directory.core.events import (
    Asked,
    Body,
    CloseMore,
    CopyDone,
    Event,
    Mode,
    MoverLost,
    PagesDamaged,
    PoolClosed,
    PoolRegistered,
)
from directory.core.ids import NO_LEASE, LeaseId, PoolId
from directory.protocol.codec import decode_envelope
from directory.protocol.endpoint import Endpoint
from scheduler_shim.session import Registration
from tests.simulation.checkers import Violation
from tests.simulation.heap import Heap
from tests.simulation.kept import Kept
from tests.simulation.memory import PoolMemory, SimTier
from tests.simulation.mover import Said, SimMover
from tests.simulation.network import Network, SimLink
from tests.simulation.options import Options
from transfer.engine import PoolReleased
from transfer.host_tier import TierShape
from transfer.messages import Imported

FRAMES_PER_TURN_MAX = 64
CLOSE_MORE_US = 40, 700, 9_000
SALT = 0x9D2C5680_3C6EF372
Observe = Callable[["SimDaemon", Event, list[Action]], None]
OnRegistered = Callable[[SimLink, Registration], None]
OnRefused = Callable[[str], None]


class Session:
    """One process's session. `pool` is 0 until the directory has taken it in."""

    def __init__(
        self,
        link: SimLink,
        instance: str,
        memory: PoolMemory,
        answer: OnRegistered,
        refuse: OnRefused,
    ) -> None:
        self.link = link
        self.instance = instance
        self.memory = memory
        self.answer = answer
        self.refuse = refuse
        self.pool: PoolId = 0
        self.generation = 0
        self.imported = False
        self.answered = False


class SimDaemon:
    """One boot. `observe` sees every event of the directory with its actions. `kept`: the host
    tier that outlives it, with its journal; None: its tier is new and dies with it."""

    def __init__(
        self,
        number: int,
        heap: Heap,
        rng: random.Random,
        options: Options,
        network: Network,
        observe: Observe,
        kept: Kept | None = None,
    ) -> None:
        self._heap = heap
        self._rng = rng
        self._options = options
        self._network = network
        self._observe = observe
        self.number = number
        self.alive = True
        self.faulty = True
        self.stopped_until_us = 0
        self.epoch = 1_000 + number
        self.counters: Counter[str] = Counter()
        cells, segment = options.host_cells, options.segment_cells
        self.kept = kept
        self.directory = Directory(
            host_bytes=cells,
            segment_bytes=segment,
            journal=SALT + number if kept else 0,
            closed_a_step=options.closed_a_step or limits.CLOSED_A_STEP_MAX,
        )
        if kept is not None:
            self.tier: SimTier | None = kept.tier
            kept.recover(self.directory)
        else:
            self.tier = SimTier(TierShape(cells, segment)) if cells else None
        self.endpoint = Endpoint(
            self.epoch,
            self._ask,
            self._send,
            self.counters,
            kept_bytes_max=options.kept_bytes or limits.KEPT_ANSWERS_BYTES_MAX,
        )
        self.mover: SimMover | None = None
        self.movers: list[SimMover] = []
        self.sessions: dict[PoolId, Session] = {}
        self.asking: SimLink | None = None
        """The connection whose frame is being carried out."""
        self.gone_receipts: set[LeaseId] = set()
        """Leases whose answers the clients can have no more."""
        self._receipts: dict[tuple[PoolId, int], LeaseId] = {}
        self._registering: dict[int, Session] = {}
        self._last_token = 0
        self._links: dict[bytes, SimLink] = {}
        self._inbox: list[tuple[SimLink, bytes, bytes]] = []
        self._awake = False
        self._releasing: dict[PoolId, str] = {}
        self._instances: dict[PoolId, str] = {}
        self._waiting: list[SubmitCopy] = []
        self.start_mover()

    # Processes.

    def start_mover(self) -> None:
        """Start a mover and tell it what it must know."""
        if not self.alive or self.mover is not None:
            return
        mover = SimMover(
            self._heap, self._rng, self._options, self._heard_from_mover, self.lose_mover
        )
        mover.device.faulty = self.faulty
        self.mover = mover
        self.movers.append(mover)
        if self.tier is not None:
            mover.open_tier(self.tier)
        for session in self.sessions.values():
            if session.pool in self._instances:
                mover.import_pool(session.pool, session.memory)
        waiting, self._waiting = self._waiting, []
        for copy in waiting:
            mover.submit(copy)

    def lose_mover(self) -> None:
        """The mover's process is dead; what it had said before still counts."""
        mover, self.mover = self.mover, None
        if mover is None or not self.alive:
            return
        assert not mover.alive, "a mover is lost only when it is dead"
        while mover.said:
            said = mover.said.popleft()
            if isinstance(said, CopyDone | PagesDamaged):
                self.tell(said)
        self._releasing.clear()
        self._waiting.clear()
        self.tell(MoverLost(self._heap.now_us, "killed"))
        for session in list(self.sessions.values()):
            self._answer_registration(session)
        self._heap.after(self._rng.randrange(1, 50_000), self.start_mover)

    def die(self) -> None:
        """The daemon's process is gone at once. Its mover is an orphan until it is killed."""
        self.alive = False
        for session in [*self.sessions.values(), *self._registering.values()]:
            self._heap.after(self._network.delay_us(), session.link.end_of_file)

    # Sessions.

    def register(
        self,
        link: SimLink,
        memory: PoolMemory,
        *,
        instance: str,
        fingerprint: bytes,
        mode: Mode,
        answer: OnRegistered,
        refuse: OnRefused,
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        """A process has connected to the session socket and hands its pool over."""
        if not self.alive:
            refuse("no daemon")
            return
        self._last_token += 1
        token = self._last_token
        self._registering[token] = Session(link, instance, memory, answer, refuse)
        layout = memory.layout
        self.tell(
            PoolRegistered(
                token,
                self._heap.now_us,
                instance,
                fingerprint,
                layout.page_size,
                layout.page_count,
                layout.page_bytes,
                mode,
                world_size,
                rank,
            )
        )

    def on_session_end(self, link: SimLink) -> None:
        """End of file on a session."""
        session = self.sessions.pop(link.pool, None)
        if session is None or session.link is not link:
            return
        self.endpoint.close_pool(session.pool)
        self.tell(PoolClosed(session.pool, self._heap.now_us))

    # Frames.

    def on_frame(self, link: SimLink, identity: bytes, frame: bytes) -> None:
        """A frame has arrived."""
        self._inbox.append((link, identity, frame))
        self._wake_in(self._rng.randrange(1, 30))

    def _wake_in(self, delay_us: int) -> None:
        if not self._awake:
            self._awake = True
            self._heap.after(delay_us, self._turn)

    def _turn(self) -> None:
        self._awake = False
        if not self.alive:
            return
        if self._heap.now_us < self.stopped_until_us:
            self._wake_in(self.stopped_until_us - self._heap.now_us)
            return
        for link, identity, frame in self._inbox[:FRAMES_PER_TURN_MAX]:
            self.asking = link
            self._links[identity] = link
            told = self.counters["answers_gone"]
            self.endpoint.take(identity, frame)
            if self.counters["answers_gone"] > told:
                seq = decode_envelope(frame).seq
                self.gone_receipts.add(self._receipts.get((link.pool, seq), NO_LEASE))
        self.asking = None
        del self._inbox[:FRAMES_PER_TURN_MAX]
        self.endpoint.acknowledge()
        if self._inbox:
            self._wake_in(10)

    def _send(self, identity: bytes, frame: bytes) -> bool:
        link = self._links.get(identity)
        if link is None or link.identity != identity or not link.open:
            self._links.pop(identity, None)
            return False
        if self._network.happens("full"):
            return False
        self._network.to_client(link, identity, frame)
        return True

    # The directory.

    def _ask(self, pool: PoolId, seq: int, body: Body) -> None:
        self.tell(Asked(pool, seq, self._heap.now_us, body))

    def tell(self, event: Event) -> None:
        """Hand an event to the directory, show it to the checkers, and do what it answers."""
        try:
            actions = self.directory.handle(event)
        except InternalError as error:
            # The endpoint would answer it as it answers a client's mistake.
            raise Violation("core", str(error)) from error
        self._observe(self, event, actions)
        for action in actions:
            self._do(action)
        if self.kept is not None:
            self.kept.check(self.directory, self._options.check_every)

    def _do(self, action: Action) -> None:
        if self.kept is not None:
            self.kept.apply(action)
        match action:
            case Answer():
                if isinstance(action.body, Matched | Locked):
                    self._receipts[action.pool, action.seq] = action.body.receipt
                self.endpoint.answer(action.pool, action.seq, action.body)
            case SubmitCopy():
                if self.mover is None:
                    self._waiting.append(action)
                else:
                    self.mover.submit(action)
            case ReleasePool():
                self._release(action.pool)
            case MoreToClose():
                # Anything may come before: it waits behind all that somebody waits for.
                self._heap.after(CLOSE_MORE_US[self.counters["closed"] % 3], self._close_more)
            case Registered():
                session = self._registering.pop(action.token)
                session.pool = session.link.pool = action.pool
                session.generation = action.generation
                self._instances[action.pool] = session.instance
                self.sessions[action.pool] = session
                if not session.link.open:
                    self.on_session_end(session.link)
                elif self.mover is not None:
                    self.mover.import_pool(action.pool, session.memory)
            case RegistrationRefused():
                session = self._registering.pop(action.token)
                self._heap.after(self._network.delay_us(), session.refuse, action.code)

    def _close_more(self) -> None:
        if self.alive:
            self.counters["closed"] += 1
            self.tell(CloseMore())

    def _release(self, pool: PoolId) -> None:
        instance = self._instances.pop(pool)
        if self.mover is not None:
            self._releasing[pool] = instance
            self.mover.release_pool(pool)
        session = self.sessions.get(pool)
        if session is not None and not session.answered:
            # Its group has ended with another rank; it would wait for ever to be answered.
            self._heap.after(self._network.delay_us(), session.refuse, "unknown_pool")

    def _heard_from_mover(self, said: Said) -> None:
        if not self.alive:
            return
        match said:
            case CopyDone() | PagesDamaged():
                self.tell(said)
            case Imported():
                session = self.sessions.get(said.pool)
                if session is not None:
                    session.imported = True
                    self._answer_registration(session)
            case PoolReleased():
                self._releasing.pop(said.pool, None)
                for session in list(self.sessions.values()):
                    self._answer_registration(session)

    def _answer_registration(self, session: Session) -> None:
        """Answer once the pool is imported and the mover has let go of its earlier generations."""
        if session.answered or not session.imported or self.still_touched(session):
            return
        if session.pool not in self._instances:
            return
        session.answered = True
        secret = b"secret %d" % session.pool
        self.endpoint.open_pool(session.pool, secret)
        registration = Registration(session.pool, session.generation, self.epoch, secret, "")
        self._heap.after(self._network.delay_us(), session.answer, session.link, registration)

    def still_touched(self, session: Session) -> bool:
        """Whether the mover may still write into memory that this instance registered before."""
        return session.instance in self._releasing.values()

    def __repr__(self) -> str:
        return f"<SimDaemon boot {self.number}, {len(self.sessions)} sessions>"
