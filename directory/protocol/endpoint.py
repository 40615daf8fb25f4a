"""The daemon's end of the numbered streams: identities, attaching, answers and acknowledgements.

Owns which identity speaks for which pool, the streams, and what was answered but not received
yet. Pure: frames come in through `take` and leave through a callable, so a socket and the
simulation run the same code. It must never let a frame raise, and never carry a message out twice.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

import msgspec

from directory.core import limits
from directory.core.actions import AnyReply, Refused
from directory.core.errors import (
    AnswerGone,
    BadMessage,
    NotAuthorised,
    ProtocolError,
    StaleEpoch,
    TreecoredError,
    UnknownPool,
)
from directory.core.events import Body, Match, Restore, Unlock
from directory.core.ids import PoolId
from directory.protocol.codec import decode_envelope, encode
from directory.protocol.ended import Ended
from directory.protocol.messages import (
    Acked,
    Attach,
    Attached,
    DaemonBody,
    Envelope,
    Extent,
    ReplyEnvelope,
)
from directory.protocol.stream import Arrival, ReceiveStream

Ask = Callable[[PoolId, int, Body], None]
Send = Callable[[bytes, bytes], bool]
Refuse = Callable[[TreecoredError], None]

UNAWAITED: Final = frozenset({Unlock, Ended})
"""Messages whose acknowledgement nobody waits for."""


class Lane(Protocol):
    """A client's own way to here, and the arena where it has written what its messages name."""

    def send(self, frame: bytes) -> bool:
        """Take a frame for the client, or say that it was dropped."""
        ...

    def read(self, extent: Extent) -> bytes:
        """A copy of a part of the arena; raises `BadMessage` for one that is not all in it."""
        ...


class Client:
    """One registered pool at the server. `identity` is None until it has attached.

    `by_lane`: it spoke last by its lane, and is answered there. `owes_soon`: it may wait for
    the acknowledgement that it is owed.
    """

    __slots__ = (
        "by_lane",
        "identity",
        "lane",
        "owes_ack",
        "owes_soon",
        "pool",
        "secret",
        "stream",
    )

    def __init__(self, pool: PoolId, secret: bytes, kept_bytes_max: int) -> None:
        self.pool = pool
        self.secret = secret
        self.identity: bytes | None = None
        self.lane: Lane | None = None
        self.by_lane = False
        self.stream = ReceiveStream(kept_bytes_max)
        self.owes_ack = self.owes_soon = False


