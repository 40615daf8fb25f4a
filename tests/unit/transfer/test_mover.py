"""The mover's loop in this process: what it answers, and that nothing ends it but the channel."""

import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from directory.core.events import CopyDone
from tests.descriptors import open_descriptors
from tests.unit.transfer.support import (
    HOST,
    OwnedPool,
    copy,
    part,
    slot,
    small_layout,
    small_tier,
)
from transfer.device.cpu import CpuDevice
from transfer.engine_limits import EngineLimits
from transfer.ipc.channel import HEADER, ChannelClosed, FdChannel
from transfer.messages import (
    Expect,
    Imported,
    ImportPool,
    OpenHostTier,
    Ping,
    Pong,
    Ready,
    Rejected,
    Released,
    ReleasePool,
    Reply,
    Request,
    Shutdown,
    TierOpened,
    decode_reply,
    decode_request,
    encode,
)
from transfer.mover import Mover
from transfer.mover_backend import make_device

DEADLINE_S = 30


class Client:
    """The daemon's side of a mover that runs in a thread."""

    def __init__(self, limits: EngineLimits | None = None) -> None:
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel, theirs = FdChannel(self.socket), FdChannel(other)
        self.ended: list[type[BaseException]] = []
        self._theirs = theirs
        self._limits = limits
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.next() == Ready(os.getpid(), "cpu")

    def _run(self) -> None:
        try:
            Mover(self._theirs, CpuDevice(), self._limits).run()
        except ChannelClosed:
            self.ended.append(ChannelClosed)

    def next(self) -> Reply:
        payload, fds = self.channel.wait_frame(DEADLINE_S)
        assert fds == []
        return decode_reply(payload)

    def ask(self, request: Request, fds: list[int] | None = None) -> Reply:
        self.channel.send(encode(request), fds or [])
        return self.next()

    def import_pool(self, pool: int, owned: OwnedPool) -> Reply:
        named = owned.page_table is not None
        request = ImportPool(pool, owned.layout, owned.handles, page_table=named)
        return self.ask(request, owned.fds)

    def close(self) -> None:
        self.channel.close()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        self._theirs.close()


@pytest.fixture
def client() -> Iterator[Client]:
    """A mover and its client."""
    made = Client()
    yield made
    made.close()


@pytest.fixture
def owned() -> Iterator[OwnedPool]:
    """A pool with patterns in it."""
    pool = OwnedPool(small_layout())
    pool.fill(1)
    yield pool
    pool.close()


def test_every_message_survives_its_encoding() -> None:
    requests: list[Request] = [
        Ping(3),
        Expect(),
        Shutdown(),
        ReleasePool(4),
        ImportPool(1, small_layout(), ()),
        copy(1, "mixed", part(1, [1], 2, [2]), fences=[(1, 0, 2)], words=[(1, 0, 2)]),
    ]
    assert [decode_request(encode(request)) for request in requests] == requests
    replies: list[Reply] = [
        Pong(3), Released(1, "x"), Imported(1, False, "x", "y"), TierOpened(True, 1),
        Rejected("a", "b"), Ready(1, "cpu"), CopyDone(1, "void", "x", 2, 3),
    ]  # fmt: skip
    assert [decode_reply(encode(reply)) for reply in replies] == replies


