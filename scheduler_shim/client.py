"""The client: one registered pool's numbered conversation with the daemon.

Owns the stream of messages, what is waited for until when, and the samples of round trips. It
never blocks beyond a deadline: an answer that does not come is None, which is always safe to take
for a miss. A daemon that is gone, restarted, silent or confused makes it `lost`, once and for
good; from then on every method returns at once. It must never let a late answer's lease leak.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from directory.core import limits
from directory.core.actions import AnyReply, Locked, Matched, Refused
from directory.core.errors import (
    NotAuthorised,
    OutOfOrder,
    StaleReceipt,
    TooMany,
    TreecoredError,
)
from directory.core.events import Live, Lock, Match, Mode, Request, Restore, Unlock
from directory.protocol.codec import decode_reply, encode
from directory.protocol.messages import (
    Acked,
    Attach,
    Attached,
    ClientBody,
    Envelope,
    ReplyEnvelope,
)
from directory.protocol.stream import SendStream
from scheduler_shim.leases import LeasesOut
from scheduler_shim.link import Link, ZmqLink
from scheduler_shim.pools import SharedPool
from scheduler_shim.questions import LiveRequest, Question, askers
from scheduler_shim.samples import Samples
from scheduler_shim.session import DaemonAbsent, Registration, raise_refusal, register

ATTACHES_MAX: Final = 16
RESEND_CHECK_US: Final = limits.RESEND_AFTER_MS * 1_000 // 4
LIVE_EVERY_US: Final = 1_000_000


class Deadlines(NamedTuple):
    """Milliseconds. `misses_max`: so many deadlines missed one after the other, with no frame from
    the daemon in between, mean a lost daemon; questions that wait at the same time miss as one."""

    call_ms: int = limits.CALL_DEADLINE_MS
    restore_ms: int = 4 * limits.FENCE_DEADLINE_MS
    connect_ms: int = 4 * limits.FENCE_DEADLINE_MS
    misses_max: int = 3


class DaemonClient:
    """One registration's client. Used from one thread."""

    def __init__(
        self, link: Link, registration: Registration, deadlines: Deadlines | None = None
    ) -> None:
        self.registration = registration
        self.deadlines = deadlines or Deadlines()
        self.lost = ""
        """Why the daemon is lost; empty while it is not."""
        self.refused: list[Refused] = []
        """Reports that the daemon did not take; mirror and daemon differ from there on."""
        self.rtt_us = Samples()
        self.counters: dict[str, int] = {}
        self._link = link
        self._stream = SendStream()
        self._attached = False
        self._attach_us = 0
        self._reattaches = 0
        self._misses = 0
        self._last_seq = 0
        self._missed_seq = 0  # the last message that was said before the last miss was counted
        self._resend_check_us = 0
        self._live_us = link.now_us() + LIVE_EVERY_US
        self._leases = LeasesOut()
        self._questions: dict[int, Question] = {}
        self._abandoned: dict[int, Request] = {}
        self._arrived: dict[int, AnyReply] = {}

    @classmethod
    def connect(
        cls,
        runtime_dir: Path,
        pool: SharedPool,
        *,
        instance: str,
        mode: Mode,
        deadlines: Deadlines | None = None,
        world_size: int = 1,
        rank: int = 0,
    ) -> DaemonClient:
        """Register a pool with the daemon of a runtime folder and attach to it.

        `world_size`, `rank`: how many processes the instance is, and which of them this one is.
        Raises `DaemonAbsent` where none answers, or the typed error of its refusal.
        """
        deadlines = deadlines or Deadlines()
        session, registration = register(
            runtime_dir,
            pool,
            instance=instance,
            mode=mode,
            deadline_s=deadlines.connect_ms / 1_000,
            world_size=world_size,
            rank=rank,
        )
        client = cls(ZmqLink(session, registration.endpoint), registration, deadlines)
        client.attach()
        return client

    def attach(self) -> None:
        """Prove to the daemon which registration this connection speaks for.

        Raises `DaemonAbsent` when it does not answer within the connect deadline.
        """
        give_up = self._link.now_us() + self.deadlines.connect_ms * 1_000
        while not self.try_attach():
            self._link.wait(limits.RESEND_AFTER_MS * 1_000)
            self._take_in()
            if self._link.now_us() >= give_up and not self._attached:
                self.lose("the daemon did not answer Attach")

    def try_attach(self) -> bool:
        """Say Attach when it is time; whether it was answered. Never waits.

        Raises `DaemonAbsent` once the daemon is lost.
        """
        now = self._link.now_us()
        if not self._attached and not self.lost and now >= self._attach_us:
            # A link that has just been made may drop the first frame, so it is said again.
            self._attach_us = now + limits.RESEND_AFTER_MS * 1_000
            self._say_attach()
        self._take_in()
        if self.lost:
            raise DaemonAbsent(f"{self.lost}; is the daemon still running?")
        return self._attached

    # Talking.

    def call(self, body: Request, deadline_ms: int = 0) -> AnyReply | None:
        """Ask and wait: one round trip. None when no answer came before the deadline.

        Raises the typed error of a refusal. A late answer is thrown away; if it carries a lease,
        that is released.
        """
        seq = self.ask(body, deadline_ms or self.deadlines.call_ms)
        while seq in self._questions and not self.lost:
            question = self._questions[seq]
            left_us = question.due_us - self._link.now_us()
            if left_us <= 0:
                break
            self._link.wait(min(left_us, limits.RESEND_AFTER_MS * 1_000))
            self._take_in()
        reply = self._arrived.pop(seq, None)
        if reply is None:
            if not self.lost:
                self._miss(seq)
                self.abandon(seq)
            return None
        if isinstance(reply, Refused):
            raise_refusal(reply.code, reply.message)
        return reply

    def report(self, body: Request) -> None:
        """Tell without waiting; the stream sees to it that it arrives, once and in order."""
        self._push(body, asks=False)

    def ask(self, body: Request, deadline_ms: int = 0) -> int:
        """Ask without waiting; `poll` brings the answer, or None when its deadline has passed.

        Returns the number by which `poll` names it (0 when the daemon is lost).
        """
        seq = self._push(body, asks=True)
        if seq:
            now = self._link.now_us()
            due = now + (deadline_ms or self.deadlines.call_ms) * 1_000
            self._questions[seq] = Question(body, now, due)
        return seq

    def poll(self) -> list[tuple[int, AnyReply | None]]:
        """Answers that have come, and None for questions whose deadline has passed.

        The late answer of a Restore still comes afterwards, because only then are its target
        pages quiet; every other late answer is dealt with here.
        """
        self._take_in()
        results: list[tuple[int, AnyReply | None]] = list(self._arrived.items())
        self._arrived.clear()
        if self._questions:
            now = self._link.now_us()
            late = [s for s, q in self._questions.items() if 0 < q.due_us <= now]
            results += [(seq, None) for seq in late if self._expire(seq)]
        return results

    def abandon(self, seq: int) -> None:
        """Want an asked answer no more. A lease that it brings is released when it comes."""
        question = self._questions.pop(seq, None)
        if question is None:
            reply = self._arrived.pop(seq, None)
            if reply is not None:
                self._release_late(reply)
            return
        if isinstance(question.body, Match | Lock):
            # Still asked for: only from the answer can the receipt be known.
            self._abandoned[seq] = question.body
        else:
            self._stream.give_up(seq)

    def live_due(self, *, idle: bool) -> bool:
        """Whether the live requests are to be listed now: once a second, and at once before a rest
        (`idle`: no request is alive) while a lease is out that nobody is left to release."""
        if idle and not self._questions and not self._abandoned:
            return len(self._leases) > 0
        return not self.lost and self.now_us() >= self._live_us

    def report_live(self, alive: Iterable[LiveRequest]) -> None:
        """List what is alive, so that a lease whose release was lost falls. Whoever asked and has
        no answer is added, wanted or not: the lease of a late answer is released by its receipt.
        """
        asked = [question.body for question in self._questions.values()]
        live = dict.fromkeys([*alive, *askers(asked), *askers(self._abandoned.values())])
        self.report(Live(tuple(live)))
        self._leases.listed(live)
        self._live_us = self.now_us() + LIVE_EVERY_US

    def wait(self, timeout_us: int | None, fds: Sequence[int] = ()) -> None:
        """Block until there may be something to `poll`, a descriptor is readable, or time is up.

        While messages are open the wait is short enough for them to be sent again in time.
        """
        if self._arrived:
            return  # a call took it in on its way; no descriptor announces it any more
        if self._stream.open_count:
            most = RESEND_CHECK_US
            timeout_us = most if timeout_us is None else min(timeout_us, most)
        self._link.wait(timeout_us, fds)

    def lose(self, reason: str) -> None:
        """Give the daemon up: close the session, so that it forgets this pool."""
        if not self.lost:
            self.lost = reason
            self._count("daemon_lost")
            self._questions.clear()
            self._arrived.clear()
            self._abandoned.clear()
            self._leases.clear()
            self._link.close()

    def close(self) -> None:
        """End the session. Repeatable."""
        if not self.lost:
            self.lost = "closed"
            self._link.close()

    def now_us(self) -> int:
        """The link's clock."""
        return self._link.now_us()

    @property
    def open_count(self) -> int:
        """Messages that are not done with."""
        return self._stream.open_count

    @property
    def abandoned_count(self) -> int:
        """Questions that nobody waits for and whose answers may still bring leases."""
        return len(self._abandoned)

    # Private: sending.

    def _push(self, body: Request, *, asks: bool) -> int:
        if self.lost:
            return 0
        now = self._link.now_us()
        try:
            seq = self._stream.push(body, asks=asks, now_us=now)
        except TooMany as error:
            self.lose(str(error))
            return 0
        self._last_seq = seq
        if isinstance(body, Unlock):
            self._leases.released(body.receipt)
        self._send(seq, body)
        return seq

    def _send(self, seq: int, body: ClientBody) -> None:
        envelope = Envelope(self.registration.epoch, seq, self._stream.answered, body)
        if not self._link.send(encode(envelope)):
            self._count("frames_not_sent")

    def _say_attach(self) -> None:
        self._send(0, Attach(self.registration.pool, self.registration.secret))

    # Private: receiving.

    def _take_in(self) -> None:
        if self.lost:
            return
        for frame in self._link.receive():
            try:
                self._take(decode_reply(frame))
            except TreecoredError:
                self._count("frames_malformed")
        if not self._link.alive:
            self.lose("the daemon closed the session")
            return
        now = self._link.now_us()
        if self._stream.open_count and now >= self._resend_check_us:
            self._resend_check_us = now + RESEND_CHECK_US
            for seq, body in self._stream.due(now):
                self._count("messages_resent")
                self._send(seq, body)  # type: ignore[arg-type]  # the stream keeps what it was given

    def _take(self, reply: ReplyEnvelope) -> None:
        if self.lost:
            return
        body = reply.body
        if reply.epoch != self.registration.epoch:
            self.lose("the daemon was started anew; register again")
            return
        self._misses = 0  # whatever it says, it is there
        if isinstance(body, Refused) and self._refusal(reply.seq, body):
            return
        wanted = self._stream.on_reply(reply.acked, reply.seq)
        if isinstance(body, Attached):
            self._attached = True
        if isinstance(body, Attached | Acked) or not reply.seq:
            return
        self._reattaches = 0
        question = self._questions.pop(reply.seq, None)
        if question is not None and wanted:
            if not isinstance(body, Refused) and not isinstance(question.body, Restore):
                self.rtt_us.add(self._link.now_us() - question.sent_us)
            self._leases.granted(question.body, body)
            self._arrived[reply.seq] = body
        elif self._abandoned.pop(reply.seq, None) is not None:
            self._count("answers_late")
            self._release_late(body)
        elif isinstance(body, Refused):
            self._count(f"report_refused_{body.code}")
            # Of all reports only an Unlock names a receipt. A list of live requests may have made
            # that lease fall before, and then what was to be released is released.
            if body.code != StaleReceipt.code:
                self.refused.append(body)

    def _refusal(self, seq: int, body: Refused) -> bool:
        """Deal with a refusal of the conversation itself; False when it answers a message."""
        if seq:
            if body.code != "unknown_pool":
                return False
            self.lose(f"the registration is gone: {body.message}")
        elif body.code == NotAuthorised.code and self._attached and self._reattaches < ATTACHES_MAX:
            # The connection was made anew beneath; what it refused is sent again when it is due.
            self._reattaches += 1
            self._say_attach()
        elif body.code == OutOfOrder.code:
            self._count("gaps")
        else:
            self.lose(f"the daemon refused the connection: {body.code}: {body.message}")
        return True

    def _release_late(self, body: AnyReply) -> None:
        if isinstance(body, Matched | Locked) and body.receipt:
            self.report(Unlock(body.receipt))

    def _expire(self, seq: int) -> bool:
        """A question's deadline has passed; False when the daemon is given up over it."""
        self._miss(seq)
        question = self._questions.get(seq)
        if question is None:
            return False
        if isinstance(question.body, Restore):
            question.due_us = 0
        else:
            self.abandon(seq)
        return True

    def _miss(self, seq: int) -> None:
        self._count("deadlines_missed")
        if seq <= self._missed_seq:
            return  # it waited when the last miss was counted already: one silence, one miss
        self._missed_seq = self._last_seq
        self._misses += 1
        if self._misses >= self.deadlines.misses_max:
            self.lose(f"{self._misses} messages in a row had no answer, the last one was {seq}")

    def _count(self, name: str) -> None:
        self.counters[name] = self.counters.get(name, 0) + 1

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"{self.open_count} open"
        return f"<DaemonClient pool {self.registration.pool}, {state}>"
