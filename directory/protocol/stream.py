"""The numbered stream over ZeroMQ: sequence numbers, cumulative acks, resending, kept answers.

ZeroMQ drops, blocks and replays in its own ways; these two pure classes make of it a stream in
which every message takes effect exactly once and every answer can be had again until the client
says it has it. No clock and no socket: the caller passes microseconds and sends the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Final

from directory.core import limits
from directory.core.errors import TooMany

WAIT_FACTOR_MAX: Final = 8
"""A message waits at most this many times the first interval before it is sent again."""


class Arrival(Enum):
    """What a message's number says about it."""

    NEW = "new"
    DUPLICATE = "duplicate"
    GAP = "gap"


class _Sent:
    """A message that is not done with. `asks`: it wants an answer, not only an ack."""

    __slots__ = ("asks", "body", "due_us", "wait_us")

    def __init__(self, body: object, asks: bool, due_us: int, wait_us: int) -> None:
        self.body = body
        self.asks = asks
        self.due_us = due_us
        self.wait_us = wait_us


class SendStream:
    """The client's end. A message is done once acked and, if it asks, answered or given up."""

    def __init__(self, resend_after_us: int = limits.RESEND_AFTER_MS * 1000) -> None:
        self._resend_after_us = resend_after_us
        self._open: OrderedDict[int, _Sent] = OrderedDict()
        self._last = 0
        self._acked = 0
        self._answered = 0

    def push(self, body: object, *, asks: bool, now_us: int) -> int:
        """Number a message; the caller sends it at once. Raises `TooMany` when too much is open."""
        if len(self._open) >= limits.UNACKED_MESSAGES_MAX:
            raise TooMany(f"{len(self._open)} messages are unacknowledged; the daemon is not there")
        self._last += 1
        wait = self._resend_after_us
        self._open[self._last] = _Sent(body, asks, now_us + wait, wait)
        return self._last

    def on_reply(self, acked: int, seq: int) -> bool:
        """Take in a reply's numbers. Returns whether `seq` is an answer still waited for."""
        if self._acked < acked <= self._last:
            # What was acknowledged before and is open still asks, so only the news is looked at.
            for number in range(self._acked + 1, acked + 1):
                if not self._open[number].asks:
                    del self._open[number]
            self._acked = acked
        sent = self._open.get(seq)
        if sent is None:
            return False
        wanted = sent.asks
        if seq <= self._acked:
            del self._open[seq]
        else:
            sent.asks = False
        return wanted

    def give_up(self, seq: int) -> None:
        """The caller no longer wants the answer (its deadline passed); delivery still matters."""
        sent = self._open.get(seq)
        if sent is not None:
            sent.asks = False
            if seq <= self._acked:
                del self._open[seq]

    def due(self, now_us: int) -> list[tuple[int, object]]:
        """Return (seq, body) to send again now, in order; each waits twice as long next time.

        Behind a lost message nothing can be carried out, so once the oldest unacknowledged one is
        due, those behind it go with it.
        """
        again: list[tuple[int, object]] = []
        head_is_due: bool | None = None
        for seq, sent in self._open.items():
            is_due = sent.due_us <= now_us
            if seq > self._acked:
                head_is_due = is_due if head_is_due is None else head_is_due
                if not head_is_due:
                    break
            elif not is_due:
                continue
            sent.wait_us = min(2 * sent.wait_us, WAIT_FACTOR_MAX * self._resend_after_us)
            sent.due_us = now_us + sent.wait_us
            again.append((seq, sent.body))
            if len(again) == limits.RESENT_AT_ONCE_MAX:
                break
        return again

    def hurry(self, now_us: int) -> None:
        """Everything that is open is due now: the way that it went is over."""
        for sent in self._open.values():
            sent.due_us = now_us

    @property
    def answered(self) -> int:
        """Every answer up to this number has been received or is not wanted.

        It never goes back, so each number is passed once however often this is read.
        """
        while self._answered < self._last:
            sent = self._open.get(self._answered + 1)
            if sent is not None and sent.asks:
                break
            self._answered += 1
        return self._answered

    @property
    def open_count(self) -> int:
        """Messages not done with."""
        return len(self._open)

    @property
    def acked(self) -> int:
        """Every message up to this number has been carried out."""
        return self._acked


class ReceiveStream:
    """The daemon's end, one a registration. `kept_bytes_max`: of the answers that are kept."""

    def __init__(self, kept_bytes_max: int = limits.KEPT_ANSWERS_BYTES_MAX) -> None:
        self.acked = 0
        self._answered = 0
        self._kept_bytes_max = kept_bytes_max
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._gone_up_to = 0  # no answer with a higher number has been dropped by a limit
        self._awaited: dict[int, None] = {}

    def arrive(self, seq: int, answered: int) -> Arrival:
        """Take in a message's numbers; a NEW one must be carried out now."""
        self._answered = max(self._answered, answered)
        while self._kept and next(iter(self._kept)) <= answered:
            self._drop_oldest()
        if seq <= self.acked:
            return Arrival.DUPLICATE
        if seq > self.acked + 1:
            return Arrival.GAP
        self.acked = seq
        return Arrival.NEW

    def keep(self, seq: int, frame: bytes) -> int:
        """Keep an answer until the client has it; returns how many old ones had to be dropped.

        Those go that were sent longest ago: they are the likeliest to have arrived.
        """
        self._awaited.pop(seq, None)
        self._kept_bytes += len(frame) - len(self._kept.pop(seq, b""))
        self._kept[seq] = frame
        dropped = 0
        while len(self._kept) > 1 and (
            len(self._kept) > limits.KEPT_ANSWERS_MAX or self._kept_bytes > self._kept_bytes_max
        ):
            self._gone_up_to = max(self._gone_up_to, self._drop_oldest())
            dropped += 1
        return dropped

    def again(self, seq: int) -> bytes | None:
        """Return the kept answer of a duplicate, or None where there is none."""
        return self._kept.get(seq)

    def awaits(self, seq: int) -> None:
        """The answer of a message comes later than the message is carried out."""
        self._awaited[seq] = None

    def gone(self, seq: int) -> bool:
        """Whether a duplicate's answer, if there was one, can be had no more: it is not kept,
        not still to come, and the client has not said that it has it."""
        return (
            self._answered < seq <= self._gone_up_to
            and seq not in self._kept
            and seq not in self._awaited
        )

    @property
    def kept_count(self) -> int:
        """Answers kept."""
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the answers kept."""
        return self._kept_bytes

    def _drop_oldest(self) -> int:
        seq, frame = self._kept.popitem(last=False)
        self._kept_bytes -= len(frame)
        return seq
