"""A run of chaos: requests go on all the while, faults come at a rate, and all is looked at again.

Owns the order of a run (calm, faults, calm again) and what is counted. What a fault does is
chaos_faults', what the verdict is chaos_report's. It must never wait for a fault's end without
also serving requests, and never give a request up.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from directory.cli.chaos_fault import Ask, Fault
from directory.cli.chaos_faults import KINDS
from directory.cli.chaos_fleet import Fleet, Held, Look, Scheduler, await_end
from directory.cli.driver import Job
from directory.cli.processes import DriverError, last_words
from directory.cli.tally import Tally
from scheduler_shim.worker_messages import AskSummary, Finished, FromWorker, Prompt, Summary

CALM_REQUESTS: Final = 40
"""Requests before the first fault: pools and host tier are in use then."""
STALL_DEADLINE_S: Final = 90.0
RECOVERY_DEADLINE_S: Final = 60.0
REST_DEADLINE_S: Final = 60.0
LOOK_EVERY_S: Final = 0.25
WALK_EVERY_S: Final = 4.0
SAMPLES: Final = 10
OVERTIME_MAX: Final = 3
TURN_S: Final = 0.02
VIOLATIONS_KEPT_MAX: Final = 20
UNDER_WAY: Final = ("copies_in_flight", "leases", "backups_waiting", "host_pages_leased")


class Plan(NamedTuple):
    """`kinds`: of the faults; `every_s`: one fault in so many seconds, and those that could not be
    done when they were due are made up for; `concurrency`: requests under way in all; `seconds`:
    how long faults are injected, longer where that is not enough for one of each kind."""

    seconds: float
    every_s: float
    kinds: Sequence[str]
    concurrency: int
    seed: int
    page_size: int
    block_tokens: int | None


class KindCount(NamedTuple):
    """Faults of one kind, and the seconds from each one's begin until all was whole again."""

    kind: str
    seconds: list[float]


class Counted(NamedTuple):
    """What a run came to. `held`: at rest, before the first fault and after the last one;
    `left_alive`: movers that outlived their daemon; `quarantined`: damaged host pages that the last
    daemon has found."""

    tally: Tally
    asked: int
    asked_again: int
    faults: list[KindCount]
    reports: int
    violations: list[str]
    held: tuple[Held, Held]
    summaries: list[Summary]
    seconds: float
    daemon_boots: int
    scheduler_boots: int
    movers: int
    left_alive: list[int]
    quarantined: int


