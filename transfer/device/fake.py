"""A fake device for tests: deterministic, asynchronous, and able to go wrong.

Owns the queue of submissions. Nothing is copied before the test says so: bytes move at the
moment of completion, so everything between submission and completion can be tried. It ships
with the product so that clients of `transfer` can test against it, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

from transfer.device.cpu import attach_view, check_batches, copy_batches
from transfer.device.protocol import Completion, MemoryBusy, Ticket, UnknownMemory
from transfer.ipc.memory import Mapping
from transfer.pages import PageBatch
from transfer.plan import MemoryKey, RangeBatch


class Submission(NamedTuple):
    """What the engine submitted."""

    ticket: Ticket
    batches: tuple[RangeBatch, ...]
    urgent: bool

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return sum(batch.nbytes for batch in self.batches)

    def touches(self, key: MemoryKey) -> bool:
        """Whether a memory is source or target."""
        return any(key in (batch.source, batch.target) for batch in self.batches)


class FakeDevice:
    """Implements `Device`; `complete`, `fail`, `step` and `delay` are for the test."""

    name = "fake"

    def __init__(self) -> None:
        self.history: list[Submission] = []
        self.waiting: dict[Ticket, Submission] = {}
        self._delayed: dict[Ticket, int] = {}
        self._finished: list[Completion] = []
        self._views: dict[MemoryKey, memoryview] = {}
        self._refusals: list[str] = []

    @property
    def in_flight(self) -> int:
        """Submissions that are waiting or not reported."""
        return len(self.waiting) + len(self._finished)

    @property
    def attached(self) -> set[MemoryKey]:
        """Memories known now."""
        return set(self._views)

    def attach(self, key: MemoryKey, mapping: Mapping) -> None:
        """Make a memory known."""
        attach_view(self._views, key, mapping)

    def detach(self, key: MemoryKey) -> None:
        """Forget a memory that no waiting submission touches."""
        if key not in self._views:
            raise UnknownMemory(f"memory {key} is not attached")
        if any(submission.touches(key) for submission in self.waiting.values()):
            raise MemoryBusy(f"memory {key} is used by a copy in flight")
        self._views.pop(key).release()

    def submit(self, batches: Sequence[RangeBatch], *, urgent: bool = False) -> Ticket:
        """Queue a submission; it waits for the test."""
        if self._refusals:
            raise UnknownMemory(self._refusals.pop(0))
        check_batches(self._views, batches)
        submission = Submission(len(self.history) + 1, tuple(batches), urgent)
        self.history.append(submission)
        self.waiting[submission.ticket] = submission
        return submission.ticket

    def poll(self) -> list[Completion]:
        """Report what the test has completed."""
        finished, self._finished = self._finished, []
        return finished

    # The test's side.

    def complete(self, ticket: Ticket) -> None:
        """Copy the bytes of a submission now, whatever stands before it."""
        submission = self.waiting.pop(ticket)
        copy_batches(self._views, submission.batches)
        self._finished.append(Completion(ticket))

    def fail(self, ticket: Ticket, error: str = "injected") -> None:
        """End a submission with an error; its first range is copied, as hardware may do."""
        submission = self.waiting.pop(ticket)
        first = submission.batches[0]
        copy_batches(self._views, [first._replace(ranges=first.ranges[:1])])
        self._finished.append(Completion(ticket, error))

    def refuse_next(self, error: str = "injected") -> None:
        """Let the next `submit` raise."""
        self._refusals.append(error)

    def delay(self, ticket: Ticket, steps: int) -> None:
        """Let `step` pass a submission over so many times."""
        self._delayed[ticket] = steps

    def step(self, count: int = 1, *, newest_first: bool = False) -> int:
        """Complete up to `count` submissions in order (or in reverse); returns how many."""
        done = 0
        for ticket in sorted(self.waiting, reverse=newest_first):
            if done == count:
                break
            if self._delayed.get(ticket, 0) > 0:
                self._delayed[ticket] -= 1
                continue
            self.complete(ticket)
            done += 1
        return done

    def __repr__(self) -> str:
        return f"<FakeDevice {len(self._views)} memories, {len(self.waiting)} waiting>"


class FakePageDevice(FakeDevice):
    """A fake device that takes whole pages, too, and copies them range by range."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[list[PageBatch]] = []
        self.calm: list[bool] = []
        self.beside: list[bool] = []

    def submit_pages(
        self,
        batches: Sequence[PageBatch],
        *,
        urgent: bool = False,
        calm: bool = False,
        beside: bool = False,
    ) -> Ticket:
        """Queue a submission; it waits for the test."""
        ticket = self.submit([r for batch in batches for r in batch.ranges()], urgent=urgent)
        self.pages.append(list(batches))
        self.calm.append(calm)
        self.beside.append(beside)
        return ticket
