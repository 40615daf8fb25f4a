"""What each match that was late waited for: its client's marks laid beside the daemon's.

Owns the arithmetic, no process. A match has the moment at which it was to begin, and every moment
from then until its end belongs to one cause: its own client (it was not on time, or not woken by
the answer), the daemon's sleep, a long piece of the daemon's work by its name, the kernel that gave
the daemon's core to somebody else, or short work, which is nearly always others' questions. Who
waited for short work most of the time stands in a queue: then the cause is what made the queue, the
longest thing since the daemon had nothing to do last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

CLIENT: Final = "its client was not on time"
WOKEN: Final = "the daemon slept"
WAITED: Final = "the daemon was awake and had no core"
ANSWERED: Final = "its client was not woken by the answer"
TAKEN: Final = "the daemon's core was taken away"
QUESTIONS: Final = "short work"
BEHIND: Final = "in a queue behind: "
EXAMPLES: Final = 5


class Late(NamedTuple):
    """One match (ns): when it was to begin, when its client was free for it, when it began and
    ended."""

    due: int
    free: int
    begun: int
    ended: int


class Marks(msgspec.Struct):
    """What a daemon has marked, each in order of its end; monotonic ns.

    `pauses`: from, until, and how long at its end a core was waited for, as far as that is known;
    `turns`: from, until, and what of it was the processor's; `pieces`: name, from, until.
    """

    pauses: list[tuple[int, int, int]] = []
    turns: list[tuple[int, int, int]] = []
    pieces: list[tuple[str, int, int]] = []


class Causes:
    """Of one phase."""

    def __init__(self, marks: Marks) -> None:
        self._pauses = marks.pauses
        self._pause_ends = [ended for _, ended, _ in marks.pauses]
        self._turns = marks.turns
        self._turn_ends = [ended for _, ended, _ in marks.turns]
        self._pieces = sorted(marks.pieces, key=lambda piece: piece[2])
        self._piece_ends = [ended for _, _, ended in self._pieces]

    def parts(self, late: Late) -> dict[str, int]:
        """ns by cause, from when it was to begin until its end."""
        found: dict[str, int] = defaultdict(int)
        own = max(late.due, min(late.free, late.begun))
        found[CLIENT] = late.begun - own
        for since, until in ((late.due, own), (late.begun, late.ended)):
            named = self._paused(since, until) | self._long(since, until)
            for name, ns in named.items():
                found[name] += ns
            found[QUESTIONS] += max(0, until - since - sum(named.values()))
        return dict(found)

    def cause(self, late: Late) -> tuple[str, dict[str, int]]:
        """The first cause, and the parts."""
        parts = self.parts(late)
        worst = max(parts, key=lambda name: parts[name])
        if worst == QUESTIONS:
            # When the daemon had nothing to do last, before this match could meet it.
            before = bisect_right(self._pause_ends, late.due) - 1
            since = self._pause_ends[before] if before >= 0 else 0
            made = self._long(since, late.ended)
            if made:
                worst = BEHIND + max(made, key=lambda name: made[name])
        return worst, parts

    def _paused(self, since: int, until: int) -> dict[str, int]:
        """Pauses between two moments. Before one that goes on at the second the answer had gone."""
        found = {WOKEN: 0, WAITED: 0, ANSWERED: 0}
        for at in range(bisect_left(self._pause_ends, since), len(self._pauses)):
            begun, ended, delay = self._pauses[at]
            if begun >= until:
                break
            shared = max(0, min(ended, until) - max(begun, since))
            if ended >= until:
                found[ANSWERED] += shared
            else:
                waited = min(delay, shared)
                found[WAITED] += waited
                found[WOKEN] += shared - waited
        return found

    def _long(self, since: int, until: int) -> dict[str, int]:
        """What was long between two moments: of a turn what was not the processor's is the
        kernel's, the rest its pieces' (the innermost of several that contain one another)."""
        found: dict[str, int] = defaultdict(int)
        for at in range(bisect_right(self._turn_ends, since), len(self._turns)):
            begun, ended, cpu = self._turns[at]
            if begun >= until:
                break
            shared = min(ended, until) - max(begun, since)
            taken = ended - begun - cpu
            if taken > (ended - begun) // 2:
                found[TAKEN] += shared
                continue
            pieces = self._innermost(max(begun, since), min(ended, until), ended)
            for name, ns in pieces.items():
                found[name] += ns
        return dict(found)

    def _innermost(self, since: int, until: int, turn_end: int) -> dict[str, int]:
        found: dict[str, int] = defaultdict(int)
        inner: list[tuple[int, int]] = []  # begun and ns of those that none has contained so far
        for at in range(bisect_right(self._piece_ends, since), len(self._pieces)):
            name, begun, ended = self._pieces[at]
            if begun >= turn_end:
                break
            shared = min(ended, until) - max(begun, since)
            if shared <= 0:
                continue
            contained = 0
            while inner and inner[-1][0] >= begun:  # whoever is inside another one ends first
                contained += inner.pop()[1]
            found[name] += shared - contained
            inner.append((begun, shared))
        return dict(found)


class CauseReport(msgspec.Struct):
    """Of one cause: how many matches, and the slowest of them in ms and in parts (ms)."""

    matches: int
    slowest_ms: float
    parts_ms: list[dict[str, float]]


def report(marks: Marks, lates: Iterable[Late]) -> dict[str, CauseReport]:
    """By cause, the most frequent first."""
    causes, found = Causes(marks), defaultdict[str, list[tuple[int, dict[str, int]]]](list)
    for late in lates:
        cause, parts = causes.cause(late)
        found[cause].append((late.ended - late.due, parts))
    told: dict[str, CauseReport] = {}
    for cause in sorted(found, key=lambda name: -len(found[name])):
        worst = sorted(found[cause], key=lambda one: -one[0])
        examples = [
            {name: round(ns / 1e6, 3) for name, ns in parts.items() if ns >= 10_000}
            for _, parts in worst[:EXAMPLES]
        ]
        told[cause] = CauseReport(len(worst), round(worst[0][0] / 1e6, 3), examples)
    return told


class LongReport(msgspec.Struct):
    """What was long by one name: how often, all together, and the longest (ms)."""

    times: int
    all_ms: float
    longest_ms: float


def long_pieces(marks: Marks) -> dict[str, LongReport]:
    """By name, the longest first; all that a piece contains is in it."""
    found = defaultdict[str, list[int]](list)
    for name, begun, ended in marks.pieces:
        found[name].append(ended - begun)
    for begun, ended, cpu in marks.turns:
        if ended - begun - cpu > (ended - begun) // 2:
            found[TAKEN].append(ended - begun - cpu)
    return {
        name: LongReport(len(took), round(sum(took) / 1e6, 3), round(max(took) / 1e6, 3))
        for name, took in sorted(found.items(), key=lambda one: -max(one[1]))
    }
