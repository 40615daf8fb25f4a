"""Trouble: which fault strikes when, and what it does to the world.

Owns the plan of faults in time; those that happen on occasions (frames, copies, batches) are drawn
where the occasion is. A fault never touches the state of real code: it ends, stops or delays
processes, devices and connections, or has a scheduler do something.
"""

from __future__ import annotations

import random

from directory.core.actions import Action, SubmitCopy
from directory.core.ids import HOST
from directory.core.tokens import unpack_pages
from tests.simulation.daemon import SimDaemon
from tests.simulation.kept import Kept
from tests.simulation.options import IN_TIME, Options
from tests.simulation.scheduler import ModelScheduler
from tests.simulation.world import World

ARMED_US_MAX = 300_000
AIMED = ("crash", "daemon_restart", "mover_death", "mover_stop", "give_up")


class Trouble(World):
    """The part of the world that makes trouble."""

    daemon: SimDaemon | None
    processes: list[ModelScheduler]
    epochs: list[int]
    kept: Kept | None
    facts: dict[str, int]

    def __init__(self, options: Options) -> None:
        self.options = options
        self.chaos = random.Random(f"{options.seed}/chaos")
        self._aims = self.chaos.choice((0.0, 0.5, 1.0))
        self._armed: list[str] = []
        self._damage = random.Random(f"{options.seed}/damage")

    def start_daemon(self) -> None:
        """Begin a boot."""
        raise NotImplementedError

    def start_process(self, index: int) -> None:
        """Start the next incarnation of an instance."""
        raise NotImplementedError

    def plan_all(self) -> None:
        """Plan every fault that this seed has."""
        for fault in IN_TIME:
            self._plan(fault)
        if self.options.page_damage:
            self._plan_damage()

    def _plan_damage(self) -> None:
        delay_us = int(self._damage.expovariate(self.options.page_damage) * 1_000_000)
        self.heap.after(delay_us, self._damage_pages)

    def _damage_pages(self) -> None:
        """A mover finds some host pages damaged, those that loads are reading among them."""
        self._plan_damage()
        if not self.faulty or self.daemon is None or self.daemon.mover is None:
            return
        slots = self.daemon.directory.slots
        known = [s for size in slots.page_sizes for s in slots.free_slots(size)[:2]]
        for node in self.daemon.directory.host.nodes.values():
            known += unpack_pages(node.places[HOST].pages)
        if known:
            self.facts["page_damage"] = self.facts.get("page_damage", 0) + 1
            self.daemon.mover.find_damage(
                self._damage.choices(known, k=self._damage.choice((1, 3)))
            )

    def _plan(self, fault: str) -> None:
        rate = self.options.rate(fault)
        if rate:
            delay_us = int(self.chaos.expovariate(rate) * 1_000_000)
            self.heap.after(delay_us, self._strike, fault)

    def _strike(self, fault: str) -> None:
        """Let a fault happen now or, for those that hurt most then, once a restore begins."""
        self._plan(fault)
        if fault in AIMED and self.chaos.random() < self._aims:
            self._armed.append(fault)
            self.heap.after(ARMED_US_MAX, self._hit, fault, True)
        else:
            self._hit(fault, False)

    def _hit(self, fault: str, aimed: bool) -> None:
        if not self.faulty or (aimed and fault not in self._armed):
            return
        if aimed:
            self._armed.remove(fault)
        self.facts[fault] = self.facts.get(fault, 0) + 1
        getattr(self, f"_{fault}")()

    def aim(self, actions: list[Action]) -> None:
        """A restore begins: what waited for one strikes before it can end."""
        begins = any(isinstance(a, SubmitCopy) and a.kind != "backup" for a in actions)
        if begins and self._armed and self.chaos.random() < 0.5:
            fault = self.chaos.choice(self._armed)
            delay_us = self.chaos.randrange(1, 2 * self.options.copy_us + 200)
            self.heap.after(delay_us, self._hit, fault, True)

    def _any(self) -> ModelScheduler | None:
        process = self.chaos.choice(self.processes)
        return None if process.dead else process

    def order(self, index: int, what: str) -> None:
        """Have a living scheduler do something at its next tick."""
        process = self.processes[index]
        if not process.dead:
            process.order(what)

    def _crash(self) -> None:
        process = self._any()
        if process is None:
            return
        if process.followers and self.chaos.random() < 0.5:
            # One rank is gone; whoever started the ranks ends the others a little later.
            self.chaos.choice(process.followers).die()
            self.heap.after(self.chaos.randrange(1, 5_000), self._crash_all, process)
        else:
            self._crash_all(process)

    def _crash_all(self, process: ModelScheduler) -> None:
        if not process.dead:
            process.die()
            self.heap.after(self.chaos.randrange(1, 200_000), self.start_process, process.index)

    def _stop(self) -> None:
        process = self._any()
        if process is not None:
            long_us = int(self.chaos.expovariate(1.0) * 1_000_000)
            process.stopped_until_us = self.heap.now_us + long_us

    def _reconnect(self) -> None:
        process = self._any()
        if process is not None and process.link is not None:
            links = [process.link, *(f.link for f in process.followers if f.link is not None)]
            link = self.chaos.choice(links) if process.followers else process.link
            link.reconnect()

    def _daemon_stop(self) -> None:
        if self.daemon is not None:
            long_us = int(self.chaos.expovariate(1.0) * 500_000)
            self.daemon.stopped_until_us = self.heap.now_us + long_us

    def _daemon_restart(self) -> None:
        daemon, self.daemon = self.daemon, None
        if daemon is None:
            return
        daemon.die()
        lives_us = 1
        if self.chaos.random() < self.options.rate("orphan") * 5:
            lives_us = self.chaos.randrange(1, 400_000)
        for mover in daemon.movers:
            mover.device.freeze(self.heap.now_us + self.chaos.randrange(lives_us))
            self.heap.after(lives_us, mover.kill)
        down_us = int(10 ** self.chaos.uniform(2, 5.5))
        if self.kept is not None:
            if self.chaos.random() >= self.options.warm:
                self.kept = None
            elif self.chaos.random() < self.options.damage:
                self.heap.after(down_us, self.kept.damage, self.chaos)
        self.heap.after(down_us, self.start_daemon)

    def _mover_death(self) -> None:
        daemon = self.daemon
        if daemon is not None and daemon.mover is not None and daemon.mover.alive:
            daemon.mover.kill()
            self.heap.after(self.chaos.randrange(1, 20_000), daemon.lose_mover)

    def _mover_stop(self) -> None:
        """What the mover's device has begun takes a while longer."""
        if self.daemon is not None and self.daemon.mover is not None:
            until_us = self.heap.now_us + int(10 ** self.chaos.uniform(3, 5.5))
            self.daemon.mover.device.freeze(until_us)

    def _give_up(self) -> None:
        """A scheduler with a restore under way takes its daemon for lost, which is not."""
        restoring = [p for p in self.processes if p.landing and not p.dead]
        if restoring:
            self.chaos.choice(restoring).order("give_up")
            if self.chaos.random() < 0.5:
                self._mover_stop()

    def _flush_pool(self) -> None:
        self.order(self.chaos.randrange(len(self.processes)), "flush_pool")

    def _flush_host(self) -> None:
        self.order(self.chaos.randrange(len(self.processes)), "flush_host")
        self.order(self.chaos.randrange(len(self.processes)), "stats")

    def _epoch_bump(self) -> None:
        index = self.chaos.randrange(len(self.processes))
        self.epochs[index] += 1
        self.order(index, "flush_pool")
