"""When log, events and metrics get their turn: never while somebody asks, and not right after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from directory.daemon.background import QUIET_US, Background
from directory.daemon.pacing import BATCH_US, LATE_US


class Heard:
    """A recording, a feed and an exporter that only note when they were called."""

    def __init__(self) -> None:
        self.ready_us: int | None = None
        self.pressed = False
        self.due: int | None = None
        self.calls: list[object] = []
        self.tells = False

    def work(self, now_us: int, waiting: Callable[[], bool]) -> None:
        self.calls.append(("work", now_us))

    def hurry(self, now_us: int) -> None:
        self.calls.append(("hurry", now_us))

    def due_us(self) -> int | None:
        return self.due

    def on_time(self, **how: bool) -> bool:
        self.calls.append(how)
        return self.tells


@pytest.fixture
def heard() -> Heard:
    return Heard()


def background(heard: Any, other: Any = None, *, asked: bool = False) -> Background:
    return Background(heard, other, None, lambda: asked)


def test_the_log_works_once_nobody_has_asked_for_a_while(heard: Heard) -> None:
    beside = background(heard)
    assert beside.due_us() is None
    heard.ready_us = 5_000
    assert beside.due_us() == 5_000
    beside.turn(4_500, quiet=False)
    assert beside.due_us() == 4_500 + QUIET_US
    beside.turn(4_500 + QUIET_US - 1, quiet=True)
    assert heard.calls == []
    beside.turn(4_500 + QUIET_US, quiet=True)
    assert heard.calls == [("work", 4_500 + QUIET_US)]


def test_a_quiet_moment_is_no_reason_to_work_before_it_is_worth_it(heard: Heard) -> None:
    heard.ready_us = 250_000
    beside = background(heard)
    beside.turn(100_000, quiet=True)
    assert heard.calls == []
    assert beside.due_us() == 250_000


def test_somebody_who_asks_is_in_front_of_a_log_unless_it_is_in_need(heard: Heard) -> None:
    heard.ready_us = 0
    beside = background(heard)
    beside.turn(10_000, quiet=False)
    assert heard.calls == []
    heard.pressed = True
    beside.turn(20_000, quiet=False)
    assert heard.calls == [("hurry", 20_000)]


def test_a_log_that_has_waited_for_long_waits_for_no_pause(heard: Heard) -> None:
    heard.ready_us = 10_000
    beside = background(heard)
    beside.turn(10_000 + LATE_US - 1, quiet=False)
    assert heard.calls == []
    beside.turn(10_000 + LATE_US, quiet=False)
    assert heard.calls == [("hurry", 10_000 + LATE_US)]


def test_whoever_is_due_first_is_waited_for(heard: Heard) -> None:
    feed = Heard()
    beside = background(heard, feed)
    assert beside.due_us() is None
    feed.due = 7_000
    assert beside.due_us() == 7_000
    heard.ready_us = 6_000
    assert beside.due_us() == 6_000
    heard.ready_us = 8_000
    assert beside.due_us() == 7_000
    assert (beside.due_us(6_500), beside.due_us(7_500)) == (6_500, 7_000)


@pytest.mark.parametrize(
    ("tells", "quiet", "ready_us", "works"),
    [
        (True, True, 1_001, True),
        (True, True, 1_000 + BATCH_US, True),
        (True, True, None, False),
        (True, False, 1_001, False),
        (False, True, 1_001, False),
    ],
)
def test_the_log_works_with_what_is_told_unless_somebody_asks(
    heard: Heard, tells: bool, quiet: bool, ready_us: int | None, works: bool
) -> None:
    feed = Heard()
    feed.tells, heard.ready_us = tells, ready_us
    background(heard, feed).turn(1_000, quiet=quiet)
    assert heard.calls == ([("work", 1_000)] if works else [])


@pytest.mark.parametrize(
    ("quiet", "asked", "idle"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_feed_is_told_whether_anybody_wants_something(
    heard: Heard, quiet: bool, asked: bool, idle: bool
) -> None:
    feed = Heard()
    background(heard, feed, asked=asked).turn(1, quiet=quiet)
    assert feed.calls == [{"idle": idle}]