class Run:
    """One run over a fleet that has just been started. `jobs` never end by themselves."""

    def __init__(self, fleet: Fleet, jobs: Iterator[Job], plan: Plan) -> None:
        self._fleet = fleet
        self._jobs = jobs
        self._plan = plan
        self._chance = random.Random(plan.seed)  # draws faults, guards nothing
        self._tally = Tally(plan.page_size, plan.block_tokens)
        self._asked = 0
        self._asked_again = 0
        self._again: deque[tuple[Scheduler, Prompt]] = deque()
        self._heard_s = time.monotonic()
        self._active: list[Fault] = []
        self._bag: list[str] = []
        self._seconds: dict[str, list[float]] = {kind: [] for kind in plan.kinds}
        self._reports = 0
        self._next_look_s = 0.0
        self._next_try_s = 0.0
        self._next_walk_s = 0.0
        self._violations: dict[str, None] = {}
        self._summaries: list[Summary] = []
        self._movers: set[int] = set()

    def run(self) -> Counted:
        """Carry the run out; the fleet lives on. Raises `DriverError`."""
        while self._tally.requests < CALM_REQUESTS:
            self._turn(submit=True)
        before = self._held(self._rest())
        began_s = time.monotonic()
        self.inject_all()
        while self._active:
            self._turn(submit=True)
        seconds = time.monotonic() - began_s
        after = self._held(self._rest())
        # Descriptors of connections that are closed are let go a little later.
        give_up = time.monotonic() + REST_DEADLINE_S / 4
        while after.descriptors != before.descriptors and time.monotonic() < give_up:
            after = self._held(self._rest())
        self._summarise()
        last = self._rest().counters
        movers = sorted(self._movers - {last["daemon_mover_pid"]})
        return Counted(
            tally=self._tally,
            asked=self._asked,
            asked_again=self._asked_again,
            faults=[KindCount(kind, seconds) for kind, seconds in self._seconds.items()],
            reports=self._reports,
            violations=list(self._violations),
            held=(before, after),
            summaries=self._summaries,
            seconds=seconds,
            daemon_boots=self._fleet.daemon.boots,
            scheduler_boots=sum(scheduler.boots for scheduler in self._fleet.schedulers),
            movers=len(self._movers),
            left_alive=[pid for pid in movers if not await_end(pid, 1.0)],
            quarantined=last.get("host_pages_quarantined", 0),
        )

    def inject_all(self) -> None:
        """Begin a fault whenever one is due and can be done, while requests go on."""
        began_s = next_s = time.monotonic()
        while self._goes_on(time.monotonic() - began_s):
            if time.monotonic() >= next_s and self._inject():
                next_s += self._plan.every_s
            self._turn(submit=True)

    def _goes_on(self, seconds: float) -> bool:
        """Whether faults are injected: for the time that was asked for, and on a slow machine until
        every kind has come about once."""
        if seconds < self._plan.seconds:
            return True
        begun = {fault.kind for fault in self._active}
        missing = any(not took and kind not in begun for kind, took in self._seconds.items())
        return missing and seconds < OVERTIME_MAX * self._plan.seconds

    # One turn.

    def _turn(self, *, submit: bool) -> None:
        if submit:
            self._submit()
        for scheduler, message in self._fleet.receive(TURN_S):
            self._take(scheduler, message)
        self._step_faults()
        waiting = any(scheduler.prompts for scheduler in self._fleet.schedulers)
        if waiting and time.monotonic() - self._heard_s > STALL_DEADLINE_S:
            raise DriverError(self._stall())

    def _submit(self) -> None:
        under_way = sum(len(scheduler.prompts) for scheduler in self._fleet.schedulers)
        while under_way < self._plan.concurrency:
            if self._again:
                self._fleet.submit(*self._again.popleft())
                self._asked_again += 1
            else:
                job = next(self._jobs)
                self._fleet.submit(self._fleet.schedulers[job.scheduler], job.prompt)
                self._asked += 1
            under_way += 1

    def _take(self, scheduler: Scheduler, message: FromWorker) -> None:
        if isinstance(message, Finished) and message.number in scheduler.prompts:
            del scheduler.prompts[message.number]
            self._tally.add(message)
            self._heard_s = time.monotonic()
        elif isinstance(message, Summary):
            self._summaries.append(message)
        else:
            raise DriverError(f"{scheduler.name} sent an unexpected {message!r:.200}")

    # Faults.

    def _inject(self) -> bool:
        """Begin a fault of the next kind that can be done now; False when none can."""
        now = time.monotonic()
        if now < self._next_try_s:
            return False
        if not self._bag:
            self._bag = list(self._plan.kinds)
            self._chance.shuffle(self._bag)
        look = self._look()
        for kind in self._bag:
            target = self._chance.choice(self._fleet.schedulers)
            fault = KINDS[kind](self._fleet, self._chance, target, self._ask_again(target))
            if any(other.bars(fault) for other in self._active) or not fault.ready(look):
                continue
            self._bag.remove(kind)
            fault.began_s = time.monotonic()
            fault.begin(fault.began_s)
            self._active.append(fault)
            return True
        self._next_try_s = now + LOOK_EVERY_S
        return False

    def _ask_again(self, scheduler: Scheduler) -> Ask:
        def take(prompts: list[Prompt]) -> None:
            self._again += [(scheduler, prompt) for prompt in prompts]

        return take

    def _step_faults(self) -> None:
        now = time.monotonic()
        for fault in self._active:
            fault.over = fault.over or fault.step(now)
        if now < self._next_look_s or not any(fault.over for fault in self._active):
            return
        self._next_look_s = now + LOOK_EVERY_S
        look = self._look()
        left: list[Fault] = []
        for fault in self._active:
            if fault.over and look is not None and fault.recovered(look):
                self._seconds[fault.kind].append(time.monotonic() - fault.began_s)
                continue
            if now - fault.began_s > RECOVERY_DEADLINE_S:
                raise DriverError(f"{fault!r}: not whole again after {RECOVERY_DEADLINE_S:.0f} s")
            left.append(fault)
        whole = [fault for fault in self._active if fault not in left]
        self._active = left
        # A walk holds everybody up, so not after each fault; but before a daemon may die again.
        if whole and (now >= self._next_walk_s or any(not f.until_whole for f in whole)):
            self._walk()
            self._next_walk_s = time.monotonic() + WALK_EVERY_S

    def _look(self) -> Look | None:
        """What the daemon says of itself now."""
        look = self._fleet.look()
        if look is not None:
            self._movers.add(look.counters["daemon_mover_pid"])
        return look

    def _walk(self) -> None:
        """Have the daemon walk its state, unless it is away; what does not hold is kept."""
        report = self._fleet.report()
        if report is not None:
            self._reports += 1
            for line in report.violations:
                if len(self._violations) < VIOLATIONS_KEPT_MAX:
                    self._violations[f"daemon: {line}"] = None

    # Rest.

    def _rest(self) -> Look:
        """Let everything that was asked finish, wait until nothing is under way, and have all of
        it walked."""
        names = {scheduler.name for scheduler in self._fleet.schedulers}
        give_up = time.monotonic() + REST_DEADLINE_S + STALL_DEADLINE_S
        look: Look | None = None
        while time.monotonic() < give_up:
            while self._again:
                self._fleet.submit(*self._again.popleft())
                self._asked_again += 1
            self._turn(submit=False)
            if any(scheduler.prompts for scheduler in self._fleet.schedulers):
                continue
            look = self._look()
            if look is None:
                continue
            live = {pool.instance for pool in look.pools if pool.phase == "live"}
            busy = [name for name in UNDER_WAY if look.counters.get(name, 0)]
            if live == names and not busy and look.counters["daemon_mover_pid"]:
                self._walk()
                return look
        raise DriverError(f"the fleet does not come to rest: {look!r:.600}")

    def _held(self, look: Look) -> Held:
        """What is held for longer than a moment: the sessions of what was just asked, for one, are
        there until the daemon has seen their end. What leaks stays, and is in every sample."""
        found = self._fleet.held(look.counters["daemon_mover_pid"])
        for _ in range(SAMPLES - 1):
            self._turn(submit=False)
            found = found.least(self._fleet.held(look.counters["daemon_mover_pid"]))
        return found

    def _summarise(self) -> None:
        for scheduler in self._fleet.schedulers:
            assert scheduler.worker is not None
            scheduler.worker.send(AskSummary(check=True))
        give_up = time.monotonic() + REST_DEADLINE_S
        while len(self._summaries) < len(self._fleet.schedulers):
            self._turn(submit=False)
            if time.monotonic() > give_up:
                raise DriverError("a scheduler does not say what it has seen")

    def _stall(self) -> str:
        owing = [scheduler for scheduler in self._fleet.schedulers if scheduler.prompts]
        said = "".join(
            f"\n{each.name} has {len(each.prompts)} under way"
            f"{last_words(each.worker.log) if each.worker is not None else ''}"
            for each in owing
        )
        faults = ", ".join(repr(fault) for fault in self._active)
        return (
            f"nothing was finished for {STALL_DEADLINE_S:.0f} s (faults: {faults or 'none'}){said}"
            f"\nthe daemon{last_words(self._fleet.daemon.log)}"
        )
