"""Lanes at the server: who may open one, what comes by it, and what a broken one costs."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from directory.core.actions import Done, Refused
from directory.core.errors import BadMessage, ImportFailed
from directory.core.events import Body, Match, Stats, Unlock
from directory.core.ids import PoolId
from directory.daemon import lanes as module
from directory.daemon.lanes import (
    ACK_AFTER_US,
    COPIED_PER_TURN_MAX,
    EXTENT_BYTES_MAX,
    FRAMES_PER_TURN_MAX,
    KNOWN_BYTES_MAX,
    KNOWN_LENGTH_MIN,
)
from directory.protocol.codec import decode_reply, encode
from directory.protocol.messages import Acked, Attach, Envelope, Extent, ReplyEnvelope
from scheduler_shim.arena import PLACED_BYTES_MIN
from tests.unit.directory.daemon.lane_rig import ARENA_BYTES, EPOCH, KEY, POOL, Rig
from transfer.ipc.lane import HEADER, FrameLane


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is carried out at once is not bounded by time."""
    monkeypatch.setattr(module, "PIECE_NS", 1 << 62)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "router.sock")
    yield rig
    rig.close()


def test_what_comes_by_a_lane_is_carried_out_and_answered_there(rig: Rig) -> None:
    rig.open()
    rig.say(1, Stats())
    assert rig.turn() == [ReplyEnvelope(EPOCH, 1, 1, Done())]
    rig.say(2, Match("r", 1, KEY, b"1234"))
    assert rig.turn() == [ReplyEnvelope(EPOCH, 2, 0, Acked())], "it was not answered yet"
    rig.server.answer(POOL, 2, Done())
    assert [decode_reply(frame).seq for frame in rig.lane.receive()] == [2]


