"""One run: the world of one seed, its safety phase, its liveness phase and its end.

Owns the heap, the daemon's boots, the scheduler processes and the checkers, and decides which
trouble strikes when. A run ends clean, or with the first `Violation` (an exception of the real
code is one, too).
"""

from __future__ import annotations

import random
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from directory.core import limits
from directory.core.actions import Action
from directory.core.events import Event
from tests.simulation.audit import agree, audit
from tests.simulation.checkers import (
    Answers,
    Bounds,
    Checker,
    Copies,
    Epochs,
    Once,
    OwnInvariants,
    Ranks,
    Violation,
)
from tests.simulation.claims import further_checkers
from tests.simulation.contents import Contents
from tests.simulation.daemon import SimDaemon
from tests.simulation.deaths import Deaths
from tests.simulation.heap import Heap
from tests.simulation.kept import Kept, small_logs
from tests.simulation.network import Network
from tests.simulation.options import Options
from tests.simulation.own import MirroredOwn, ThinOwn
from tests.simulation.scheduler import ModelScheduler
from tests.simulation.trouble import Trouble
from tests.simulation.workload import Workload

LIVENESS_US_MAX = 120_000_000
LIVENESS_STEPS_MAX = 150_000

_encode = msgspec.msgpack.Encoder().encode


class Result(NamedTuple):
    """How a run ended. `problem`: empty if it was clean."""

    options: Options
    events: int
    digest: int
    problem: str
    checker: str
    story: str
    facts: dict[str, int]


@contextmanager
def portions(most: int) -> Iterator[None]:
    """Small messages while it runs, so that what is too long for one is said in several."""
    names = ("GAVE_UP_PAGES_MAX", "LIVE_REQUESTS_MAX") if most else ()
    before = [getattr(limits, name) for name in names]
    try:
        for name in names:
            setattr(limits, name, most)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(limits, name, value)


