"""Whose slice goes next: a lane for each way that copies go, bounded, capped and paced.

Owns the queues of copies that are ready or running and the count of their slices in flight. It
decides only the order and the moment; it must never hold back a restore for a backup, nor let one
lane take every place there is.
"""

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

from transfer.alone import Alone
from transfer.copies import Copy, CopyState
from transfer.device.protocol import Ticket


class Way(enum.Enum):
    """What a lane's copies do, in the order in which they are served."""

    RESTORE = "restore"  # host tier to pool, and copies with parts of both kinds
    PEER = "peer"  # pool to pool
    BACKUP = "backup"  # pool to host tier


WAYS: dict[str, Way] = {"backup": Way.BACKUP, "peer_copy": Way.PEER}
"""The lane of each kind of copy; of any other it is RESTORE."""


BEGUN_BEHIND = 4
"""Slices of backups in flight behind which another backup begins: it takes as long as the bus takes
for two."""


class Pace(NamedTuple):
    """How much of a lane's time is used.

    `bytes_per_s`: a cap (0: none). `share`: of the time that is used by a copy within one GPU while
    that GPU computes; its slices go one at a time then. The two take turns on the GPU, so a step
    is longer by a slice and a change of contexts. `alone_bytes_per_us`: of a slice that had the GPU
    to itself (see alone.Alone); `link_bytes_per_us`: of one over a link to another GPU.
    """

    bytes_per_s: int = 0
    share: float = 1.0
    alone_bytes_per_us: int = 0
    link_bytes_per_us: int = 0


class Turn(enum.Enum):
    """How the next slice of a copy goes."""

    PLAIN = "plain"  # as the device moves it by itself
    CALM = "calm"  # by whatever is the fastest: nothing computes where it goes
    TRY = "try"  # a small one by that, to find out whether anything does
    GENTLE = "gentle"  # over a link by copy engines, whatever computes; small, for it takes long
    PACED = "paced"  # within a GPU one at a time, with a pause behind it


FASTEST = (Turn.CALM, Turn.TRY)
"""What goes by whatever is the fastest, whoever computes."""


class Lane:
    """One way's queue. Mutated by the engine as it submits slices and sees them done."""

    def __init__(self, way: Way, submissions_max: int, pace: Pace) -> None:
        self.way = way
        self.queue: deque[Copy] = deque()
        self.in_flight = 0
        self._submissions_max = submissions_max
        self._pace = pace
        self._not_before_us = 0
        self._paced_since_us = 0  # when the only slice of a paced copy was submitted

    def may_submit(self, now_us: int, most: int) -> bool:
        """Whether a slice may go now; `most`: at most so many of them at once."""
        return now_us >= self._not_before_us and self.in_flight < min(most, self._submissions_max)

    def submitted(self, nbytes: int, now_us: int, *, paced: bool) -> None:
        """A slice has gone."""
        self.in_flight += 1
        self._paced_since_us = now_us if paced else 0
        if self._pace.bytes_per_s:
            due_us = nbytes * 1_000_000 // self._pace.bytes_per_s
            self._not_before_us = max(now_us, self._not_before_us) + due_us

    def ended(self, now_us: int, *, paced: bool) -> None:
        """A slice is no more in flight. `paced`: where it went alone, it is for others' sake."""
        self.in_flight -= 1
        if self._paced_since_us and not self.in_flight:
            if not paced:
                self._paced_since_us = 0
                return
            took_us = now_us - self._paced_since_us
            pause_us = int(took_us * (1 - self._pace.share) / self._pace.share)
            self._not_before_us = max(self._not_before_us, now_us + pause_us)
            self._paced_since_us = 0

    def __repr__(self) -> str:
        return f"<Lane {self.way.value}: {len(self.queue)} copies, {self.in_flight} in flight>"


