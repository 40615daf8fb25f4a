"""Groups: the tp/pp ranks of one instance say the same things and are told the same things.

Owns, for each numbered message of a group, what was asked first and what was answered. The first
rank to arrive decides; every rank gets the same answer, whenever it asks. It never lets a rank's
own clock or free space decide anything, and never answers a rank that has not asked.
"""

from __future__ import annotations

from directory.core import limits
from directory.core.actions import AnyReply
from directory.core.errors import Diverged, TooMany
from directory.core.events import Body
from directory.core.ids import PoolId


class _Entry:
    """One numbered message. `waiting`: members that asked and have no answer yet."""

    __slots__ = ("asked", "body", "reply", "silent", "waiting")

    def __init__(self, body: Body) -> None:
        self.body = body
        self.reply: AnyReply | None = None
        self.silent = False
        self.asked: dict[PoolId, None] = {}
        self.waiting: dict[PoolId, None] = {}


class GroupLog:
    """The messages of one group that not every rank has asked and been answered yet.

    `members`: the ranks' own ids in rank order.
    """

    def __init__(self, members: tuple[PoolId, ...]) -> None:
        self.members = members
        self._entries: dict[int, _Entry] = {}
        self._decided = 0

    def arrive(self, member: PoolId, seq: int, body: Body) -> bool:
        """Take in a rank's message; True when it is the first and must be carried out now.

        Raises `Diverged` when a rank says something else than the first one did, `TooMany` when
        the ranks are too far apart.
        """
        entry = self._entries.get(seq)
        first = entry is None
        if entry is None:
            if len(self._entries) >= limits.UNACKED_MESSAGES_MAX:
                raise TooMany(f"a rank is {len(self._entries)} messages behind its group")
            entry = self._entries[seq] = _Entry(body)
            self._decided = max(self._decided, seq)
        elif entry.body != body:
            raise Diverged(
                f"rank {self.members.index(member)} sent another message {seq} than its group; "
                "ranks must send the same numbered operations"
            )
        entry.asked[member] = None
        entry.waiting[member] = None
        return first

    def reply(self, seq: int, reply: AnyReply) -> list[PoolId]:
        """Decide a message's answer; returns the members to send it to now."""
        entry = self._entries.get(seq)
        if entry is None:
            return []
        entry.reply = reply
        return self._take(seq, entry)

    def settle(self, seq: int) -> None:
        """A message was carried out and will have no answer (a report)."""
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

    def _take(self, seq: int, entry: _Entry) -> list[PoolId]:
        members = list(entry.waiting)
        entry.waiting.clear()
        self._forget_if_done(seq, entry)
        return members

    def _forget_if_done(self, seq: int, entry: _Entry) -> None:
        if len(entry.asked) == len(self.members) and not entry.waiting:
            del self._entries[seq]

    def __len__(self) -> int:
        return len(self._entries)
