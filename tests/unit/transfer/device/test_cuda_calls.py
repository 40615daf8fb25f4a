"""The driver's calls made by a thread: what is not made is not done, whatever an event says.

Strategy of the torture: a driver that moves real bytes, stream by stream and as late as it may;
lists long and short are drawn from a seed, and at every completion its bytes are compared.
"""

import ctypes
import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.transfer.device.calls_scene import (
    CHUNK,
    CHUNKS,
    DEADLINE_S,
    GPU,
    HOST,
    RANGES_MIN,
    SIZE,
    MovingDriver,
    Scene,
    SlowDriver,
    gate_of,
    ranges,
)
from tests.unit.transfer.device.fake_driver import FakeDriver
from transfer.device.cuda_calls import SWITCH_S, Beside, Calls, Queued
from transfer.device.protocol import Completion, DeviceLost, MemoryBusy
from transfer.device.work import KernelPages, Work
from transfer.plan import Chunk, RangeBatch


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A device whose driver's lists wait."""
    made = Scene(SlowDriver())
    yield made
    assert isinstance(made.driver, SlowDriver)
    made.driver.gate.set()
    made.close()


def test_what_was_handed_over_is_not_done_before_its_calls_were_made(scene: Scene) -> None:
    driver = gate_of(scene)
    driver.reached = True  # events say so of whatever was before
    long = scene.device.submit([ranges(RANGES_MIN)])
    assert driver.waits.wait(DEADLINE_S)
    assert scene.device.poll() == []
    assert scene.device.in_flight == 1
    for key in (GPU, HOST):
        with pytest.raises(MemoryBusy):
            scene.device.detach(key)
    assert driver.named("cuEventRecord") == []
    driver.gate.set()
    assert scene.polled(1) == [Completion(long)]
    scene.device.detach(HOST)


def test_its_event_is_asked_once_they_were(scene: Scene) -> None:
    driver = gate_of(scene)
    driver.gate.set()
    long = scene.device.submit([ranges(RANGES_MIN)])
    while not driver.named("cuEventRecord"):
        time.sleep(1e-3)
    time.sleep(1e-2)
    assert scene.device.poll() == []
    driver.reached = True
    assert scene.polled(1) == [Completion(long)]


def test_long_lists_go_by_the_thread_and_short_ones_at_once(scene: Scene) -> None:
    driver = gate_of(scene)
    driver.gate.set()
    driver.reached = True
    for count in (RANGES_MIN, RANGES_MIN - 1):
        scene.device.submit([ranges(count)])
        assert len(scene.polled(1)) == 1
    callers = [who for name, who in driver.callers if name == "cuMemcpyAsync"]
    assert callers[0] != threading.get_ident()
    assert set(callers[:RANGES_MIN]) == {callers[0]}
    assert set(callers[RANGES_MIN:]) == {threading.get_ident()}


def test_nothing_overtakes_what_is_to_be_made_on_its_stream(scene: Scene) -> None:
    driver = gate_of(scene)
    driver.reached = True
    first = scene.device.submit([ranges(RANGES_MIN)])  # the others of the lane's four streams
    assert driver.waits.wait(DEADLINE_S)
    streams = len(scene.device._others)
    for _ in range(streams - 1):
        scene.device._others.rotate(-1)
    behind = scene.device.submit([ranges(1)])
    assert scene.device.poll() == []
    driver.gate.set()
    assert [done.ticket for done in scene.polled(2)] == [first, behind]
    sizes = [call[3] for call in driver.named("cuMemcpyAsync")]
    assert len(sizes) == RANGES_MIN + 1
    assert len(set(sizes)) == 1, "one stream"
    recorded = [name for name, _ in driver.callers if name in ("cuMemcpyAsync", "cuEventRecord")]
    assert recorded == ["cuMemcpyAsync"] * RANGES_MIN + ["cuEventRecord", "cuMemcpyAsync",
                                                         "cuEventRecord"]  # fmt: skip


def test_an_error_is_that_submissions_and_told_when_its_event_has_passed(scene: Scene) -> None:
    driver = gate_of(scene)
    driver.fail("cuMemcpyAsync", "", "CUDA_ERROR_INVALID_VALUE")
    bad, good = (scene.device.submit([ranges(RANGES_MIN)]) for _ in range(2))
    driver.gate.set()
    while len(driver.named("cuEventRecord")) < 2:
        time.sleep(1e-3)
    assert scene.device.poll() == [], "its first range may be under way"
    driver.reached = True
    errors = {done.ticket: done.error for done in scene.polled(2)}
    assert "CUDA_ERROR_INVALID_VALUE" in errors[bad]
    assert errors[good] == ""


@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        ("cuMemcpyAsync", "CUDA_ERROR_ILLEGAL_ADDRESS", "context is broken"),
        ("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE", "GPU-fake is lost"),
    ],
)
def test_a_call_after_which_nobody_knows_ends_the_device(
    scene: Scene, function: str, status: str, said: str
) -> None:
    driver = gate_of(scene)
    driver.reached = True
    driver.fail(function, status)
    for _ in range(2):
        scene.device.submit([ranges(RANGES_MIN)])
    driver.gate.set()
    with pytest.raises(DeviceLost, match=said):
        assert not scene.polled(1), "those behind it are never done either"
    with pytest.raises(DeviceLost, match=said):
        scene.device.poll()


