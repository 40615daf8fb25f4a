"""The ROUTER's streams: exactly once in, as often as asked out, under lost and repeated frames.

Strategy: a real Server and a real DEALER in this process; `ask` only counts what it was given and
answers it, so that an effect that came twice or out of order is seen at once.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from directory.core.actions import Done, Refused
from directory.core.events import Body, Stats, Unlock
from directory.core.ids import PoolId
from directory.daemon.loop import Loop
from directory.daemon.runtime import StartError
from directory.daemon.server import MESSAGES_PER_WAKE_MAX, Server
from directory.protocol.codec import decode_reply, encode
from directory.protocol.messages import Acked, Attach, Attached, ClientBody, Envelope, ReplyEnvelope
from directory.protocol.stream import SendStream

EPOCH = 42
SECRET = b"s" * 32
POOL = 3
WAIT_MS = 10_000


class Rig:
    """A server, what it was asked, and one client. Stats are answered, Unlocks are reports."""

    def __init__(self, path: Path) -> None:
        self.asked: list[tuple[PoolId, int, Body]] = []
        self.counters: Counter[str] = Counter()
        self.loop = Loop()
        self.server = Server(path, EPOCH, self.ask, self.counters, self.loop)
        self.context = zmq.Context()
        self.endpoint = f"ipc://{path}"
        self.dealers: list[zmq.Socket[bytes]] = []  # keeps replaced ones until they are closed
        self.dealer = self.connect()

    def ask(self, pool: PoolId, seq: int, body: Body) -> None:
        self.asked.append((pool, seq, body))
        if isinstance(body, Stats):
            self.server.answer(pool, seq, Done())

    def connect(self) -> "zmq.Socket[bytes]":
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.endpoint)
        self.dealers.append(dealer)
        return dealer

    def send(
        self, body: ClientBody, seq: int, answered: int = 0, epoch: int = EPOCH, turn: bool = True
    ) -> None:
        self.dealer.send(encode(Envelope(epoch, seq, answered, body)))
        if turn:
            self.turn()

    def turn(self) -> None:
        """Let the server read what has arrived."""
        poller = zmq.Poller()
        poller.register(self.server.fileno(), zmq.POLLIN)
        while not self.server.pending():
            assert poller.poll(WAIT_MS), "nothing arrived"
            self.server.woken()
        self.server.drain()

    def receive(self, dealer: "zmq.Socket[bytes] | None" = None) -> ReplyEnvelope:
        dealer = dealer or self.dealer
        assert dealer.poll(WAIT_MS), "no reply came"
        return decode_reply(dealer.recv())

    def attach(self) -> None:
        self.server.open_pool(POOL, SECRET)
        self.send(Attach(POOL, SECRET), 0)
        assert self.receive() == ReplyEnvelope(EPOCH, 0, 0, Attached())

    def refusal(self) -> str:
        """The code of the refusal that comes now, outside the stream."""
        envelope = self.receive()
        assert isinstance(envelope.body, Refused)
        assert envelope.seq == 0
        return envelope.body.code

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.server.close()
        self.loop.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A rig that is closed afterwards."""
    rig = Rig(tmp_path / "router.sock")
    yield rig
    rig.close()


def test_a_new_message_is_asked_once_and_answered_with_its_number(rig: Rig) -> None:
    rig.attach()
    rig.send(Stats(), 1)
    assert rig.receive() == ReplyEnvelope(EPOCH, 1, 1, Done())
    assert rig.asked == [(POOL, 1, Stats())]


def test_a_duplicate_gets_the_kept_answer_and_no_second_effect_f76(rig: Rig) -> None:
    rig.attach()
    for _ in range(4):
        rig.send(Stats(), 1)
        assert rig.receive() == ReplyEnvelope(EPOCH, 1, 1, Done())
    assert len(rig.asked) == 1


