"""The GPU side of the copy benchmark's scheduler: torch memory, a decode-like CUDA graph, staging.

Owns torch tensors and the CUDA graph of a step. Pools are made as SGLang makes them: one tensor a
layer and role, all K before all V, in torch's caching allocator.
"""

from __future__ import annotations

import hashlib
from array import array
from itertools import pairwise
from typing import Any

import torch

from benchmarks import copy_messages as m
from benchmarks.copy_layouts import pool_layout
from benchmarks.copy_scheduler import LANDINGS_MADE, WORDS
from scheduler_shim.staging import Staging
from transfer.ipc.cuda_driver import Driver, load_api, visible_devices
from transfer.ipc.cuda_export import export_tensor
from transfer.ipc.cuda_staging import CudaSlab
from transfer.ipc.memory import MemoryHandle, SharedMemoryIPC
from transfer.ipc.stage_ring import STAGE_BELOW_BYTES
from transfer.ipc.sync import TimelineTable, WordTable

LAYERS, WIDTH, ROWS = 48, 4096, 16
QUEUED_STEPS_MAX = 3


class GpuSubstrate:
    """Implements `Substrate` on the first GPU that this process sees."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda:0")
        self.device = next(u for u, n in visible_devices(load_api()).items() if n == 0)
        self.versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        self._driver = Driver.open(self.device)
        self._ipc = SharedMemoryIPC()
        self._tensors: dict[str, list[Any]] = {}
        self._tables: dict[str, tuple[TimelineTable, WordTable]] = {}
        self._graph: Any = None
        self._events: list[Any] = []
        self._stagings: list[Staging] = []

    def make(self, request: m.MakeMemory) -> tuple[tuple[MemoryHandle, ...], list[int]]:
        """One tensor a buffer."""
        tensors: list[Any] = [None] * request.buffers
        for number in [*range(0, request.buffers, 2), *range(1, request.buffers, 2)]:
            tensors[number] = self._empty(request.nbytes)
        exported = [
            export_tensor(
                self._driver, data_ptr=t.data_ptr(), nbytes=t.numel(), shape=tuple(t.shape),
                strides=tuple(t.stride()), itemsize=1, device=self.device,
            )
            for t in tensors
        ]  # fmt: skip
        timelines = TimelineTable.create(self._ipc, "timelines", landings=LANDINGS_MADE)
        self._tensors[request.name] = tensors
        self._tables[request.name] = timelines, WordTable.create(self._ipc, "words", WORDS)
        return tuple(e.handle for e in exported), [fd for e in exported for fd in e.fds]

    def tables(self, name: str) -> tuple[TimelineTable, WordTable]:
        """The tables of a memory."""
        return self._tables[name]

    def fill(self, name: str, seed: int) -> None:
        """Random bytes."""
        generator = torch.Generator(device="cuda:0").manual_seed(seed)
        for tensor in self._tensors[name]:
            tensor.view(torch.int64).random_(generator=generator)
        torch.cuda.synchronize()

    def digest(self, request: m.Digest) -> bytes:
        """Read by torch, whatever wrote it."""
        rows = _rows(request.rows)
        views = [t.view(-1, request.chunk_bytes) for t in self._tensors[request.name]]
        pages = torch.cat([view.index_select(0, rows) for view in views], dim=1)
        return hashlib.sha256(pages.cpu().numpy().tobytes()).digest()

    def make_slab(self, request: m.MakeSlab) -> Staging:
        """As a scheduler's shim does, kernels of this very context."""
        tensors = self._tensors[request.name]
        layout = pool_layout(len(tensors), tensors[0].numel(), request.page_size)
        slab = CudaSlab(self._driver, layout, [t.data_ptr() for t in tensors], request.nbytes)
        return _begun(self._stagings, Staging(layout, slab))

    def step(self) -> None:
        """One replay, timed by events around it."""
        if self._graph is None:
            self._graph = _decode_like()
        if not self._events:
            self._events.append(_event())
        self._graph.replay()
        self._events.append(_event())
        if len(self._events) > QUEUED_STEPS_MAX:
            self._events[-QUEUED_STEPS_MAX].synchronize()

    def step_times_us(self) -> array[float]:
        """Between the events."""
        torch.cuda.synchronize()
        events, self._events = self._events, []
        return array("f", [start.elapsed_time(end) * 1000 for start, end in pairwise(events)])

    @staticmethod
    def _empty(nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda:0")


def _begun(stagings: list[Staging], staging: Staging) -> Staging:
    stagings.append(staging)
    staging.begin(STAGE_BELOW_BYTES)
    return staging


def _rows(packed: bytes) -> Any:
    rows = torch.frombuffer(bytearray(packed), dtype=torch.int32).long()
    return rows.pin_memory().to("cuda:0", non_blocking=True)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _decode_like() -> Any:
    """A graph of memory-bound matrix products: about 730 us alone on an H200."""
    weights = [
        torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda:0") / 64 for _ in range(LAYERS)
    ]
    given = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda:0")

    def forward() -> Any:
        x = given
        for weight in weights:
            x = torch.relu(x @ weight)
        return x

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = forward()
    graph.kept = kept, weights, given
    return graph