class Endpoint:
    """`ask` carries out one new message; its answer comes through `answer`. `send` takes a frame
    for an identity, or says that it was dropped. `refused` hears of every refused frame.
    `kept_bytes_max`: answers that are kept for one client, until it has said that it has them."""

    def __init__(
        self,
        epoch: int,
        ask: Ask,
        send: Send,
        counters: Counter[str],
        refused: Refuse | None = None,
        *,
        kept_bytes_max: int = limits.KEPT_ANSWERS_BYTES_MAX,
    ) -> None:
        self.epoch = epoch
        self.clients: dict[PoolId, Client] = {}
        self._ask = ask
        self._send_frame = send
        self._counters = counters
        self._refused = refused
        self._kept_bytes_max = kept_bytes_max
        self._by_identity: dict[bytes, Client] = {}
        self._owing: dict[PoolId, Client] = {}

    # Registrations.

    def open_pool(self, pool: PoolId, secret: bytes) -> None:
        """Let whoever has the secret speak for the pool."""
        self.clients[pool] = Client(pool, secret, self._kept_bytes_max)

    def close_pool(self, pool: PoolId) -> None:
        """Forget a pool with its stream. Repeatable."""
        client = self.clients.pop(pool, None)
        self._owing.pop(pool, None)
        if client is not None and client.identity is not None:
            del self._by_identity[client.identity]

    def open_lane(self, pool: PoolId, lane: Lane) -> None:
        """Let the pool be spoken for by a lane, too; its session has proved whose it is."""
        self.clients[pool].lane = lane

    def close_lane(self, pool: PoolId) -> None:
        """The pool's lane is over; its client goes on by its connection. Repeatable."""
        client = self.clients.get(pool)
        if client is not None:
            client.by_lane, client.lane = False, None

    def begin_epoch(self, epoch: int) -> None:
        """Forget everything; messages of the epoch before are refused from now on."""
        for pool in list(self.clients):
            self.close_pool(pool)
        self.epoch = epoch

    # The directory's side.

    def answer(self, pool: PoolId, seq: int, body: AnyReply) -> None:
        """Send an answer and keep it until the client has said that it has it."""
        client = self.clients.get(pool)
        if client is None:
            self._counters["answers_to_gone_pools"] += 1
            return
        frame = encode(ReplyEnvelope(self.epoch, client.stream.acked, seq, body))
        self._counters["answers_dropped_by_limit"] += client.stream.keep(seq, frame)
        self._send_to(client, frame)

    # Messages.

    def take(self, identity: bytes, *frames: bytes) -> None:
        """Carry out one message, or refuse it; a client's mistake never leaves this function."""
        client = self._by_identity.get(identity)
        self._counters["frames"] += 1
        try:
            if len(frames) != 1:
                raise BadMessage(f"a message is one frame, not {len(frames)}")
            envelope = decode_envelope(frames[0])
            self._check_epoch(envelope)
            if isinstance(envelope.body, Attach):
                self._attach(identity, envelope.body)
            elif client is None:
                raise NotAuthorised("this connection belongs to no pool; attach it first")
            else:
                client.by_lane = False
                self._stream(client, envelope, envelope.body)
        except TreecoredError as error:
            self._say(identity, client, self._refusal(error))

    def read_lane(self, pool: PoolId, frame: bytes) -> Envelope | None:
        """The message that came by a pool's lane; what is none is refused, and its lane is to be
        closed (None)."""
        client = self.clients[pool]
        self._counters["frames"] += 1
        client.by_lane = True
        try:
            return decode_envelope(frame)
        except TreecoredError as error:
            self._refuse_lane(client, error)
            return None

    def take_lane(self, pool: PoolId, envelope: Envelope) -> bool:
        """Carry out one message that came by a pool's lane, or refuse it.

        Returns whether somebody waits for the answer, and more so than for those to come.
        """
        client, body = self.clients[pool], envelope.body
        client.by_lane = True
        try:
            self._check_epoch(envelope)
            if isinstance(body, Attach):
                raise BadMessage("a lane is attached by its session; say Attach by a connection")
            self._stream(client, envelope, body)
            return isinstance(body, Match)
        except TreecoredError as error:
            self._refuse_lane(client, error)
            return True

    def _refuse_lane(self, client: Client, error: TreecoredError) -> None:
        said = ReplyEnvelope(self.epoch, client.stream.acked, 0, self._refusal(error))
        self._send_to(client, encode(said))

    def _check_epoch(self, envelope: Envelope) -> None:
        if envelope.epoch != self.epoch:
            raise StaleEpoch("the message belongs to another epoch; register again")

    def _refusal(self, error: TreecoredError) -> Refused:
        kind = "frames_malformed" if isinstance(error, ProtocolError) else "frames_stale"
        if isinstance(error, NotAuthorised):
            kind = "frames_not_authorised"
        self._counters[kind] += 1
        if self._refused is not None:
            self._refused(error)
        return Refused(error.code, str(error))

    def _attach(self, identity: bytes, body: Attach) -> None:
        client = self.clients.get(body.pool)
        if client is None:
            raise UnknownPool(f"pool {body.pool} is not registered; register again")
        if not hmac.compare_digest(client.secret, body.secret):
            raise NotAuthorised(f"that is not the secret of pool {body.pool}")
        earlier = self._by_identity.get(identity)
        if earlier is not None:
            earlier.identity = None
        if client.identity is not None:
            # The client has connected anew; its old connection no longer speaks for the pool.
            self._by_identity.pop(client.identity, None)
        client.identity = identity
        self._by_identity[identity] = client
        self._say(identity, client, Attached())

    def _stream(self, client: Client, envelope: Envelope, body: Body) -> None:
        seq = envelope.seq
        if seq < 1:
            raise BadMessage(f"a message is numbered from 1 up, not {seq}")
        if envelope.tokens[1] or envelope.pages[1]:
            body = _filled(body, envelope, client.lane)
        arrival = client.stream.arrive(seq, envelope.answered)
        if arrival is Arrival.NEW:
            # An answer, if one comes now, carries the acknowledgement and cancels this.
            self._owe(client, soon=type(body) not in UNAWAITED)
            if isinstance(body, Restore):
                client.stream.awaits(seq)
            self._ask(client.pool, seq, body)
            return
        if arrival is Arrival.DUPLICATE:
            self._counters["messages_duplicate"] += 1
            kept = client.stream.again(seq)
            if kept is not None:
                self._send_to(client, kept, current=False)
                return
            if client.stream.gone(seq):
                self._counters["answers_gone"] += 1
                gone = Refused(AnswerGone.code, f"the answer to message {seq} is kept no longer")
                frame = encode(ReplyEnvelope(self.epoch, client.stream.acked, seq, gone))
                self._send_to(client, frame)
                return
        else:
            self._counters["messages_after_a_gap"] += 1
        self._owe(client)

    # Replies.

    def _owe(self, client: Client, *, soon: bool = True) -> None:
        client.owes_ack = True
        client.owes_soon |= soon
        self._owing[client.pool] = client

    @property
    def owing(self) -> bool:
        """Whether something is to be acknowledged: by an answer that comes soon, or in time by
        `acknowledge`."""
        return bool(self._owing)

    def acknowledge(self) -> None:
        """One acknowledgement for each pool whose messages had no answer."""
        if not self._owing:
            return
        owing, self._owing = self._owing, {}
        for client in owing.values():
            self._acknowledge(client)

    def acknowledge_soon(self, pool: PoolId) -> None:
        """The same for one pool, but for messages whose acknowledgement nobody waits for."""
        client = self._owing.get(pool)
        if client is not None and (client.owes_soon or not client.owes_ack):
            del self._owing[pool]
            self._acknowledge(client)

    def _acknowledge(self, client: Client) -> None:
        if client.owes_ack:
            frame = encode(ReplyEnvelope(self.epoch, client.stream.acked, 0, Acked()))
            self._send_to(client, frame)
        client.owes_ack = client.owes_soon = False

    def _say(self, identity: bytes, client: Client | None, body: DaemonBody) -> None:
        """Send something that is outside the numbered stream."""
        acked = client.stream.acked if client is not None else 0
        self._send(identity, encode(ReplyEnvelope(self.epoch, acked, 0, body)))

    def _send_to(self, client: Client, frame: bytes, *, current: bool = True) -> None:
        lane = client.lane
        if client.by_lane and lane is not None:
            sent = lane.send(frame)
            self._counters["replies_dropped"] += not sent
        elif client.identity is None:
            sent = False
            self._counters["replies_dropped"] += 1
        else:
            sent = self._send(client.identity, frame)
        if sent and current:
            client.owes_ack = client.owes_soon = False

    def _send(self, identity: bytes, frame: bytes) -> bool:
        """Send or drop: the client asks again for what it did not get."""
        sent = self._send_frame(identity, frame)
        if not sent:
            self._counters["replies_dropped"] += 1
        return sent


T = TypeVar("T", bound=msgspec.Struct)


def _filled(body: T, envelope: Envelope, arena: Lane | None) -> T:
    """The body with what its envelope says lies in the arena; raises `BadMessage`."""
    if arena is None:
        raise BadMessage("the message names a part of an arena, and there is none; open a lane")
    if type(body) is Match and not envelope.pages[1]:  # what is filled in of nearly all
        return msgspec.structs.replace(body, tokens=arena.read(envelope.tokens))
    parts: dict[str, bytes] = {}
    if envelope.tokens[1]:
        parts["tokens"] = arena.read(envelope.tokens)
    if envelope.pages[1]:
        parts["pages"] = arena.read(envelope.pages)
    for name in parts:
        if not isinstance(getattr(body, name, None), bytes):
            raise BadMessage(f"{type(body).__name__} has no {name} that could lie in an arena")
    return msgspec.structs.replace(body, **parts)
