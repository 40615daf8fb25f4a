"""Random requests, aborts, losses and losses of frames over three schedulers, checked every tick.

Strategy: one seed draws prompts from a small tree of prefixes (so that they share, split and
diverge), pools and a host tier that are too small for them (every other pool speaks of its pages
by name), and after every step at most one disturbance. Checked after every tick, at every scheduler
and at the daemon: pages are conserved, spans and words agree, locks equal claims, orders equal a
recount, no verified page is wrong. At rest: nothing is leased, and the daemon's view of each pool
equals that pool's own.
"""

import random
from collections import Counter

import pytest

from directory.core.actions import Restored
from directory.core.events import Body, Live, Mode
from directory.protocol.messages import Attached, DaemonBody
from scheduler_shim.deadlines import Deadlines
from tests.unit.scheduler_shim.support import FakeDaemon, Node, tokens

STEPS = 150
# A thin scheduler that misses an answer to Insert or Evict gives its daemon up; these storms are
# about losing frames, so it waits until they have been sent again.
DEADLINES: dict[Mode, Deadlines] = {
    "mirrored": Deadlines(2_000, 20_000, 1_000, misses_max=1_000),
    "thin": Deadlines(600_000, 20_000, 1_000, misses_max=1_000),
}


class Storm:
    """One run from one seed."""

    def __init__(
        self, seed: int, modes: tuple[Mode, ...], *, lossy: bool = False, restarts: bool = False
    ) -> None:
        self.chance = random.Random(seed)
        self.lossy = lossy
        self.restarts = restarts
        self.daemon = FakeDaemon(host_pages=self.chance.choice((1, 6, 40)))
        self.nodes = [
            Node(
                self.daemon,
                instance=f"node-{number}",
                mode=mode,
                page_count=self.chance.randint(5, 14),
                concurrency=self.chance.randint(1, 4),
                chunk_pages=self.chance.choice((0, 0, 1, 2)),
                deadlines=DEADLINES[mode],
                renamed=(seed + number) % 2 == 1,
            )
            for number, mode in enumerate(modes)
        ]
        self.submitted = 0
        if lossy:
            self.daemon.drop_request = self._drop_request
            self.daemon.drop_reply = self._drop_reply

    def _drop_request(self, body: Body) -> bool:
        return self.chance.random() < 0.1

    def _drop_reply(self, body: DaemonBody) -> bool:
        return not isinstance(body, Attached) and self.chance.random() < 0.1

    def run(self) -> None:
        for _ in range(STEPS):
            node = self.chance.choice(self.nodes)
            what = self.chance.random()
            if what < 0.3:
                self._submit(node)
            elif what < 0.34:
                node.scheduler.abort(self.chance.choice([0, *node.scheduler.requests]))
            elif what < 0.35:
                node.scheduler.flush()
            elif what < 0.355:
                node.scheduler.bump_weights()
            elif what < 0.38:
                node.scheduler.retract(self.chance.choice([0, *node.scheduler.requests]))
            elif self.restarts and what < 0.4:
                self._die_or_restart()
            elif what < 0.5:
                self.daemon.hold_copies = not self.daemon.hold_copies
            elif what < 0.52:
                self.daemon.fail_copies = self.chance.choice(
                    (lambda _: False, lambda _: self.chance.random() < 0.5)
                )
            else:
                node.tick(self.chance.randint(1, 3))
            self.daemon.run()
            if self.lossy or self.restarts:
                self.daemon.clock_us += self.chance.choice((0, 10_000, 300_000))
            node.check()

    def settle(self) -> None:
        """A phase without disturbances, after which everything must be at rest."""
        self.daemon.hold_copies = False
        self.daemon.drop_request = lambda _: False
        self.daemon.drop_reply = lambda _: False
        self.daemon.fail_copies = lambda _: False
        if self.daemon.absent:
            self.daemon.restart()
        for node in self.nodes:
            node.tick()  # an end that came with the last step is noticed
        while any(node.scheduler.client is None for node in self.nodes):
            self.daemon.clock_us += 50_000
            for node in self.nodes:
                node.tick()
            self.daemon.run()
        for node in self.nodes:
            node.settle()
        self.daemon.run()
        for node in self.nodes:
            node.settle()

    def _die_or_restart(self) -> None:
        if self.daemon.absent:
            self.daemon.restart()
        else:
            self.daemon.die()

    def _submit(self, node: Node) -> None:
        self.submitted += 1
        pages = [self.chance.choice((1, 1, 2, 3)) for _ in range(self.chance.randint(1, 6))]
        cut = self.chance.choice((0, 0, 4, 8))
        prompt = tokens(*pages)
        output = tokens(*pages[:2])[: self.chance.choice((0, 0, 12, 32))]
        node.scheduler.submit(self.submitted, prompt[: len(prompt) - cut], output)

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        self.daemon.close()


