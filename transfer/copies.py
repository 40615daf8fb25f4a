"""One copy on its way through the engine: its state table and what belongs to it.

Owns the life cycle of a copy. Decides nothing; the engine names the steps.
"""

import enum
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from directory.core.actions import SubmitCopy
from directory.core.errors import InvalidTransition
from directory.core.events import CopyDone, Outcome
from directory.core.ids import PoolId, is_pool
from transfer.checksum_copies import Check
from transfer.device.protocol import Ticket
from transfer.landing import Progress
from transfer.pages import PageBatch
from transfer.plan import RangeBatch
from transfer.staging import StagedCopy

CPU = "cpu"
"""The device of memory that is the host's."""

Slice: TypeAlias = "list[RangeBatch] | list[PageBatch]"
"""What is submitted at once, in the form that the device takes."""


class CopyState(enum.Enum):
    """Where a copy is."""

    FENCED = "fenced"  # waits for its fences; nothing is touched
    READY = "ready"  # waits for its turn; nothing is touched
    RUNNING = "running"  # slices are being submitted or are in flight
    DRAINING = "draining"  # lost; no slice follows, those in flight still touch its pages
    DONE = "done"  # nothing touches its pages any more


class CopyStep(enum.Enum):
    """What can happen to a copy."""

    PASS = "pass"  # all fences have passed
    START = "start"  # its words are as reported and its plan is made
    DROP = "drop"  # it is lost before anything was submitted
    LOSE = "lose"  # it is lost while slices may be in flight
    LAND = "land"  # every slice is done and its words are still as reported
    DRAIN = "drain"  # the last slice of a lost copy is done


TRANSITIONS: dict[tuple[CopyState, CopyStep], CopyState] = {
    (CopyState.FENCED, CopyStep.PASS): CopyState.READY,
    (CopyState.FENCED, CopyStep.DROP): CopyState.DONE,
    (CopyState.READY, CopyStep.START): CopyState.RUNNING,
    (CopyState.READY, CopyStep.DROP): CopyState.DONE,
    (CopyState.RUNNING, CopyStep.LOSE): CopyState.DRAINING,
    (CopyState.RUNNING, CopyStep.LAND): CopyState.DONE,
    (CopyState.DRAINING, CopyStep.DRAIN): CopyState.DONE,
}


class Copy:
    """A copy that the engine has taken; mutated by the engine alone."""

    __slots__ = (
        "broken",
        "check",
        "deadline_us",
        "detail",
        "fences",
        "in_flight",
        "linked",
        "local",
        "more",
        "near",
        "nbytes",
        "outcome",
        "pools",
        "progress",
        "request",
        "rest",
        "slices",
        "staged",
        "started_us",
        "state",
        "urgent",
    )

    def __init__(self, request: SubmitCopy, deadline_us: int) -> None:
        self.request = request
        self.state = CopyState.FENCED
        self.urgent = request.kind != "backup"
        self.fences = request.fences  # those that had not passed when last looked at
        self.deadline_us = deadline_us
        self.pools = involved_pools(request)
        self.slices: Iterator[Slice] = iter(())
        self.more: Slice | None = None  # the next slice to submit; None: no more
        self.rest: Slice | None = None  # of what `more` was cut off from, before other slices
        self.near = False  # between GPU memories
        self.local = False  # within one GPU
        self.linked = False  # between GPUs, over links whose speed is known
        self.in_flight: set[Ticket] = set()
        self.progress: Progress | None = None  # of a load that lands layer by layer
        self.staged: StagedCopy | None = None  # of one that goes through a slab
        self.check: Check | None = None  # what its checksums are still to be computed of
        self.outcome: Outcome = "ok"
        self.broken = False
        self.detail = ""
        self.nbytes = 0  # submitted so far
        self.started_us = 0

    def lies_at(self, devices: AbstractSet[str], own: str, links: Collection[str]) -> None:
        """Its pages are there ("cpu": in the host's memory); `links`: GPUs that `own` reaches at a
        speed that is known."""
        self.near = CPU not in devices
        self.local = self.near and len(devices) == 1
        others = devices - {own}
        self.linked = self.near and not self.local and all(other in links for other in others)

    @property
    def checked(self) -> bool:
        """Whether every checksum that it waits for was computed."""
        return self.check is None or self.check.done

    @property
    def busy(self) -> bool:
        """Whether the device or the pool's scheduler is still at it."""
        return bool(self.in_flight) or (self.staged is not None and self.staged.waits)

    @property
    def parked(self) -> bool:
        """Whether there is nothing to do for it before its scheduler, or another copy of its, has
        done something."""
        staged = self.staged
        return (
            staged is not None and not staged.willing and self.more is None and not self.in_flight
        )

    @property
    def whole(self) -> bool:
        """Whether everything was submitted, and packed and unpacked where that is needed."""
        return self.more is None and (self.staged is None or self.staged.over)

    def next_slice(self) -> "Slice | None":
        """What is to be submitted next; None: nothing can be now, or nothing is left."""
        if self.staged is not None:
            return self.staged.next_slice()
        rest, self.rest = self.rest, None
        return next(self.slices, None) if rest is None else rest

    def step(self, step: CopyStep) -> None:
        """Go to the next state; raises `InvalidTransition` where the table has none."""
        following = TRANSITIONS.get((self.state, step))
        if following is None:
            raise InvalidTransition(f"{self!r} has no step {step.value!r}")
        self.state = following

    def done(self, now_us: int) -> CopyDone:
        """The event that reports the copy."""
        duration_us = now_us - self.started_us if self.started_us else 0
        return CopyDone(
            self.request.op, self.outcome, self.detail, self.nbytes, duration_us, self.broken
        )

    def __repr__(self) -> str:
        return (
            f"<Copy {self.request.op} {self.request.kind} {self.state.value}, "
            f"{self.nbytes} bytes submitted, {len(self.in_flight)} in flight>"
        )


def involved_pools(request: SubmitCopy) -> frozenset[PoolId]:
    """Pools whose memory, timelines or words a copy needs."""
    places = {place for part in request.parts for place in (part.source, part.target)}
    named = {fence.pool for fence in request.fences} | {word.pool for word in request.words}
    return frozenset(place for place in places if is_pool(place)) | named
