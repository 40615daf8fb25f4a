"""The counter that SGLang's KV pool asks before it hands out a layer's buffers."""

from types import ModuleType, SimpleNamespace

import pytest

from scheduler_shim.sglang.layer_counter import LayerCounter
from scheduler_shim.sglang.load import end_request, without


class FakeLoad:
    """A load that is waited for up to a layer."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.waited: list[int] = []

    def wait(self, layer: int) -> bool:
        self.waited.append(layer)
        return layer < self.last


def test_every_load_of_the_batch_is_waited_for_at_each_layer_until_it_is_over() -> None:
    counter = LayerCounter(4)
    short, long = FakeLoad(1), FakeLoad(3)
    counter.begin(short)
    counter.begin(long)
    for layer in (0, 0, 1, 2, 3):  # a layer's keys and values are read one after the other
        counter.wait_until(layer)
    assert short.waited == [0, 0, 1]
    assert long.waited == [0, 0, 1, 2, 3]
    assert counter.consumer_index == -1


def test_graph_runners_learn_whether_anything_is_waited_for() -> None:
    counter = LayerCounter(4)
    assert (counter.consumer_index, counter.num_layers) == (-1, 4)
    load = FakeLoad(3)
    counter.begin(load)
    assert counter.consumer_index == 0
    counter.end(load)
    counter.end(load)
    assert counter.consumer_index == -1


def test_a_batch_without_a_consumer_of_sglangs_own_is_waited_for_all_the_same() -> None:
    counter = LayerCounter(2)
    load = FakeLoad(1)
    counter.begin(load)
    counter.set_consumer(-1)
    counter.wait_until(0)
    assert load.waited == [0]


@pytest.mark.parametrize(
    ("pages", "left"),
    [
        (None, [(16, 90)]),
        ((1, 4), [(64, 90)]),
        ((2, 4), [(16, 32), (64, 90)]),
        ((2, 6), [(16, 32)]),
        ((0, 9), []),
        ((6, 8), [(16, 90)]),
    ],
)
def test_a_row_is_given_back_without_the_pages_that_are_kept(
    pages: tuple[int, int] | None, left: list[tuple[int, int]]
) -> None:
    assert without([(16, 90)], pages, 16) == left


@pytest.mark.parametrize("finished", [True, False])
def test_a_request_is_ended_with_status_503_unless_it_has_ended(
    finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("schedule_batch")
    module.FINISH_ABORT = lambda *given: given  # type: ignore[attr-defined]
    monkeypatch.setattr("importlib.import_module", lambda _: module)
    req = SimpleNamespace(to_finish=None, finished=lambda: finished)
    end_request(req, "lost")
    wanted = None if finished else ("lost", 503, "ServiceUnavailableError")
    assert req.to_finish == wanted
