"""Frames over a stream socket: whole, in order, or not at all."""

import socket
import struct
from collections.abc import Iterator
from random import Random

import pytest

from directory.core.limits import MESSAGE_BYTES_MAX
from transfer.ipc.lane import BUFFER_BYTES, HEADER, FrameLane, LaneOver


@pytest.fixture
def ends() -> Iterator[tuple[FrameLane, FrameLane]]:
    lane, other = FrameLane.pair()
    far = FrameLane(other)
    yield lane, far
    lane.close()
    far.close()


def drained(near: FrameLane, far: FrameLane, count: int) -> list[bytes]:
    """What arrives at the far end while the near end sends what it has queued."""
    found: list[bytes] = []
    while len(found) < count:
        near.flush()
        found += far.receive()
    return found


def test_frames_of_every_size_arrive_whole_and_in_order(ends: tuple[FrameLane, FrameLane]) -> None:
    near, far = ends
    draw = Random(1)
    sizes = [0, 1, BUFFER_BYTES - HEADER.size, BUFFER_BYTES, 3 * BUFFER_BYTES, 5]
    frames = [draw.randbytes(size) for size in sizes]
    assert all(near.send(frame) for frame in frames)
    assert drained(near, far, len(frames)) == frames
    assert not near.want_write
    assert far.receive() == []


def test_a_frame_that_comes_in_pieces_is_put_together() -> None:
    lane, other = FrameLane.pair()
    data = HEADER.pack(3) + b"abc" + HEADER.pack(2) + b"de"
    found: list[bytes] = []
    for at in range(len(data)):
        other.send(data[at : at + 1])
        found += lane.receive()
    assert found == [b"abc", b"de"]
    lane.close()
    other.close()


@pytest.mark.parametrize("size", [0, 1, 1_000, BUFFER_BYTES - 1, BUFFER_BYTES + 9])
def test_what_is_left_of_a_read_is_handed_out_before_anything_more_is_read(
    ends: tuple[FrameLane, FrameLane], size: int
) -> None:
    """`more` says so truly: nothing else tells of them."""
    near, far = ends
    frames = [bytes([n]) * size for n in range(20)]
    assert all(near.send(frame) for frame in frames)
    found: list[bytes] = []
    while len(found) < len(frames):
        near.flush()
        received = far.receive(3)
        assert len(received) <= 3
        found += received
        while far.more:
            found += far.receive(3)
    assert found == frames
    assert far.receive(3) == []


def test_the_frames_before_the_end_of_the_peer_are_handed_out_first(
    ends: tuple[FrameLane, FrameLane],
) -> None:
    near, far = ends
    for frame in (b"1", b"2", b"3"):
        near.send(frame)
    near.close()
    handed_out = [(far.receive(2), far.more) for _ in range(2)]
    assert handed_out == [([b"1", b"2"], True), ([b"3"], False)]
    with pytest.raises(LaneOver, match="closed"):
        far.receive(2)


def test_what_is_held_goes_before_what_comes_next(ends: tuple[FrameLane, FrameLane]) -> None:
    near, far = ends
    assert near.hold(b"one")
    assert far.receive() == []
    assert near.send(b"two")
    assert far.receive() == [b"one", b"two"]
    near.hold(b"three")
    near.hold(b"x" * 100_000)  # too much to wait for anything
    assert drained(near, far, 2) == [b"three", b"x" * 100_000]
    near.hold(b"four")
    assert near.send_held()
    assert far.receive() == [b"four"]


def test_a_peer_that_reads_nothing_costs_bounded_memory(
    ends: tuple[FrameLane, FrameLane],
) -> None:
    near, far = ends
    big = bytes(MESSAGE_BYTES_MAX)
    sent = 0
    while near.send(big):
        sent += 1
        assert sent < 10
    assert near.want_write
    assert not near.send(bytes(MESSAGE_BYTES_MAX + 1))
    assert len(drained(near, far, sent)) == sent
    assert near.send(b"again")


def test_the_end_of_the_peer_and_a_broken_length_end_the_lane() -> None:
    lane, other = FrameLane.pair()
    other.send(struct.pack("<I", MESSAGE_BYTES_MAX + 1))
    with pytest.raises(LaneOver, match="at most"):
        lane.receive()
    lane.close()
    other.close()
    lane, other = FrameLane.pair()
    lane.send(b"last")
    assert other.recv(100) == HEADER.pack(4) + b"last"
    other.close()
    with pytest.raises(LaneOver, match="closed"):
        lane.receive()
    assert not lane.send(b"to nobody")
    assert isinstance(other, socket.socket)
    lane.close()


def test_held_frames_that_cannot_be_sent_are_counted(ends: tuple[FrameLane, FrameLane]) -> None:
    near, far = ends
    assert near.hold(b"one")
    assert near.send_held()
    assert near.held_lost == 0
    far.close()
    assert near.hold(b"two")
    assert near.hold(b"three")
    assert not near.send_held()
    assert near.held_lost == 2
    assert near.hold(b"four")
    assert not near.send(b"five"), "whoever sends is told; what was held before is counted"
    assert near.held_lost == 3


def test_a_lane_is_silent_where_nothing_came_and_nothing_is_to_be_said(
    ends: tuple[FrameLane, FrameLane],
) -> None:
    near, far = ends
    assert near.silent()
    near.hold(b"later")
    assert not near.silent(), "something is to be sent"
    near.send_held()
    assert near.silent()
    assert not far.silent(), "something has come"
    far.send(b"one")
    far.send(b"two")
    assert not near.silent()
    assert near.receive(1) == [b"one"]
    assert not near.silent(), "something was left to be handed out"
    assert near.receive() == [b"two"]
    assert near.silent()


def test_a_lane_whose_peer_has_gone_is_not_silent(ends: tuple[FrameLane, FrameLane]) -> None:
    near, far = ends
    far.close()
    assert not near.silent()


def test_a_lane_with_a_part_of_a_frame_is_not_silent() -> None:
    lane, other = FrameLane.pair()
    other.send(HEADER.pack(3) + b"ab")
    assert lane.receive() == []
    assert not lane.silent(), "the rest may be long in coming, but it is under way"
    other.close()
    lane.close()


def test_a_lane_says_what_it_holds_and_what_of_that_is_lost(
    ends: tuple[FrameLane, FrameLane],
) -> None:
    near, far = ends
    said = [near.holds]
    near.hold(b"one")
    said.append(near.holds)
    near.send_held()
    said.append(near.holds)
    far.close()
    near.hold(b"two")
    near.send_held()
    said.append(near.holds)
    assert said == [False, True, False, True], "who asks for what was lost must hear of it"
    assert near.held_lost == 1
