"""SGLang's own pools and allocators, small, and a context as its scheduler makes one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

HEADS, HEAD_DIM, LAYERS = 2, 8, 3


def mha(
    size: int, page_size: int, *, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> MHATokenToKVPool:
    """SGLang's pool of keys and values; `size` in tokens."""
    return MHATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=dtype,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        **more,
    )


def mla(size: int, page_size: int, *, dtype: torch.dtype = torch.bfloat16) -> MLATokenToKVPool:
    """SGLang's pool of latents; `size` in tokens."""
    return MLATokenToKVPool(
        size=size,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def allocator_of(kvcache: Any) -> Any:
    """SGLang's allocator over a pool."""
    if kvcache.page_size == 1:
        return TokenToKVPoolAllocator(kvcache.size, kvcache.dtype, "cpu", kvcache, need_sort=False)
    return PagedTokenToKVPoolAllocator(
        kvcache.size, kvcache.page_size, kvcache.dtype, "cpu", kvcache, need_sort=False
    )


def model_folder(folder: Path, *, weights: bytes = b"weights") -> Path:
    """A folder that looks like a model's."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Llama"]}))
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "README.md").write_text("not of the model")
    return folder


def context(allocator: Any, folder: Path, *, network: Any = None, **args: Any) -> Any:
    """What SGLang hands to a cache backend, as far as it is looked at."""
    given = {
        "model_path": str(folder),
        "revision": None,
        "load_format": "auto",
        "random_seed": 7,
        "torchao_config": "",
        "json_model_override_args": "{}",
        "model_loader_extra_config": "{}",
        "model_impl": "auto",
        "download_dir": None,
        **args,
    }
    dtype = given.pop("dtype", torch.bfloat16)
    quantization = given.pop("quantization", None)
    return SimpleNamespace(
        server_args=SimpleNamespace(**given),
        model_config=SimpleNamespace(
            model_path=given["model_path"], dtype=dtype, quantization=quantization
        ),
        params=SimpleNamespace(token_to_kv_pool_allocator=allocator, pp_size=1, pp_rank=0),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=network or torch.nn.Module())),
        tp_size=given.pop("tp_size", 1),
        tp_rank=given.pop("tp_rank", 0),
    )


def fill(kvcache: Any) -> None:
    """Give every element a value of its own."""
    for number, tensor in enumerate(tensors_of(kvcache)):
        values = torch.arange(tensor.numel(), dtype=torch.int64) + 1009 * number
        plain = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor
        plain.copy_((values % 30011).reshape(plain.shape))


def tensors_of(kvcache: Any) -> list[torch.Tensor]:
    """K0 V0 K1 V1 ..., or the latents of each layer."""
    if hasattr(kvcache, "kv_buffer"):
        return list(kvcache.kv_buffer)
    return [part for pair in zip(kvcache.k_buffer, kvcache.v_buffer, strict=True) for part in pair]


def host_page(kvcache: Any, page: int) -> bytes:
    """A page as it lies in the host tier, by SGLang's own slots."""
    size = kvcache.page_size
    parts = []
    for tensor in tensors_of(kvcache):
        rows = tensor[page * size : (page + 1) * size]
        parts.append(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(parts)
