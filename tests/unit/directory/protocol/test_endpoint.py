"""The daemon's end: what a client hears that asks again for an answer."""

from __future__ import annotations

from collections import Counter

from directory.core.actions import AnyReply, Done, Refused, Restored, Totals
from directory.core.events import Body, Flush, Restore, Stats, Unlock
from directory.core.ids import PoolId
from directory.protocol.codec import decode_reply, encode
from directory.protocol.endpoint import Endpoint
from directory.protocol.messages import Acked, Attach, ClientBody, DaemonBody, Envelope

EPOCH = 3
RESTORE = Restore("r", 0, 1, 0, b"", (0, 0))


class Rig:
    """An endpoint with one client that is attached. `later`: whose answers come later."""

    def __init__(self, kept_bytes_max: int) -> None:
        self.counters: Counter[str] = Counter()
        self.said: list[tuple[int, DaemonBody]] = []
        self.endpoint = Endpoint(
            EPOCH, self.ask, self.send, self.counters, kept_bytes_max=kept_bytes_max
        )
        self.endpoint.open_pool(1, b"s")
        self.hear(0, Attach(1, b"s"))

    def ask(self, pool: PoolId, seq: int, body: Body) -> None:
        if isinstance(body, Stats):
            self.answer(seq, Done(Totals()))

    def answer(self, seq: int, body: AnyReply) -> None:
        self.endpoint.answer(1, seq, body)

    def send(self, identity: bytes, frame: bytes) -> bool:
        reply = decode_reply(frame)
        self.said.append((reply.seq, reply.body))
        return True

    def hear(self, seq: int, body: ClientBody, answered: int = 0) -> list[tuple[int, DaemonBody]]:
        """Take one message; returns what was said to it."""
        self.said.clear()
        self.endpoint.take(b"id", encode(Envelope(EPOCH, seq, answered, body)))
        self.endpoint.acknowledge()
        return list(self.said)


def codes(said: list[tuple[int, DaemonBody]]) -> list[tuple[int, str]]:
    """Numbers, with the code of a refusal or the kind of the body."""
    return [(seq, b.code if isinstance(b, Refused) else type(b).__name__) for seq, b in said]


def test_a_question_whose_answer_was_dropped_by_a_limit_is_told_that_it_is_gone_f76() -> None:
    rig = Rig(kept_bytes_max=8)
    for seq in (1, 2):
        assert codes(rig.hear(seq, Stats())) == [(seq, "Done")]
    assert codes(rig.hear(1, Stats())) == [(1, "answer_gone")]
    assert codes(rig.hear(2, Stats())) == [(2, "Done")], "the latest one is kept"
    assert codes(rig.hear(1, Stats())) == [(1, "answer_gone")], "however often it asks"
    assert (rig.counters["answers_dropped_by_limit"], rig.counters["answers_gone"]) == (1, 2)
    assert codes(rig.hear(1, Stats(), answered=1)) == [(0, "Acked")], "it has said that it has it"


def test_a_restore_that_has_not_ended_is_never_told_that_its_answer_is_gone_f76() -> None:
    rig = Rig(kept_bytes_max=8)
    assert codes(rig.hear(1, RESTORE)) == [(0, "Acked")]
    for seq in (2, 3):
        rig.hear(seq, Stats())
    assert codes(rig.hear(1, RESTORE)) == [(0, "Acked")]
    landed = Restored(True, 1, 0, 8, 9)
    rig.answer(1, landed)
    assert rig.hear(1, RESTORE) == [(1, landed)]
    rig.hear(4, Stats())
    assert codes(rig.hear(1, RESTORE)) == [(1, "answer_gone")]


def test_a_report_is_acknowledged_again_where_nothing_was_dropped() -> None:
    rig = Rig(kept_bytes_max=1 << 20)
    for _ in range(2):
        assert rig.hear(1, Unlock(5)) == [(0, Acked())]


def test_a_releases_acknowledgement_waits_for_an_answer_and_a_reports_does_not() -> None:
    rig = Rig(kept_bytes_max=8)

    def hear(seq: int, body: ClientBody) -> list[tuple[int, str]]:
        rig.said.clear()
        rig.endpoint.take(b"id", encode(Envelope(EPOCH, seq, 0, body)))
        rig.endpoint.acknowledge_soon(1)
        return codes(rig.said)

    assert (hear(1, Unlock(1)), rig.endpoint.owing) == ([], True)
    answered = hear(2, Stats()), rig.endpoint.owing
    assert answered == ([(2, "Done")], False), "which says that the release has come, too"
    assert hear(3, Unlock(2)) == []
    assert hear(4, Flush("pool", 1)) == [(0, "Acked")]
    assert hear(5, Unlock(3)) == []
    assert hear(5, Unlock(3)) == [(0, "Acked")], "it was said again, so somebody does wait"
    assert hear(6, Unlock(4)) == []
    rig.said.clear()
    rig.endpoint.acknowledge()
    assert (codes(rig.said), rig.endpoint.owing) == ([(0, "Acked")], False)
    rig.endpoint.close_pool(1)
    rig.endpoint.acknowledge_soon(1)
