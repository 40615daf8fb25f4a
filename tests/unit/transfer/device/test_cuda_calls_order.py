"""In which order a thread makes the driver's calls: loads first, a stream's in their own."""

from collections.abc import Iterator

import pytest

from tests.unit.transfer.device.calls_scene import (
    DEADLINE_S,
    RANGES_MIN,
    Scene,
    SlowDriver,
    gate_of,
    ranges,
)
from transfer.device.cuda_calls import URGENT_RUN_MAX

COPIED = ("cuMemcpyAsync", "cuEventRecord")


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A device whose driver's lists wait."""
    made = Scene(SlowDriver())
    yield made
    gate_of(made).gate.set()
    made.close()


def order_of(scene: Scene) -> str:
    """Whose calls were made, one letter each: a load's, which is urgent, or a backup's."""
    urgent = {int(stream) for stream in scene.device._urgent}
    recorded = gate_of(scene).named("cuEventRecord")
    return "".join("l" if int(call[1]) in urgent else "b" for call in recorded)


@pytest.mark.parametrize(
    ("handed", "made"),
    [
        # The first one's call is under way already.
        ("bbbl", "blbb"),
        ("bbblbl", "bllbbb"),
        ("lbbl", "llbb"),
        ("bb" + "l" * (URGENT_RUN_MAX + 2), "b" + "l" * URGENT_RUN_MAX + "bll"),
        ("b" + "l" * (URGENT_RUN_MAX + 2), "b" + "l" * (URGENT_RUN_MAX + 2)),
    ],
)
def test_urgent_calls_are_made_before_others_that_wait_but_do_not_starve_them(
    scene: Scene, handed: str, made: str
) -> None:
    driver = gate_of(scene)
    for kind in handed:
        scene.device.submit([ranges(RANGES_MIN)], urgent=kind == "l")
        assert driver.waits.wait(DEADLINE_S)
    driver.reached = True
    driver.gate.set()
    done = [completion.ticket for completion in scene.polled(len(handed))]
    assert sorted(done) == list(range(1, len(handed) + 1))
    assert order_of(scene) == made


def test_a_short_urgent_list_stays_behind_the_long_ones_on_its_stream(scene: Scene) -> None:
    driver = gate_of(scene)
    scene.device.submit([ranges(RANGES_MIN)])
    assert driver.waits.wait(DEADLINE_S)
    streams = len(scene.device._urgent)
    longs = 3 * streams  # and then a short one on each
    assert longs > URGENT_RUN_MAX
    for number in range(longs + streams):
        scene.device.submit([ranges(RANGES_MIN if number < longs else 1)], urgent=True)
    driver.reached = True
    driver.gate.set()
    scene.polled(1 + longs + streams)
    for stream in scene.device._urgent:
        made = [name for name, *rest in driver.calls if name in COPIED and rest[-1] == stream]
        assert made == [*([COPIED[0]] * RANGES_MIN), COPIED[1]] * 3 + [*COPIED]
