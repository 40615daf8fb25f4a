"""What the torture's driver and its schedulers say to each other; frames of an FdChannel."""

import msgspec

from transfer.ipc.memory import MemoryHandle
from transfer.layout import PoolLayout

WORD_FACTOR = 0x9E37_79B9_7F4A_7C15
BUFFER_FACTOR = 0xC2B2_AE3D_27D4_EB4F
MASK = (1 << 64) - 1
LANDING_COUNTERS = 8
"""Loads of one pool that may land layer by layer at a time."""

Position = tuple[int, int]
"""Values of the timelines (forward, current)."""


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """A new generation of the scheduler's pool; descriptors: timelines, words (CPU: memory too)."""

    generation: int
    layout: PoolLayout
    handles: tuple[MemoryHandle, ...]
    staged: bool = False


class Published(msgspec.Struct, frozen=True, tag="published"):
    """A span: pages, what they contain, its word as reported, and when it is written."""

    generation: int
    slot: int
    word: int
    pages: tuple[int, ...]
    contents: tuple[int, ...]
    position: Position


class Targets(msgspec.Struct, frozen=True, tag="targets"):
    """Pages for a restore (none: there is no room), quiet from a position on."""

    token: int
    generation: int
    pages: tuple[int, ...]
    position: Position


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """What a restore had landed was looked at after all late writes: so many wrong pages."""

    token: int
    pages: int
    wrong: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The scheduler has nothing left to do. Counts of what it did."""

    counts: dict[str, int]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Ask for pages to restore into."""

    token: int
    pages: int


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """A restore is over; `contents` of its pages if it counts, else none."""

    token: int
    contents: tuple[int, ...]


class Unmapped(msgspec.Struct, frozen=True, tag="unmapped"):
    """Nobody but the scheduler maps a generation any more."""

    generation: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Publish no more; end when every restore is over."""


FromScheduler = Registered | Published | Targets | Checked | Ended
ToScheduler = Ask | Landed | Unmapped | Stop


def word_of(content: int, buffer: int) -> int:
    """The 8-byte word of which a page with this content is full in a buffer."""
    return (content * WORD_FACTOR + buffer * BUFFER_FACTOR) & MASK


def page_of(content: int, layout: PoolLayout) -> bytes:
    """A whole host page with this content."""
    return b"".join(
        word_of(content, number).to_bytes(8, "little") * (buffer.chunk_bytes // 8)
        for number, buffer in enumerate(layout.buffers)
    )
