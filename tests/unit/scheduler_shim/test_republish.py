"""How long a step of republication may take, by the clock of the links."""

from itertools import pairwise

import pytest

from directory.core.events import Insert
from scheduler_shim.republish import BATCH_SHARE, BATCH_US_MIN, SPANS_PER_BATCH_MAX, Republisher
from tests.unit.scheduler_shim.support import Cluster, FakeDaemon, tokens


def test_a_batch_takes_no_longer_than_its_share_of_a_schedulers_time(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = SPANS_PER_BATCH_MAX
    node = cluster.add("a", "mirrored", page_count=2 * count)
    daemon.die()
    node.tick()
    assert node.scheduler.mode == "degraded"
    for number in range(count):
        node.serve(number, tokens(number))
    daemon.restart()
    say = Republisher._say

    def slowly(self: Republisher, report: Insert) -> None:
        say(self, report)
        daemon.clock_us += BATCH_US_MIN // 2

    monkeypatch.setattr(Republisher, "_say", slowly)
    daemon.heard.clear()
    said = [0]
    while node.scheduler.client is None:
        daemon.clock_us += 5 * BATCH_US_MIN
        node.tick()
        daemon.run()
        said.append(sum(isinstance(body, Insert) for body in daemon.heard))
    steps = [after - before for before, after in pairwise(said)]
    assert max(steps) == 2, "two take the whole time of a batch"
    assert said[-1] == count


def test_one_long_wait_makes_no_batch_longer_and_a_habit_of_them_does(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else had the core for once; that is no reason to hold the next step up."""
    count = SPANS_PER_BATCH_MAX
    node = cluster.add("a", "mirrored", page_count=2 * count)
    daemon.die()
    node.tick()
    assert node.scheduler.mode == "degraded"
    for number in range(count):
        node.serve(number, tokens(number))
    daemon.restart()
    say = Republisher._say
    said: list[int] = []

    def slowly(self: Republisher, report: Insert) -> None:
        say(self, report)
        said[-1] += 1
        daemon.clock_us += BATCH_US_MIN // 2

    monkeypatch.setattr(Republisher, "_say", slowly)
    long_us = BATCH_SHARE * 4 * BATCH_US_MIN  # a share of four of the shortest batches
    while node.scheduler.client is None:
        said.append(0)
        begun = sum(said) > 0
        waited = len(said) % 4 in (0, 1) if begun else False
        daemon.clock_us += long_us if waited else BATCH_US_MIN
        node.tick()
        daemon.run()
    steps = [step for step in said if step]
    assert sum(steps) == count
    assert set(steps[:-1]) == {2, 8}, "after one long wait as always, after the second one more"
