"""The event loop: callbacks by descriptor, and a hidden source that is never slept over."""

import os
import socket
from collections.abc import Iterator

import pytest

from directory.daemon.loop import Loop


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