def test_a_page_goes_from_a_pool_to_the_tier(client: Client, owned: OwnedPool) -> None:
    tier = small_tier(owned.layout)
    for first in (0, 2):
        opened = client.ask(OpenHostTier(tier.shape, first), tier.fds[first : first + 2])
        assert opened == TierOpened(True, first + 2)
    assert client.import_pool(1, owned) == Imported(1, True)
    done = client.ask(copy(5, "backup", part(1, [3], HOST, [slot(9)])))
    assert isinstance(done, CopyDone)
    assert (done.op, done.outcome, done.nbytes) == (5, "ok", owned.layout.page_bytes)
    page = tier.page(slot(9), owned.layout.page_bytes)
    assert bytes(page) == owned.pattern(1, 3)
    page.release()
    tier.close()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        random.Random(64).randbytes(64),
        b"GET / HTTP/1.1\r\n\r\n",
        msgspec.msgpack.encode(["ping", "not a number"]),
        msgspec.msgpack.encode(["no such message"]),
        msgspec.msgpack.encode(["submit_copy", 1, "no such kind", [], [], []]),
        b"\x91" * 1000,
    ],
    ids=lambda payload: repr(payload[:12]),
)
def test_a_bad_message_is_answered_and_ends_nothing_f79(client: Client, payload: bytes) -> None:
    descriptors = open_descriptors()
    read_end, write_end = os.pipe()
    client.channel.send(payload, [read_end, write_end])
    os.close(read_end)
    os.close(write_end)
    answer = client.next()
    assert isinstance(answer, Rejected)
    assert answer.code == "bad_message"
    assert client.ask(Ping(1)) == Pong(1)
    assert open_descriptors() == descriptors


def test_a_forged_layout_is_refused_with_its_code(client: Client, owned: OwnedPool) -> None:
    descriptors = open_descriptors()
    forged = msgspec.structs.replace(owned.layout, page_count=1 << 20)
    answer = client.ask(ImportPool(1, forged, owned.handles), owned.fds)
    assert isinstance(answer, Imported)
    assert (answer.ok, answer.code) == (False, "bad_layout")
    assert "ends at byte" in answer.detail
    short = client.ask(ImportPool(1, owned.layout, owned.handles), owned.fds[:-1])
    assert isinstance(short, Imported)
    assert (short.ok, short.code) == (False, "import_failed")
    # Descriptors are given back after the answer, and before the next message is looked at.
    assert client.ask(Ping(1)) == Pong(1)
    assert open_descriptors() == descriptors
    assert client.import_pool(1, owned) == Imported(1, True), "the id is still free"


def test_a_pool_imported_twice_is_refused_and_stays_imported(
    client: Client, owned: OwnedPool
) -> None:
    client.import_pool(1, owned)
    again = client.import_pool(1, owned)
    assert isinstance(again, Imported)
    assert "imported already" in again.detail
    done = client.ask(copy(1, "peer_copy", part(1, [0], 1, [1])))
    assert isinstance(done, CopyDone)
    assert done.outcome == "ok"


def test_releasing_a_pool_gives_its_descriptors_and_memory_back_f62(
    client: Client, owned: OwnedPool
) -> None:
    descriptors = open_descriptors()
    client.import_pool(1, owned)
    assert open_descriptors() > descriptors
    assert client.ask(ReleasePool(1)) == Released(1)
    assert open_descriptors() == descriptors
    assert client.ask(ReleasePool(1)) == Released(1)


def test_a_tier_of_another_shape_is_refused(client: Client, owned: OwnedPool) -> None:
    tier, other = small_tier(owned.layout), small_tier(owned.layout, slots=16)
    client.ask(OpenHostTier(tier.shape), tier.fds)
    answer = client.ask(OpenHostTier(other.shape), other.fds)
    assert isinstance(answer, TierOpened)
    assert (answer.ok, answer.segments) == (False, 4)
    tier.close()
    other.close()


def test_a_copy_waits_for_its_fence_while_others_are_served(
    client: Client, owned: OwnedPool
) -> None:
    client.import_pool(1, owned)
    client.channel.send(encode(copy(1, "peer_copy", part(1, [0], 1, [1]), fences=[(1, 1, 4)])))
    for token in range(3):
        assert client.ask(Ping(token)) == Pong(token)
    assert owned.read_page(1) == owned.pattern(1, 1)
    owned.timelines.write(1, 4)
    done = client.next()
    assert isinstance(done, CopyDone)
    assert done.outcome == "ok"
    assert owned.read_page(1) == owned.pattern(1, 0)


def test_an_op_sent_twice_fails_once_by_its_name(client: Client, owned: OwnedPool) -> None:
    client.import_pool(1, owned)
    request = copy(1, "peer_copy", part(1, [0], 1, [1]), fences=[(1, 1, 4)])
    client.channel.send(encode(request))
    done = client.ask(request)
    assert isinstance(done, CopyDone)
    assert (done.op, done.outcome) == (1, "failed")
    owned.timelines.write(1, 4)
    assert client.ask(Ping(1)) == Pong(1)


