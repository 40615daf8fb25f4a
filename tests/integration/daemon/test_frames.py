"""Malformed frames on the ROUTER: answered or dropped, counted, and nobody else notices."""

import random

import msgspec
import zmq

from directory.core.actions import Refused
from directory.core.events import Stats
from directory.core.limits import MESSAGE_BYTES_MAX
from directory.protocol.codec import encode
from directory.protocol.messages import Attach, Envelope
from tests.integration.daemon.support import DaemonProcess, RawClient, wait_until


def junk_frames(seed: int, epoch: int) -> list[list[bytes]]:
    """Messages of every wrong shape, the same ones for a seed."""
    chance = random.Random(seed)
    good = encode(Envelope(epoch, 1, 0, Stats()))
    pack = msgspec.msgpack.encode
    shapes = [
        [b""],
        [b"", good],
        [good, good],
        [b""] * 50,
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
        [b"\x91" * 50_000],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xc6\xff\xff\xff\xff"],
        [pack([epoch, 1, 0])],
        [pack([epoch, 1, 0, ["no such body"]])],
        [pack([epoch, 1, 0, ["stats", "yes"]])],
        [pack([epoch, 1, 0, ["match", 1]])],
        [pack([epoch, -1, 0, ["stats"]])],
        [pack({"epoch": epoch})],
        [pack(None)],
        [good[:-1]],
        [good + b"\x00"],
    ]
    return shapes + [[chance.randbytes(chance.randrange(1, 400))] for _ in range(100)]


def test_a_storm_of_malformed_frames_is_counted_while_a_good_client_is_served_f79(
    daemon: DaemonProcess,
) -> None:
    with RawClient(daemon.runtime_dir, "good") as good, RawClient(daemon.runtime_dir, "b") as bad:
        stranger = bad.connect()
        storm = junk_frames(1, good.epoch)
        for frames in storm:
            for socket in (bad.dealer, stranger):
                socket.send_multipart(frames)
            good.stats(check=False)
        for socket in (bad.dealer, stranger):
            for _ in storm:
                envelope = bad.receive(socket)
                assert isinstance(envelope.body, Refused), envelope
                assert envelope.seq == 0
        counters = good.stats()
        refused = counters["daemon_frames_malformed"] + counters.get("daemon_frames_stale", 0)
        refused += counters.get("daemon_frames_not_authorised", 0)
        assert refused == 2 * len(storm)
        # The connection that sent it all still speaks for its pool.
        assert bad.stats()["pools"] == 2
    assert "Traceback" not in daemon.log()


def test_a_frame_beyond_the_size_limit_costs_its_sender_the_connection_only_f79(
    daemon: DaemonProcess,
) -> None:
    with RawClient(daemon.runtime_dir, "good") as good, RawClient(daemon.runtime_dir, "b") as bad:
        bad.dealer.send(bytes(MESSAGE_BYTES_MAX + 1))
        assert good.stats()["pools"] == 2
        # The session lives: a new connection attaches and goes on.
        bad.dealer = bad.connect()
        assert type(bad.ask(Attach(bad.pool, bad.registered.secret), seq=0)).__name__ == "Attached"
        assert bad.stats()["pools"] == 2


def test_a_client_that_never_reads_does_not_stop_the_others_f79(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "good") as good, RawClient(daemon.runtime_dir, "b") as deaf:
        frame = encode(Envelope(deaf.epoch, 0, 0, Stats()))  # refused: numbers begin at 1

        def replies_are_dropped() -> int:
            while deaf.dealer.poll(0, zmq.POLLOUT):
                deaf.dealer.send(frame, zmq.NOBLOCK)
            return good.stats(check=False).get("daemon_replies_dropped", 0)

        wait_until(replies_are_dropped)
        assert good.stats()["pools"] == 2


def test_a_message_of_another_epoch_is_refused(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as client:
        real, client.epoch = client.epoch, client.epoch ^ 1
        client.dealer.send(encode(Envelope(client.epoch, 1, 0, Stats())))
        envelope = client.receive()
        assert isinstance(envelope.body, Refused)
        assert envelope.body.code == "stale_epoch"
        assert envelope.epoch == real
        client.epoch = real
        assert client.stats()["pools"] == 1
