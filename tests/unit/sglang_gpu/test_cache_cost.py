"""What the cache costs a scheduler: the work of each of our hooks is counted, and by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sglang_gpu import cache_cost
from scheduler_shim.sglang import hooks
from tests.unit.scheduler_shim.conftest import daemon as daemon_fixture
from tests.unit.scheduler_shim.sglang import test_hooks
from tests.unit.scheduler_shim.sglang.layerwise_rig import LoadingEngine
from tests.unit.scheduler_shim.sglang.test_hooks import Adder, Scheduler, request
from tests.unit.scheduler_shim.support import FakeDaemon

policy = test_hooks.policy
daemon = daemon_fixture
"""Fixtures for all of these."""


def test_the_look_at_who_stays_in_the_queue_is_counted_whole(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in cache_cost.HOOKS:
        monkeypatch.setattr(hooks, name, getattr(hooks, name))  # so that it is undone
    engine = LoadingEngine(daemon, "loading", loads="adaptive")
    cost = cache_cost.Cost(tmp_path / "cost.json")
    cache_cost.watch(cost, Scheduler(engine))
    said = hooks.around_add_one_req(Adder.add_one_req, Adder(engine), request("r"), False)
    assert said == "added"
    assert cost.calls == {"stays": 1, "crowded": 1, "admitted": 1}
    assert hooks.around_preempt(lambda *_: True, Adder(engine), request("r"))
    assert cost.calls["stays"] == 2
    assert 0 < cost.by["stays"] <= cost.ns
    engine.close()