def test_a_copy_too_many_fails_by_its_name_and_harms_no_other(owned: OwnedPool) -> None:
    client = Client(EngineLimits(copies_max=1))
    client.import_pool(1, owned)
    waits = copy(1, "peer_copy", part(1, [0], 1, [1]), fences=[(1, 1, 4)])
    client.channel.send(encode(waits))
    done = client.ask(copy(2, "peer_copy", part(1, [2], 1, [3])))
    assert isinstance(done, CopyDone)
    assert (done.op, done.outcome) == (2, "failed")
    assert "copies under way" in done.detail
    owned.timelines.write(1, 4)
    done = client.next()
    assert isinstance(done, CopyDone)
    assert (done.op, done.outcome) == (1, "ok")
    client.close()


def test_a_ping_behind_many_copies_is_answered_before_they_are_done(owned: OwnedPool) -> None:
    # One range a slice: what a step does is little, and between two of them messages are read.
    client = Client(EngineLimits(slice_ranges=1, submissions_max=1))
    client.import_pool(1, owned)
    count = 50
    frames = [
        encode(copy(op, "peer_copy", part(1, range(8), 1, range(8, 16))))
        for op in range(1, count + 1)
    ]
    frames.append(encode(Ping(7)))
    client.socket.sendall(b"".join(HEADER.pack(len(f), 0) + f for f in frames))
    replies = [client.next() for _ in range(count + 1)]
    assert replies.index(Pong(7)) < count // 2
    assert {r.outcome for r in replies if isinstance(r, CopyDone)} == {"ok"}
    client.close()


def test_shutdown_finishes_what_runs_and_drops_what_waits(client: Client, owned: OwnedPool) -> None:
    client.import_pool(1, owned)
    client.channel.send(encode(copy(1, "peer_copy", part(1, [0], 1, [1]), fences=[(1, 1, 4)])))
    client.channel.send(encode(Shutdown()))
    client.thread.join(DEADLINE_S)
    assert not client.thread.is_alive()
    assert client.ended == []


def test_a_daemon_that_asks_much_before_it_reads_gets_every_answer_in_order(
    client: Client,
) -> None:
    # The questions go as one piece. The answers are small frames, of which a socket's buffer holds
    # a few hundred only.
    count = 3_000
    payloads = [encode(Ping(token)) for token in range(count)]
    client.socket.sendall(b"".join(HEADER.pack(len(p), 0) + p for p in payloads))
    assert [client.next() for _ in range(count)] == [Pong(token) for token in range(count)]


def test_the_end_of_the_channel_ends_the_mover() -> None:
    client = Client()
    client.close()
    assert client.ended == [ChannelClosed]


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(SystemExit, match="'tpu'"):
        make_device("tpu")


def test_a_process_whose_parent_is_another_ends_itself() -> None:
    program = (
        "from transfer.mover import die_with_parent; die_with_parent(parent=1); print('alive')"
    )
    child = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert (child.returncode, child.stdout) == (1, b"")


def test_named_pages_are_found_by_the_pools_table(client: Client) -> None:
    named, plain = OwnedPool(small_layout(), page_table=True), OwnedPool(small_layout())
    named.fill(1)
    plain.fill(2)
    named.name(3, 9)
    assert client.import_pool(1, named) == Imported(1, True)
    assert client.import_pool(2, plain) == Imported(2, True)
    done = client.ask(copy(5, "peer_copy", part(1, [3], 2, [3])))
    assert isinstance(done, CopyDone)
    assert done.outcome == "ok"
    assert plain.read_page(3) == named.pattern(1, 9)
    named.name(3, 4)
    client.ask(copy(6, "peer_copy", part(2, [5], 1, [3])))
    assert named.read_page(4) == plain.pattern(2, 5)
    assert named.read_page(9) == named.pattern(1, 9)
    named.close()
    plain.close()
