"""SGLang's KV pool as the shim registers it: memory, layout, fingerprint, counters and names.

Owns everything of a pool that the daemon is handed, and nothing of SGLang's: its tensors stay
where SGLang looks for them. On a CPU their storage is moved into shared memory first, on a GPU
their memory is exported as it is. It must never be closed before the daemon has let go of it, or
the pages could be written while SGLang uses them for something else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch

from directory.core.errors import LayoutError, TransferError
from directory.core.ids import CURRENT, FORWARD
from directory.core.limits import FDS_PER_FRAME_MAX
from scheduler_shim.landings import Landings, Streams
from scheduler_shim.pools import TABLE_FDS, Allocator
from scheduler_shim.sglang.allocator import NamedAllocator
from scheduler_shim.sglang.buffers import KvTensor, find_tensors, layout_of
from scheduler_shim.sglang.fingerprint import fingerprint_of
from scheduler_shim.sglang.layer_counter import Layers
from scheduler_shim.sglang.names import PageNames
from scheduler_shim.sglang.shared_memory import SharedTensors
from scheduler_shim.staging import SlabMemory, Staging
from transfer.ipc.memory import MappingBusy, MemoryHandle, SharedMemoryIPC
from transfer.ipc.page_table import PageTable
from transfer.ipc.stage_ring import STAGE_BELOW_BYTES
from transfer.ipc.sync import TimelineTable, WordTable
from transfer.layout import PoolLayout

PAGE_TABLE_FDS = 1
STAGING_FDS = 3

log = logging.getLogger("treecored.pool")


class KvMemory(Protocol):
    """A pool's tensors as allocations that a mover can map."""

    @property
    def fds(self) -> list[int]:
        """Descriptors, one an allocation whose kind has one."""
        ...

    @property
    def handles(self) -> tuple[MemoryHandle, ...]:
        """One an allocation."""
        ...

    @property
    def allocation_bytes(self) -> tuple[int, ...]:
        """Usable size of each allocation."""
        ...

    def where(self, part: KvTensor) -> tuple[int, int]:
        """Allocation and byte offset of a tensor's first element."""
        ...

    def make_slab(self, layout: PoolLayout, nbytes: int) -> SlabMemory:
        """A staging slab beside them. Raises `TransferError` where it cannot be had."""
        ...

    def close(self) -> None:
        """Give back what was made for the export. Repeatable."""
        ...


class Signals(Protocol):
    """How timelines and the page table are written: by the CPU, or by a GPU's streams."""

    table: torch.Tensor
    """The page table as 32-bit integers, on the device of the pool."""

    @property
    def streams(self) -> Streams | None:
        """How streams wait for counters; None where no stream runs the forward pass."""
        ...

    def current_stream(self) -> int:
        """The stream that work is given to now."""
        ...

    def signal(self, index: int, value: int) -> None:
        """Let a timeline reach a value once all work queued for it now is done."""
        ...

    def close(self) -> None:
        """Give everything back but the tables. Repeatable."""
        ...


class CpuSignals:
    """Work on the CPU is done when it was called."""

    def __init__(self, timelines: TimelineTable, page_table: PageTable) -> None:
        self._timelines = timelines
        # A slice of the view: torch keeps the object alive, and while it lives nothing is unmapped.
        self.table = torch.frombuffer(
            page_table.mapping.view[:], dtype=torch.int32, count=len(page_table)
        )

    streams = None

    def current_stream(self) -> int:
        """There is none."""
        return 0

    def signal(self, index: int, value: int) -> None:
        """Write it."""
        self._timelines.write(index, value)

    def close(self) -> None:
        """The names keep a view of the table as long as they live."""


