"""Whether a GPU computes, as the management library says; how fast its memory would be alone."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.transfer.device.fake_driver import FakeDriver
from transfer.device.cuda_busy import (
    MEMORY_BUS_ATTRIBUTE,
    MEMORY_CLOCK_ATTRIBUTE,
    PAUSE_US,
    TRUSTED_US,
    Beside,
    Computing,
    alone_bytes_per_us,
)


def at_once(work: Callable[[], None]) -> None:
    """A look that is over when it was begun."""
    work()


class Library:
    """Stands in for the management library."""

    def __init__(self, percent: int) -> None:
        self.percent = percent
        self.asked = 0
        self.broken = False

    def nvmlInit(self) -> None:  # noqa: N802
        """As the library has it."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetUtilizationRates(self, device: str) -> Any:  # noqa: N802
        self.asked += 1
        if self.broken:
            raise RuntimeError("gone")
        return type("Rates", (), {"gpu": self.percent})


def test_a_gpu_computes_when_the_library_says_so_and_a_pause_asks_again() -> None:
    now, library = [0], Library(0)
    computing = Computing("GPU-1", lambda: now[0], library, at_once)
    assert not computing()
    library.percent = 80  # by copies of our own, as far as anybody can tell
    for _ in range(5):
        now[0] += TRUSTED_US // 10
        assert not computing(), "the answer from before our own copies stands"
    assert library.asked == 1
    now[0] += PAUSE_US
    assert computing()
    library.percent = 3
    now[0] += PAUSE_US
    assert not computing()


def test_an_answer_that_is_too_old_counts_as_computing_until_there_is_a_pause() -> None:
    now, library = [0], Library(0)
    computing = Computing("GPU-1", lambda: now[0], library, at_once)
    said = []
    for _ in range(15):
        said.append(computing())
        now[0] += TRUSTED_US // 10
    assert said == [False] * 11 + [True] * 4
    now[0] += PAUSE_US
    assert not computing()


def test_where_nobody_can_say_a_gpu_counts_as_computing() -> None:
    library = Library(0)
    library.broken = True
    assert Computing("GPU-1", lambda: 0, library, at_once)()


def test_until_the_library_has_answered_a_gpu_counts_as_computing_and_nobody_waits() -> None:
    now, library = [0], Library(0)
    begun: list[Callable[[], None]] = []
    computing = Computing("GPU-1", lambda: now[0], library, begun.append)
    assert computing()
    assert computing()
    assert not library.asked
    assert len(begun) == 1, "one look at a time"
    begun.pop()()
    assert not computing()
    now[0] += PAUSE_US
    assert computing(), "what was found before the pause is old"
    begun.pop()()
    assert not computing()


def test_the_library_is_asked_by_a_thread_of_its_own_once_slices_have_gone() -> None:
    library, asked_by, beside = Library(0), list[str](), Beside()
    ask = library.nvmlDeviceGetUtilizationRates

    def noted(device: str) -> Any:
        asked_by.append(threading.current_thread().name)
        return ask(device)

    library.nvmlDeviceGetUtilizationRates = noted  # type: ignore[method-assign]
    computing = Computing("GPU-1", lambda: 0, library, beside.put)
    assert computing()
    time.sleep(0.02)
    assert not asked_by, "a copy waits for what is done before it has gone"
    beside.go()
    give_up = time.monotonic() + 60
    while computing():
        assert time.monotonic() < give_up
        time.sleep(0.001)
    assert asked_by == ["computing"]
    beside.go()
    assert library.asked == 1, "nothing is put off any more"


def test_without_a_thread_nothing_is_put_off_and_a_gpu_counts_as_computing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    beside, library = Beside(), Library(0)
    computing = Computing("GPU-1", lambda: 0, library, beside.put)
    assert computing()
    beside.go()
    assert not library.asked


def test_how_fast_a_copy_is_that_has_the_gpu_to_itself_is_what_the_driver_says_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    said = {MEMORY_CLOCK_ATTRIBUTE: 3_201_000, MEMORY_BUS_ATTRIBUTE: 6_144}  # an H200
    monkeypatch.setattr(driver, "call", lambda _, attribute, __: said[attribute])
    # 4.9 TB/s, each byte read and written: a copy alone did 1.45 to 1.7 TB/s, one beside
    # computations at most half of that.
    assert 1_200_000 < alone_bytes_per_us(driver) < 1_450_000


def test_a_driver_that_does_not_say_how_fast_its_memory_is_leaves_copies_paced() -> None:
    driver = FakeDriver()
    driver.fail("cuDeviceGetAttribute", "CUDA_ERROR_INVALID_VALUE")
    assert alone_bytes_per_us(driver) == 0


def test_a_look_that_cannot_be_begun_is_begun_after_the_next_pause() -> None:
    now, library = [0], Library(0)

    def no_thread(_: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    computing = Computing("GPU-1", lambda: now[0], library, no_thread)
    assert computing(), "nobody knows, and nobody waits"
    now[0] += PAUSE_US
    computing._begin = at_once
    assert not computing()
