"""A group over lossy connections: real streams and endpoint, frames lost, repeated and delayed.

Strategy: the ranks send one program through a SendStream each; drawn faults drop frames in both
directions, send them twice, or hold one rank back for long. Every message must take effect once
for the group, and every rank must get the same answer to each, in the end.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from directory.core.actions import Answer, AnyReply, Registered
from directory.core.directory import Directory
from directory.core.events import Asked, Body, Evict, Insert, Match, PoolRegistered, Stats
from directory.core.ids import PoolId
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages, pack_tokens
from directory.protocol.codec import decode_reply, encode
from directory.protocol.endpoint import Endpoint
from directory.protocol.messages import Acked, Attach, Attached, ClientBody, Envelope
from directory.protocol.stream import SendStream

EPOCH = 5
SECRET = b"s" * 32
STEP_US = 100_000
PAGES = 64
KEY = NamespaceKey()


class RankClient:
    """One rank's end: what it has sent and been answered."""

    def __init__(self, number: int, pool: PoolId) -> None:
        self.identity = b"rank %d" % number
        self.pool = pool
        self.stream = SendStream()
        self.answers: dict[int, AnyReply] = {}
        self.sent = 0

    def take(self, frame: bytes) -> None:
        """A frame of the daemon's."""
        reply = decode_reply(frame)
        self.stream.on_reply(reply.acked, reply.seq)
        if isinstance(reply.body, Acked | Attached) or not reply.seq:
            return
        assert self.answers.setdefault(reply.seq, reply.body) == reply.body


class Wire:
    """The directory behind its endpoint, and frames that may be lost on the way."""

    def __init__(self, rng: random.Random, ranks: int, loss: float) -> None:
        self.rng, self.loss = rng, loss
        self.directory = Directory()
        self.endpoint = Endpoint(EPOCH, self.ask, self.send, Counter())
        self.clients: list[RankClient] = []
        for rank in range(ranks):
            event = PoolRegistered(1, 0, "g", b"f", 1, PAGES, 8, "thin", ranks, rank)
            (registered,) = self.directory.handle(event)
            assert isinstance(registered, Registered)
            self.endpoint.open_pool(registered.pool, SECRET)
            self.clients.append(RankClient(rank, registered.pool))
            self.push(self.clients[rank], 0, Attach(registered.pool, SECRET), lost=False)

    def ask(self, pool: PoolId, seq: int, body: Body) -> None:
        for action in self.directory.handle(Asked(pool, seq, 0, body)):
            assert isinstance(action, Answer)
            self.endpoint.answer(action.pool, action.seq, action.body)
        assert self.directory.check() == []

    def send(self, identity: bytes, frame: bytes) -> bool:
        for client in self.clients:
            if client.identity == identity and self.rng.random() >= self.loss:
                client.take(frame)
        return self.rng.random() >= self.loss

    def push(self, client: RankClient, seq: int, body: ClientBody, *, lost: bool = True) -> None:
        for _ in range(1 + (self.rng.random() < self.loss)):
            if not lost or self.rng.random() >= self.loss:
                frame = encode(Envelope(EPOCH, seq, client.stream.answered, body))
                self.endpoint.take(client.identity, frame)


def program(rng: random.Random) -> list[ClientBody]:
    """Inserts of paths of their own, evictions, matches and counters."""
    bodies: list[ClientBody] = []
    for number in range(20):
        tokens = pack_tokens([number % 7, number])
        pages = pack_pages([2 * number, 2 * number + 1])
        kind = rng.randrange(4)
        if kind == 0:
            span = number + 1
            bodies.append(Insert("r", 0, KEY, tokens, pages, span, 0, (0, 0)))
        else:
            bodies.append(
                (Evict(rng.randrange(1, 4)), Match("r", 0, KEY, tokens), Stats())[kind - 1]
            )
    return bodies


@given(seed=st.integers(0, 1 << 32), ranks=st.integers(2, 4), loss=st.sampled_from([0.0, 0.1, 0.4]))
def test_each_message_takes_effect_once_for_the_group_and_all_ranks_hear_the_same_f107(
    seed: int, ranks: int, loss: float
) -> None:
    rng = random.Random(seed)
    wire = Wire(rng, ranks, loss)
    bodies = program(rng)
    slow, now = rng.randrange(ranks), 0
    for turn in range(100_000):
        now += STEP_US
        for number, client in enumerate(wire.clients):
            if number == slow and turn % 10:
                continue
            for seq, body in client.stream.due(now):
                assert isinstance(body, Insert | Evict | Match | Stats)
                wire.push(client, seq, body)
            if client.sent < len(bodies) and rng.random() < 0.7:
                body = bodies[client.sent]
                client.sent += 1
                wire.push(client, client.stream.push(body, asks=True, now_us=now), body)
        wire.endpoint.acknowledge()
        if all(len(client.answers) == len(bodies) for client in wire.clients):
            break
    first = wire.clients[0].answers
    assert sorted(first) == list(range(1, len(bodies) + 1))
    assert all(client.answers == first for client in wire.clients)
    asked = {k: n for k, n in wire.directory.counters.items() if k.startswith("asked_")}
    wanted = Counter(f"asked_{type(body).__name__.lower()}" for body in bodies)
    assert asked == wanted
    (pool,) = wire.directory.pools.values()
    assert pool.log is not None
    assert len(pool.log) == 0
