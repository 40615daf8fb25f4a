"""Registrations: what a scheduler hands over of its pool, checked before anything is done with it.

Owns the descriptors of one pool in the control process: they are kept while the pool lives, so
that a new mover can import it, and closed exactly once. It must never map the memory itself.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from directory.core import limits
from directory.core.errors import BadMessage, TooLarge
from directory.core.events import PoolRegistered
from directory.protocol.messages import Register
from transfer.imports import STAGE_FDS, TABLE_FDS
from transfer.ipc.channel import close_fds
from transfer.ipc.memory import MemoryHandle
from transfer.ipc.sync import SyncHandle
from transfer.layout import PoolLayout
from transfer.mover_handle import TIMELINE

Handles = Annotated[tuple[MemoryHandle, ...], msgspec.Meta(max_length=limits.BUFFERS_PER_POOL_MAX)]

_layouts = msgspec.msgpack.Decoder(PoolLayout)
_syncs = msgspec.msgpack.Decoder(SyncHandle)
_handles: msgspec.msgpack.Decoder[tuple[MemoryHandle, ...]] = msgspec.msgpack.Decoder(Handles)


class Registration:
    """One pool as its scheduler described it. `fds`: allocations, tables, what staging needs;
    `sync`: how its timelines are to be read."""

    def __init__(
        self,
        message: Register,
        layout: PoolLayout,
        handles: tuple[MemoryHandle, ...],
        fds: Sequence[int],
        sync: SyncHandle = TIMELINE,
    ) -> None:
        self.message = message
        self.layout = layout
        self.handles = handles
        self.fds = list(fds)
        self.sync = sync

    @classmethod
    def read(cls, message: Register, fds: Sequence[int]) -> "Registration":
        """Decode and check a Register message; the descriptors become the result's.

        Raises a typed error, and then the descriptors stay the caller's.
        """
        if not 0 < len(message.fingerprint) <= limits.FINGERPRINT_BYTES_MAX:
            raise BadMessage(f"a fingerprint has 1 to {limits.FINGERPRINT_BYTES_MAX} bytes")
        try:
            layout = _layouts.decode(message.layout)
            handles = _handles.decode(message.handles)
            sync = _syncs.decode(message.sync) if message.sync else TIMELINE
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadMessage(
                f"the pool's layout, handles or sync cannot be decoded: {error}"
            ) from None
        layout.check()
        if layout.page_bytes > limits.MESSAGE_BYTES_MAX:
            raise TooLarge(
                f"a page of {layout.page_bytes} bytes, at most {limits.MESSAGE_BYTES_MAX}"
            )
        if len(fds) < TABLE_FDS + message.page_table + STAGE_FDS * message.staging:
            raise BadMessage(
                f"{len(fds)} descriptors came with the pool; those of the timelines, of the words, "
                "and of a page table and a stage ring that it announces must come with it"
            )
        return cls(message, layout, handles, fds, sync)

    def event(self, token: int, now_us: int) -> PoolRegistered:
        """The event that asks the directory to take the pool in."""
        return PoolRegistered(
            token,
            now_us,
            self.message.instance,
            self.message.fingerprint,
            self.layout.page_size,
            self.layout.page_count,
            self.layout.page_bytes,
            self.message.mode,
            self.message.world_size,
            self.message.rank,
        )

    def close(self) -> None:
        """Close the descriptors. Repeatable."""
        close_fds(self.fds)
        self.fds.clear()

    def __repr__(self) -> str:
        return f"<Registration {self.message.instance!r}, {len(self.fds)} descriptors>"
