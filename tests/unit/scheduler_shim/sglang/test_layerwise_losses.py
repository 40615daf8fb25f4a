"""Loads that are lost under a forward pass: whom it costs, and what stays behind."""

import pytest

from directory.core.actions import Restored
from directory.core.events import Mode
from tests.unit.scheduler_shim.sglang.conftest import Load
from tests.unit.scheduler_shim.sglang.layerwise_rig import (
    ABC,
    OTHERS,
    STREAM,
    at_rest,
)
from tests.unit.scheduler_shim.sglang.rig import prompt
from tests.unit.scheduler_shim.support import FakeDaemon


def test_a_refused_restore_ends_exactly_that_request(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    daemon.fail_copies = lambda copy: bool(copy.landing)
    request = a.start("r", ABC)
    assert "made to fail" in request.failed
    assert a.holds(ABC) == 0, "nothing of it is published"
    daemon.fail_copies = lambda _: False
    assert a.serve("other", prompt(30, 31)).hit_pages == 0
    at_rest(a)
    assert a.counters["loads_lost_in_flight"] == a.counters["lost"] == 1


def test_a_layer_that_does_not_come_in_time_ends_the_request_and_withdraws_other_offers(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.closed = True
    first, second = a.submit("r1", ABC), a.submit("r2", OTHERS[0])
    for _ in range(3):
        a.step()
        daemon.run()
    a.closed, daemon.hold_copies = False, True
    a.step()
    assert "layer 0 was not there after 20 ms" in first.failed
    assert a.counters["layers_timed_out"] == 1
    assert (second.loaded_pages, second.failed) == (0, ""), "computed: copies do not come"
    assert a.shim.outside_pages == 3, "a mover may still write into them"
    daemon.hold_copies = False
    at_rest(a)
    assert a.start("again", ABC).loaded_pages == 3


def test_a_daemon_that_dies_during_the_load_costs_that_request_alone(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.keeps = True
    running = a.start("running", OTHERS[-1])
    daemon.hold_copies = True

    def die(layer: int) -> None:
        if layer == 0:
            a.counter_says(1)  # the first layer has landed
        else:
            daemon.die()

    a.in_forward = die
    request = a.start("r", ABC)
    assert "gone" in request.failed
    assert running.failed == ""
    a.step()
    assert a.shim.mode == "degraded"
    assert a.shim.outside_pages == 3, "quarantined: a mover may still be alive"
    daemon.hold_copies = False
    a.finish("running")
    daemon.restart()
    for _ in range(400):
        a.step()
        daemon.run()
        daemon.clock_us += 10_000
    assert a.shim.mode == mode
    assert "0 open" in repr(a.shim.loads._layers), "its counter serves the next load"
    at_rest(a)


def test_a_load_that_is_whole_when_the_daemon_dies_ends_nobody_and_is_not_published(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    a.keeps = True
    daemon.drop_reply = lambda body: isinstance(body, Restored)
    request = a.start("r", ABC)
    assert (request.loaded_pages, request.failed) == (3, "")
    daemon.die()
    a.step()
    a.step()
    a.finish("r")
    assert request.failed == ""
    assert a.holds(ABC) == 0, "its answer has never come"
    assert a.shim.outside_pages == 0
    assert a.free + a.shim.tree.pages == a.pool.page_count


def test_a_defect_in_a_wait_ends_the_request_and_is_told_by_the_next_tick(
    engine: Load, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = engine("mirrored")
    daemon.hold_copies = True

    def broken(_: int) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(a.shim, "peek", broken)
    request = a.start("r", ABC)
    assert "broken" in request.failed
    with pytest.raises(RuntimeError, match="broken"):
        a.step()
    daemon.hold_copies = False
    monkeypatch.undo()
    at_rest(a)


class FakeStreams:
    """What a GPU's streams are asked to wait for; `gone`: layers whose wait was over too early."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []
        self.gone: set[int] = set()

    def wait(self, stream: int, index: int, value: int, deadline_s: float) -> None:
        assert deadline_s == 0.02
        self.waits.append((stream, value))

    def answered(self, index: int, value: int, *, landed: bool) -> None:
        """Nobody waits here."""

    def lost(self, index: int, value: int) -> bool:
        return value in self.gone


def test_on_a_gpu_the_stream_waits_and_the_results_are_held_until_it_is_known(
    engine: Load, mode: Mode
) -> None:
    streams = FakeStreams()
    a = engine(mode, streams=streams)
    first = a.landed_layers()
    request = a.start("r", ABC)
    assert streams.waits == [(STREAM, first + 1), (STREAM, first + 2)]
    assert a.shim.loads.counter.consumer_index == -1, "what a stream runs later waits for nothing"
    assert (request.loaded_pages, request.failed, a.synchronized) == (3, "", 1)
    assert a.holds(ABC) == 3
    at_rest(a)


def test_a_request_whose_stream_went_on_without_a_layer_ends(engine: Load, mode: Mode) -> None:
    streams = FakeStreams()
    a = engine(mode, streams=streams)
    streams.gone = {a.landed_layers() + 2}
    request = a.start("r", ABC)
    assert "in time" in request.failed
    assert a.holds(ABC) == 0
    at_rest(a)


def test_a_loss_in_the_lock_of_the_admission_ends_the_request_it_cannot_be_undone_for(
    engine: Load, daemon: FakeDaemon, mode: Mode
) -> None:
    a = engine(mode)
    launch = a.shim.loads.launch

    def lose_first(req: object) -> int:
        assert a.shim.client is not None
        a.shim.client.lose("no answer to Lock")
        a.shim.look_for_loss()
        return launch(req)

    a.shim.loads.launch = lose_first  # type: ignore[method-assign]
    daemon.hold_copies = True
    request = a.start("r", ABC)
    assert "gone" in request.failed
    assert a.counters["loads_lost_in_flight"] == 1
    assert a.shim.outside_pages == 3, "a mover may still write into them"
