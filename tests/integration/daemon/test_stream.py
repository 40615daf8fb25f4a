"""The numbered stream against the real daemon: lost, repeated and overtaking messages."""

import zmq

from directory.core.actions import Counters, Matched
from directory.core.events import Insert, Match, Stats, Unlock
from directory.core.namespace import NamespaceKey
from directory.protocol.messages import Acked, Attach
from tests.integration.daemon.support import DaemonProcess, RawClient, packed


def match(tokens: range) -> Match:
    """A question that takes a lease: its effect can be counted."""
    return Match("r", 0, NamespaceKey(), packed(tokens))


def test_an_answer_that_was_lost_can_be_had_again_and_takes_effect_once_f76(
    daemon: DaemonProcess,
) -> None:
    tokens = range(8)
    with RawClient(daemon.runtime_dir, "a") as a, RawClient(daemon.runtime_dir, "b") as b:
        a.pool_memory.write(0, b"x")
        a.insert(tokens, [0, 1])
        seq = b.send(match(tokens))
        first = b.answer_to(seq)
        for _ in range(3):
            b.send(match(tokens), seq=seq)
            assert b.answer_to(seq) == first
        assert isinstance(first, Matched)
        assert first.receipt
        counters = b.stats()
        assert counters["asked_match"] == 1
        assert counters["leases"] == 1
        assert counters["daemon_messages_duplicate"] == 3


def test_an_answer_is_kept_across_a_new_connection_f76(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as client:
        seq = client.send(Stats())
        lost = client.answer_to(seq)
        client.dealer = client.connect()
        client.ask(Attach(client.pool, client.registered.secret), seq=0)
        client.send(Stats(), seq=seq)
        assert client.answer_to(seq) == lost


def test_a_received_answer_is_forgotten_and_its_repeat_is_only_acknowledged_f76(
    daemon: DaemonProcess,
) -> None:
    with RawClient(daemon.runtime_dir, "a") as client:
        first = client.send(Stats())
        client.answer_to(first)
        second = client.send(Stats(), answered=first)
        client.answer_to(second)
        client.send(Stats(), seq=first)
        envelope = client.receive()
        assert isinstance(envelope.body, Acked)
        assert envelope.acked == second


def test_a_message_after_a_gap_waits_for_what_is_missing_f76(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as client:
        client.send(Stats(), seq=3)
        envelope = client.receive()
        assert (envelope.acked, envelope.seq) == (0, 0)
        assert isinstance(envelope.body, Acked)
        for seq in (1, 2, 3):
            client.send(Stats(), seq=seq)
            assert isinstance(client.answer_to(seq), Counters)
        client.seq = 3
        assert client.stats()["daemon_messages_after_a_gap"] == 1


def test_reports_without_answers_are_acknowledged_cumulatively(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as client:
        last = 0
        for page in range(32):
            tokens = packed(range(page * 10, page * 10 + 4))
            last = client.send(
                Insert("r", 0, NamespaceKey(), tokens, packed([page]), page + 1, 0, (0, 0))
            )
        replies = 0
        while client.acked < last:
            assert isinstance(client.receive().body, Acked)
            replies += 1
        assert replies <= 32
        assert client.dealer.poll(0, zmq.POLLIN) == 0
        assert client.stats()["pages_inserted"] == 32


def test_a_refusal_by_the_directory_is_an_answer_like_any_other(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as client:
        answer = client.ask(Unlock(999))
        assert type(answer).__name__ == "Refused"
        assert getattr(answer, "code", "") == "stale_receipt"
        assert client.acked == 1