def test_tokens_are_read_out_of_the_arena_once_for_each_number(rig: Rig) -> None:
    rig.open()
    size = KNOWN_LENGTH_MIN
    first, second = b"tokens!!" * (size // 8), b"changed!" * (size // 8)
    rig.memory.view[100 : 100 + size] = first
    assert rig.match(1, (100, size, 1)) == Match("r", 1, KEY, first)
    rig.memory.view[100 : 100 + size] = second
    assert rig.match(2, (100, size, 1)) == Match("r", 1, KEY, first)
    assert rig.match(3, (100, size, 2)) == Match("r", 1, KEY, second)
    assert rig.match(4, (100, 4, 2)) == Match("r", 1, KEY, b"chan"), "another length is read anew"
    assert rig.match(5, (100, 4, 0)) == Match("r", 1, KEY, b"chan")


def test_small_parts_of_an_arena_are_not_remembered_however_many_there_are(rig: Rig) -> None:
    rig.open()
    lane = rig.server._lanes._lanes[POOL]
    for number in range(1, 3_000):
        lane.read((0, KNOWN_LENGTH_MIN - 1, number))
    assert (lane._known, lane._known_bytes) == ({}, 0)
    assert KNOWN_LENGTH_MIN <= PLACED_BYTES_MIN, "what a client places there is remembered"


def test_what_is_remembered_of_an_arena_is_bounded(rig: Rig) -> None:
    rig.open()
    lane = rig.server._lanes._lanes[POOL]
    for number in range(1, 2 * KNOWN_BYTES_MAX // ARENA_BYTES):
        lane.read((0, ARENA_BYTES, number))
    assert lane._known_bytes == sum(map(len, lane._known.values())) <= KNOWN_BYTES_MAX


@pytest.mark.parametrize(
    "extent",
    [(0, ARENA_BYTES + 1, 1), (ARENA_BYTES, 1, 1), (-4, 8, 1), (8, -4, 1), (1 << 62, 1 << 62, 1)],
)
def test_an_extent_beyond_the_arena_is_refused_and_nothing_else_happens(
    rig: Rig, extent: Extent
) -> None:
    rig.open()
    (refused,) = rig.match(1, extent)  # type: ignore[misc]
    assert isinstance(refused.body, Refused)
    assert refused.body.code == "bad_message"
    assert isinstance(rig.match(1, (0, 8, 2)), Match), "the stream stands where it stood"


def test_an_extent_that_no_message_can_have_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "router.sock", EXTENT_BYTES_MAX + 4096)
    rig.open()
    lane = rig.server._lanes._lanes[POOL]
    (refused,) = rig.match(1, (0, EXTENT_BYTES_MAX + 1, 0))  # type: ignore[misc]
    assert isinstance(refused.body, Refused)
    assert refused.body.code == "too_large"
    assert lane.copied == 0
    assert isinstance(rig.match(1, (0, EXTENT_BYTES_MAX, 0)), Match)
    assert lane.copied == EXTENT_BYTES_MAX, "the longest that a message can have"
    rig.close()


@pytest.mark.usefixtures("unhurried")
def test_one_turn_carries_a_bounded_number_of_a_lanes_frames_out(rig: Rig) -> None:
    """The others are not forgotten, though epoll has nothing more to tell of them."""
    rig.open()
    count = 2 * FRAMES_PER_TURN_MAX + 7
    frames = (encode(Envelope(EPOCH, seq, 0, Stats())) for seq in range(1, count + 1))
    rig.lane._sock.send(b"".join(HEADER.pack(len(frame)) + frame for frame in frames))
    carried: list[int] = []
    while len(rig.asked) < count:
        before = len(rig.asked)
        assert rig.loop.waiting()
        rig.loop.turn(0)
        carried.append(len(rig.asked) - before)
    assert carried == [FRAMES_PER_TURN_MAX, FRAMES_PER_TURN_MAX, 7]
    assert not rig.loop.waiting()


def test_a_question_is_answered_before_others_reports_that_came_first(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_NS", 0)
    rig.open()
    other = rig.another(POOL + 1)
    for seq in range(1, 20):
        rig.say(seq, Stats())
    rig.loop.turn(0)
    other.send(encode(Envelope(EPOCH, 1, 0, Match("r", 1, KEY, b"1234"))))
    rig.loop.turn(0)
    assert [type(body) for body in rig.asked[:2]] == [Stats, Match]
    while rig.loop.waiting():
        rig.loop.turn(0)
    assert len(rig.asked) == 20
    other.close()


def test_a_clients_messages_do_not_overtake_one_another(rig: Rig) -> None:
    rig.open()
    said = [Match("r", 1, KEY, bytes(4 * n)) if n % 3 else Stats() for n in range(1, 40)]
    for seq, body in enumerate(said, 1):
        rig.say(seq, body)
    while rig.loop.waiting():
        rig.loop.turn(0)
    assert rig.asked == said


def test_reports_are_carried_out_for_a_bounded_time_and_one_at_least(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 0

    def clock() -> int:
        nonlocal now_ns
        now_ns += module.PIECE_NS // 4
        return now_ns

    monkeypatch.setattr(module, "monotonic_ns", clock)
    rig.open()
    for seq in range(1, 13):
        rig.say(seq, Stats())
    carried: list[int] = []
    while rig.loop.waiting():
        before = len(rig.asked)
        rig.loop.turn(0)
        carried.append(len(rig.asked) - before)
    assert carried == [4, 4, 4]
    monkeypatch.setattr(module, "PIECE_NS", 0)
    for seq in range(13, 16):
        rig.say(seq, Stats())
        rig.loop.turn(0)
        assert len(rig.asked) == seq


def test_a_release_is_acknowledged_by_what_is_answered_next_or_in_a_while(rig: Rig) -> None:
    rig.open()
    rig.say(1, Unlock(7))
    rig.loop.turn(1)
    assert rig.lane.receive() == []
    due_us = rig.server.due_us()
    assert due_us is not None
    rig.server.on_time(due_us - 1)
    assert rig.lane.receive() == []
    rig.say(2, Stats())
    assert rig.turn() == [ReplyEnvelope(EPOCH, 2, 2, Done())]
    rig.server.on_time(due_us)
    assert rig.lane.receive() == [], "it is acknowledged"
    assert rig.server.due_us() is None
    rig.say(3, Unlock(8))
    rig.loop.turn(1)
    rig.server.on_time(due_us + ACK_AFTER_US + 1_000_000)
    assert [decode_reply(f) for f in rig.lane.receive()] == [ReplyEnvelope(EPOCH, 3, 0, Acked())]


@pytest.mark.usefixtures("unhurried")
def test_one_turn_copies_a_bounded_part_of_a_lanes_arena(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "router.sock", EXTENT_BYTES_MAX)
    rig.open()
    for seq in range(1, 8):
        rig.say(seq, Match("r", 1, KEY, b""), (0, EXTENT_BYTES_MAX, 0))
    carried: list[int] = []
    while sum(carried) < 7:
        rig.asked.clear()
        rig.loop.turn(0)
        carried.append(len(rig.asked))
    a_turn = -(-COPIED_PER_TURN_MAX // EXTENT_BYTES_MAX)
    assert carried == [a_turn] * (7 // a_turn) + [7 % a_turn] * (7 % a_turn > 0)
    assert not rig.loop.waiting()
    rig.close()


@pytest.mark.usefixtures("unhurried")
def test_what_a_lane_had_left_goes_with_it(rig: Rig) -> None:
    rig.open()
    for seq in range(1, FRAMES_PER_TURN_MAX + 2):
        rig.say(seq, Stats())
    rig.loop.turn(0)
    rig.server.close_pool(POOL)
    assert not rig.loop.waiting()
    rig.loop.turn(0)
    assert len(rig.asked) == FRAMES_PER_TURN_MAX


def test_a_body_without_tokens_cannot_have_them_in_an_arena(rig: Rig) -> None:
    rig.open()
    rig.say(1, Stats(), (0, 8, 1))
    (refused,) = rig.turn()
    assert isinstance(refused.body, Refused)
    assert "no tokens" in refused.body.message


@pytest.mark.usefixtures("unhurried")
def test_attach_and_another_epoch_are_refused_and_the_lane_goes_on(rig: Rig) -> None:
    rig.open()
    rig.say(0, Attach(POOL, b"s" * 32))
    rig.lane.send(encode(Envelope(EPOCH + 1, 1, 0, Stats())))
    bodies = [reply.body for reply in rig.turn()]
    assert [body.code for body in bodies if isinstance(body, Refused)] == [
        "bad_message",
        "stale_epoch",
    ]
    rig.say(1, Stats())
    assert rig.turn() == [ReplyEnvelope(EPOCH, 1, 1, Done())]


@pytest.mark.parametrize("junk", [b"", b"\xc1 garbage"])
def test_the_first_frame_that_is_no_message_is_refused_and_ends_the_lane(
    rig: Rig, junk: bytes
) -> None:
    rig.open()
    rig.say(1, Stats())
    rig.lane._sock.send(10_000 * (HEADER.pack(len(junk)) + junk))
    rig.loop.turn(1)
    assert rig.counters["frames"] == 2, "nothing behind it is looked at"
    assert rig.counters["frames_malformed"] == 1
    assert len(rig.server._lanes) == 0
    done, refused = (decode_reply(frame) for frame in rig.lane.receive())
    assert done == ReplyEnvelope(EPOCH, 1, 1, Done())
    assert isinstance(refused.body, Refused)
    assert refused.body.code == "bad_message"
    assert not rig.loop.waiting()
    assert POOL in rig.server._endpoint.clients, "its client goes on by its connection"


def test_a_broken_frame_ends_the_lane_and_not_the_pool(rig: Rig) -> None:
    rig.open()
    rig.lane._sock.send(b"\xff\xff\xff\xff")
    rig.loop.turn(1)
    assert len(rig.server._lanes) == 0
    rig.server.answer(POOL, 1, Done())
    assert rig.counters["replies_dropped"] == 1, "it has not attached by a connection either"
    rig.server.close_pool(POOL)


def test_a_pool_that_goes_takes_its_lane_along(rig: Rig) -> None:
    rig.open()
    rig.server.close_pool(POOL)
    assert len(rig.server._lanes) == 0
    rig.server.open_pool(POOL + 1, b"s" * 32)
    rig.server.begin_epoch(EPOCH + 1)


def test_descriptors_that_are_no_lane_are_refused_and_stay_the_callers(rig: Rig) -> None:
    sock, memory = rig.fds
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    for fds, nbytes in [
        ((sock,), ARENA_BYTES),
        ((memory, memory), ARENA_BYTES),
        ((datagram.fileno(), memory), ARENA_BYTES),
        ((sock, memory), 0),
        ((sock, memory), 1 << 40),
    ]:
        with pytest.raises(BadMessage):
            rig.server.open_lane(POOL, fds, nbytes)
    for fds, nbytes in [((sock, datagram.fileno()), 1), ((sock, memory), ARENA_BYTES + 1)]:
        with pytest.raises(ImportFailed):
            rig.server.open_lane(POOL, fds, nbytes)
    datagram.close()
    rig.open()
    with pytest.raises(BadMessage, match="already"):
        rig.server.open_lane(POOL, (sock, memory), ARENA_BYTES)


class Beside:
    """A client that says more while what it has said is carried out."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = rig
        self.more: list[tuple[int, Match | Unlock | Stats]] = []
        self.reads = 0
        ask, receive = rig.ask, FrameLane.receive

        def asked(pool: PoolId, seq: int, body: Body) -> None:
            ask(pool, seq, body)
            if isinstance(body, Match):
                self.say(pool, seq)

        def read(lane: FrameLane, most: int = sys.maxsize) -> list[bytes]:
            self.reads += lane is not rig.lane
            return receive(lane, most)

        rig.server._endpoint._ask = asked
        monkeypatch.setattr(FrameLane, "receive", read)

    def say(self, pool: PoolId, seq: int) -> None:
        more, self.more = self.more, []
        for number, body in more:
            self.rig.say(number, body)
        self.rig.server.answer(pool, seq, Done())

    def turn(self, seq: int, *more: tuple[int, Match | Unlock | Stats]) -> tuple[int, list[Body]]:
        """A match is said, and `more` while it is carried out: reads, and what was carried out."""
        self.more, self.reads = list(more), 0
        self.rig.asked.clear()
        self.rig.say(seq, Match("r", 1, KEY, b""))
        self.rig.loop.turn(1)
        return self.reads, list(self.rig.asked)


def test_a_release_that_comes_behind_a_match_is_carried_out_in_the_same_turn(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.open(thin=True)
    beside = Beside(rig, monkeypatch)
    match = Match("r", 1, KEY, b"")
    assert beside.turn(1, (2, Unlock(7))) == (1, [match]), "nothing is known of this client yet"
    rig.loop.turn(1)
    assert rig.asked == [match, Unlock(7)]
    assert beside.turn(3, (4, Unlock(8))) == (2, [match, Unlock(8)])
    assert beside.turn(5, (6, Unlock(9))) == (2, [match, Unlock(9)])
    assert beside.turn(7) == (2, [match]), "looked for once more, in vain"
    assert beside.turn(8, (9, Unlock(10))) == (1, [match]), "and not again"
    rig.loop.turn(1)
    assert beside.turn(10, (11, Unlock(11))) == (2, [match, Unlock(11)])
    assert [decode_reply(frame).seq for frame in rig.lane.receive() if decode_reply(frame).seq] == [
        1, 3, 5, 7, 8, 10,
    ]  # fmt: skip


def test_what_waits_for_its_turn_waits_behind_such_a_match_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.open(thin=True)
    beside = Beside(rig, monkeypatch)
    beside.turn(1, (2, Unlock(7)))
    rig.loop.turn(1)
    match = Match("r", 1, KEY, b"")
    assert beside.turn(3, (4, Stats()), (5, Unlock(8)))[1] == [match, Stats(), Unlock(8)], (
        "in its order, in the piece that a turn does of what can wait"
    )


def test_a_lane_that_ends_behind_a_match_is_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.open(thin=True)
    beside = Beside(rig, monkeypatch)
    beside.turn(1, (2, Unlock(7)))
    rig.loop.turn(1)
    monkeypatch.setattr(beside, "say", lambda *_: rig.lane.close())
    assert beside.turn(3) == (2, [Match("r", 1, KEY, b"")])
    assert len(rig.server._lanes) == 0
