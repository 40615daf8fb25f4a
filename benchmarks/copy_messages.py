"""What the copy benchmark says to its scheduler process, and what that answers (FdChannel frames).

Owns the shapes of the messages, nothing else.
"""

from __future__ import annotations

import msgspec

from transfer.ipc.memory import MemoryHandle


class MakeMemory(msgspec.Struct, frozen=True, tag="make"):
    """Make and export the memory of a pool: `buffers` allocations of `nbytes` each, made in the
    order that a real engine makes them (all K, then all V), and a timeline and a word table.

    Answered by `Memory`.
    """

    name: str
    buffers: int
    nbytes: int


class MakeSlab(msgspec.Struct, frozen=True, tag="make_slab"):
    """Make a staging slab for a memory in pages of a size, and serve its stage ring from now on.

    Answered by `Memory`: the slab's handle, and beside it its descriptor, if its kind has one, and
    those of ring and event.
    """

    name: str
    page_size: int
    nbytes: int


class StartSteps(msgspec.Struct, frozen=True, tag="start"):
    """Replay the decode-like step again and again from now on; answered by `Done`."""


class StopSteps(msgspec.Struct, frozen=True, tag="stop"):
    """Stop replaying; answered by `Steps`."""


class Fill(msgspec.Struct, frozen=True, tag="fill"):
    """Fill the memory of a pool with bytes that differ everywhere; answered by `Done`."""

    name: str
    seed: int


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """SHA-256 of chunks `rows` (packed u32) of `chunk_bytes` of every buffer, row by row in host
    page order; answered by `Digested`."""

    name: str
    chunk_bytes: int
    rows: bytes


class Quit(msgspec.Struct, frozen=True, tag="quit"):
    """End."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The process is up. `device`: UUID of its GPU, or "cpu"."""

    device: str
    versions: str = ""


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """Handles of the allocations in host page order (k0 v0 k1 v1 ...); beside it their
    descriptors, where their kind has one, then timelines and words."""

    handles: tuple[MemoryHandle, ...]


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """Microseconds of each step, float32."""

    times_us: bytes


class Digested(msgspec.Struct, frozen=True, tag="digested"):
    """A digest."""

    digest: bytes


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It was done."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """An error, in words."""

    detail: str


ToScheduler = MakeMemory | MakeSlab | StartSteps | StopSteps | Fill | Digest | Quit
FromScheduler = Hello | Memory | Steps | Digested | Done | Failed
