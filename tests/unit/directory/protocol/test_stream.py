"""The numbered stream: exactly one effect a message, and every answer is had."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.core import limits
from directory.core.errors import TooMany
from directory.protocol.stream import Arrival, ReceiveStream, SendStream


def test_numbers_count_up_and_an_ack_ends_what_asks_nothing() -> None:
    stream = SendStream()
    assert [stream.push("x", asks=False, now_us=0) for _ in range(3)] == [1, 2, 3]
    assert not stream.on_reply(2, 0)
    assert (stream.open_count, stream.acked, stream.answered) == (1, 2, 3)


def test_a_question_stays_open_until_it_is_answered_and_counts_once() -> None:
    stream = SendStream()
    seq = stream.push("q", asks=True, now_us=0)
    stream.on_reply(seq, 0)
    assert (stream.open_count, stream.answered) == (1, 0)
    assert stream.on_reply(seq, seq)
    assert not stream.on_reply(seq, seq)
    assert (stream.open_count, stream.answered) == (0, 1)


def test_an_answer_that_overtakes_its_ack_is_taken_once() -> None:
    stream = SendStream()
    seq = stream.push("q", asks=True, now_us=0)
    assert stream.on_reply(0, seq)
    assert not stream.on_reply(0, seq)
    assert stream.open_count == 1
    stream.on_reply(seq, 0)
    assert stream.open_count == 0


def test_a_question_that_is_given_up_is_still_delivered() -> None:
    stream = SendStream(resend_after_us=10)
    seq = stream.push("q", asks=True, now_us=0)
    stream.give_up(seq)
    assert stream.answered == seq
    assert stream.due(10) == [(seq, "q")]
    stream.on_reply(seq, 0)
    assert stream.open_count == 0
    other = stream.push("q", asks=True, now_us=0)
    stream.on_reply(other, 0)
    stream.give_up(other)
    stream.give_up(99)
    assert stream.open_count == 0


def test_each_resending_waits_twice_as_long_up_to_a_bound() -> None:
    stream = SendStream(resend_after_us=10)
    stream.push("m", asks=False, now_us=0)
    times: list[int] = []
    now = 0
    while len(times) < 9:
        if stream.due(now):
            times.append(now)
        now += 10
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 10
    assert gaps[:3] == [20, 40, 80]
    assert set(gaps[3:]) == {80}


def test_an_ack_of_what_was_never_sent_is_ignored() -> None:
    stream = SendStream()
    stream.push("m", asks=False, now_us=0)
    stream.on_reply(5, 0)
    assert (stream.acked, stream.open_count) == (0, 1)


def test_too_much_that_is_unacknowledged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNACKED_MESSAGES_MAX", 2)
    stream = SendStream()
    for _ in range(2):
        stream.push("m", asks=False, now_us=0)
    with pytest.raises(TooMany):
        stream.push("m", asks=False, now_us=0)


def test_a_gap_is_not_carried_out() -> None:
    stream = ReceiveStream()
    assert stream.arrive(2, 0) is Arrival.GAP
    assert stream.arrive(1, 0) is Arrival.NEW
    assert stream.arrive(1, 0) is Arrival.DUPLICATE
    assert stream.arrive(0, 0) is Arrival.DUPLICATE
    assert stream.arrive(2, 0) is Arrival.NEW
    assert stream.acked == 2


def test_an_answer_is_kept_until_the_client_has_it() -> None:
    stream = ReceiveStream()
    for seq in (1, 2, 3):
        stream.arrive(seq, 0)
        assert stream.keep(seq, b"%d" % seq) == 0
    stream.arrive(4, 2)
    assert [stream.again(seq) for seq in (1, 2, 3)] == [None, None, b"3"]
    assert stream.kept_count == 1


def test_kept_answers_have_a_limit_and_the_loss_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "KEPT_ANSWERS_MAX", 2)
    stream = ReceiveStream()
    assert [stream.keep(seq, b"a") for seq in range(1, 5)] == [0, 0, 1, 1]
    assert stream.kept_count == 2


class Wire:
    """Both ends and the frames between them; a daemon that answers questions, some later."""

    def __init__(self) -> None:
        self.client = SendStream(resend_after_us=10)
        self.daemon = ReceiveStream()
        self.up: list[tuple[int, int, str]] = []
        self.down: list[tuple[int, int]] = []
        self.done: list[str] = []
        self.later: list[int] = []
        self.had: list[int] = []

    def send(self, body: str, now: int) -> None:
        asks = not body.startswith("report")
        seq = self.client.push(body, asks=asks, now_us=now)
        self.up.append((seq, self.client.answered, body))

    def resend(self, now: int) -> None:
        for seq, body in self.client.due(now):
            self.up.append((seq, self.client.answered, str(body)))

    def reach_daemon(self, frame: tuple[int, int, str]) -> None:
        seq, answered, body = frame
        arrival = self.daemon.arrive(seq, answered)
        if arrival is Arrival.NEW:
            self.done.append(body)
            if body.startswith("late"):
                self.later.append(seq)
            elif body.startswith("ask"):
                self.answer(seq)
        elif arrival is Arrival.DUPLICATE and self.daemon.again(seq) is not None:
            self.down.append((self.daemon.acked, seq))
            return
        self.down.append((self.daemon.acked, 0))

    def answer(self, seq: int) -> None:
        self.daemon.keep(seq, b"answer")
        self.down.append((self.daemon.acked, seq))

    def reach_client(self, frame: tuple[int, int]) -> None:
        acked, seq = frame
        if self.client.on_reply(acked, seq):
            self.had.append(seq)


@given(
    bodies=st.lists(st.sampled_from(["report", "ask", "late"]), min_size=1, max_size=12),
    faults=st.lists(
        st.tuples(st.sampled_from(["deliver", "drop", "double"]), st.booleans(), st.integers(0, 7)),
        max_size=80,
    ),
)
def test_any_loss_duplication_and_reordering_ends_with_every_effect_and_answer_once_f76(
    bodies: list[str], faults: list[tuple[str, bool, int]]
) -> None:
    wire, now = Wire(), 0
    for number, body in enumerate(bodies):
        wire.send(f"{body}{number}", now)
    for kind, upward, at in faults:
        now += 7
        wire.resend(now)
        if wire.later and at == 7:
            wire.answer(wire.later.pop())
        frames: list[tuple[int, int, str]] | list[tuple[int, int]]
        frames = wire.up if upward else wire.down
        if not frames:
            continue
        at %= len(frames)
        frame = frames[at] if kind == "double" else frames.pop(at)
        if kind == "drop":
            continue
        if len(frame) == 3:
            wire.reach_daemon(frame)
        else:
            wire.reach_client(frame)
    for _ in range(400):
        now += 400
        wire.resend(now)
        while wire.up:
            wire.reach_daemon(wire.up.pop(0))
        while wire.later:
            wire.answer(wire.later.pop())
        while wire.down:
            wire.reach_client(wire.down.pop(0))
        if not wire.client.open_count:
            break
    assert wire.done == [f"{body}{number}" for number, body in enumerate(bodies)]
    asked = [number for number, body in enumerate(bodies, start=1) if body != "report"]
    assert sorted(wire.had) == asked
    assert wire.client.open_count == 0


def test_what_stands_behind_a_lost_message_is_sent_again_with_it() -> None:
    client = SendStream(resend_after_us=100)
    for n in range(3):
        client.push(n, asks=False, now_us=n * 90)
    assert [seq for seq, _ in client.due(99)] == []
    assert [seq for seq, _ in client.due(100)] == [1, 2, 3]
    assert [seq for seq, _ in client.due(299)] == []
    assert [seq for seq, _ in client.due(300)] == [1, 2, 3]


class Counting(OrderedDict[int, Any]):
    """An ordered dictionary that counts how often an entry is looked at."""

    looks = 0

    def items(self) -> Any:
        for pair in super().items():
            self.looks += 1
            yield pair

    def get(self, key: int, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)

    def __getitem__(self, key: int) -> Any:
        self.looks += 1
        return super().__getitem__(key)


def test_what_is_answered_and_acked_costs_nothing_for_what_is_open() -> None:
    stream, count = SendStream(), 1_000
    stream._open = opened = Counting()
    for number in range(1, count + 1):
        stream.push("report", asks=False, now_us=0)
        assert stream.answered == number
    asked = [stream.push("question", asks=True, now_us=0) for _ in range(count)]
    for number in range(1, 2 * count + 1):
        assert stream.answered == count
        stream.on_reply(number, 0)
    for seq in reversed(asked):
        assert stream.answered == count
        stream.on_reply(2 * count, seq)
    assert stream.answered == 2 * count
    assert opened.looks < 20 * count


def test_kept_answers_are_bounded_in_bytes_and_the_oldest_go_first() -> None:
    stream = ReceiveStream(kept_bytes_max=10)
    assert [stream.keep(seq, b"1234") for seq in (1, 2)] == [0, 0]
    assert stream.keep(3, b"12345678") == 2
    assert (stream.kept_count, stream.kept_bytes) == (1, 8)
    assert stream.keep(3, b"12") == 0
    assert stream.kept_bytes == 2
    stream.arrive(1, 3)
    assert (stream.kept_count, stream.kept_bytes) == (0, 0)


def test_the_answer_that_is_kept_now_stays_however_large() -> None:
    stream = ReceiveStream(kept_bytes_max=3)
    assert stream.keep(1, b"12345678") == 0
    assert stream.again(1) == b"12345678"


def test_an_answer_is_gone_when_a_limit_dropped_it_and_nobody_has_said_to_have_it() -> None:
    stream = ReceiveStream(kept_bytes_max=10)
    for seq in (1, 2, 3):
        assert stream.arrive(seq, 0) is Arrival.NEW
    assert not stream.gone(1)
    stream.keep(1, b"12345678")
    stream.keep(2, b"12345678")
    assert (stream.gone(1), stream.gone(2)) == (True, False)
    assert not stream.gone(3), "nothing with so high a number was ever dropped"
    stream.arrive(1, 1)
    assert not stream.gone(1), "the client has said that it has it"


def test_an_answer_that_is_still_to_come_is_not_gone() -> None:
    stream = ReceiveStream(kept_bytes_max=10)
    for seq in (1, 2, 3):
        stream.arrive(seq, 0)
    stream.awaits(1)
    stream.keep(2, b"12345678")
    stream.keep(3, b"12345678")
    assert (stream.gone(1), stream.gone(2)) == (False, True)
    stream.keep(1, b"12345678")
    assert stream.again(1) is not None
    stream.keep(3, b"123456789")
    assert (stream.gone(1), stream.again(1)) == (True, None)
