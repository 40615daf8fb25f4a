"""The device seam: what the engine needs of whatever carries the bytes.

Owns the contract and its plain types; implementations are cpu (memory copies), fake (for tests)
and, on a GPU, cuda. The engine decides when and what, a device only how.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from directory.core.errors import TransferError, TreecoredError
from transfer.ipc.memory import Mapping
from transfer.pages import PageBatch
from transfer.plan import MemoryKey, RangeBatch

Ticket: TypeAlias = int
"""One submission, from 1 up; never used twice by a device."""


class MemoryBusy(TransferError):
    """A memory cannot be detached: a submitted copy may still touch it."""


class UnknownMemory(TransferError):
    """A batch names a memory that is not attached, or ranges beyond its end."""


class DeviceLost(TreecoredError):
    """The device can no longer say what it has done: only another process can go on.

    Raised by any method. Copies in flight may still touch their pages until this process is dead.
    It is no `TransferError`, because it is not one copy's or one pool's: whoever goes on after
    those must not go on after this.
    """


class Completion(NamedTuple):
    """A submission after which the device touches its ranges no more. `error`: empty if done."""

    ticket: Ticket
    error: str = ""


class Device(Protocol):
    """Carries bytes between attached memories.

    *Mutated*: only the target ranges of a submission, at any time between `submit` and its
    completion, in any order; on an error they hold anything. *Safe*: a completion without error
    means that all target bytes are in place and visible to every process that maps them, and that
    neither side is touched any more. With an error the bytes are lost, but neither side is
    touched any more either. *Order*: none between submissions; completions may come in any order,
    each ticket exactly once. *Raised*: `UnknownMemory` by `submit`, before anything is copied;
    `MemoryBusy` by `detach`; `DeviceLost` by any. No method waits for a copy of unbounded length.
    """

    @property
    def name(self) -> str:
        """UUID of a GPU, or the name of the implementation."""
        ...

    @property
    def in_flight(self) -> int:
        """Submissions whose completion `poll` has not returned yet."""
        ...

    def attach(self, key: MemoryKey, mapping: Mapping) -> None:
        """Make a memory known (and register it with the hardware). One mapping a key."""
        ...

    def detach(self, key: MemoryKey) -> None:
        """Forget a memory, after which its mapping may be closed."""
        ...

    def submit(self, batches: Sequence[RangeBatch], *, urgent: bool = False) -> Ticket:
        """Start copying; `urgent` submissions may overtake others."""
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call; never blocks."""
        ...


@runtime_checkable
class PageDevice(Protocol):
    """A device that also takes whole pages and chooses itself how their bytes go.

    As `submit` in all that it promises; a page that is not within its memories is `UnknownMemory`.
    """

    def submit_pages(
        self,
        batches: Sequence[PageBatch],
        *,
        urgent: bool = False,
        calm: bool = False,
        beside: bool = False,
    ) -> Ticket:
        """Start copying; `urgent` submissions may overtake others. `calm`: between GPUs the fastest
        way may be taken whatever else the device knows, for what computes there may wait. `beside`:
        what takes the processor long may be done by a thread, if there is one."""
        ...
