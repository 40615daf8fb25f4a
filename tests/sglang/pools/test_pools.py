"""SGLang's pools as they are registered: whole, exact, and refused where they cannot be."""

from __future__ import annotations

import gc
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

import torch

from directory.core.errors import LayoutError, TransferError
from scheduler_shim.sglang import buffers
from scheduler_shim.sglang.pools import SglangPool
from scheduler_shim.sglang.shared_memory import SharedTensors
from tests.sglang.pools import support
from transfer.imports import ImportedPool
from transfer.ipc.memory import MemoryHandle, SharedMemoryIPC
from transfer.layout import PoolLayout

pytestmark = pytest.mark.sglang

MAKERS = {"mha": support.mha, "mla": support.mla}


def register(kvcache: Any, folder: Path) -> tuple[SglangPool, Any]:
    """A pool over a KV cache and its allocator."""
    allocator = support.allocator_of(kvcache)
    return SglangPool.of(support.context(allocator, support.model_folder(folder))), allocator


def import_as_a_mover(pool: SglangPool) -> ImportedPool:
    """Import what the pool registers, as it travels."""
    ipc = SharedMemoryIPC()
    return ImportedPool.open(
        1,
        msgspec.msgpack.decode(pool.packed_layout(), type=PoolLayout),
        msgspec.msgpack.decode(pool.packed_handles(), type=tuple[MemoryHandle, ...]),
        pool.fds,
        memory=ipc,
        tables=ipc,
        page_table=pool.named,
    )


def mapped_page(imported: ImportedPool, page: int) -> bytes:
    """A page as the mover finds it."""
    parts = []
    for buffer in imported.layout.buffers:
        view = imported.mappings[buffer.allocation].view  # type: ignore[attr-defined]
        at = buffer.offset + page * buffer.page_stride
        parts.append(bytes(view[at : at + buffer.chunk_bytes]))
    return b"".join(parts)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_mover_sees_every_page_as_sglang_does(tmp_path: Path, kind: str, page_size: int) -> None:
    kvcache = MAKERS[kind](4 * page_size, page_size)
    support.fill(kvcache)
    before = [support.host_page(kvcache, page) for page in range(5)]
    pool, _ = register(kvcache, tmp_path / "model")
    assert [support.host_page(kvcache, page) for page in range(5)] == before, "contents moved along"
    imported = import_as_a_mover(pool)
    assert (pool.page_count, pool.page_size) == (5, page_size)
    assert pool.page_bytes == len(before[0])
    assert [mapped_page(imported, page) for page in range(5)] == before
    support.tensors_of(kvcache)[-1].zero_()
    after = [support.host_page(kvcache, page) for page in range(5)]
    assert after != before
    assert [mapped_page(imported, page) for page in range(5)] == after
    imported.close()
    pool.close()


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_whoever_holds_a_tensor_of_the_pool_sees_the_shared_memory(
    tmp_path: Path, kind: str
) -> None:
    kvcache = MAKERS[kind](32, 16)
    kept = support.tensors_of(kvcache)
    register(kvcache, tmp_path / "model")
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in support.tensors_of(kvcache)]
    slots = torch.arange(16, 32)
    value = torch.ones(16, *kept[0].shape[1:], dtype=kept[0].dtype)
    kept[0][slots] = value
    assert torch.equal(support.tensors_of(kvcache)[0][slots], value)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pointer_tables_point_into_the_shared_memory(tmp_path: Path, kind: str) -> None:
    kvcache = MAKERS[kind](32, 16)
    register(kvcache, tmp_path / "model")
    if kind == "mla":
        assert kvcache.data_ptrs.tolist() == [t.data_ptr() for t in kvcache.kv_buffer]
        return
    keys, values = ([t.data_ptr() for t in part] for part in (kvcache.k_buffer, kvcache.v_buffer))
    assert kvcache.k_data_ptrs.tolist() == keys
    assert kvcache.v_data_ptrs.tolist() == values
    assert kvcache.data_ptrs.tolist() == keys + values


def test_sglangs_own_writes_and_moves_reach_the_shared_memory(tmp_path: Path) -> None:
    kvcache = support.mha(64, 16)
    pool, allocator = register(kvcache, tmp_path / "model")
    imported = import_as_a_mover(pool)
    slots = allocator.alloc(16)
    k = torch.randn(16, support.HEADS, support.HEAD_DIM, dtype=torch.bfloat16)
    for layer in range(support.LAYERS):
        kvcache.k_buffer[layer][slots] = k + layer
        kvcache.v_buffer[layer][slots] = k - layer
    page = int(slots[0]) // 16
    assert mapped_page(imported, page) == support.host_page(kvcache, page)
    assert kvcache.get_key_buffer(0).data_ptr() == kvcache.k_buffer[0].data_ptr()


def test_a_hidden_view_of_the_old_memory_is_found_and_the_pool_refused(tmp_path: Path) -> None:
    kvcache = support.mha(32, 16)
    hidden = kvcache.k_buffer[0][3:]
    with pytest.raises(TransferError, match="holds a view"):
        register(kvcache, tmp_path / "model")
    del hidden


def test_two_pools_do_not_share_memory(tmp_path: Path) -> None:
    pools = [register(support.mha(32, 16), tmp_path / name)[0] for name in "ab"]
    assert len({pool.page_table.mapping.identity for pool in pools}) == 2
    assert pools[0].kvcache.k_buffer[0].data_ptr() != pools[1].kvcache.k_buffer[0].data_ptr()


