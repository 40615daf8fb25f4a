"""Random life of an engine whose loads land layer by layer, beside one that computes for both.

What a forward pass reads is compared with what its pages must hold, every invariant is looked at
after every step, and at the end nothing is leased and every page is accounted for. With adaptive
loads chance says what decodes, and no load may begin meanwhile but one that had no room. Turns are
left out as in SGLang's loop; with every other seed they are had all the same, and must be idle.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from directory.core.events import Match, Mode
from tests.unit.scheduler_shim.sglang.conftest import Add
from tests.unit.scheduler_shim.sglang.layerwise_rig import LoadingEngine
from tests.unit.scheduler_shim.sglang.rig import MiniEngine, leases, prompt
from tests.unit.scheduler_shim.support import FakeDaemon


class LoadStorm:
    """One run. `chance`: draws everything."""

    def __init__(
        self, daemon: FakeDaemon, engine: LoadingEngine, other: MiniEngine, chance: random.Random
    ) -> None:
        self.daemon = daemon
        self.engine = engine
        self.other = other
        self.chance = chance
        self.submitted = 0
        self.mode = engine.settings.mode
        self.decodes = False
        self.loads_beside_decodes = 0
        offers = engine.shim.loads.offers
        assert offers is not None
        offers.decoding = lambda: self.decodes
        begin = engine.shim.loads.begin

        def counted(req: Any, own: bytes, count: int) -> bytes:
            targets = begin(req, own, count)
            self.loads_beside_decodes += bool(targets) and self.decodes
            return targets

        engine.shim.loads.begin = counted  # type: ignore[method-assign]

    def step(self) -> None:
        """A few things happen, then both engines take a turn."""
        chance, daemon, engine = self.chance, self.daemon, self.engine
        draw = chance.random()
        if draw < 0.45 and len(engine.queue) < 4:
            self.submitted += 1
            where = engine if chance.random() < 0.9 else self.other
            where.submit(f"r{self.submitted}", self.prompt())
        elif draw < 0.55:
            names = [request.rid for request in engine.queue] + list(engine.rows)
            if names:
                engine.abort(chance.choice(names))
        elif draw < 0.65 and engine.rows:
            engine.finish(chance.choice(list(engine.rows)))
        elif draw < 0.70:
            daemon.hold_copies = not daemon.hold_copies
        elif draw < 0.73:
            daemon.fail_copies = lambda _: chance.random() < 0.3
        elif draw < 0.75 and not engine.rows and not engine.queue:
            engine.shim.flush()
            engine.shim.after_clear()
        elif draw < 0.77:
            engine.shim.change_weights(chance.randrange(1, 3))
        elif draw < 0.80:
            daemon.drop_request = lambda body: isinstance(body, Match) and chance.random() < 0.1
        elif draw < 0.81:
            daemon.die() if not daemon.absent else daemon.restart()
        elif draw < 0.86 and daemon.absent:
            daemon.restart()
        elif draw < 0.88 and not daemon.absent:
            daemon.lose_mover()
        self._turn()

    def _turn(self) -> None:
        chance, daemon, engine = self.chance, self.daemon, self.engine
        engine.keeps = chance.random() < 0.4 and len(engine.rows) < 1
        engine.refuses = {r.rid for r in engine.queue if chance.random() < 0.1}
        engine.behind = chance.random() < 0.4
        engine.in_forward = self._in_forward
        engine.closed = self.other.closed = chance.random() < 0.2
        self.decodes = chance.random() < 0.4
        engine.step()
        if engine.settings.loads == "adaptive":
            assert self.loads_beside_decodes <= engine.counters.get("offers_crowded", 0)
        self.other.step()
        daemon.clock_us += chance.choice((0, 1_000, 30_000, 700_000))
        if not daemon.absent:
            daemon.run()
        if chance.random() < 0.3:
            self._rest()

    def _rest(self) -> None:
        """Loops in which nobody is admitted: what waits and what runs stays as it is."""
        self.engine.closed = True
        for _ in range(5):
            self.decodes = self.chance.random() < 0.2
            self.engine.step()
            self.daemon.clock_us += 100
            if not self.daemon.absent:
                self.daemon.run()

    def _in_forward(self, _: int) -> None:
        """Whatever can befall a daemon befalls it in the midst of a forward pass."""
        draw = self.chance.random()
        if draw < 0.01 and not self.daemon.absent:
            self.daemon.die()
        elif draw < 0.05 and not self.daemon.absent:
            self.daemon.lose_mover()
        elif draw < 0.2:
            self.daemon.hold_copies = not self.daemon.hold_copies

    def prompt(self) -> bytes:
        """One of few families of prompts, cut or grown at random."""
        family = self.chance.randrange(9)
        ids = [10 * family + at for at in range(self.chance.randrange(1, 6))]
        if self.chance.random() < 0.3:
            ids[-1] += 5
        return prompt(*ids, tail=self.chance.randrange(1, 4))

    def calm(self) -> None:
        """Everything works again; everybody comes to rest."""
        daemon, engine = self.daemon, self.engine
        daemon.hold_copies = False
        daemon.fail_copies = lambda _: False
        daemon.drop_request = lambda _: False
        if daemon.absent:
            daemon.restart()
        engine.in_forward = lambda _: None
        engine.refuses, engine.keeps, engine.behind = set(), False, False
        engine.closed = self.other.closed = False
        for name in list(engine.rows):
            engine.finish(name)
        for _ in range(400):
            engine.step()
            self.other.step()
            daemon.run()
            daemon.clock_us += 20_000
        daemon.clock_us += 2_000_000
        engine.settle()
        self.other.settle()


@pytest.mark.parametrize("loads", ["layerwise", "adaptive"])
@pytest.mark.parametrize("seed", [*range(16), 109])
def test_no_load_is_read_too_early_lost_silently_or_leaked(
    seed: int, loads: str, daemon: FakeDaemon, add: Add, mode: Mode
) -> None:
    chance = random.Random(seed)
    other = add("other", mode, page_count=7, steps=1)
    engine = LoadingEngine(
        daemon,
        "loading",
        mode,
        loads=loads,
        page_count=chance.choice((13, 16)),
        layer_ms=chance.choice((2, 20)),
        match_ms=chance.choice((2, 20)),
        reask_ms=50,
        hold_ms_max=chance.choice((5, 200)),
    )
    engine.doubts = other.doubts = seed % 2 == 1
    storm = LoadStorm(daemon, engine, other, chance)
    for _ in range(200):
        storm.step()
    storm.calm()
    assert engine.shim.mode == mode
    assert engine.left_out > 0
    assert engine.queue == []
    assert engine.shim.outside_pages == 0
    assert engine.free + engine.shim.tree.pages == engine.pool.page_count
    assert leases(daemon) == 0
    engine.close()
