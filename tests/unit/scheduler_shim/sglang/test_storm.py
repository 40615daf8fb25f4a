"""Random life of two engines: shared prefixes, tiny pools, aborts, flushes, updates, dead daemons.

Every page that a request did not compute is read back, every invariant is looked at after every
step of every engine, and at the end nothing is leased and every page is accounted for. Turns are
left out as in SGLang's loop; with every other seed they are had all the same, and must be idle.
"""

from __future__ import annotations

import random

import pytest

from directory.core.events import Match, Mode, Restore
from tests.unit.scheduler_shim.sglang.conftest import Add
from tests.unit.scheduler_shim.sglang.rig import MiniEngine, leases, prompt
from tests.unit.scheduler_shim.support import FakeDaemon


class Storm:
    """One run. `chance`: draws everything."""

    def __init__(self, daemon: FakeDaemon, engines: list[MiniEngine], chance: random.Random):
        self.daemon = daemon
        self.engines = engines
        self.chance = chance
        self.submitted = 0
        self.aborted: set[str] = set()

    def step(self) -> None:
        """A few things happen, then every engine takes a turn."""
        chance, daemon = self.chance, self.daemon
        engine = chance.choice(self.engines)
        draw = chance.random()
        if draw < 0.45:
            self.submitted += 1
            engine.submit(f"r{self.submitted}", self.prompt())
        elif draw < 0.52 and engine.queue:
            request = chance.choice(engine.queue)
            engine.abort(request.rid)
            self.aborted.add(request.rid)
        elif draw < 0.60:
            daemon.hold_copies = not daemon.hold_copies
        elif draw < 0.63:
            daemon.fail_copies = lambda _: chance.random() < 0.3
        elif draw < 0.65 and not engine.queue and not engine.running:
            engine.shim.flush()
            engine.shim.after_clear()
        elif draw < 0.66 and not engine.running:
            engine.shim.change_weights(chance.randrange(1, 3))
        elif draw < 0.69:
            daemon.drop_request = lambda body: isinstance(body, Match) and chance.random() < 0.2
            daemon.drop_reply = lambda body: isinstance(body, Restore) and chance.random() < 0.2
        elif draw < 0.70:
            daemon.die() if not daemon.absent else daemon.restart()
        elif draw < 0.75 and daemon.absent:
            daemon.restart()
        engine.closed = chance.random() < 0.2
        for each in self.engines:
            each.step()
        daemon.clock_us += chance.choice((0, 1_000, 30_000, 700_000))
        if not daemon.absent:
            daemon.run()

    def prompt(self) -> bytes:
        """One of few families of prompts, cut or grown at random."""
        family = self.chance.randrange(3)
        length = self.chance.randrange(1, 7)
        ids = [10 * family + at for at in range(length)]
        if self.chance.random() < 0.3:
            ids[-1] += 5
        return prompt(*ids, tail=self.chance.randrange(4))

    def calm(self) -> None:
        """Everything works again; everybody comes to rest."""
        daemon = self.daemon
        daemon.hold_copies = False
        daemon.fail_copies = lambda _: False
        daemon.drop_request = lambda _: False
        daemon.drop_reply = lambda _: False
        if daemon.absent:
            daemon.restart()
        for engine in self.engines:
            engine.closed = False
        for _ in range(400):
            for engine in self.engines:
                engine.step()
            daemon.run()
            daemon.clock_us += 20_000
        for engine in self.engines:
            engine.settle()


@pytest.mark.parametrize("seed", [*range(12), 104])
def test_nothing_is_wrong_lost_or_leaked_in_a_storm(
    seed: int, daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    chance = random.Random(seed)
    engines = [
        add(
            name,
            mode,
            page_count=chance.choice((9, 12, 20)),
            renamed=chance.random() < 0.5,
            steps=chance.choice((0, 1, 3)),
            hold_ms_max=chance.choice((5, 100, 2_000)),
            share=chance.choice((0.3, 0.6, 1.0)),
            window=chance.choice((2, 128)),
            reask_ms=50,
        )
        for name in "ab"
    ]
    for engine in engines:
        engine.doubts = seed % 2 == 1
    storm = Storm(daemon, engines, chance)
    for _ in range(250):
        storm.step()
    storm.calm()
    done = sum(len(engine.done) for engine in engines)
    assert done == storm.submitted - len(storm.aborted)
    daemon.clock_us += 2_000_000
    for engine in engines:
        engine.settle()
        assert engine.shim.mode == mode
        assert engine.shim.outside_pages == 0
        assert not engine.shim.failure
        assert engine.left_out > 0
    assert leases(daemon) == 0
