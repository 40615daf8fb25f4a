"""The client: one registered pool's numbered conversation with the daemon.

Owns the stream of messages, what is waited for until when, and the samples of round trips. It
never blocks beyond a deadline: an answer that does not come is None, which is always safe to take
for a miss. A daemon that is gone, restarted, silent or confused makes it `lost`, once and for
good; from then on every method returns at once. It must never let a late answer's lease leak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from directory.core import limits
from directory.core.actions import AnyReply, Locked, Matched, Refused, Restored
from directory.core.errors import (
    AnswerGone,
    NotAuthorised,
    OutOfOrder,
    StaleReceipt,
    TreecoredError,
)
from directory.core.events import Lock, Match, Mode, Request, Restore, Unlock
from directory.protocol.codec import decode_reply
from directory.protocol.ended import Ended
from directory.protocol.messages import Acked, Attached, ReplyEnvelope
from scheduler_shim.deadlines import Deadlines, Silence
from scheduler_shim.lane_link import open_link
from scheduler_shim.link import Link
from scheduler_shim.pools import Pool
from scheduler_shim.questions import LiveRequest, Question, askers, live_parts
from scheduler_shim.samples import Samples
from scheduler_shim.session import SOFTWARE, Registration, raise_refusal, register
from scheduler_shim.speaking import Speaker

RESEND_CHECK_US: Final = limits.RESEND_AFTER_MS * 1_000 // 4
LIVE_EVERY_US: Final = 1_000_000


class DaemonClient(Speaker):
    """One registration's client. Used from one thread."""

    def __init__(
        self,
        link: Link,
        registration: Registration,
        deadlines: Deadlines | None = None,
        *,
        world_size: int = 1,
    ) -> None:
        super().__init__(link, registration, deadlines or Deadlines(), alone=world_size == 1)
        self.refused: list[Refused] = []
        """Reports that the daemon did not take; mirror and daemon differ from there on."""
        self.before_loss: Callable[[], object] = lambda: None
        """Called before it is told that a restore is lost: its targets may be used for something
        else then, and a dead mover may have asked this process to write into them."""
        self.rtt_us = Samples()
        self._world_size = world_size
        self._silence = Silence()
        self.live_us = link.now_us() + LIVE_EVERY_US
        """When the live requests are to be listed next."""
        self._questions: dict[int, Question] = {}
        self._abandoned: dict[int, Request] = {}
        self._arrived: dict[int, AnyReply | None] = {}

    @classmethod
    def connect(
        cls,
        runtime_dir: Path,
        pool: Pool,
        *,
        instance: str,
        mode: Mode,
        deadlines: Deadlines | None = None,
        world_size: int = 1,
        rank: int = 0,
        software: str = SOFTWARE,
        lane: bool = True,
    ) -> DaemonClient:
        """Register a pool with the daemon of a runtime folder and attach to it.

        `lane`: speak by the fast lane where the daemon takes one, else by ZeroMQ alone.
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
            software=software,
        )
        link = open_link(session, registration.endpoint, lane=registration.lane and lane)
        client = cls(link, registration, deadlines, world_size=world_size)
        client.before_loss = pool.settle
        client.attach()
        return client

    # Talking.

    def call(self, body: Request, deadline_ms: int = 0) -> AnyReply | None:
        """Ask and wait: one round trip. None when no answer came before the deadline, or when the
        daemon has carried the message out and keeps its answer no longer.

        Raises the typed error of a refusal. A late answer is thrown away; if it carries a lease,
        that is released.
        """
        seq = self.ask(body, deadline_ms)
        return self.answer(seq)

    def answer(self, seq: int, wait_ms: int = 0) -> AnyReply | None:
        """Wait for the answer of something asked that `poll` has not brought; as `call` does.

        `wait_ms`: no longer than this, though it has more time.
        """
        give_up_us = self._link.now_us() + wait_ms * 1_000
        while seq in self._questions and not self.lost:
            due_us = self._questions[seq].due_us
            left_us = (min(due_us, give_up_us) if wait_ms else due_us) - self._link.now_us()
            if left_us <= 0:
                break
            self._link.wait(min(left_us, limits.RESEND_AFTER_MS * 1_000))
            self._take_in()
        reply = self._arrived.pop(seq, None)
        if reply is None:
            if seq in self._questions:
                self._miss(seq)
                self.abandon(seq)
            return None
        if isinstance(reply, Refused):
            raise_refusal(reply.code, reply.message)
        return reply

    def report(self, body: Request | Ended, *, hold: bool = False) -> None:
        """Tell without waiting; the stream sees to it that it arrives, once and in order. With
        `hold` it may go together with what is told next, or when `send_held` is called."""
        self._push(body, asks=False, hold=hold)

    def ask(self, body: Request, deadline_ms: int = 0, *, hold: bool = False) -> int:
        """Ask without waiting; `poll` brings the answer, or None when its deadline has passed.

        With `hold` it may go together with what is told next, or when `send_held` is called.
        Returns the number by which `poll` names it (0 when the daemon is lost).
        """
        seq = self._push(body, asks=True, hold=hold)
        if seq:
            now = self._link.now_us()
            due = now + (deadline_ms or self.deadlines.of(body)) * 1_000
            self._questions[seq] = Question(body, now, due)
        return seq

    def poll(self) -> list[tuple[int, AnyReply | None]]:
        """Answers that have come, and None for questions whose deadline has passed or whose answer
        can be had no more.

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

    @property
    def at_rest(self) -> bool:
        """Whether nothing is open, wanted, to be said or to be heard, by one look at the lane. By
        ZeroMQ that is never known."""
        if self.lost or self._questions or self._abandoned or self._arrived:
            return False
        return not self.refused and self.silent

    def live_due(self, *, idle: bool) -> bool:
        """Whether the live requests are to be listed now: once a second, and at once before a rest
        (`idle`: no request is alive) while a lease is out that nobody is left to release. With none
        out there is nothing to be listed, and it is asked again in a second."""
        if idle and not self._questions and not self._abandoned:
            if not self._leases and self.now_us() >= self.live_us:
                self.live_us = self.now_us() + LIVE_EVERY_US
            return len(self._leases) > 0
        return not self.lost and self.now_us() >= self.live_us

    def report_live(self, alive: Iterable[LiveRequest]) -> None:
        """List what is alive, so that a lease whose release was lost falls. Whoever asked and has
        no answer is added, wanted or not: the lease of a late answer is released by its receipt.
        """
        asked = [question.body for question in self._questions.values()]
        live = dict.fromkeys([*alive, *askers(asked), *askers(self._abandoned.values())])
        for part in live_parts(live):
            self.report(part)
        self._leases.listed(live)
        self.live_us = self.now_us() + LIVE_EVERY_US

    def wait(self, timeout_us: int | None, fds: Sequence[int] = ()) -> None:
        """Block until there may be something to `poll`, a descriptor is readable, or time is up.

        While messages are open the wait is short enough for them to be sent again in time.
        """
        self._say_releases()
        if self._arrived:
            return  # a call took it in on its way; no descriptor announces it any more
        if self._stream.open_count:
            most = RESEND_CHECK_US
            timeout_us = most if timeout_us is None else min(timeout_us, most)
        self._link.wait(timeout_us, fds)

    def sleep(self, timeout_us: int) -> None:
        """As `wait`, for whoever has the time that waking up takes: it does not look first whether
        an answer comes at once, which costs as much processor time as the answer takes."""
        if self._lane is not None:
            self._lane.looks_no_more()
        self.wait(timeout_us)

    def lose(self, reason: str) -> None:
        """Give the daemon up: close the session, so that it forgets this pool."""
        if not self.lost:
            self.lost = reason
            self._count("daemon_lost")
            self._questions.clear()
            self._arrived.clear()
            self._abandoned.clear()
            self._releases.clear()
            self._leases.clear()
            self._link.close()

    def close(self) -> None:
        """End the session. Repeatable."""
        if not self.lost:
            self.lost = "closed"
            self._link.close()

    @property
    def open_count(self) -> int:
        """Messages that are not done with."""
        return self._stream.open_count + len(self._releases)

    @property
    def abandoned_count(self) -> int:
        """Questions that nobody waits for and whose answers may still bring leases."""
        return len(self._abandoned)

    def may_lease(self, seq: int, body: Request) -> bool:
        """Whether a question that had no answer may still bring a lease, or has brought one whose
        receipt nobody knows."""
        return seq in self._abandoned or self._leases.may_hold(body)

    # Private: receiving.

    def _take_in(self) -> None:
        if self.lost:
            return
        self._say_releases()
        for frame in self._link.receive():
            try:
                self._take(decode_reply(frame))
            except TreecoredError:
                self._count("frames_malformed")
        if not self._link.alive:
            self.lose("the daemon closed the session")
            return
        self._leave_lane()
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
        self._silence.broken()
        if isinstance(body, Refused) and self._refusal(reply.seq, body):
            return
        wanted = self._stream.on_reply(reply.acked, reply.seq)
        if isinstance(body, Attached):
            self._attached, self._attach_us = True, 0
            self._say_open()
        if isinstance(body, Attached | Acked) or not reply.seq:
            return
        self._reattaches = 0
        if isinstance(body, Refused) and body.code == AnswerGone.code:
            self._answer_gone(reply.seq, body)
            return
        question = self._questions.pop(reply.seq, None)
        if question is not None and wanted:
            if not isinstance(body, Refused) and not isinstance(question.body, Restore):
                self.rtt_us.add(self._link.now_us() - question.sent_us)
            self._leases.granted(question.body, body)
            landed = isinstance(body, Restored) and body.landed
            if isinstance(question.body, Restore) and not landed and not self._settled():
                return
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

    def _settled(self) -> bool:
        """Whether nobody writes into the targets of a lost restore any more. If that cannot be
        known the daemon is lost with it, and with it all targets go into quarantine."""
        try:
            self.before_loss()
        except TreecoredError as error:
            self.lose(f"what movers asked of this pool is not over: {error}")
            return False
        return True

    def _answer_gone(self, seq: int, body: Refused) -> None:
        """A message was carried out, and what came of it can be known no more.

        Nothing is lost of a report. Of a question it is no answer, which each asker takes as it
        takes silence; a Restore is over, whichever way, so its targets are quiet. The lease of a
        Match or Lock has no known receipt: it falls by the list of live requests.
        """
        question = self._questions.pop(seq, None)
        asked = self._abandoned.pop(seq, None) if question is None else question.body
        if asked is None:
            return
        self._count("answers_gone")
        self._leases.unknown(asked)
        if isinstance(asked, Restore) and not self._settled():
            return
        if question is not None:
            self._arrived[seq] = body if isinstance(asked, Restore) else None
        if self._world_size > 1:
            # The other ranks may have the answer, and all of them must go on alike.
            self.lose(f"the answer to message {seq} is gone, and the ranks must have the same")

    def _refusal(self, seq: int, body: Refused) -> bool:
        """Deal with a refusal of the conversation itself; False when it answers a message."""
        if seq:
            if body.code != "unknown_pool":
                return False
            self.lose(f"the registration is gone: {body.message}")
        elif body.code == NotAuthorised.code and self._attach_again():
            pass  # What the connection refused is sent again when it is due.
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
        misses = self._silence.missed(seq, self._last_seq)
        if misses and misses >= self.deadlines.misses_max:
            self.lose(f"{misses} messages in a row had no answer, the last one was {seq}")

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"{self.open_count} open"
        return f"<DaemonClient pool {self.registration.pool}, {state}>"