@pytest.mark.parametrize("disturbed", ["not", "lossy", "restarts"])
@pytest.mark.parametrize("seed", range(12))
def test_a_storm_of_requests_leaves_every_page_accounted_for_f26_f76(
    seed: int, disturbed: str
) -> None:
    storm = Storm(
        seed,
        ("mirrored", "thin", "mirrored"),
        lossy=disturbed == "lossy",
        restarts=disturbed == "restarts",
    )
    try:
        storm.run()
        storm.settle()
        if disturbed != "not":  # time passes
            assert any(isinstance(body, Live) for body in storm.daemon.heard)
        finished = [record for node in storm.nodes for record in node.finished.values()]
        assert len(finished) == storm.submitted
        assert sum(record.wrong for record in finished) == 0
        assert {r.error for r in finished if " need " not in r.error} <= {"", "aborted"}
        directory = storm.daemon.directory
        assert len(directory.leases) == 0
        # Every lease went with its release; a list of live requests never took one away.
        assert "leases_unlisted" not in directory.counters
        assert len(directory.pools) == len(storm.nodes)
        for node in storm.nodes:
            assert node.scheduler.degraded == ""
            pool, pages = directory.pools[node.link_pool], node.scheduler.pages
            assert pages.tree == pool.pages
            assert pages.free + pages.tree == pool.page_count
            assert pool.locked_pages == 0
    finally:
        storm.close()


def test_the_storms_bring_about_all_that_they_are_meant_to() -> None:
    restored: list[Restored] = []
    counters: Counter[str] = Counter()
    for seed in range(6):
        storm = Storm(seed, ("mirrored", "thin"), lossy=False)
        storm.run()
        storm.settle()
        restored += [body for body in storm.daemon.said if isinstance(body, Restored)]
        for node in storm.nodes:
            counters.update(node.scheduler.counters)
        storm.close()
    assert sum(body.host_pages for body in restored) > 10
    assert sum(body.peer_pages for body in restored) > 10
    assert any(not body.landed for body in restored)
    wanted = "aborted retracted weight_bumps pages_evicted pages_flushed duplicates_freed"
    for name in [*wanted.split(), "restores_joined", "landings_kept"]:
        assert counters[name], name


def test_the_storms_with_restarts_come_back_in_the_middle_of_things() -> None:
    counters: Counter[str] = Counter()
    for seed in range(6):
        storm = Storm(seed, ("mirrored", "thin", "mirrored"), restarts=True)
        storm.run()
        for node in storm.nodes:
            counters.update(node.scheduler.counters)
        storm.close()
    for name in ("degraded", "returned", "spans_republished", "quarantine_released"):
        assert counters[name], name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_a_storm_goes_on_without_its_daemon_f67(seed: int, mode: Mode) -> None:
    storm = Storm(seed, (mode, mode), lossy=False)
    try:
        storm.run()
        storm.daemon.hold_copies = True
        node = storm.nodes[0]
        for _ in range(8):
            storm._submit(node)
        node.tick(2)
        node.link.alive = False  # the session ended, as after the daemon's death
        for _ in range(60):
            node.tick()
        assert node.scheduler.idle
        assert node.scheduler.mode == "degraded"
        assert sum(record.wrong for record in node.finished.values()) == 0
        pages = node.scheduler.pages
        assert pages.free + pages.tree + pages.quarantined == node.pool.page_count
        assert node.serve(9_001, tokens(5, 6)[:24]).error == ""
        assert node.serve(9_002, tokens(5, 6)).own_pages == 1
    finally:
        storm.close()
