"""The event loop: callbacks by descriptor, and a hidden source that is never slept over."""

import os
import select
import socket
from collections.abc import Iterator
from itertools import pairwise
from time import monotonic_ns

import pytest

from directory.daemon import loop as loop_module
from directory.daemon.loop import Loop
from directory.daemon.turns import SHARE, Rank


@pytest.fixture
def loop() -> Iterator[Loop]:
    """A loop that is closed afterwards."""
    loop = Loop()
    yield loop
    loop.close()


class Hidden:
    """A source whose descriptor never announces anything."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0)
        self.waiting = 0
        self.drained = 0

    def fileno(self) -> int:
        return self.fd

    def woken(self) -> None:
        raise AssertionError("its descriptor announces nothing")

    def pending(self) -> bool:
        return self.waiting > 0

    def drain(self) -> None:
        self.waiting -= 1
        self.drained += 1


def test_a_readable_descriptor_is_called_and_a_forgotten_one_is_not(loop: Loop) -> None:
    left, right = socket.socketpair()
    called: list[int] = []
    loop.watch(left.fileno(), called.append)
    loop.turn(0)
    assert called == []
    right.send(b"x")
    loop.turn(None)
    assert len(called) == 1
    loop.unwatch(left.fileno())
    loop.unwatch(left.fileno())
    loop.turn(0)
    assert len(called) == 1
    left.close()
    right.close()


def test_who_has_left_something_is_called_again_though_nothing_comes(loop: Loop) -> None:
    left, right = socket.socketpair()
    called: list[int] = []
    loop.watch(left.fileno(), called.append)
    loop.call_again(left.fileno())
    assert loop.waiting()
    loop.turn(None)
    assert called == [0]
    assert not loop.waiting(), "once"
    loop.turn(0)
    assert called == [0]
    loop.call_again(left.fileno())
    right.send(b"x")
    loop.turn(None)
    assert len(called) == 2, "one call for both"
    assert called[1] & select.EPOLLIN
    loop.call_again(left.fileno())
    left.recv(1)
    loop.unwatch(left.fileno())
    loop.call_again(left.fileno())
    assert not loop.waiting(), "who is gone is forgotten"
    left.close()
    right.close()


def test_an_event_of_a_descriptor_that_was_closed_in_the_same_batch_is_dropped(loop: Loop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    called: list[int] = []

    def close_the_other(mine: int) -> None:
        called.append(mine)
        other = pairs[1 - mine][0]
        loop.unwatch(other.fileno())

    loop.watch(pairs[0][0].fileno(), lambda _: close_the_other(0))
    loop.watch(pairs[1][0].fileno(), lambda _: close_the_other(1))
    for _, far in pairs:
        far.send(b"x")
    loop.turn(None)
    assert len(called) == 1
    for near, far in pairs:
        near.close()
        far.close()


def test_it_can_be_asked_whether_something_waits_and_nothing_is_taken_by_that(loop: Loop) -> None:
    left, right = socket.socketpair()
    called: list[int] = []
    loop.watch(left.fileno(), called.append)
    assert not loop.waiting()
    right.send(b"x")
    assert loop.waiting()
    assert loop.waiting()
    assert called == []
    loop.turn(None)
    assert len(called) == 1
    assert left.recv(1) == b"x"
    hidden = Hidden()
    loop.watch_hidden(hidden)
    assert not loop.waiting()
    hidden.waiting = 1
    assert loop.waiting()
    assert hidden.drained == 0
    for fd in (left, right):
        fd.close()
    os.close(hidden.fd)


def test_writing_is_announced_only_while_it_is_wanted(loop: Loop) -> None:
    left, right = socket.socketpair()
    called: list[int] = []
    loop.watch(left.fileno(), called.append)
    loop.want_write(left.fileno(), True)
    loop.turn(None)
    loop.want_write(left.fileno(), False)
    loop.turn(0)
    assert len(called) == 1
    left.close()
    right.close()


def test_a_hidden_source_with_something_is_drained_without_waiting(loop: Loop) -> None:
    hidden = Hidden()
    loop.watch_hidden(hidden)
    hidden.waiting = 2
    loop.turn(None)
    loop.turn(None)
    assert hidden.drained == 2
    loop.turn(0)
    assert hidden.drained == 2
    os.close(hidden.fd)


class Callers:
    """Descriptors that are always readable, and callbacks that take their time."""

    def __init__(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 1
        self.called: list[str] = []
        self.fds: dict[str, int] = {}
        self._loop = loop
        monkeypatch.setattr(loop_module, "monotonic_ns", lambda: self.now_ns)

    def add(self, name: str, takes_ns: int) -> None:
        fd = self.fds[name] = os.eventfd(1)

        def callback(_: int) -> None:
            self.called.append(name)
            self.now_ns += takes_ns

        self._loop.watch(fd, callback)

    def turn(self) -> list[str]:
        """Who was called in one turn."""
        self.called.clear()
        self._loop.turn(0)
        return list(self.called)

    def close(self) -> None:
        for fd in self.fds.values():
            self._loop.unwatch(fd)
            os.close(fd)


@pytest.fixture
def callers(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callers]:
    callers = Callers(loop, monkeypatch)
    yield callers
    callers.close()


def test_of_several_that_wait_those_come_first_that_took_least_the_last_time(
    callers: Callers,
) -> None:
    for name, takes_ns in (("c", 90_000), ("a", 10_000), ("b", 50_000)):
        callers.add(name, takes_ns)
    assert sorted(callers.turn()) == ["a", "b", "c"]
    assert callers.turn() == ["a", "b", "c"]


def test_what_takes_long_is_left_for_a_while_and_never_for_ever(callers: Callers) -> None:
    callers.add("long", 2_000_000)
    for number in range(3):
        callers.add(f"short {number}", 50_000)
    while "long" not in callers.turn():  # nobody knows yet how long each takes
        pass
    turns = [callers.turn() for _ in range(60)]
    assert all(len([name for name in turn if name != "long"]) == 3 for turn in turns)
    assert all(turn[-1] == "long" for turn in turns if "long" in turn)
    served = [at for at, turn in enumerate(turns) if "long" in turn]
    gaps = [later - earlier for earlier, later in pairwise(served)]
    assert gaps
    assert 1 < max(gaps) <= (2_000_000 // 150_000).bit_length() + 1


def test_what_takes_long_is_called_at_once_where_nobody_else_waits(callers: Callers) -> None:
    callers.add("long", 20_000_000)
    assert [callers.turn() for _ in range(3)] == [["long"]] * 3


def test_of_two_that_take_long_each_has_its_turn(callers: Callers) -> None:
    callers.add("one", 5_000_000)
    callers.add("other", 5_000_000)
    for _ in range(4):
        assert len(callers.turn()) <= 2
    called = [name for _ in range(20) for name in callers.turn()]
    assert 8 <= called.count("one") <= 12


def test_a_turn_does_one_piece_of_what_was_put_off_and_the_loop_does_not_sleep_over_it(
    loop: Loop,
) -> None:
    done: list[int] = []
    for number in range(3):
        loop.later(number, Rank.REPORTS, lambda number=number: done.append(number))  # type: ignore[misc]
    for count in range(1, 4):
        assert loop.waiting()
        loop.turn(None)
        assert done == list(range(count))
    assert not loop.waiting()
    loop.turn(0)
    assert done == [0, 1, 2]


def test_beside_questions_without_a_pause_a_piece_has_its_share(
    loop: Loop, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, question_ns, piece_ns = os.eventfd(1), 100_000, 700_000
    spent = {"questions": 0, "pieces": 0}

    def answer(_: int) -> None:
        loop.asked = True
        callers.now_ns += question_ns
        spent["questions"] += question_ns

    def piece() -> None:
        callers.now_ns += piece_ns
        spent["pieces"] += piece_ns
        loop.later("flood", Rank.REPORTS, piece)

    loop.watch(asking, answer)
    loop.later("flood", Rank.REPORTS, piece)
    for _ in range(2_000):
        loop.turn(0)
    assert spent["questions"] == 2_000 * question_ns, "one in each turn, whatever else there is"
    assert spent["pieces"] / sum(spent.values()) == pytest.approx(SHARE, rel=0.05)
    loop.unwatch(asking)
    loop.turn(0)
    loop.turn(0)
    assert spent["pieces"] / piece_ns > 2_000 * question_ns * SHARE / (1 - SHARE) // piece_ns
    os.close(asking)


def test_who_waits_for_a_turn_hears_nothing_before_it_and_is_called_after_it(loop: Loop) -> None:
    ours, theirs = socket.socketpair()
    other, others = socket.socketpair()
    called: list[str] = []
    loop.watch(ours.fileno(), lambda _: called.append("ours"))
    loop.watch(other.fileno(), lambda _: called.append("other"))
    for one in (theirs, others):
        one.send(b"x")
    loop.later("before", Rank.RESTORES, lambda: called.append("before"))
    loop.later(ours.fileno(), Rank.REPORTS, lambda: called.append("piece"))
    loop.turn(0)
    assert called == ["other", "before"]
    loop.turn(0)
    assert called == ["other", "before", "other", "piece"]
    called.clear()
    loop.turn(0)
    assert sorted(called) == ["other", "ours"]
    loop.later(ours.fileno(), Rank.REPORTS, lambda: called.append("piece"))
    theirs.close()
    called.clear()
    loop.turn(0)
    assert "ours" in called, "that it has hung up"
    for one in (ours, other, others):
        one.close()


def test_what_a_descriptor_has_put_off_goes_with_it(loop: Loop) -> None:
    left, right = socket.socketpair()
    loop.watch(left.fileno(), lambda _: None)
    done: list[str] = []
    loop.later(left.fileno(), Rank.REPORTS, lambda: done.append("of one that is gone"))
    loop.later("other", Rank.BACKUPS, lambda: done.append("other"))
    loop.unwatch(left.fileno())
    loop.forget("other")
    assert not loop.waiting()
    loop.turn(0)
    assert done == []
    left.close()
    right.close()


@pytest.mark.parametrize("shared", [True, False])
def test_who_has_to_give_way_to_whoever_asks_sleeps_now_and_then(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Two that look in turns on one core are never put on two; who is woken may be."""
    if not loop._can_spin:
        pytest.skip("with one core nobody looks")
    left, right = socket.socketpair()
    heard: list[bytes] = []
    loop.watch(left.fileno(), lambda _: heard.append(left.recv(16)))
    yields, slept = 0, 0

    def give_way() -> None:
        nonlocal yields
        yields += 1
        begun = monotonic_ns()
        # Whoever asks runs on this core, and before that it cannot have asked.
        while shared and monotonic_ns() - begun < 2 * loop_module.YIELDED_NS:
            pass
        right.send(b"x")

    loop._spin_ns = 10**10
    monkeypatch.setattr(os, "sched_yield", give_way)
    loop._close = True
    for _ in range(3 * loop_module.SHARED_MAX):
        before = yields
        if not loop._close:
            slept += 1
            right.send(b"x")
        loop.turn(None)
        assert yields - before <= 1
    assert slept == (2 if shared else 0)
    left.close()
    right.close()


def test_who_has_gone_is_forgotten(loop: Loop, callers: Callers) -> None:
    callers.add("a", 1_000)
    callers.turn()
    assert loop._took_ns
    loop.unwatch(callers.fds["a"])
    assert loop._took_ns == {}
