"""Sequence numbers and replays of one stream."""

import msgspec
import pytest

from directory.core import limits
from directory.kvevents.stream import Stream
from directory.kvevents.wire import END, Event, asked_from

NOW_US = 1_700_000_000_000_000


def number(frame: bytes) -> int:
    return int.from_bytes(frame, "big")


def test_sequences_begin_at_the_clock_and_go_up_by_one() -> None:
    stream = Stream("map", lambda: NOW_US)
    first, second = stream.publish([None]), stream.publish([])
    assert [number(frames[1]) for frames in (first, second)] == [NOW_US, NOW_US + 1]
    assert msgspec.msgpack.decode(second[2]) == [NOW_US / 1e6, [], 0]


def test_a_replay_of_what_is_kept_is_what_was_sent() -> None:
    stream = Stream("map", lambda: NOW_US)
    live = [stream.publish([("GPU", [at])]) for at in range(4)]
    replies = stream.replay(NOW_US + 1, lambda: pytest.fail("a snapshot was asked for"))
    assert replies == [[b"", b"", *frames[1:]] for frames in live[1:]] + [[b"", b"", END, b""]]
    assert stream.replay(NOW_US + 9, list) == [[b"", b"", END, b""]]


def test_a_replay_of_what_is_not_kept_is_a_snapshot_under_the_last_number() -> None:
    stream = Stream("array", lambda: NOW_US)
    stream.publish([None])
    stream.publish([None])
    snapshot, end = stream.replay(0, lambda: [None, ("GPU", [1])])
    assert len(snapshot) == len(end) == 3
    assert number(snapshot[1]) == NOW_US + 1
    events = msgspec.msgpack.decode(snapshot[2])[1]
    assert events == [["AllBlocksCleared"], ["BlockRemoved", [1], "GPU"]]
    assert end == [b"", END, b""]


def test_what_is_kept_is_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KV_EVENTS_REPLAY_BATCHES_MAX", 3)
    stream = Stream("map", lambda: NOW_US)
    for _ in range(5):
        stream.publish([None])
    asked: list[int] = []

    def everything() -> list[Event]:
        asked.append(1)
        return [None]

    assert len(stream.replay(NOW_US + 2, everything)) == 4
    assert not asked
    stream.replay(NOW_US + 1, everything)
    assert asked
    monkeypatch.setattr(limits, "KV_EVENTS_REPLAY_BYTES_MAX", 10)
    stream.publish([None])
    stream.replay(NOW_US + 5, everything)
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("frames", "first"),
    [
        ([b"", b"\0" * 7 + b"\x05"], 5),
        ([b"\0" * 8], None),
        ([b"x", b"\0" * 8], None),
        ([b"", b"\0" * 7], None),
        ([], None),
    ],
)
def test_a_request_that_cannot_be_read_is_nobodys(frames: list[bytes], first: int | None) -> None:
    assert asked_from(frames) == first
