"""The tensors of SGLang's KV pool: which ones there are, and how their pages lie.

Owns what is known of SGLang's pool classes, of both dialects: which can be shared, and why the
others cannot. A pool that it does not know exactly is refused: a page of which a part stays behind
is a wrong page. It must never touch what is in a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from directory.core.errors import LayoutError
from transfer.layout import BufferLayout, PoolLayout, Role, buffer_from_tensor

MHA: Final = "MHATokenToKVPool"
MLA: Final = "MLATokenToKVPool"

REASONS: Final = (
    (r"Hybrid|Mamba|Linear", "state of layers without attention is not kept in pages"),
    (r"SWA|SlidingWindow", "sliding-window layers keep their pages in a pool of their own"),
    (r"DSA|NSA|IndexKey|Compress|V4|QSA", "its index keys do not lie in the pages of the KV"),
    (r"FP4|MXFP8|Quant", "its scales do not lie in the pages of the KV"),
    (r"PageMajor|PageInterleave|Unified", "its pages do not lie one behind the other in a tensor"),
    (r"NoOp", "it keeps no KV"),
    (r"HiSparse|Double", "it keeps a second pool beside"),
)
"""What a class of pool is known by, and what hinders: the first that fits is told."""

AXES: Final = {
    "nhd": ("slot", "head", "dim"),
    "hnd": ("page", "head", "token", "dim"),
}


class KvTensor(NamedTuple):
    """One layer's K, V or latent of a pool. `axes`: as in `buffer_from_tensor`."""

    role: Role
    layer: int
    tensor: torch.Tensor
    axes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from its first element to behind its last."""
        strides, sizes = self.tensor.stride(), self.tensor.size()
        spread = sum(stride * (size - 1) for stride, size in zip(strides, sizes, strict=True))
        return int((spread + 1) * self.tensor.element_size())


Where = Callable[[KvTensor], tuple[int, int]]
"""(allocation, byte offset in it) of a tensor's first element."""


def find_tensors(kvcache: Any) -> list[KvTensor]:
    """The tensors of a pool in host page order: by layer, K before V.

    Raises `LayoutError` with the reason for a pool that cannot be shared whole.
    """
    refuse_unsupported(kvcache)
    first = int(kvcache.start_layer)
    if type(kvcache).__name__ == MLA:
        return [
            KvTensor("kv", first + at, tensor, ("slot", "one", "latent"))
            for at, tensor in enumerate(kvcache.kv_buffer)
        ]
    axes = AXES[_kv_layout(kvcache)]
    found: list[KvTensor] = []
    for at, (k, v) in enumerate(zip(kvcache.k_buffer, kvcache.v_buffer, strict=True)):
        found.append(KvTensor("k", first + at, k, axes))
        found.append(KvTensor("v", first + at, v, axes))
    return found


def refuse_unsupported(kvcache: Any) -> None:
    """Raise `LayoutError` unless every byte of this pool's pages is known to lie in its tensors."""
    name = type(kvcache).__name__
    if name not in (MHA, MLA):
        why = next((why for known, why in REASONS if re.search(known, name)), "it is not known")
        raise LayoutError(f"SGLang's KV pool {name} cannot be shared: {why}; use {MHA} or {MLA}")
    for attribute, hindrance in (
        ("is_quantized_kv_cache", "the KV cache is quantised with scales of its own"),
        ("dsa_kv_cache_store_fp8", "the latents are packed with scales"),
        ("use_dsa", "its index keys do not lie in the pages of the KV"),
        ("enable_custom_mem_pool", "its memory is a custom pool's, for disaggregation"),
        ("post_capture_active", "its memory is sized after the capture of CUDA graphs"),
        ("layer_shard_enabled", "its layers are spread over ranks"),
        ("dcp_replicated", "its rows are spread over ranks of a context-parallel group"),
        ("k_scale_buffer", "its scales do not lie in the pages of the KV"),
        ("kv_scale_buffer", "its scales do not lie in the pages of the KV"),
    ):
        value = getattr(kvcache, attribute, None)
        if value is not None and value is not False:
            raise LayoutError(f"SGLang's KV pool {name} cannot be shared: {hindrance}")
    saver = getattr(kvcache, "memory_saver_adapter", None)
    if getattr(saver, "enabled", False):
        raise LayoutError(
            "SGLang's KV pool cannot be shared while --enable-memory-saver may take its memory "
            "away; leave that flag out"
        )
    if name == MHA and _kv_layout(kvcache) not in AXES:
        raise LayoutError(
            f"SGLang's KV layout {_kv_layout(kvcache)!r} cannot be shared; known are "
            f"{', '.join(AXES)}"
        )


def layout_of(
    tensors: Sequence[KvTensor],
    page_size: int,
    page_count: int,
    where: Where,
    allocation_bytes: tuple[int, ...],
) -> PoolLayout:
    """How the pages of these tensors lie. `page_size` in tokens; a tensor may be longer than
    `page_count` pages."""
    buffers: list[BufferLayout] = []
    for part in tensors:
        allocation, offset = where(part)
        shape = list(part.tensor.shape)
        for at, axis in enumerate(part.axes):
            if axis == "slot":
                shape[at] = min(shape[at], page_count * page_size)
        buffers.append(
            buffer_from_tensor(
                role=part.role,
                layer=part.layer,
                allocation=allocation,
                offset=offset,
                page_size=page_size,
                shape=shape,
                strides=part.tensor.stride(),
                itemsize=part.tensor.element_size(),
                axes=part.axes,
            )
        )
    return PoolLayout(page_size, page_count, tuple(buffers), allocation_bytes)


def _kv_layout(kvcache: Any) -> str:
    return str(getattr(kvcache, "kv_cache_layout", "nhd"))
