"""FdChannel: framing, descriptors, limits, broken peers, deadlines."""

import array
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.core.errors import BadMessage, CapacityError, ProtocolError, TooLarge
from directory.core.limits import FDS_PER_FRAME_MAX
from tests.descriptors import open_descriptors
from transfer.ipc.channel import (
    ChannelClosed,
    ChannelDeadline,
    FdChannel,
    OutOfDescriptors,
    close_fds,
)

Pair = tuple[FdChannel, FdChannel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected channels; a descriptor that outlives the test is a failure."""
    before = open_descriptors()
    left, right = FdChannel.pair()
    yield left, right
    left.close()
    right.close()
    assert open_descriptors() == before


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, FdChannel]]:
    """A bare socket that can misbehave, and the channel at its other end."""
    before = open_descriptors()
    bare, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = FdChannel(sock, frame_bytes_max=1000)
    yield bare, channel
    bare.close()
    channel.close()
    assert open_descriptors() == before


def pipe_with(content: bytes) -> int:
    read_end, write_end = os.pipe()
    os.write(write_end, content)
    os.close(write_end)
    return read_end


def read_and_close(fd: int) -> bytes:
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


def rights(*fds: int) -> "list[tuple[int, int, array.array[int]]]":
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]


def send_for_ever(channel: FdChannel) -> None:
    while True:
        channel.send(bytes(1 << 18))


def pump(sender: FdChannel, receiver: FdChannel, count: int) -> list[tuple[bytes, list[int]]]:
    """Flush and receive in turn, as two poll loops would."""
    frames = receiver.receive()
    while len(frames) < count:
        sender.flush()
        frames += receiver.receive()
    return frames


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    left, right = pair
    for payload in (b"one", b"", b"three" * 1000):
        left.send(payload)
    assert right.receive() == [(b"one", []), (b"", []), (b"three" * 1000, [])]
    assert right.receive() == []


@given(sizes=st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 3)), max_size=12))
def test_every_descriptor_stays_with_its_frame(sizes: list[tuple[int, int]]) -> None:
    left, right = FdChannel.pair()
    for number, (size, fd_count) in enumerate(sizes):
        fds = [pipe_with(f"{number}.{i}".encode()) for i in range(fd_count)]
        left.send(bytes([number]) * size, fds)
        close_fds(fds)  # what is queued has descriptors of its own
    frames = pump(left, right, len(sizes))
    for number, ((size, fd_count), (payload, fds)) in enumerate(zip(sizes, frames, strict=True)):
        assert payload == bytes([number]) * size
        assert [read_and_close(fd) for fd in fds] == [
            f"{number}.{i}".encode() for i in range(fd_count)
        ]
    assert not left.want_write
    left.close()
    right.close()


def test_a_large_frame_is_queued_and_flushed_without_blocking(pair: Pair) -> None:
    left, right = pair
    payload = os.urandom(8 << 20)
    left.send(payload)
    assert left.want_write
    assert not left.flush()
    assert pump(left, right, 1) == [(payload, [])]
    assert left.flush()


def test_received_descriptors_do_not_survive_exec(pair: Pair) -> None:
    left, right = pair
    fd = pipe_with(b"x")
    left.send(b"", [fd])
    os.close(fd)
    ((_, (received,)),) = right.receive()
    assert not os.get_inheritable(received)
    os.close(received)


def test_frames_beyond_a_limit_are_refused_by_the_sender(pair: Pair) -> None:
    left, right = pair
    with pytest.raises(TooLarge):
        left.send(bytes((16 << 20) + 1))
    with pytest.raises(TooLarge):
        left.send(b"", [0] * (FDS_PER_FRAME_MAX + 1))
    assert right.receive() == []


def test_a_peer_that_does_not_read_fills_a_bounded_queue() -> None:
    left_sock, right_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left, right = FdChannel(left_sock, queued_bytes_max=1 << 20), FdChannel(right_sock)
    with pytest.raises(CapacityError, match="has not read"):
        send_for_ever(left)
    left.close()
    right.close()


def test_the_end_comes_after_everything_that_was_sent_before_it(pair: Pair) -> None:
    left, right = pair
    left.send(b"last words")
    left.close()
    frames = right.receive()
    assert frames == [(b"last words", [])]
    with pytest.raises(ChannelClosed):
        right.receive()
    with pytest.raises(ChannelClosed):
        right.receive()
    with pytest.raises(ChannelClosed):
        send_for_ever(right)
    with pytest.raises(ChannelClosed):
        left.send(b"anybody?")


def test_closing_gives_undelivered_descriptors_back(pair: Pair) -> None:
    left, right = pair
    fd = pipe_with(b"x")
    left.send(bytes(4 << 20))
    left.send(b"queued behind a large one", [fd])
    right.send(b"sent and never received", [fd])
    os.close(fd)
    # The fixture counts what is still open after close().


def test_a_frame_beyond_the_limit_is_refused_by_the_receiver(
    raw: tuple[socket.socket, FdChannel],
) -> None:
    bare, channel = raw
    bare.sendall(struct.pack("<IB", 2, 0) + b"ok" + struct.pack("<IB", 1001, 0))
    assert channel.receive() == [(b"ok", [])]
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    assert poller.poll(0), "whoever polls must come back for the error"
    with pytest.raises(TooLarge):
        channel.receive()


def test_a_frame_without_its_descriptors_is_refused(
    raw: tuple[socket.socket, FdChannel],
) -> None:
    bare, channel = raw
    bare.sendall(struct.pack("<IB", 1, 1) + b"x")
    with pytest.raises(BadMessage, match="without the 1 descriptors"):
        channel.receive()


@pytest.mark.parametrize("head", [b"", b"abcd"])  # a frame begun, and a whole one
def test_descriptors_that_no_frame_announces_are_refused_and_closed(
    raw: tuple[socket.socket, FdChannel], head: bytes
) -> None:
    bare, channel = raw
    before = open_descriptors()
    fd = pipe_with(b"x")
    bare.sendmsg([struct.pack("<IB", 4, 0) + head], rights(fd))
    os.close(fd)
    if head:
        assert channel.receive() == [(head, [])]
    with pytest.raises(BadMessage, match="no frame announces"):
        channel.receive()
    assert open_descriptors() == before


def test_more_descriptors_than_a_frame_may_have_are_refused_and_closed(
    raw: tuple[socket.socket, FdChannel],
) -> None:
    bare, channel = raw
    fd = pipe_with(b"x")
    bare.sendmsg([struct.pack("<IB", 1, 1) + b"x"], rights(*[fd] * (FDS_PER_FRAME_MAX + 1)))
    os.close(fd)
    with pytest.raises(ProtocolError):
        channel.receive()


def test_a_frame_may_come_one_byte_at_a_time(raw: tuple[socket.socket, FdChannel]) -> None:
    bare, channel = raw
    fd = pipe_with(b"late")
    frame = struct.pack("<IB", 3, 1) + b"abc"
    bare.sendmsg([frame[:1]], rights(fd))
    os.close(fd)
    for byte in frame[1:-1]:
        assert channel.receive() == []
        bare.send(bytes([byte]))
    assert channel.receive() == []
    bare.send(frame[-1:])
    ((payload, fds),) = channel.receive()
    assert payload == b"abc"
    assert [read_and_close(fd) for fd in fds] == [b"late"]


def test_a_call_returns_the_answer_with_its_descriptors(pair: Pair) -> None:
    left, right = pair

    def serve() -> None:
        payload, fds = right.wait_frame(30)
        right.send(payload[::-1], fds)
        close_fds(fds)

    server = threading.Thread(target=serve)
    server.start()
    fd = pipe_with(b"there and back")
    answer, fds = left.call(b"abc", [fd], deadline_s=30)
    os.close(fd)
    server.join()
    assert answer == b"cba"
    assert [read_and_close(fd) for fd in fds] == [b"there and back"]


def test_a_call_ends_at_its_deadline(pair: Pair) -> None:
    left, right = pair
    with pytest.raises(ChannelDeadline):
        left.call(b"hello", deadline_s=0.01)
    right.send(b"too late")
    right.send(b"more")
    assert left.wait_frame(30) == (b"too late", [])
    assert left.receive() == [(b"more", [])]


def test_a_call_to_a_dead_peer_fails_at_once(pair: Pair) -> None:
    left, right = pair
    right.close()
    with pytest.raises(ChannelClosed):
        left.call(b"hello", deadline_s=30)


def test_the_kernel_says_who_the_peer_is(pair: Pair) -> None:
    left, _ = pair
    assert left.peer_credentials() == (os.getpid(), os.getuid(), os.getgid())
    pidfd = left.peer_pidfd()
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(0) == [], "a live process's pidfd is not readable"
    os.close(pidfd)


def test_connecting_to_nobody_fails(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        FdChannel.connect(str(tmp_path / "none"), 1.0)
    assert open_descriptors() == before


def test_a_channel_can_be_made_through_a_listening_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        client = FdChannel.connect(path, 30)
        server = FdChannel(listener.accept()[0])
    client.send(b"hello")
    assert server.receive() == [(b"hello", [])]
    client.close()
    server.close()
    assert repr(server) == "<FdChannel closed, 0 bytes unsent>"


def test_a_call_to_a_peer_that_has_said_why_it_goes_returns_that(pair: Pair) -> None:
    left, right = pair
    right.send(b"full")
    right.close()
    assert left.call(b"hello", deadline_s=30) == (b"full", [])
    with pytest.raises(ChannelClosed):
        left.call(b"hello", deadline_s=30)


def test_a_peer_that_goes_with_the_question_unread_has_said_why_as_well(pair: Pair) -> None:
    left, right = pair
    left.send(b"an earlier message, which resets the connection when it is thrown away")
    right.send(b"full")
    right.close()
    assert left.call(b"hello", deadline_s=30) == (b"full", [])


@pytest.mark.parametrize("room", [0, 3])
def test_a_process_without_room_for_descriptors_says_so(pair: Pair, room: int) -> None:
    left, right = pair
    fd = pipe_with(b"x")
    left.send(b"before")
    left.send(b"abc", [fd] * 5)
    os.close(fd)
    assert left.want_write is False
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free: list[int] = []
    with Path(os.devnull).open("rb") as null:
        free += [os.dup(null.fileno()) for _ in range(room)]
        highest = max([null.fileno(), *free])
        # Below the highest descriptor nothing may be free but what is given back here.
        fill = []
        while (got := os.dup(null.fileno())) < highest:
            fill.append(got)
        os.close(got)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, *fill, 0) + 1, hard))
        try:
            close_fds(free)
            assert right.receive() == [(b"before", [])]
            with pytest.raises(OutOfDescriptors, match="no room") as caught:
                right.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            close_fds(fill)
    assert caught.value.code == "too_many"
