"""The CPU device: copies between host memories, at once, in the caller's thread.

Owns the views of the attached memories. A submission is copied inside `submit` and reported by
the next `poll`, so that the engine treats it like any other device; slices bound how long one
call takes.
"""

from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from operator import itemgetter

from transfer.device.protocol import Completion, MemoryBusy, Ticket, UnknownMemory
from transfer.ipc.memory import Mapping, SharedMapping
from transfer.plan import MemoryKey, RangeBatch

_nbytes = itemgetter(2)


class CpuDevice:
    """Implements `Device` for memory that this process maps."""

    name = "cpu"

    def __init__(self) -> None:
        self._views: dict[MemoryKey, memoryview] = {}
        self._finished: list[Completion] = []
        self._last_ticket = 0

    @property
    def in_flight(self) -> int:
        """Submissions that `poll` has not reported."""
        return len(self._finished)

    def attach(self, key: MemoryKey, mapping: Mapping) -> None:
        """Take a slice of the mapping's view, which keeps it from being closed."""
        attach_view(self._views, key, mapping)

    def detach(self, key: MemoryKey) -> None:
        """Release the slice."""
        if key not in self._views:
            raise UnknownMemory(f"memory {key} is not attached")
        self._views.pop(key).release()

    def submit(self, batches: Sequence[RangeBatch], *, urgent: bool = False) -> Ticket:
        """Copy now."""
        del urgent  # there is no queue that could be overtaken
        check_batches(self._views, batches)
        copy_batches(self._views, batches)
        self._last_ticket += 1
        self._finished.append(Completion(self._last_ticket))
        return self._last_ticket

    def poll(self) -> list[Completion]:
        """Report what `submit` has copied."""
        finished, self._finished = self._finished, []
        return finished

    def __repr__(self) -> str:
        return f"<CpuDevice {len(self._views)} memories, {self.in_flight} in flight>"


def attach_view(views: dict[MemoryKey, memoryview], key: MemoryKey, mapping: Mapping) -> None:
    """Add a view of a host mapping to a table of attached memories."""
    if key in views:
        raise MemoryBusy(f"memory {key} is attached already")
    if not isinstance(mapping, SharedMapping):
        raise UnknownMemory(f"memory {key} is not host memory")
    views[key] = mapping.view[:]


def check_batches(views: MappingOf[MemoryKey, memoryview], batches: Sequence[RangeBatch]) -> None:
    """Raise `UnknownMemory` unless every range lies within two attached memories."""
    for batch in batches:
        for key in (batch.source, batch.target):
            if key not in views:
                raise UnknownMemory(f"memory {key} is not attached")
        # A slice of a view beyond its end is silently short, so the ends are looked at first.
        for side, key in ((0, batch.source), (1, batch.target)):
            size = len(views[key])
            # Where ranges are equally long, which is the usual case, this bound is exact.
            if max(map(itemgetter(side), batch.ranges)) + max(map(_nbytes, batch.ranges)) <= size:
                continue
            end = max(r[side] + r[2] for r in batch.ranges)
            if end > size:
                raise UnknownMemory(f"a range reaches byte {end} of {key}, which has {size}")


def copy_batches(views: MappingOf[MemoryKey, memoryview], batches: Sequence[RangeBatch]) -> None:
    """Copy checked batches."""
    for batch in batches:
        source = views[batch.source]
        target = views[batch.target]
        for source_start, target_start, nbytes in batch.ranges:
            target[target_start : target_start + nbytes] = source[
                source_start : source_start + nbytes
            ]