def test_a_duplicate_of_what_has_no_answer_yet_is_acknowledged_only_f76(rig: Rig) -> None:
    rig.attach()
    for _ in range(2):
        rig.send(Unlock(1), 1)
        assert rig.receive() == ReplyEnvelope(EPOCH, 1, 0, Acked())
    rig.server.answer(POOL, 1, Done())
    rig.receive()
    rig.send(Unlock(1), 1)
    assert rig.receive().body == Done()
    assert len(rig.asked) == 1


def test_a_received_answer_is_not_kept_f76(rig: Rig) -> None:
    rig.attach()
    rig.send(Stats(), 1)
    rig.receive()
    rig.send(Stats(), 2, answered=1)
    rig.receive()
    rig.send(Stats(), 1)
    assert rig.receive() == ReplyEnvelope(EPOCH, 2, 0, Acked())


def test_a_message_beyond_a_gap_is_not_carried_out_f76(rig: Rig) -> None:
    rig.attach()
    rig.send(Stats(), 2)
    assert rig.receive() == ReplyEnvelope(EPOCH, 0, 0, Acked())
    assert rig.asked == []


def test_reports_of_one_batch_share_one_acknowledgement(rig: Rig) -> None:
    rig.attach()
    for seq in range(1, 11):
        rig.send(Unlock(seq), seq, turn=False)
    while len(rig.asked) < 10:
        rig.turn()
    acks = [rig.receive()]
    while acks[-1].acked < 10:
        acks.append(rig.receive())
    assert all(isinstance(ack.body, Acked) for ack in acks)
    assert rig.dealer.poll(0) == 0


def test_an_answer_in_the_batch_replaces_the_acknowledgement(rig: Rig) -> None:
    rig.attach()
    rig.send(Unlock(1), 1, turn=False)
    rig.send(Stats(), 2, turn=False)
    while len(rig.asked) < 2:
        rig.turn()
    last = rig.receive()
    while last.seq != 2:
        last = rig.receive()
    assert last.acked == 2
    assert rig.dealer.poll(0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_lost_and_repeated_frames_lose_and_repeat_no_effect_f76(rig: Rig, seed: int) -> None:
    # Both directions lose and repeat frames by a seed; the client resends what is due until all
    # is answered. Time is the loop counter, so nothing waits for a clock.
    rig.attach()
    chance = random.Random(seed)
    stream = SendStream(resend_after_us=1)
    bodies = [Stats() if chance.random() < 0.5 else Unlock(n) for n in range(60)]
    pending = list(bodies)
    answers: list[int] = []
    for now in range(1, 100_000):
        if pending:
            body = pending.pop(0)
            stream.push(body, asks=isinstance(body, Stats), now_us=now)
        elif not stream.open_count:
            break
        for seq, sent in stream.due(now):
            for _ in range(chance.choice((0, 1, 1, 2))):
                assert isinstance(sent, Stats | Unlock)
                rig.send(sent, seq, stream.answered)
        while rig.dealer.poll(0):
            reply = decode_reply(rig.dealer.recv())
            if chance.random() < 0.7 and stream.on_reply(reply.acked, reply.seq):
                answers.append(reply.seq)
    assert not pending
    assert stream.open_count == 0
    assert [body for _, _, body in rig.asked] == bodies
    assert sorted(answers) == [n for n, body in enumerate(bodies, 1) if isinstance(body, Stats)]


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b""], "bad_message"),
        ([b"\xff" * 20], "bad_message"),
        ([b"a", b"b"], "bad_message"),
        ([b"\x91" * 20_000], "bad_message"),
        ([encode(Envelope(EPOCH, 1, 0, Stats()))], "not_authorised"),
        ([encode(Envelope(EPOCH + 1, 1, 0, Stats()))], "stale_epoch"),
        ([encode(Envelope(EPOCH, 0, 0, Attach(POOL, SECRET)))], "unknown_pool"),
    ],
)
def test_what_an_unknown_connection_sends_is_refused_and_counted(
    rig: Rig, frames: list[bytes], code: str
) -> None:
    rig.dealer.send_multipart(frames)
    rig.turn()
    assert rig.refusal() == code
    counted = ("frames_malformed", "frames_not_authorised", "frames_stale")
    assert sum(rig.counters[name] for name in counted) == 1
    assert rig.asked == []


