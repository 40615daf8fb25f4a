"""Landing counters over a loss: a counter is spare or one load's, whatever is answered when."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from directory.core.ids import LANDINGS
from scheduler_shim.landings import Landing, Landings
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import TimelineTable

COUNTERS = 3


@pytest.fixture
def table() -> Iterator[TimelineTable]:
    made = TimelineTable.create(SharedMemoryIPC(), "timelines", landings=COUNTERS)
    yield made
    made.close()


def begun(landings: Landings) -> Landing:
    landing = landings.begin(2)
    assert landing is not None
    return landing


def test_what_begins_after_a_loss_is_not_settled_with_what_was_lost(table: TimelineTable) -> None:
    landings = Landings(table)
    lost = begun(landings)
    landings.lose_all("the daemon is gone")
    healthy = begun(landings)
    landings.settle()
    assert (lost.answered, healthy.answered, healthy.lost) == (True, False, "")
    assert table.read(healthy.counter) == healthy.first, "its mover alone writes it"
    assert landings.open == [healthy]
    assert healthy.take_answer(landed=True)
    landings.settle()
    assert landings.open == []
    assert landings.check() == []


def test_loads_lost_in_two_losses_are_all_settled(table: TimelineTable) -> None:
    landings = Landings(table)
    begun(landings)
    landings.lose_all("the first daemon is gone")
    begun(landings)
    landings.lose_all("the second daemon is gone")
    assert len(landings.open) == 2
    landings.settle()
    assert landings.open == []
    assert landings.check() == []


def test_a_second_answer_frees_nobody_elses_counter(table: TimelineTable) -> None:
    landings = Landings(table)
    first = begun(landings)
    first.take_answer(landed=False)
    second = begun(landings)
    assert second.counter == first.counter
    first.take_answer(landed=False)
    assert landings.open == [second]
    assert landings.check() == []
    others = set(range(LANDINGS, LANDINGS + COUNTERS)) - {second.counter}
    assert {begun(landings).counter for _ in range(COUNTERS - 1)} == others
    assert landings.begin(2) is None


@pytest.mark.parametrize("seed", range(8))
def test_no_counter_is_spare_twice_or_while_it_serves_whatever_happens(
    seed: int, table: TimelineTable
) -> None:
    chance, landings = random.Random(seed), Landings(table)
    healthy: list[Landing] = []
    lost: list[Landing] = []
    for _ in range(400):
        draw = chance.random()
        if draw < 0.5 and (landing := landings.begin(chance.randrange(1, 4))) is not None:
            healthy.append(landing)
        elif draw < 0.8 and healthy:
            healthy.pop(chance.randrange(len(healthy))).take_answer(landed=chance.random() < 0.5)
        elif draw < 0.9:
            landings.lose_all("the daemon is gone")
            lost, healthy = lost + healthy, []
        elif draw < 0.95:
            landings.settle()
            assert all(landing.answered for landing in lost)
            lost = []
        elif lost:
            chance.choice(lost).take_answer(landed=False)
            lost = [landing for landing in lost if not landing.answered]
        assert landings.check() == []
        assert not any(landing.lost for landing in healthy)
        assert {one.counter for one in landings.open} == {one.counter for one in healthy + lost}
    assert len(landings.open) <= COUNTERS