class Lanes:
    """All lanes. `computing`: whether the GPU has computed lately; asked only for copies
    between GPU memories, whose own slices say whether it does now."""

    def __init__(
        self,
        submissions_max: int,
        lane_submissions_max: int,
        calm_submissions_max: int,
        pace: Pace,
        computing: Callable[[], bool],
    ) -> None:
        """The first three: slices in flight of all, of a lane, of one within a calm GPU."""
        each = min(submissions_max, lane_submissions_max)
        self._submissions_max = submissions_max
        self._calm_max = calm_submissions_max
        self._computing = computing
        self._alone = Alone(pace.alone_bytes_per_us)
        self._link = Alone(pace.link_bytes_per_us)
        self._links = pace.link_bytes_per_us > 0
        self._lanes = {way: Lane(way, each, pace) for way in Way}

    @property
    def in_flight(self) -> int:
        """Slices of all lanes."""
        return sum(lane.in_flight for lane in self._lanes.values())

    def lane(self, copy: Copy) -> Lane:
        """Where a copy goes."""
        return self._lanes[WAYS.get(copy.request.kind, Way.RESTORE)]

    def add(self, copy: Copy) -> None:
        """A copy is ready, or goes on: then before those that have not begun, which takes longer
        than a slice."""
        queue = self.lane(copy).queue
        if copy.state is CopyState.RUNNING:
            begun = sum(1 for _ in takewhile(lambda c: c.state is CopyState.RUNNING, queue))
            queue.insert(begun, copy)
        else:
            queue.append(copy)

    def discard(self, copy: Copy) -> None:
        """A copy has no more slices, or is lost."""
        queue = self.lane(copy).queue
        if queue and queue[0] is copy:
            queue.popleft()
        elif copy in queue:
            queue.remove(copy)

    def begins_later(self, copy: Copy, staged: Iterable[Copy], now_us: int) -> bool:
        """Whether the bus is better served by what schedulers are just packing than by beginning a
        backup, which takes as long: until there are slices behind which to begin it."""
        if copy.urgent or self.lane(copy).in_flight >= BEGUN_BEHIND:
            return False
        backups = (c.staged for c in staged if not c.urgent)
        return any(s is not None and s.packs(now_us) for s in backups)

    def turn(self, copy: Copy, now_us: int, *, goes: bool = True) -> Turn:
        """How the next slice of a copy goes: between GPU memories that depends on whether the GPU
        computes, as far as that is known and unless the last slices were seen to be alone. `goes`:
        now, so that it is no try behind others; else it may wait to be one."""
        if copy.local:
            held_up = self._computing() and not self._alone.holds(now_us)
            return Turn.PACED if held_up else Turn.CALM
        if not copy.linked or not self._links:
            return Turn.PLAIN
        if not self._computing() or self._link.holds(now_us):
            return Turn.CALM
        may_try = self._link.may_try(now_us) and not (goes and self.lane(copy).in_flight)
        return Turn.TRY if may_try else Turn.GENTLE

    def submitted(self, copy: Copy, ticket: Ticket, nbytes: int, now_us: int, turn: Turn) -> None:
        """A slice of a copy has gone."""
        self.lane(copy).submitted(nbytes, now_us, paced=turn is Turn.PACED)
        if copy.local:
            self._alone.submitted(ticket, nbytes, now_us)
        elif turn in FASTEST:
            self._link.submitted(ticket, nbytes, now_us, tried=turn is Turn.TRY)

    def ended(self, copy: Copy, ticket: Ticket, now_us: int) -> None:
        """A slice of a copy is no more in flight."""
        self._alone.ended(ticket, now_us)
        self._link.ended(ticket, now_us)
        self.lane(copy).ended(now_us, paced=copy.local and not self._alone.holds(now_us))

    def looked(self, now_us: int) -> None:
        """All slices that have ended by now were told of."""
        self._alone.looked(now_us)
        self._link.looked(now_us)

    def ready(self, now_us: Callable[[], int]) -> Iterator[Copy]:
        """Copies whose next slice may go now: each time the one whose turn it is.

        The taker submits a slice or takes the copy out before it asks for the next.
        """
        for lane in self._lanes.values():
            while lane.queue and self.in_flight < self._submissions_max:
                copy = lane.queue[0]
                now = now_us()
                if not lane.may_submit(now, self._most(copy, now)):
                    break
                yield copy

    def _most(self, copy: Copy, now_us: int) -> int:
        """How many of a copy's slices may be in flight: one where it is paced, with a pause behind
        each; within a GPU a few, since whatever begins to compute waits for them."""
        if copy.progress is not None and copy.progress.leads and copy.staged is None:
            return 0  # for less than a slice's time: the first layer has the bus to itself
        turn = self.turn(copy, now_us, goes=False)
        if turn in (Turn.PACED, Turn.TRY):
            return 1  # a try alone, or it would be late for those that it stands behind
        if turn is Turn.GENTLE and self._link.trying(now_us):
            return 0  # for the time of a slice: how the others go depends on it
        return self._calm_max if turn is Turn.CALM else self._submissions_max

    def __repr__(self) -> str:
        return f"<Lanes {list(self._lanes.values())}>"
