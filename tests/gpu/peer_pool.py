"""Pools of the scheduler process of GPU tests: tensors, layouts, exports, and late writes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from directory.core.errors import TreecoredError
from directory.core.ids import CURRENT, FORWARD
from tests.gpu import peer_messages as m
from tests.gpu.peer_forward import Forwarding
from transfer.ipc.cuda_driver import Driver
from transfer.ipc.cuda_events import EventTimelines
from transfer.ipc.cuda_export import Exported, VmmAllocation, export_tensor
from transfer.ipc.cuda_sync import CudaTimelines, HostTimelines, ProducerTimelines
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import SyncHandle, TimelineTable, WordTable
from transfer.layout import (
    PoolLayout,
    buffer_from_tensor,
    mha_layer_first,
    mla,
    page_first,
)

DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16}
WORDS = 4096
LANDING_COUNTERS = 4
INDEX_BYTES = 132


class ForeignArray:
    """Memory that torch did not allocate, in the form that `torch.as_tensor` takes."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class PeerPool:
    """One pool: tensors, tables, streams."""

    def __init__(
        self,
        driver: Driver,
        name: str,
        layout: PoolLayout,
        tensors: Sequence[Any],
        exported: Sequence[Exported],
        sync: m.Sync,
        owned: Sequence[VmmAllocation] = (),
    ) -> None:
        self.name = name
        self.layout = layout
        self._tensors = list(tensors)
        self._exported = list(exported)
        self._owned = owned
        self._driver = driver
        ipc = SharedMemoryIPC()
        self.timelines = TimelineTable.create(
            ipc, "timelines", EventTimelines.table_counters(), landings=LANDING_COUNTERS
        )
        self.words = WordTable.create(ipc, "words", WORDS)
        self._sync_kind = sync
        self._producer: ProducerTimelines | None = self._make_producer()
        self.forward, self.current = torch.cuda.Stream(), torch.cuda.Stream()
        self._values = [0, 0]
        self._forwarding: Forwarding | None = None

    @classmethod
    def create(cls, driver: Driver, request: m.Create) -> "PeerPool":
        """Make the tensors of a layout and export each."""
        layout = layout_of(request)
        owned = []
        tensors = []
        exported = []
        for nbytes in layout.allocation_bytes:
            if request.memory == "vmm":
                owned.append(VmmAllocation(driver, nbytes))
                tensor = torch.as_tensor(ForeignArray(owned[-1].address, nbytes), device="cuda:0")
                exported.append(owned[-1].export())
            else:
                dtype = DTYPES[request.itemsize]
                tensor = torch.empty(nbytes // request.itemsize, dtype=dtype, device="cuda:0")
                exported.append(export(driver, tensor))
            tensors.append(tensor.view(torch.uint8))
        return cls(driver, request.name, layout, tensors, exported, request.sync, owned)

    @property
    def fds(self) -> list[int]:
        """Descriptors of an import: allocations, timelines, words."""
        return [*(fd for e in self._exported for fd in e.fds), self.timelines.fd, self.words.fd]

    def describe(self) -> m.Pool:
        """The pool as a message."""
        sync = SyncHandle()
        if isinstance(self._producer, EventTimelines):
            sync = self._producer.handle()
        return m.Pool(self.name, self.layout, tuple(e.handle for e in self._exported), sync)

    def close_sent(self) -> None:
        """Close the descriptors that were sent."""
        for _, fds in self._exported:
            for fd in fds:
                os.close(fd)
        self._exported.clear()

    def fill(self, seed: int, value: int) -> None:
        """Random bytes of a seed, or one value."""
        generator = torch.Generator(device="cuda:0").manual_seed(max(seed, 0))
        for tensor in self._tensors:
            if seed < 0:
                tensor.fill_(value)
            else:
                tensor.random_(0, 256, generator=generator)
        torch.cuda.synchronize()

    def read(self, pages: bytes) -> bytes:
        """Pages as host pages, read by torch on the device."""
        rows = torch.frombuffer(bytearray(pages), dtype=torch.int32).to("cuda:0")
        pieces = [view.index_select(0, rows) for view in self._views()]
        return bytes(torch.cat(pieces, dim=1).cpu().numpy().tobytes())

    def late_write(self, request: m.LateWrite) -> m.Position:
        """Queue the sleep and the write on one stream, then a signal on each."""
        assert self._producer is not None
        stream = self.current if request.current else self.forward
        rows = torch.frombuffer(bytearray(request.pages), dtype=torch.int32)
        with torch.cuda.stream(stream):
            on_device = rows.pin_memory().to("cuda:0", non_blocking=True)
            torch.cuda._sleep(request.cycles)
            for view in self._views():
                view.index_fill_(0, on_device.long(), request.value)
        for index, lane in ((FORWARD, self.forward), (CURRENT, self.current)):
            self._values[index] += 1
            self._producer.signal(lane.cuda_stream, index, self._values[index])
        return m.Position(*self._values)

    @contextmanager
    def unregistered(self) -> Iterator[None]:
        """Let somebody else register the timelines for a while."""
        assert self._producer is not None
        self._producer.close()
        try:
            yield
        finally:
            self._producer = self._make_producer()

    def begin_forward(self, request: m.Forward) -> m.Begun:
        """Queue a forward pass that waits for its layers."""
        if self._forwarding is None:
            assert isinstance(self._producer, CudaTimelines)
            self._forwarding = Forwarding(
                self._driver, self.timelines, self._producer.registered, self.layout
            )
        return self._forwarding.begin(request, self._views())

    def collect_forward(self, request: m.Collect) -> m.Forwarded:
        """What the forward pass read."""
        assert self._forwarding is not None
        return self._forwarding.collect(request)

    def drop_events(self) -> None:
        """Destroy the events, if there are any."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def close(self) -> None:
        """Free everything."""
        if self._forwarding is not None:
            self._forwarding.close()
        torch.cuda.synchronize()
        self.drop_events()
        self._tensors.clear()
        self.close_sent()
        for allocation in self._owned:
            allocation.close()
        self.timelines.close()
        self.words.close()

    def _make_producer(self) -> ProducerTimelines:
        if self._sync_kind == "events":
            return EventTimelines(self._driver, self.timelines)
        if self._sync_kind == "host":
            return HostTimelines(self._driver, self.timelines)
        return CudaTimelines(self._driver, self.timelines)

    def _views(self) -> list[Any]:
        return [
            tensor.as_strided(
                (self.layout.page_count, b.chunk_bytes),
                (b.page_stride, 1),
                tensor.storage_offset() + b.offset,
            )
            for b in self.layout.buffers
            for tensor in (self._tensors[b.allocation],)
        ]


def layout_of(request: m.Create) -> PoolLayout:
    """The layout that a request names."""
    sizes: dict[str, Any] = {
        "layers": request.layers,
        "page_size": request.page_size,
        "page_count": request.page_count,
    }
    if request.layout in ("mla", "mla-index"):
        return mla(
            **sizes,
            latent_dim=request.heads * request.head_dim,
            itemsize=request.itemsize,
            index_bytes_per_token=INDEX_BYTES if request.layout == "mla-index" else 0,
        )
    form: dict[str, Any] = {
        "heads": request.heads,
        "head_dim": request.head_dim,
        "itemsize": request.itemsize,
    }
    if request.layout == "page-first":
        return page_first(**sizes, **form)
    return mha_layer_first(**sizes, **form, separate=request.layout == "mha")


def export(driver: Driver, tensor: Any, device: str = "") -> Exported:
    """Export a tensor as it is."""
    return export_tensor(
        driver,
        data_ptr=tensor.data_ptr(),
        nbytes=tensor.numel() * tensor.element_size(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        itemsize=tensor.element_size(),
        device=device or driver.uuid,
    )


def carve(driver: Driver, request: m.Carve) -> list[PeerPool]:
    """Pools of one allocation: K, V and a side pool."""
    page_bytes, count = 4096, request.page_count
    whole = torch.zeros(len(request.names) * count * page_bytes, dtype=torch.uint8, device="cuda:0")
    pools = []
    for number, name in enumerate(request.names):
        part = whole[number * count * page_bytes :][: count * page_bytes].view(count, page_bytes)
        buffer = buffer_from_tensor(
            role="index", layer=0, allocation=0, offset=0, page_size=1, shape=part.shape,
            strides=part.stride(), itemsize=1, axes=("page", "byte"),
        )  # fmt: skip
        layout = PoolLayout(1, count, (buffer,), (count * page_bytes,))
        flat = part.view(-1)
        pools.append(PeerPool(driver, name, layout, [flat], [export(driver, part)], "stream"))
    return pools


def export_odd(driver: Driver, how: str) -> m.Done | m.Failed:
    """Try to export what may not be exportable."""
    whole = torch.zeros((64, 8, 32), dtype=torch.bfloat16, device="cuda:0")
    odd = {
        "sliced": whole[:, :4],
        "expanded": whole[:, :1].expand(64, 8, 32),
        "permuted": whole.permute(1, 0, 2),
        "other-device": whole,
    }[how]
    elsewhere = "GPU-00000000-0000-0000-0000-000000000000" if how == "other-device" else ""
    try:
        exported = export(driver, odd, elsewhere)
    except TreecoredError as error:
        return m.Failed(error.code, str(error))
    return m.Done(str(exported.handle.nbytes))