def test_whatever_ends_the_thread_ends_the_device(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    gate_of(scene).gate.set()
    beside = scene.device._beside
    assert beside is not None
    beside.hand_over(Queued(None, 1, 1), urgent=False)  # type: ignore[arg-type]
    with pytest.raises(DeviceLost, match="AssertionError"):
        scene.polled(1)
    assert "calls cannot be made" in caplog.text


def test_a_kernel_is_launched_by_the_thread_that_its_tables_belong_to() -> None:
    driver = FakeDriver()
    beside = Beside(driver, Calls(driver, batched=False, kernel=None), RANGES_MIN)
    work = Work()
    work.add_ranges(0, 0, [(n, n, 1) for n in range(RANGES_MIN)])
    assert beside.wants(work, 1, beside=True)
    work.kernels.append(KernelPages([Chunk(0, 0, 512, 0, 0, 512, 512)], [0], [0]))
    assert not beside.wants(work, 1, beside=True)
    assert beside.close()


def test_the_end_waits_for_what_was_handed_over_but_not_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    was = sys.getswitchinterval()
    assert was > 2 * SWITCH_S, "those before this one have put it back"
    driver = SlowDriver()
    scene = Scene(driver)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    for _ in range(3):
        scene.device.submit([ranges(RANGES_MIN)])
    assert driver.waits.wait(DEADLINE_S)
    beside = scene.device._beside
    assert beside is not None
    with caplog.at_level(logging.WARNING):
        assert not beside.close(0.02)
    assert "has not returned" in caplog.text
    assert sys.getswitchinterval() == pytest.approx(was)
    driver.gate.set()
    assert beside.close(DEADLINE_S)
    assert len(driver.named("cuEventRecord")) == 3
    scene.ipc.close(scene.host)


def test_an_event_that_was_used_before_says_nothing_of_what_is_to_be_made() -> None:
    driver = MovingDriver()
    scene = Scene(driver)
    scene.host.view[:] = b"\x11" * SIZE
    ticket = scene.device.submit([ranges(1)])
    assert scene.polled(1) == [Completion(ticket)]
    turn = threading.Event()
    real: Callable[..., Any] = driver.call

    def later(function: str, *arguments: Any) -> Any:
        if threading.current_thread().name == "treecored-calls":
            turn.wait(DEADLINE_S)
        return real(function, *arguments)

    driver.call = later  # type: ignore[method-assign]
    scene.host.view[:] = b"\x22" * SIZE
    ticket = scene.device.submit([ranges(RANGES_MIN)])
    assert [scene.device.poll() for _ in range(3)] == [[], [], []]
    turn.set()
    assert scene.polled(1) == [Completion(ticket)]
    assert scene.memory.raw[: RANGES_MIN * CHUNK] == b"\x22" * RANGES_MIN * CHUNK
    assert len(driver.named("cuEventCreate")) == 1
    scene.close()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_done_has_its_bytes_in_place(seed: int) -> None:
    scene = Scene(MovingDriver())
    try:
        torture(scene, random.Random(seed))
    finally:
        scene.close()


def torture(scene: Scene, rng: random.Random) -> None:
    """Lists of any chunks that nobody else touches, either way, each with a content of its own.
    What is free when depends on the thread, so hypothesis could not draw it again."""
    free = set(range(CHUNKS))
    expected: dict[int, tuple[bool, list[int], int]] = {}
    for number in range(1, 200):
        count = min(len(free), rng.choice([1, 3, RANGES_MIN, 2 * RANGES_MIN]))
        if count:
            chosen = rng.sample(sorted(free), count)
            free -= set(chosen)
            loads = rng.random() < 0.5
            for chunk in chosen:
                write(scene, chunk, number, host=loads)
            spans = [(c * CHUNK, c * CHUNK, CHUNK) for c in chosen]
            ends = (HOST, GPU) if loads else (GPU, HOST)
            batch = RangeBatch(*ends, spans, count * CHUNK)
            ticket = scene.device.submit([batch], urgent=rng.random() < 0.5)
            expected[ticket] = loads, chosen, number
        if rng.random() < 0.5:
            look(scene, expected, free, scene.device.poll())
    look(scene, expected, free, scene.polled(len(expected)))
    assert not expected


def look(
    scene: Scene,
    expected: dict[int, tuple[bool, list[int], int]],
    free: set[int],
    done: list[Completion],
) -> None:
    """Right bytes at the moment of the answer."""
    for ticket, error in done:
        loads, chosen, number = expected.pop(ticket)
        assert not error
        for chunk in chosen:
            assert read(scene, chunk, host=not loads) == bytes([number]) * CHUNK
        free |= set(chosen)


def write(scene: Scene, chunk: int, number: int, *, host: bool) -> None:
    """Fill a chunk on one side, and with something else on the other."""
    at = chunk * CHUNK
    sides = bytes([number]) * CHUNK, b"\xff" * CHUNK
    scene.host.view[at : at + CHUNK] = sides[not host]
    ctypes.memmove(ctypes.addressof(scene.memory) + at, sides[host], CHUNK)


def read(scene: Scene, chunk: int, *, host: bool) -> bytes:
    at = chunk * CHUNK
    return bytes(scene.host.view[at : at + CHUNK]) if host else scene.memory.raw[at : at + CHUNK]
