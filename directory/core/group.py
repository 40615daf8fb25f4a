"""Groups: the tp/pp ranks of one instance say the same things and are told the same things.

Owns, for each numbered message of a group, what was asked first and what was answered. The first
rank to arrive decides; every rank gets the same answer, whenever it asks. It never lets a rank's
own clock or free space decide anything, and never answers a rank that has not asked.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from directory.core import limits
from directory.core.actions import AnyReply
from directory.core.errors import Diverged, TooMany
from directory.core.events import Body, Evicted, Insert, Live, Match, Restore
from directory.core.ids import PoolId

RUN_BYTES: Final = 24
"""A run of an eviction report, as it is counted."""


class Turn(Enum):
    """What a rank's message is to its group."""

    FIRST = "first"
    LATER = "later"
    OVER = "over"


class _Entry:
    """One numbered message. `waiting`: members that asked and have no answer yet."""

    __slots__ = ("asked", "body", "nbytes", "reply", "silent", "waiting")

    def __init__(self, body: Body) -> None:
        self.body = body
        self.nbytes = _payload_bytes(body)
        self.reply: AnyReply | None = None
        self.silent = False
        self.asked: dict[PoolId, None] = {}
        self.waiting: dict[PoolId, None] = {}


class GroupLog:
    """The messages of one group that not every rank has asked and been answered yet.

    `ranks`: how many there are. They are known here by their own numbers.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._entries: dict[int, _Entry] = {}
        self._decided = 0
        self._nbytes = 0

    def arrive(self, member: PoolId, seq: int, body: Body) -> Turn:
        """Take in a rank's message; FIRST must be carried out now, LATER has `again`.

        OVER: every rank has sent it before, so this is a repetition. Raises `Diverged` when a rank
        says something else than the first one did, `TooMany` when the ranks are too far apart.
        """
        entry = self._entries.get(seq)
        turn = Turn.LATER
        if entry is None:
            if seq <= self._decided:
                return Turn.OVER
            turn = Turn.FIRST
            entry = self._open(seq, body)
        elif entry.body != body:
            raise Diverged(
                f"pool {member} sent another message {seq} than the other ranks of its group; "
                "ranks must send the same numbered operations; register them again"
            )
        entry.asked[member] = None
        entry.waiting[member] = None
        return turn

    def reply(self, seq: int, reply: AnyReply) -> list[PoolId]:
        """Decide a message's answer; returns the members to send it to now."""
        entry = self._entries.get(seq)
        if entry is None or entry.reply is not None:
            return []
        entry.reply = reply
        return self._take(seq, entry)

    def settle(self, seq: int) -> None:
        """A message was carried out; if it has no answer by now there will be none (a report)."""
        entry = self._entries.get(seq)
        if entry is not None and entry.reply is None:
            entry.silent = True
            self._take(seq, entry)

    def again(self, member: PoolId, seq: int) -> AnyReply | None:
        """Return the answer for a rank that is not the first, or None while there is none."""
        entry = self._entries[seq]
        reply = entry.reply
        if reply is not None or entry.silent:
            entry.waiting.pop(member, None)
            self._forget_if_done(seq, entry)
        return reply

    def leave(self, member: PoolId) -> None:
        """A rank is gone: it waits for nothing any more."""
        for seq, entry in list(self._entries.items()):
            entry.waiting.pop(member, None)
            self._forget_if_done(seq, entry)

    def _open(self, seq: int, body: Body) -> _Entry:
        entry = _Entry(body)
        behind, nbytes = len(self._entries), self._nbytes + entry.nbytes
        if behind >= limits.GROUP_LAG_MESSAGES_MAX or nbytes > limits.GROUP_LAG_BYTES_MAX:
            raise TooMany(
                f"a rank is {behind} messages ({self._nbytes} bytes) behind its group; "
                "register the ranks again"
            )
        self._entries[seq] = entry
        self._nbytes = nbytes
        self._decided = seq
        return entry

    def _take(self, seq: int, entry: _Entry) -> list[PoolId]:
        members = list(entry.waiting)
        entry.waiting.clear()
        self._forget_if_done(seq, entry)
        return members

    def _forget_if_done(self, seq: int, entry: _Entry) -> None:
        if len(entry.asked) == self._ranks and not entry.waiting:
            del self._entries[seq]
            self._nbytes -= entry.nbytes

    def violations(self) -> list[str]:
        """Return what does not hold of the log itself."""
        found: list[str] = []
        if sum(entry.nbytes for entry in self._entries.values()) != self._nbytes:
            found.append(f"counts {self._nbytes} bytes, wrongly")
        for seq, entry in self._entries.items():
            if not entry.waiting.keys() <= entry.asked.keys():
                found.append(f"message {seq} is to be answered to ranks that have not asked")
            if len(entry.asked) == self._ranks and not entry.waiting:
                found.append(f"message {seq} is done with and kept")
            if entry.waiting and (entry.silent or entry.reply is not None):
                found.append(f"message {seq} is answered, and {list(entry.waiting)} wait for it")
        return found

    def __len__(self) -> int:
        return len(self._entries)


def _payload_bytes(body: Body) -> int:
    """The part of a message whose size a client chooses."""
    match body:
        case Insert():
            return len(body.tokens) + len(body.pages)
        case Match():
            return len(body.tokens)
        case Restore():
            return len(body.pages)
        case Evicted():
            return RUN_BYTES * len(body.runs)
        case Live():
            return sum(len(request) for request, _ in body.requests)
        case _:
            return 0
