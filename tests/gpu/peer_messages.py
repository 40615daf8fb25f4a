"""What a GPU test says to a scheduler process, and what that answers. Frames of an FdChannel."""

from typing import Literal

import msgspec

from transfer.ipc.memory import MemoryHandle
from transfer.ipc.sync import SyncHandle
from transfer.layout import PoolLayout

POISON = 0xEE

LayoutKind = Literal["mha", "mha-one", "page-first", "mla", "mla-index"]
Memory = Literal["torch", "vmm"]
Sync = Literal["stream", "events", "host"]


class Create(msgspec.Struct, frozen=True, tag="create"):
    """Make and export a pool. `itemsize` 2 is bf16, 1 is fp8."""

    name: str
    layout: LayoutKind = "mha"
    layers: int = 3
    heads: int = 4
    head_dim: int = 64
    itemsize: int = 2
    page_size: int = 16
    page_count: int = 64
    memory: Memory = "torch"
    sync: Sync = "stream"


class Carve(msgspec.Struct, frozen=True, tag="carve"):
    """Make three pools (names) of one allocation, each of `page_count` pages of one buffer."""

    names: tuple[str, ...]
    page_count: int = 16


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Fill a pool: random bytes of a seed, or one byte value everywhere (seed < 0)."""

    name: str
    seed: int
    value: int = POISON


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Ask for pages (packed) as host pages, back to back."""

    name: str
    pages: bytes


class LateWrite(msgspec.Struct, frozen=True, tag="late_write"):
    """Queue a slow kernel and behind it a write of one byte value to pages; answer at once."""

    name: str
    pages: bytes
    value: int
    cycles: int
    current: bool = False


class Bump(msgspec.Struct, frozen=True, tag="bump"):
    """Bump a span word."""

    name: str
    slot: int


class WaitFor(msgspec.Struct, frozen=True, tag="wait_for"):
    """Let a stream wait for a timeline to reach a value; answer when the stream went on."""

    name: str
    index: int
    value: int
    deadline_s: float


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Queue a forward pass over pages (packed): each layer waits for its landing (unless told not
    to) and is then copied aside, as a kernel would read it. Answered at
    once by `Begun`; `Collect` brings what it read."""

    name: str
    pages: bytes
    deadline_s: float
    waits: bool = True


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """Wait for the forward pass to end; answered by `Forwarded`. `landed`: what the restore's
    answer was, None to say nothing of it."""

    name: str
    landed: bool | None


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Free a pool (all without a name) and give its memory back to the driver."""

    name: str = ""


class DropEvents(msgspec.Struct, frozen=True, tag="drop_events"):
    """Destroy the events of a pool and collect the garbage."""

    name: str


class ExportOdd(msgspec.Struct, frozen=True, tag="export_odd"):
    """Try to export a tensor that is sliced, expanded or permuted; say what came of it."""

    how: Literal["sliced", "expanded", "permuted", "other-device"]


class MemoryInfo(msgspec.Struct, frozen=True, tag="memory_info"):
    """Ask the driver how much memory is free."""


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    """End the process."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The process is up. `device`: UUID of the GPU that torch calls cuda:0."""

    device: str
    torch: str


class Pool(msgspec.Struct, frozen=True, tag="pool"):
    """A pool, for an import message; descriptors beside it."""

    name: str
    layout: PoolLayout
    handles: tuple[MemoryHandle, ...]
    sync: SyncHandle = SyncHandle()


class Pools(msgspec.Struct, frozen=True, tag="pools"):
    """Several pools; the descriptors of their tables, two each, beside it."""

    pools: tuple[Pool, ...]


class Content(msgspec.Struct, frozen=True, tag="content"):
    """Bytes of pages."""

    data: bytes


class Position(msgspec.Struct, frozen=True, tag="position"):
    """Values of the timelines (forward, current) at which something is done."""

    forward: int
    current: int


class Waited(msgspec.Struct, frozen=True, tag="waited"):
    """A stream went on after so long; `lost`: by the watchdog."""

    lost: bool
    seconds: float


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """A load began on a landing counter that stands at `first`."""

    counter: int
    first: int


class Forwarded(msgspec.Struct, frozen=True, tag="forwarded"):
    """What a forward pass read, as host pages back to back: their SHA-256, and how many bytes of
    them are still poison; which layers it went on without; whether it had ended before the answer
    was known; seconds from queue to end."""

    digest: bytes
    poisoned: int
    lost: tuple[bool, ...]
    early: bool
    seconds: float


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Bytes."""

    free: int
    total: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It was done."""

    detail: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A typed error."""

    code: str
    detail: str


ToPeer = (
    Create | Carve | Fill | Read | LateWrite | Bump | WaitFor | Forward | Collect | Drop
    | DropEvents | ExportOdd | MemoryInfo | Quit
)  # fmt: skip
FromPeer = (
    Hello | Pool | Pools | Content | Position | Waited | Begun | Forwarded | Free | Done | Failed
)
