"""What decodes has a step before a restored request is computed: `adaptive` loads, in the hooks."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_shim.sglang import hooks
from tests.unit.scheduler_shim.sglang import test_hooks
from tests.unit.scheduler_shim.sglang.layerwise_rig import LoadingEngine
from tests.unit.scheduler_shim.sglang.test_hooks import Adder, Batch, Scheduler, request
from tests.unit.scheduler_shim.support import FakeDaemon

policy = test_hooks.policy
"""A fixture for all of these."""


def test_a_tick_has_offers_told_what_kind_of_batch_ran_last(daemon: FakeDaemon) -> None:
    loading = LoadingEngine(daemon, "loading")
    scheduler, offers = Scheduler(loading), loading.shim.loads.offers
    hooks.after_input(None, scheduler)
    assert offers is not None
    assert not offers.passed()
    scheduler.last_batch = Batch()
    assert not offers.passed()
    scheduler.last_batch.extends = True
    assert offers.passed()
    loading.close()


@pytest.mark.parametrize("loads", ["adaptive", "layerwise"])
def test_what_decodes_has_a_step_before_a_restored_request_is_computed(
    daemon: FakeDaemon, loads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LoadingEngine(daemon, "loading", loads=loads)
    scheduler, restored = Scheduler(engine), {"r": (12, 0), "other": (0, 0)}
    monkeypatch.setattr(engine.shim, "restored_tokens", lambda rid: restored[rid])
    hooks.after_input(None, scheduler)

    def admits(rid: str, in_front: Any = None) -> bool:
        adder = Adder(engine)
        adder.can_run_list += [in_front] if in_front else []
        said: str = hooks.around_add_one_req(Adder.add_one_req, adder, request(rid), False)
        return said == "added"

    scheduler.last_batch, scheduler.running_batch.reqs = Batch(), []
    scheduler.last_batch.extends = True
    assert admits("r"), "nothing decodes"
    scheduler.running_batch.reqs = [request("computed", finished=lambda: False)]
    assert admits("r", in_front=request("front")), "a pass comes anyway"
    assert admits("other"), "it was not restored while it was held back"
    first = loads == "layerwise"
    assert admits("r") is first
    assert admits("r"), "once"
    scheduler.last_batch.extends = False
    assert admits("r"), "it was a step"
    scheduler.last_batch.extends = True
    assert hooks.around_preempt(lambda *_: True, Adder(engine), request("r")) is first
    assert admits("r"), "there was a step meanwhile, and it has been asked once"
    assert engine.counters.get("steps_first", 0) == (0 if first else 2)
    engine.close()


def test_a_pass_for_somebody_behind_takes_a_restored_request_along(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one pass becomes two, and what decodes waits for both, one after the other."""
    engine = LoadingEngine(daemon, "loading", loads="adaptive")
    scheduler, restored = Scheduler(engine), {"r": (12, 0), "q": (0, 0), "s": (12, 0)}
    held: set[str] = set()
    monkeypatch.setattr(engine.shim, "restored_tokens", lambda rid: restored[rid])
    monkeypatch.setattr(engine.shim, "held", lambda rid: rid in held)
    hooks.after_input(None, scheduler)
    scheduler.last_batch, scheduler.running_batch.reqs = Batch(), []
    scheduler.last_batch.extends = True
    scheduler.running_batch.reqs = [request("computed", finished=lambda: False)]

    def admits(*queue: str) -> list[str]:
        """Who of these is in the pass that is formed now."""
        waiting: list[Any] = [request(rid) for rid in queue]
        scheduler.waiting_queue, adder = waiting, Adder(engine)
        for req in waiting:
            hooks.around_add_one_req(Adder.add_one_req, adder, req, False)
        return [req.rid for req in adder.can_run_list]

    assert admits("r", "q") == ["r", "q"], "q is computed now anyway"
    held.add("q")
    assert admits("r", "q") == [], "q is held back, so nobody is"
    assert admits("s", "r") == ["s", "r"], "r has let a step go first"
    scheduler.last_batch.extends = False
    assert admits("s", "r") == ["s", "r"], "it was a step"
    scheduler.last_batch.extends = True
    assert admits("s", "r") == [], "both were restored, and nobody else comes"
    crowd = [f"far{n}" for n in range(engine.shim.settings.window)]
    restored |= dict.fromkeys(crowd, (0, 0))
    held.update(crowd)
    held.discard("q")
    scheduler.last_batch.extends = False
    admits("r")
    scheduler.last_batch.extends = True
    assert admits("r", *crowd[1:], "q")[0] == "q", (
        "q is behind the head of the queue: not looked at"
    )
    engine.close()
