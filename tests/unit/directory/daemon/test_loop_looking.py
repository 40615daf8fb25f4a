"""Looking for what is expected instead of sleeping: until a moment, and never beyond a timeout."""

import os

import pytest

from directory.daemon import loop as loop_module
from directory.daemon.loop import SPIN_NS, YIELDED_NS, Loop

YIELD_NS = 1_000


class Epoll:
    """Stands for epoll: what it was asked, and after how many looks something is there."""

    def __init__(self, empty: int) -> None:
        self.empty = empty
        self.asked: list[float | None] = []

    def poll(self, timeout_s: float | None, _most: int) -> list[tuple[int, int]]:
        self.asked.append(timeout_s)
        self.empty -= 1
        return [] if self.empty >= 0 else [(-7, 1)]

    def close(self) -> None:
        """Nothing is open."""


class Scene:
    """A loop whose clock goes on with every look that finds nothing."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, empty: int, *, spin_ns: int = SPIN_NS
    ) -> None:
        self.now = 1_000_000
        monkeypatch.setattr(loop_module, "monotonic_ns", lambda: self.now)
        monkeypatch.setattr(os, "sched_yield", self.give_way)
        self.loop = Loop(spin_ns)
        self.loop._epoll.close()
        self.epoll = Epoll(empty)
        self.loop._epoll = self.epoll  # type: ignore[assignment]
        self.loop._can_spin = True

    def give_way(self) -> None:
        self.now += YIELD_NS

    @property
    def slept(self) -> list[float | None]:
        """How long it would have slept, each time it did."""
        return [asked for asked in self.epoll.asked if asked != 0]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> type:
    """Scenes with a clock of their own."""

    class Made(Scene):
        def __init__(self, empty: int) -> None:
            super().__init__(monkeypatch, empty)

    return Made


def test_what_is_expected_is_found_without_a_sleep(make: type) -> None:
    scene = make(empty=2 * SPIN_NS // YIELD_NS)
    scene.loop.look_out(scene.now + 4 * SPIN_NS)
    scene.loop.turn(None)
    assert scene.slept == []


def test_what_does_not_come_in_time_is_slept_for(make: type) -> None:
    scene = make(empty=1_000)
    began = scene.now
    scene.loop.look_out(began + 4 * SPIN_NS)
    scene.loop.look_out(began + 2 * SPIN_NS)
    scene.loop.turn(None)
    assert scene.slept == [None]
    assert scene.now == began + 4 * SPIN_NS, "as long as it was expected, and no longer"
    scene.loop.turn(None)
    assert scene.slept == [None, None]
    assert scene.now == began + 4 * SPIN_NS


def test_nothing_that_is_due_waits_for_what_is_expected(make: type) -> None:
    scene = make(empty=1_000)
    began = scene.now
    scene.loop.look_out(began + 4 * SPIN_NS)
    scene.loop.turn(SPIN_NS / 1e9)
    assert scene.now == began + SPIN_NS
    assert sum(asked or 0 for asked in scene.epoll.asked) == pytest.approx(0)


def test_with_one_core_nobody_looks(make: type) -> None:
    scene = make(empty=1)
    scene.loop._can_spin = False
    scene.loop.look_out(scene.now + 4 * SPIN_NS)
    scene.loop.turn(None)
    assert scene.slept == [None]


def test_what_is_for_after_the_turn_is_done_once_and_after_everything_else() -> None:
    loop, done = Loop(), list[str]()
    asking = os.eventfd(1)

    def answer(_: int) -> None:
        os.eventfd_read(asking)
        loop.after_turn(lambda: done.append("after"))
        done.append("answered")

    loop.watch(asking, answer)
    loop.turn(0)
    loop.turn(0)
    assert done == ["answered", "after"]
    loop.unwatch(asking)
    os.close(asking)
    loop.close()


def test_how_long_it_has_looked_in_vain_is_counted(make: type) -> None:
    looks = 20
    scene = make(empty=looks)
    scene.loop.look_out(scene.now + 10 * SPIN_NS)
    scene.loop.turn(None)
    assert scene.loop.looked_ns == (looks - 1) * YIELD_NS, "the last one found something"
    slept = make(empty=0)
    slept.loop.turn(None)
    assert slept.loop.looked_ns == 0


@pytest.mark.parametrize("spin_ns", [0, SPIN_NS // 5, 5 * SPIN_NS])
def test_it_looks_as_long_as_it_is_told_while_things_come_as_close(
    monkeypatch: pytest.MonkeyPatch, spin_ns: int
) -> None:
    scene = Scene(monkeypatch, empty=10 * SPIN_NS // YIELD_NS, spin_ns=spin_ns)
    scene.loop._close = True
    began = scene.now
    scene.loop.turn(None)
    assert scene.slept == [None]
    assert (scene.now - began, scene.loop.looked_ns) == (spin_ns, spin_ns)
    scene.epoll.empty = 1 + spin_ns // YIELD_NS
    scene.loop._close = True
    scene.loop.turn(None)
    assert scene.loop._close == (spin_ns > 0), "it came, and not so late"


def test_while_somebody_else_has_the_core_nothing_is_looked_for(make: type) -> None:
    scene = make(empty=3)
    steps = iter([2 * YIELDED_NS, YIELD_NS, YIELD_NS])
    scene.give_way = lambda: setattr(scene, "now", scene.now + next(steps))
    os.sched_yield = scene.give_way  # the fixture undoes it
    scene.loop.look_out(scene.now + 10 * SPIN_NS)
    scene.loop.turn(None)
    assert scene.loop.looked_ns == YIELD_NS