class SglangPool:
    """One scheduler's pool. Implements `Pool`."""

    named = True

    def __init__(
        self,
        kvcache: Any,
        allocator: Any,
        tensors: Sequence[KvTensor],
        memory: KvMemory,
        make_signals: Callable[[TimelineTable, PageTable], Signals],
        landings: int = 0,
        staging_bytes: int = 0,
    ) -> None:
        """Describe a pool; `of` and `over` are the ways to make one."""
        self.kvcache = kvcache
        self._slots = allocator
        self._memory = memory
        page_size = int(allocator.page_size)
        page_count = page_count_of(allocator)
        self.layout = layout_of(
            tensors, page_size, page_count, memory.where, memory.allocation_bytes
        )
        self.layout.check()
        most = FDS_PER_FRAME_MAX - TABLE_FDS - PAGE_TABLE_FDS - STAGING_FDS
        if len(memory.fds) > most:
            raise LayoutError(
                f"the KV pool lies in {len(memory.fds)} allocations with descriptors, at most "
                f"{most} can be handed over"
            )
        self._ipc = SharedMemoryIPC()
        self.timelines = TimelineTable.create(self._ipc, "treecored-timelines", landings=landings)
        self.words = WordTable.create(self._ipc, "treecored-words", page_count + 1)
        self.page_table = PageTable.create(self._ipc, "treecored-pages", page_count)
        self.signals = make_signals(self.timelines, self.page_table)
        self.names = PageNames(page_count, page_size, tensors[0].tensor.device, self.signals.table)
        self.staging = _staging(memory, self.layout, staging_bytes)
        self._staged = False  # in the present registration
        self._values = [0, 0]
        self._fingerprint = b""

    @classmethod
    def of(
        cls,
        context: Any,
        *,
        model_id: str = "",
        share_versions: bool = False,
        landings: int = 0,
        staging_bytes: int = 0,
    ) -> SglangPool:
        """The pool of a scheduler that is being built. `context`: its TreeCacheBuildContext;
        `model_id`, `share_versions`: as in `fingerprint_of`; `landings`: so many loads may land
        layer by layer at the same time; `staging_bytes`: of a staging slab (0: none).

        Raises `LayoutError` for a pool that cannot be shared and `TransferError` for memory that
        cannot.
        """
        allocator = context.params.token_to_kv_pool_allocator
        runner = context.tp_worker.model_runner
        forward_stream = getattr(runner, "forward_stream", None)
        on_gpu = torch.device(allocator.get_kvcache().device).type == "cuda"
        if on_gpu and forward_stream is None and not context.server_args.disable_overlap_schedule:
            raise LayoutError(
                "this SGLang does not say on which stream its forward passes run, so nobody can "
                "tell when a page is written; use --disable-overlap-schedule"
            )
        pool = cls.over(
            allocator,
            forward_stream=forward_stream,
            landings=landings,
            staging_bytes=staging_bytes,
        )
        pool._fingerprint = fingerprint_of(
            context, pool.kvcache, pool.layout, model_id=model_id, share_versions=share_versions
        ).encode()
        return pool

    @classmethod
    def over(
        cls,
        allocator: Any,
        *,
        forward_stream: Any = None,
        landings: int = 0,
        staging_bytes: int = 0,
    ) -> SglangPool:
        """The pool beneath SGLang's allocator, without a fingerprint yet. Errors as `of`."""
        kvcache = allocator.get_kvcache()
        tensors = find_tensors(kvcache)
        device = torch.device(kvcache.device)
        if device.type == "cpu":
            memory = SharedTensors(kvcache, tensors)
            return cls(kvcache, allocator, tensors, memory, CpuSignals, landings, staging_bytes)
        if device.type != "cuda":
            raise LayoutError(f"a KV pool on {device} cannot be shared; use cpu or cuda")
        # Imported here: a CPU's scheduler runs without CUDA's bindings.
        from scheduler_shim.sglang.cuda_pool import ExportedTensors, StreamSignals, uuid_of
        from transfer.ipc.cuda_driver import Driver

        device = tensors[0].tensor.device  # with its number
        driver = Driver.open(uuid_of(device))
        return cls(
            kvcache,
            allocator,
            tensors,
            ExportedTensors(driver, tensors),
            lambda timelines, pages: StreamSignals(
                driver, device, timelines, pages, forward_stream
            ),
            landings,
            staging_bytes,
        )

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.layout.page_size

    @property
    def page_count(self) -> int:
        """Pages of the layout: SGLang's first page, for dummy writes, counts."""
        return self.layout.page_count

    @property
    def page_bytes(self) -> int:
        """Bytes of a page over all buffers."""
        return self.layout.page_bytes

    @property
    def fingerprint(self) -> bytes:
        """What must agree before another pool's bytes are this pool's, in full."""
        return self._fingerprint

    @property
    def fds(self) -> list[int]:
        """Descriptors of a registration in order: allocations, timelines, words, page table, and
        what staging needs."""
        tables, staging = [self.timelines.fd, self.words.fd, self.page_table.fd], self._offered
        if staging is None:
            return [*self._memory.fds, *tables]
        return [*self._memory.fds, *staging.slab_fds, *tables, *staging.fds]

    def packed_layout(self) -> bytes:
        """The layout as it stands in a registration."""
        offered = self._offered
        return msgspec.msgpack.encode(self.layout if offered is None else offered.layout)

    def packed_handles(self) -> bytes:
        """The memory handles as they stand in a registration, one an allocation."""
        more = () if self._offered is None else (self._offered.handle,)
        return msgspec.msgpack.encode((*self._memory.handles, *more))

    def packed_sync(self) -> bytes:
        """The timelines say it all."""
        return b""

    def make_allocator(self) -> Allocator:
        """Names for what SGLang's allocator gives and takes."""
        return NamedAllocator(self.names, self._slots)

    def make_layers(self) -> Layers:
        """What loads that land layer by layer need of it; once, for a pool with `landings`."""
        streams = self.signals.streams
        return Layers(
            Landings(self.timelines, streams),
            len(self.layout.layers()),
            self.names.forget,
            self.signals.current_stream if streams is not None else None,
        )

    def now(self) -> tuple[int, int]:
        """Where the timelines stand (forward, current)."""
        return self.timelines.read(FORWARD), self.timelines.read(CURRENT)

    def advance(self) -> tuple[int, int]:
        """Let both timelines pass everything queued so far; returns the values that say so."""
        for index in (FORWARD, CURRENT):
            self._values[index] += 1
            self.signals.signal(index, self._values[index])
        return self._values[FORWARD], self._values[CURRENT]

    def begin_staging(self, below_bytes: int) -> bool:
        """Make a ring for the registration that follows, where there is a slab."""
        if self.staging is not None:
            self._staged = self.staging.begin(below_bytes)
        return self._staged

    @property
    def stage_requests(self) -> int:
        """So many times movers had pages packed or unpacked."""
        return self.staging.requests if self.staging is not None else 0

    @property
    def at_rest(self) -> bool:
        """Whether the stager is."""
        return self.staging is None or self.staging.at_rest

    def settle(self) -> None:
        """Wait for the stager."""
        if self.staging is not None:
            self.staging.settle()

    @property
    def _offered(self) -> Staging | None:
        return self.staging if self._staged else None

    def close(self) -> None:
        """Give back what was made for the daemon; SGLang keeps its tensors. Repeatable."""
        if self.staging is not None:
            self.staging.close()
        self.signals.close()
        self.timelines.close()
        self.words.close()
        try:
            self.page_table.close()
        except MappingBusy:
            pass  # names are still written into it; it goes with them
        self._memory.close()

    def __repr__(self) -> str:
        return f"<SglangPool {self.page_count} pages of {self.page_bytes} bytes>"


def _staging(memory: KvMemory, layout: PoolLayout, nbytes: int) -> Staging | None:
    """A slab, if one is wanted and pages are such that it helps; without it all works, too."""
    if not nbytes or min(b.chunk_bytes for b in layout.buffers) >= STAGE_BELOW_BYTES:
        return None
    try:
        return Staging(layout, memory.make_slab(layout, nbytes))
    except TransferError as error:
        log.warning("no staging slab, pages go as they lie: %s", error)
        return None


def page_count_of(allocator: Any) -> int:
    """Pages that SGLang's numbers reach: those that it allocates, and page 0 before them."""
    return int(allocator.size) // int(allocator.page_size) + 1
