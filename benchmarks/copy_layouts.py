"""Layouts of the copy benchmark's pools: one memory, seen in pages of several sizes. Pure."""

from __future__ import annotations

from transfer.layout import BufferLayout, PoolLayout

TOKEN_BYTES = 2048
"""Of one token in one buffer: 8 heads of 128 bf16 values, as an 8B model has them."""


def pool_layout(buffers: int, buffer_bytes: int, page_size: int) -> PoolLayout:
    """K and V of each layer, each an allocation of its own, seen in pages of a size."""
    chunk = page_size * TOKEN_BYTES
    specs = tuple(
        BufferLayout("v" if n % 2 else "k", n // 2, n, 0, chunk, chunk, "bytes")
        for n in range(buffers)
    )
    return PoolLayout(page_size, buffer_bytes // chunk, specs, (buffer_bytes,) * buffers)