def test_an_fp8_pool_is_shared_as_the_bytes_that_it_is(tmp_path: Path) -> None:
    kvcache = support.mha(32, 16, dtype=torch.float8_e4m3fn)
    pool, _ = register(kvcache, tmp_path / "model")
    assert pool.page_bytes == 2 * support.LAYERS * 16 * support.HEADS * support.HEAD_DIM
    assert b'"kv_dtype":"float8_e4m3fn"' in pool.fingerprint


def test_the_page_table_that_a_mover_reads_is_written_by_naming(tmp_path: Path) -> None:
    pool, _ = register(support.mha(64, 16), tmp_path / "model")
    imported = import_as_a_mover(pool)
    assert imported.page_table is not None
    allocator = pool.make_allocator()
    first = allocator.allocate(3)
    assert first is not None
    allocator.free(first[:2])
    second = allocator.allocate(1)
    assert second is not None
    both = array("I", [first[2], second[0]])
    pages = array("I")
    pages.frombytes(imported.page_table.translate(both.tobytes()))
    assert list(pages) == pool.names.pages(both).tolist()
    imported.close()


def test_timelines_pass_what_was_written_before(tmp_path: Path) -> None:
    pool, _ = register(support.mha(32, 16), tmp_path / "model")
    imported = import_as_a_mover(pool)
    assert (pool.now(), pool.advance(), pool.now()) == ((0, 0), (1, 1), (1, 1))
    assert (imported.timelines.read(0), imported.timelines.read(1)) == (1, 1)
    imported.close()


def test_layers_are_numbered_as_in_the_model(tmp_path: Path) -> None:
    pool, _ = register(support.mha(32, 16, start_layer=4, end_layer=6), tmp_path / "model")
    assert [buffer.layer for buffer in pool.layout.buffers] == [4, 4, 5, 5, 6, 6]
    assert [buffer.role for buffer in pool.layout.buffers] == ["k", "v"] * 3


def test_a_closed_pool_leaves_sglang_its_tensors(tmp_path: Path) -> None:
    kvcache = support.mha(32, 16)
    pool, _ = register(kvcache, tmp_path / "model")
    pool.close()
    pool.close()
    del pool
    gc.collect()
    support.fill(kvcache)
    assert kvcache.k_buffer[0].float().abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("HybridLinearKVPool", "without attention"),
        ("SWAKVPool", "sliding-window"),
        ("DSATokenToKVPool", "index keys"),
        ("MHATokenToKVPoolFP4", "its scales"),
        ("MHATokenToKVPoolMXFP8", "its scales"),
        ("PageMajorMHATokenToKVPool", "one behind the other"),
        ("NoOpMHATokenToKVPool", "keeps no KV"),
        ("HiSparseTokenToKVPool", "second pool"),
        ("SomebodysPool", "not known"),
    ],
)
def test_a_pool_of_which_a_part_would_stay_behind_is_refused_with_the_reason(
    name: str, why: str
) -> None:
    with pytest.raises(LayoutError, match=f"{name} cannot be shared: .*{why}"):
        buffers.find_tensors(type(name, (), {})())


@pytest.mark.parametrize(
    ("attribute", "why"),
    [
        ("is_quantized_kv_cache", "quantised"),
        ("use_dsa", "index keys"),
        ("enable_custom_mem_pool", "disaggregation"),
        ("post_capture_active", "CUDA graphs"),
        ("k_scale_buffer", "scales"),
        ("layer_shard_enabled", "spread"),
    ],
)
def test_a_known_pool_in_an_unknown_state_is_refused(attribute: str, why: str) -> None:
    kvcache = type(buffers.MHA, (), {attribute: [1]})()
    with pytest.raises(LayoutError, match=why):
        buffers.find_tensors(kvcache)


def test_memory_that_may_be_taken_away_is_refused() -> None:
    saver = type("Saver", (), {"enabled": True})()
    kvcache = type(buffers.MHA, (), {"memory_saver_adapter": saver})()
    with pytest.raises(LayoutError, match="leave that flag out"):
        buffers.find_tensors(kvcache)


def test_a_layout_of_rows_that_is_not_known_is_refused() -> None:
    kvcache = type(buffers.MHA, (), {"kv_cache_layout": "vectorized_5d"})()
    with pytest.raises(LayoutError, match="vectorized_5d"):
        buffers.find_tensors(kvcache)


def test_every_class_of_pool_that_sglang_has_is_either_known_or_refused_with_a_reason() -> None:
    from sglang.srt.mem_cache import memory_pool

    classes = {
        name
        for name, found in vars(memory_pool).items()
        if isinstance(found, type) and issubclass(found, memory_pool.KVCache)
    }
    for name in classes - {buffers.MHA, buffers.MLA, "KVCache"}:
        with pytest.raises(LayoutError, match="cannot be shared"):
            buffers.find_tensors(type(name, (), {})())


def test_heads_before_tokens_is_another_form_and_lies_right(tmp_path: Path) -> None:
    kvcache = support.mha(32, 16)
    pool, _ = register(kvcache, tmp_path / "plain")
    pages = [torch.zeros(3, support.HEADS, 16, support.HEAD_DIM) for _ in range(2)]
    parts = [buffers.KvTensor("k", 0, pages[0], buffers.AXES["hnd"])]
    memory = SharedTensors(object.__new__(type("Holder", (), {})), parts)
    layout = buffers.layout_of(parts, 16, 3, memory.where, memory.allocation_bytes)
    layout.check()
    assert layout.buffers[0].form != pool.layout.buffers[0].form
    assert layout.buffers[0].chunk_bytes == support.HEADS * 16 * support.HEAD_DIM * 4
