"""What befalls a look-up between two turns is seen to in the next loop, though turns are left out.

The shim, its client and its daemon are real; the loop is the hook's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from directory.core.events import Mode
from scheduler_shim.client import LIVE_EVERY_US
from scheduler_shim.sglang import hooks
from scheduler_shim.sglang.waiting import Stage
from tests.unit.scheduler_shim.sglang.conftest import Add, Load
from tests.unit.scheduler_shim.sglang.layerwise_rig import ABC
from tests.unit.scheduler_shim.sglang.rig import MiniEngine, prompt
from tests.unit.scheduler_shim.support import FakeDaemon

LOOP_US = 10_000


class Batch:
    """What is looked at of one of SGLang's."""

    def __init__(self, *reqs: Any) -> None:
        self.reqs = list(reqs)
        self.batch_is_full = False

    def is_empty(self) -> bool:
        return not self.reqs


class Loop:
    """SGLang's, as far as the shim's turns go: it admits nobody."""

    def __init__(self, engine: MiniEngine, daemon: FakeDaemon, *running: Any) -> None:
        self.engine = engine
        self.daemon = daemon
        self.scheduler = SimpleNamespace(
            tree_cache=SimpleNamespace(shim=engine.shim),
            waiting_queue=engine.queue,
            page_size=engine.pool.page_size,
            running_batch=Batch(*running),
            last_batch=None,
            chunked_req=None,
        )

    def run(self) -> None:
        """One loop."""
        hooks.after_input(None, self.scheduler)
        assert not self.engine.shim.failure
        self.daemon.run()
        self.daemon.clock_us += LOOP_US

    def to_rest(self) -> None:
        """Loop until a turn is left out."""
        before = self.engine.left_out
        for _ in range(20):
            self.run()
            if self.engine.left_out > before:
                return
        raise AssertionError(f"{self.engine.shim!r} does not come to rest")


def running(rid: str, *, done: bool = False) -> Any:
    """A request of a batch that runs, or that is still listed there."""
    return SimpleNamespace(
        rid=rid, finished=lambda: done, origin_input_ids=[1], output_ids=[1], prefix_len=1,
        sampling_params=SimpleNamespace(max_new_tokens=1),
    )  # fmt: skip


def test_an_offer_is_taken_back_in_the_loop_in_which_something_decodes(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    """Nobody decodes beside the chunks of a prompt; then these are through, and it does."""
    a = engine(mode, loads="adaptive")
    a.closed = True
    a.submit("r", ABC)
    ended, chunked = running("ended", done=True), running("chunked")
    loop = Loop(a, daemon, ended)
    loop.scheduler.last_batch, loop.scheduler.chunked_req = Batch(chunked), chunked
    for _ in range(20):
        loop.run()
    offers = a.shim.loads.offers
    assert offers is not None
    assert offers.offered("r")
    loop.scheduler.chunked_req = None
    assert hooks.decodes(loop.scheduler)
    loop.run()
    assert not offers.offered("r")
    assert a.shim.held("r")
    assert a.counters["offers_held_back"] == 1


def test_a_crowded_offer_is_rested_with(engine: Load, daemon: FakeDaemon, mode: Mode) -> None:
    a = engine(mode, loads="adaptive", share=0.1)
    a.closed = True
    a.submit("r", ABC)
    loop = Loop(a, daemon, running("decoding"))
    loop.to_rest()
    offers = a.shim.loads.offers
    assert offers is not None
    assert offers.offered("r")
    assert a.counters["offers_crowded"] == 1


def test_who_joined_a_load_is_let_go_once_that_has_landed(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    """It joins in its admission and is let go where the other one's outputs are used: both lie
    between two turns."""
    a = engine(mode)
    a.keeps = a.closed = True
    first, second = a.submit("first", ABC), a.submit("second", ABC)
    loop = Loop(a, daemon)
    for _ in range(4):
        loop.run()
    passes: list[Any] = []
    forward, a._forward = a._forward, lambda *row: passes.append(row)  # type: ignore[method-assign]
    daemon.hold_copies = True
    a._admit_loading(first)
    loop.scheduler.running_batch = Batch(running("first"))
    for _ in range(6):
        loop.run()
    held = a.shim._held
    changes, entry = held.changes, held._entries["second"]
    assert (entry.stage, a.shim.held("second")) == (Stage.OFFERED, False)
    a._admit_loading(second)
    assert (entry.stage, a.shim.held("second")) == (Stage.FILLING, True)
    assert held.changes > changes, "it waits for something else"
    daemon.hold_copies = False
    daemon.run()
    forward(*passes[0])
    hooks.results_used(a.shim)
    assert a.shim.loads.has_turns, "it was answered, and nobody was let go on yet"
    for _ in range(2):
        loop.run()
    assert not a.shim.held("second")
    assert not a.shim.loads.has_turns


@pytest.mark.parametrize("how", ["weights", "eviction"])
def test_who_was_forgotten_is_looked_up_in_the_next_loop(
    how: str, add: Add, daemon: FakeDaemon, mode: Mode
) -> None:
    a = add("a", mode, restore_min_pages=1)
    a.closed = True
    a.submit("r", prompt(1, 2))
    loop = Loop(a, daemon, running("decoding"))
    loop.to_rest()
    asked = a.counters["asked"]
    if how == "weights":
        a.shim.change_weights(7)
    else:
        a.shim._held.forget_all()
    loop.run()
    assert a.counters["asked"] == asked + 1


def test_who_waited_when_the_daemon_came_back_is_looked_up_in_the_next_loop(
    add: Add, daemon: FakeDaemon, mode: Mode
) -> None:
    a = add("a", mode, restore_min_pages=1)
    a.closed = True
    a.submit("r", prompt(1, 2))
    loop = Loop(a, daemon, running("decoding"))
    loop.to_rest()
    asked = a.counters["asked"]
    daemon.die()
    loop.run()
    assert a.shim.mode == "degraded"
    daemon.restart()
    while a.shim.mode == "degraded":
        loop.run()
    loop.run()
    assert a.counters["asked"] == asked + 1


def test_an_idle_engine_leaves_turns_out_in_every_second(
    add: Add, daemon: FakeDaemon, mode: Mode
) -> None:
    a = add("a", mode)
    a.serve("r", prompt(1, 2))
    loop = Loop(a, daemon)
    loop.to_rest()
    a_second = LIVE_EVERY_US // LOOP_US
    for second in range(4):
        before = a.left_out
        for _ in range(a_second):
            loop.run()
        assert a.left_out - before >= a_second - 2, f"second {second}"
