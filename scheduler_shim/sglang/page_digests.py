"""Digests of pages, computed where the pages lie: by the engine's own device, on its own stream.

Owns the arithmetic and its order. A page's digest is two sums, modulo 2**64, of its 32-bit words
over all layers, K and V, each word times a weight of its place in the page; the weights of the two
sums are independent, and the same in every engine. Two pages that differ have equal sums with a
probability of at most 2**-33 for each, whatever the difference (a difference of two words has at
most 31 trailing zero bits, and the weights are drawn from all of 2**64): 2**-66 for both.

Digests are queued behind everything that was given to the forward stream and to the current one,
so behind the forward pass that writes the pages, and read nothing afterwards. On the way to the
host nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from scheduler_shim.sglang.buffers import KvTensor
from scheduler_shim.sglang.names import PageNames

SEED: Final = 0x74726565
AT_ONCE_BYTES: Final = 8 << 20
"""Pages are digested in portions of so many bytes; each needs about ten times that for a moment."""
SUMS: Final = 2


class PageDigests:
    """Those of one pool. Callable with packed names, as `checking.Digests` wants it.

    `forward_stream`: where forward passes run under the overlap schedule; None: on the current
    stream.
    """

    def __init__(
        self, tensors: Sequence[KvTensor], names: PageNames, forward_stream: Any = None
    ) -> None:
        self._tensors = tensors
        self._names = names
        self._stream = forward_stream
        draw = torch.Generator().manual_seed(SEED)
        low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        self._weights: list[torch.Tensor] = []
        self.page_bytes = 0
        for part in tensors:
            nbytes = part.tensor[:1].nbytes
            if part.axes[0] == "slot":
                nbytes *= names.page_size
            self.page_bytes += nbytes
            words = torch.randint(low, high, (SUMS, nbytes // 4), generator=draw)
            self._weights.append(words.to(names.device))

    def __call__(self, names: bytes) -> Now | Later:
        """Begin them, of the bytes as they are after everything queued so far."""
        device = self._names.device
        if device.type != "cuda":
            return Now(self._sums(self._names.slots(names)))
        current = torch.cuda.current_stream(device)
        slots = self._names.slots(names)
        stream = current
        if self._stream is not None:
            # As SGLang's scheduler has it before each forward pass, so nothing waits any longer.
            stream = self._stream
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            sums = self._sums(slots)
            there = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            there.copy_(sums, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        if stream is not current:
            slots.record_stream(stream)
        return Later(there, done)

    def _sums(self, slots: torch.Tensor) -> torch.Tensor:
        """int64 [n, 2] of the pages whose slots these are."""
        size = self._names.page_size
        portion = max(1, AT_ONCE_BYTES // max(1, self.page_bytes)) * size
        return torch.cat([self._sums_of(part) for part in slots.split(portion)])

    def _sums_of(self, slots: torch.Tensor) -> torch.Tensor:
        size = self._names.page_size
        count = slots.numel() // size
        found = torch.zeros((count, SUMS), dtype=torch.int64, device=slots.device)
        for part, weights in zip(self._tensors, self._weights, strict=True):
            index = slots if part.axes[0] == "slot" else slots[::size] // size
            bytes_ = part.tensor[index].reshape(count, -1).view(torch.uint8)
            words = bytes_.view(torch.int32).to(torch.int64)
            for number in range(SUMS):
                found[:, number] += (words * weights[number]).sum(1)
        return found

    def __repr__(self) -> str:
        return f"<PageDigests over {len(self._tensors)} tensors>"


class Now:
    """Digests that are there."""

    def __init__(self, sums: torch.Tensor) -> None:
        self._sums = sums

    def ready(self) -> bool:
        """They are."""
        return True

    def take(self) -> bytes:
        """16 bytes a page."""
        packed: bytes = self._sums.contiguous().view(torch.uint8).numpy().tobytes()
        return packed


class Later(Now):
    """Digests that a stream computes and copies to the host."""

    def __init__(self, sums: torch.Tensor, done: Any) -> None:
        super().__init__(sums)
        self._done = done

    def ready(self) -> bool:
        """Whether the stream got there."""
        return bool(self._done.query())

    def take(self) -> bytes:
        """Them, once the stream got there."""
        self._done.synchronize()
        return super().take()
