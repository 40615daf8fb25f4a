"""A load's counter as its scheduler sees it: waiting for layers, losing, and using it again."""

import threading
from collections.abc import Iterator

import pytest

from directory.core.errors import BadMessage, InternalError
from directory.core.ids import LANDINGS
from scheduler_shim.landings import Landings, LoadLost
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import TimelineTable

LAYERS = 4


class FakeStreams:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int, int, float]] = []
        self.answers: list[tuple[int, int, bool]] = []
        self.gone: set[tuple[int, int]] = set()

    def wait(self, stream: int, index: int, value: int, deadline_s: float) -> None:
        self.waits.append((stream, index, value, deadline_s))

    def answered(self, index: int, value: int, *, landed: bool) -> None:
        self.answers.append((index, value, landed))

    def lost(self, index: int, value: int) -> bool:
        return (index, value) in self.gone


@pytest.fixture
def table() -> Iterator[TimelineTable]:
    """Timelines with two landing counters."""
    made = TimelineTable.create(SharedMemoryIPC(), "timelines", landings=2)
    made.write(LANDINGS, 100)
    yield made
    made.close()


def test_a_load_begins_where_its_counter_stands(table: TimelineTable) -> None:
    landings = Landings(table)
    landing = landings.begin(LAYERS)
    assert landing is not None
    assert landing.wire == (LANDINGS, 100)
    assert landing.landed_layers == 0
    table.write(LANDINGS, 102)
    assert landing.landed_layers == 2
    landing.wait_until(1, 5.0)


def test_a_waiter_goes_on_as_soon_as_its_layer_has_landed(table: TimelineTable) -> None:
    landing = Landings(table).begin(LAYERS)
    assert landing is not None
    passed: list[int] = []

    def forward() -> None:
        for layer in range(LAYERS):
            landing.wait_until(layer, 30.0)
            passed.append(layer)
            reached.release()

    reached = threading.Semaphore(0)
    thread = threading.Thread(target=forward)
    thread.start()
    for layer in range(LAYERS):
        assert len(passed) == layer, "not before"
        table.write(LANDINGS, 100 + layer + 1)
        assert reached.acquire(timeout=30)
    thread.join(30)
    assert landing.take_answer(landed=True)


def test_a_lost_answer_ends_every_wait_as_lost_never_as_landed(table: TimelineTable) -> None:
    landing = Landings(table).begin(LAYERS)
    assert landing is not None
    table.write(LANDINGS, 102)
    outcome: list[str] = []

    def forward() -> None:
        try:
            landing.wait_until(3, 30.0)
        except LoadLost as error:
            outcome.append(str(error))
        else:
            outcome.append("landed")

    thread = threading.Thread(target=forward)
    thread.start()
    assert not landing.take_answer(landed=False, detail="the mover died")
    thread.join(30)
    assert outcome == ["layer 3 has not landed: the mover died"]
    assert landing.landed_layers == 0, "nothing of a lost load counts"
    with pytest.raises(LoadLost):
        landing.wait_until(0, 1.0)
    assert table.read(LANDINGS) == 100 + LAYERS, "whoever polls the counter goes on"


def test_a_wait_over_its_deadline_gives_the_load_up(table: TimelineTable) -> None:
    landing = Landings(table).begin(LAYERS)
    assert landing is not None
    with pytest.raises(LoadLost, match=r"layer 2 was not there after 0.001 s"):
        landing.wait_until(2, 0.001)
    assert table.read(LANDINGS) == 100 + LAYERS, "which the mover sees"
    assert not landing.take_answer(landed=True), "somebody went on without it"


def test_pages_of_pools_land_with_the_answer(table: TimelineTable) -> None:
    landing = Landings(table).begin(LAYERS)
    assert landing is not None
    assert landing.take_answer(landed=True)
    landing.wait_until(LAYERS - 1, 0.0)
    assert table.read(LANDINGS) == 100 + LAYERS


def test_a_counter_serves_one_load_until_its_answer(table: TimelineTable) -> None:
    landings = Landings(table)
    first, second = landings.begin(LAYERS), landings.begin(LAYERS)
    assert first is not None
    assert second is not None
    assert {first.counter, second.counter} == {LANDINGS, LANDINGS + 1}
    assert landings.begin(LAYERS) is None
    first.give_up("enough")
    assert landings.begin(LAYERS) is None, "the mover may still write it"
    first.take_answer(landed=False)
    third = landings.begin(LAYERS)
    assert third is not None
    assert third.wire == (first.counter, first.first + LAYERS)


def test_with_the_daemon_all_loads_are_lost_and_their_counters_wait_for_the_mover(
    table: TimelineTable,
) -> None:
    landings = Landings(table)
    landing = landings.begin(LAYERS)
    assert landing is not None
    landings.lose_all("the daemon is gone")
    with pytest.raises(LoadLost, match="the daemon is gone"):
        landing.wait_until(0, 5.0)
    assert landings.begin(1) is not None
    assert landings.begin(1) is None
    landings.settle()
    assert landings.begin(1) is not None


def test_streams_wait_for_values_of_this_load(table: TimelineTable) -> None:
    streams = FakeStreams()
    landing = Landings(table, streams).begin(LAYERS)
    assert landing is not None
    landing.wait_in_stream(7, 2, 1.5)
    assert streams.waits == [(7, LANDINGS, 103, 1.5)]
    assert not landing.stream_lost(2)
    streams.gone.add((LANDINGS, 103))
    assert landing.stream_lost(2)
    landing.take_answer(landed=False)
    assert streams.answers == [(LANDINGS, 104, False)]
    assert landing.stream_lost(0)
    with pytest.raises(LoadLost):
        landing.wait_in_stream(7, 3, 1.0)


def test_what_cannot_be_is_refused(table: TimelineTable) -> None:
    landings = Landings(table)
    with pytest.raises(BadMessage):
        landings.begin(0)
    landing = landings.begin(1)
    assert landing is not None
    with pytest.raises(InternalError, match="no streams"):
        landing.wait_in_stream(7, 0, 1.0)


def test_a_table_without_counters_serves_no_load() -> None:
    made = TimelineTable.create(SharedMemoryIPC(), "timelines")
    assert Landings(made).begin(1) is None
    made.close()
