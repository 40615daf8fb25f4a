"""When events are asked for beside a thread that makes calls, and what is done without a thread."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.transfer.device.calls_scene import (
    DEADLINE_S,
    RANGES_MIN,
    MovingDriver,
    Scene,
    SlowDriver,
    ranges,
)
from transfer.device import cuda
from transfer.device.cuda import ASK_NS
from transfer.device.protocol import Completion, DeviceLost


class AskedDriver(SlowDriver):
    """Counts questions for events."""

    asked = 0

    def ready(self, event: Any) -> bool:
        self.asked += 1
        return super().ready(event)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Its clock stands still until the test moves it."""
    monkeypatch.setattr(cuda, "monotonic_ns", lambda: clock[0])
    clock[0] = 10 * ASK_NS
    driver = AskedDriver()
    made = Scene(driver)
    yield made
    driver.gate.set()
    made.close()


clock = [0]


def driver_of(scene: Scene) -> AskedDriver:
    assert isinstance(scene.driver, AskedDriver)
    return scene.driver


def test_events_are_not_asked_for_all_the_time_while_a_call_is_made(scene: Scene) -> None:
    driver = driver_of(scene)
    long = scene.device.submit([ranges(RANGES_MIN)])
    longer = scene.device.submit([ranges(RANGES_MIN)])
    assert driver.waits.wait(DEADLINE_S)
    for _ in range(100):
        assert scene.device.poll() == []
    clock[0] += ASK_NS - 1
    assert scene.device.poll() == []
    assert driver.asked == 0, "they would wait for the call, and it for them"
    driver.gate.set()
    driver.reached = True
    assert scene.polled(2) == [Completion(long), Completion(longer)]


def test_with_no_call_under_way_they_are_asked_for_each_time(scene: Scene) -> None:
    driver = driver_of(scene)
    driver.gate.set()
    scene.device.submit([ranges(1)])
    for _ in range(5):
        assert scene.device.poll() == []
    assert driver.asked == 5
    driver.reached = True
    assert len(scene.polled(1)) == 1


def test_a_call_that_never_returns_hides_no_lost_device(scene: Scene) -> None:
    driver = driver_of(scene)
    scene.device.submit([ranges(RANGES_MIN)])
    assert driver.waits.wait(DEADLINE_S)
    beside = scene.device._beside
    assert beside is not None
    beside._lost = DeviceLost("as it were")
    with pytest.raises(DeviceLost, match="as it were"):
        scene.device.poll()
    beside._lost = None


def test_where_there_is_no_thread_left_the_loop_makes_the_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    was = sys.getswitchinterval()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        scene = Scene(MovingDriver())
    assert "can't start new thread" in caplog.text
    assert sys.getswitchinterval() == was
    ticket = scene.device.submit([ranges(RANGES_MIN)])
    assert scene.polled(1) == [Completion(ticket)]
    scene.close()