class Simulation(Trouble):
    """The world of one run."""

    def __init__(self, options: Options, *, keep_log: bool = False) -> None:
        super().__init__(options)
        self.heap = Heap()
        if keep_log:
            self.heap.lines = []
        self.contents = Contents()
        self.faulty = True
        seed = options.seed
        self.network = Network(self.heap, random.Random(f"{seed}/network"), options)
        self.workload = Workload(random.Random(f"{seed}/workload"), options)
        self._movers = random.Random(f"{seed}/movers")
        self._recount = OwnInvariants(options.check_every)
        self.checkers: list[Checker] = [
            Epochs(),
            Once(),
            Copies(),
            Deaths(),
            Ranks(),
            Answers(),
            Bounds(),
            *further_checkers(),
            self._recount,
        ]
        self.facts: dict[str, int] = {}
        self.kept: Kept | None = None
        self._audit_left = 1
        self._boots = 0
        self.boots: list[SimDaemon] = []
        self.daemon: SimDaemon | None = None
        self.processes: list[ModelScheduler] = []
        self.incarnations = [0] * len(options.modes)
        self.epochs = [0] * len(options.modes)
        self.left = [options.requests] * len(options.modes)
        self.submitted = 0
        self.network.heir = lambda: self.daemon
        self.start_daemon()
        for index in range(len(options.modes)):
            self.start_process(index)
            self.processes[index].wake()
            self.heap.after(self.chaos.randrange(options.arrival_us), self._arrive, index)
        self.plan_all()

    # The run.

    def run(self) -> Result:
        """Safety phase, liveness phase, end."""
        problem = checker = ""
        try:
            with portions(self.options.portion), small_logs(self.options.log_bytes):
                self._safety()
                self._liveness()
                self._at_rest()
        except Violation as violation:
            problem, checker = str(violation), violation.checker
        except Exception as error:  # noqa: BLE001 - whatever the real code raises is a finding
            problem = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            checker = type(error).__name__
        self._count_up()
        story = ""
        if problem and self.boots:
            story = self.boots[-1].directory.story.tell()
        return Result(
            self.options,
            self.heap.ran,
            self.heap.digest,
            problem,
            checker,
            story,
            dict(self.facts),
        )

    def _safety(self) -> None:
        options = self.options
        heap = self.heap
        while heap.now_us < options.safety_us and heap.ran < options.steps_max and heap.step():
            if not any(self.left) and not any(p.active for p in self.processes):
                return

    def _liveness(self) -> None:
        """No faults any more: everything that was begun ends."""
        self.faulty = self.network.faulty = False
        now = self.heap.now_us
        self.left = [0] * len(self.left)
        for boot in self.boots:
            boot.faulty = False
            boot.stopped_until_us = min(boot.stopped_until_us, now)
            for mover in boot.movers:
                mover.device.faulty = False
                mover.device.frozen_until_us = 0
        for process in self.processes:
            process.stopped_until_us = min(process.stopped_until_us, now)
            for streams in process.all_streams():
                streams.faulty = False
            process.wake()
        moved = True
        last_us, last = now + LIVENESS_US_MAX, self.heap.ran + LIVENESS_STEPS_MAX
        while not self._quiet():
            for _ in range(16):
                moved = self.heap.step()
            if self.heap.now_us > last_us or self.heap.ran > last or not (moved or self._quiet()):
                raise Violation("liveness", f"not at rest: {self._state()}")

    def _quiet(self) -> bool:
        daemon = self.daemon
        if daemon is None or daemon.mover is None:
            return False
        if not daemon.mover.engine.idle or daemon.directory.transfers.copies:
            return False
        for process in self.processes:
            client = process.client
            if process.dead:
                return False
            if process.active or process.landing or not process.idle or client is None:
                return False
            if process.link is None or process.link.host is not daemon or not process.link.alive:
                return False
            if client.open_count or process.connecting is not None or process.orders:
                return False
        return not (daemon.directory.transfers.wished or daemon.directory.closing.busy)

    def _at_rest(self) -> None:
        """At rest nothing is held for anybody, and what is said is what is there."""
        daemon = self.daemon
        assert daemon is not None
        self._recount.check(daemon)
        audit(daemon, self.contents)
        directory = daemon.directory
        if len(directory.leases) or directory.host.locked_pages:
            raise Violation("rest", f"leases are left: {list(directory.leases)}")
        if len(directory.pools) != len(self.processes):
            raise Violation("rest", f"pools are left: {directory.pools}")
        for process in self.processes:
            process.check()
            own = process.own
            assert own is not None
            cached = len(own.tree_pages())
            if process.allocator.free_count != process.allocator.page_count - cached:
                raise Violation(
                    "rest", f"{process.name} has pages that are neither free nor cached"
                )
            if isinstance(own, MirroredOwn):
                agree(process, daemon, own.mirror)
                if own.mirror.pool.locked_pages:
                    raise Violation("rest", f"{process.name} has locks left")
            elif isinstance(own, ThinOwn) and process.link is not None:
                pool = directory.registry.members[process.link.pool]
                if set(pool.owned) != own.tree_pages():
                    raise Violation("rest", f"{process.name}: {pool.owned} {own.tree_pages()}")
        for size in directory.slots.page_sizes:
            held = sum(
                node.page_count
                for node in directory.host.nodes.values()
                if node.space.page_bytes == size
            )
            out = len(directory.slots.damaged_slots(size))
            if directory.slots.free_count(size) + held + out != directory.slots.capacity(size):
                raise Violation("rest", f"host slots of {size} are neither free nor cached")

    def _state(self) -> str:
        copies = self.daemon.directory.transfers.copies if self.daemon is not None else {}
        lines = [f"{self.daemon!r}, copies {copies}"]
        lines += [process.describe() for process in self.processes]
        return "\n".join(lines)

    # Processes.

    def start_daemon(self) -> None:
        """Begin a boot, unless movers of earlier ones live: it waits for them."""
        if self.movers_of_earlier_boots_live():
            self.heap.after(1_000, self.start_daemon)
            return
        self._boots += 1
        daemon = SimDaemon(
            self._boots,
            self.heap,
            self._movers,
            self.options,
            self.network,
            self.observe,
            self._keep(),
        )
        self._add("recovered", daemon.directory.counters.get("host_pages_recovered", 0))
        daemon.faulty = self.faulty
        if daemon.mover is not None:
            daemon.mover.device.faulty = self.faulty
        self.daemon = daemon
        self.boots.append(daemon)
        self.heap.note(f"daemon boot {self._boots}")

    def _keep(self) -> Kept | None:
        """The host tier that an earlier boot left, or a new one that outlives this boot."""
        options = self.options
        if self.kept is None and options.warm and options.host_pages:
            self.kept = Kept(options.host_cells, options.segment_cells)
        return self.kept

    def movers_of_earlier_boots_live(self) -> bool:
        """Whether a mover of a dead daemon may still write."""
        return any(mover.alive for boot in self.boots for mover in boot.movers)

    def start_process(self, index: int) -> None:
        """Start a scheduler's process, the next incarnation of its instance."""
        self.incarnations[index] += 1
        number = self.incarnations[index]
        rng = random.Random(f"{self.options.seed}/process {index}.{number}")
        process = ModelScheduler(self, index, number, rng)
        if index < len(self.processes):
            self.processes[index] = process
        else:
            self.processes.append(process)
        for streams in process.all_streams():
            streams.faulty = self.faulty

    def _arrive(self, index: int) -> None:
        if not self.left[index]:
            return
        self.left[index] -= 1
        process = self.processes[index]
        if not process.dead:
            self.submitted += 1
            process.submit(self.workload.make(self.epochs[index]))
            for what in ("abort", "retract"):
                if self.chaos.random() < self.options.rate(what):
                    delay_us = int(self.chaos.expovariate(1.0) * 20_000)
                    self.heap.after(delay_us, self.order, index, what)
        delay_us = int(self.chaos.expovariate(1.0) * self.options.arrival_us)
        self.heap.after(delay_us, self._arrive, index)

    # Eyes.

    def observe(self, daemon: SimDaemon, event: Event, actions: list[Action]) -> None:
        """Show an event of the directory to the checkers."""
        said = zlib.crc32(_encode(actions), zlib.crc32(_encode(event)))
        self.heap.note(f"{type(event).__name__} {said}")
        for checker in self.checkers:
            checker.after(daemon, event, actions)
        self.aim(actions)
        self._audit_left -= 1
        if self._audit_left <= 0:
            self._audit_left = self.options.audit_every
            self._add("audited", audit(daemon, self.contents))

    def wrong(self, who: str, problem: str) -> None:
        """Something that must never happen did."""
        raise Violation("scheduler", f"{who}: {problem}")

    def _add(self, what: str, amount: int) -> None:
        self.facts[what] = self.facts.get(what, 0) + amount

    def _count_up(self) -> None:
        self._add("submitted", self.submitted)
        self._add("frames", self.network.frames)
        self._add("frames_lost", self.network.lost)
        self._add("boots", self._boots)
        self._add("incarnations", sum(self.incarnations))
        for process in self.processes:
            self._add("restored", process.restored_pages)
            self._add("own_hits", process.own_hits)
            self._add("finished", len(process.finished))
            self._add("losses", len(process.losses))
            if isinstance(process.own, ThinOwn) and process.own.shadow is not None:
                self._add("lockstep", process.own.shadow.compared)