def test_a_wrong_secret_is_refused(rig: Rig) -> None:
    rig.server.open_pool(POOL, SECRET)
    for secret in (b"", b"x" * 32, SECRET[:-1], SECRET + b"s"):
        rig.send(Attach(POOL, secret), 0)
        assert rig.refusal() == "not_authorised"


def test_a_new_connection_takes_over_and_the_old_one_no_longer_speaks(rig: Rig) -> None:
    rig.attach()
    old, rig.dealer = rig.dealer, rig.connect()
    rig.send(Attach(POOL, SECRET), 0)
    rig.receive()
    new, rig.dealer = rig.dealer, old
    rig.send(Stats(), 1)
    assert rig.refusal() == "not_authorised"
    rig.dealer = new
    rig.send(Stats(), 1)
    assert rig.receive().body == Done()


def test_one_connection_that_attaches_to_another_pool_leaves_the_first(rig: Rig) -> None:
    rig.attach()
    rig.server.open_pool(POOL + 1, b"t" * 32)
    rig.send(Attach(POOL + 1, b"t" * 32), 0)
    rig.receive()
    rig.send(Stats(), 1)
    rig.receive()
    assert rig.asked == [(POOL + 1, 1, Stats())]
    rig.server.close_pool(POOL)
    rig.server.close_pool(POOL + 1)
    rig.send(Stats(), 2)
    assert rig.refusal() == "not_authorised"


def test_numbers_below_one_are_refused(rig: Rig) -> None:
    rig.attach()
    for seq in (0, -5):
        rig.send(Stats(), seq)
        assert rig.refusal() == "bad_message"


def test_answers_to_pools_that_are_gone_or_not_attached_are_counted(rig: Rig) -> None:
    rig.server.answer(POOL, 1, Done())
    assert rig.counters["answers_to_gone_pools"] == 1
    rig.server.open_pool(POOL, SECRET)
    rig.server.answer(POOL, 1, Done())
    assert rig.counters["replies_dropped"] == 1


def test_a_reply_to_a_connection_that_is_gone_is_dropped_and_can_be_had_again(rig: Rig) -> None:
    rig.attach()
    rig.dealer.close(linger=0)
    answers = 0
    while not rig.counters["replies_dropped"]:
        answers += 1
        assert answers < 1_000_000, "the server never noticed"
        rig.server.answer(POOL, 1, Done())
        rig.server.pending()  # lets the socket learn of the end
    rig.dealer = rig.connect()
    rig.send(Attach(POOL, SECRET), 0)
    rig.receive()
    rig.server.answer(POOL, 1, Done())
    assert rig.receive().seq == 1


def test_a_new_epoch_forgets_everything(rig: Rig) -> None:
    rig.attach()
    rig.server.begin_epoch(EPOCH + 1)
    rig.send(Stats(), 1)
    envelope = rig.receive()
    assert isinstance(envelope.body, Refused)
    assert (envelope.body.code, envelope.epoch) == ("stale_epoch", EPOCH + 1)
    rig.send(Attach(POOL, SECRET), 0, epoch=EPOCH + 1)
    assert rig.refusal() == "unknown_pool"


def test_one_wake_reads_a_bounded_number_of_messages(rig: Rig) -> None:
    rig.attach()
    total = MESSAGES_PER_WAKE_MAX + 50
    for seq in range(1, total + 1):
        rig.send(Unlock(seq), seq, turn=False)
    largest = 0
    while len(rig.asked) < total:
        before = len(rig.asked)
        rig.turn()
        largest = max(largest, len(rig.asked) - before)
    assert largest <= MESSAGES_PER_WAKE_MAX


def test_a_path_that_cannot_be_bound_is_a_start_error(tmp_path: Path) -> None:
    loop = Loop()
    with pytest.raises(StartError, match="cannot be bound"):
        Server(tmp_path / "no" / "such" / "folder", EPOCH, lambda *_: None, Counter(), loop)
    loop.close()
