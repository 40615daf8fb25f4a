"""SGLang's KV pool on a GPU as the shim registers it: exported as it is, pages named by streams.

SGLang itself is not needed: a stand-in has the tensors and the allocator that its classes have.
"""

import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from directory.core.actions import Fence
from directory.core.ids import CURRENT, FORWARD, HOST
from tests.gpu.support import CYCLES_PER_MS, Rig
from transfer.messages import Imported

torch = pytest.importorskip("torch", reason="torch is not installed in this environment")

LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 3, 2, 64, 16, 33
BUSY_MS = 300


class Slots:
    """What is used of SGLang's paged allocator."""

    def __init__(self, kvcache: Any) -> None:
        self.size, self.page_size, self._kvcache = kvcache.size, PAGE_SIZE, kvcache
        self.free_pages = torch.arange(1, PAGES, device="cuda")

    def get_kvcache(self) -> Any:
        return self._kvcache

    def available_size(self) -> int:
        return len(self.free_pages) * PAGE_SIZE

    def alloc(self, need_size: int) -> Any:
        pages, self.free_pages = self.free_pages.split(
            [need_size // PAGE_SIZE, len(self.free_pages) - need_size // PAGE_SIZE]
        )
        return (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")).reshape(-1)

    def free_page_ids(self, page_ids: Any) -> None:
        self.free_pages = torch.cat((page_ids, self.free_pages))


def kvcache(*, fused: bool) -> Any:
    """A pool as 0.5.16 has it, or (fused) as 0.5.23: K and V are halves of one tensor."""
    shape = (PAGES * PAGE_SIZE, HEADS, HEAD_DIM)
    if fused:
        both = [
            torch.zeros((2, *shape), dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)
        ]
        k, v = [part[0] for part in both], [part[1] for part in both]
    else:
        k, v = (
            [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
            for _ in range(2)
        )
    cache = type("MHATokenToKVPool", (SimpleNamespace,), {})(
        size=(PAGES - 1) * PAGE_SIZE, page_size=PAGE_SIZE, start_layer=0, layer_num=LAYERS,
        k_buffer=k, v_buffer=v, device="cuda", dtype=torch.bfloat16, store_dtype=torch.bfloat16,
    )  # fmt: skip
    for number, tensor in enumerate([*k, *v]):
        tensor.view(torch.int16).copy_(
            (torch.arange(tensor.numel(), device="cuda") * 7 + number * 1009)
            .remainder(31013).to(torch.int16).reshape(shape)
        )  # fmt: skip
    return cache


def host_page(cache: Any, page: int) -> bytes:
    """A page as it lies in the host tier."""
    parts = [part for pair in zip(cache.k_buffer, cache.v_buffer, strict=True) for part in pair]
    rows = [part[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].contiguous() for part in parts]
    return b"".join(row.view(torch.uint8).cpu().numpy().tobytes() for row in rows)


@pytest.fixture(params=[False, True], ids=["apart", "fused"])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A pool over a stand-in, with a forward stream of its own."""
    from scheduler_shim.sglang.pools import SglangPool

    cache = kvcache(fused=request.param)
    torch.cuda.synchronize()
    made = SglangPool.over(Slots(cache), forward_stream=torch.cuda.Stream())
    yield made
    made.close()


def import_pool(rig: Rig, number: int, pool: Any) -> None:
    """Import it into the mover, page table and all."""
    handles = pool._memory.handles
    rig.mover.import_pool(number, pool.layout, handles, pool.fds, page_table=pool.named)
    answer = rig.wait(Imported)
    assert answer.ok, answer.detail


def fences(number: int, position: tuple[int, int]) -> list[Fence]:
    return [Fence(number, FORWARD, position[0]), Fence(number, CURRENT, position[1])]


def test_naming_and_fencing_never_wait_for_the_device(pool: Any) -> None:
    allocator = pool.make_allocator()
    allocator.free(allocator.allocate(2))  # first calls load kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_MS * CYCLES_PER_MS)
    begun = time.monotonic()
    names = allocator.allocate(5)
    slots = pool.names.slots(names)
    position = pool.advance()
    assert time.monotonic() - begun < BUSY_MS / 1e3 / 3, "the CPU ran ahead of the stream"
    assert pool.now() < position
    torch.cuda.synchronize()
    assert pool.now() == position
    pages = array("I")
    pages.frombytes(pool.page_table.translate(names.tobytes()))
    assert [page * PAGE_SIZE for page in pages] == slots[::PAGE_SIZE].tolist()
    assert pool.names.check() == []


def test_a_mover_reads_named_pages_once_the_stream_has_named_and_written_them(
    pool: Any, rig: Rig
) -> None:
    import_pool(rig, 1, pool)
    allocator = pool.make_allocator()
    allocator.free(allocator.allocate(7)[::-1])  # old entries lie in the table
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_MS * CYCLES_PER_MS)
    names = allocator.allocate(4)
    slots = pool.names.slots(names)
    for layer, tensor in enumerate(pool.kvcache.k_buffer):
        tensor[slots] = float(layer + 3)
    position = pool.advance()
    done = rig.copy("backup", 1, names, HOST, [4, 5, 6, 7], fences(1, position))
    assert done.outcome == "ok", done.detail
    pages = pool.names.pages(names).tolist()
    stored = [rig.host_page(slot, pool.page_bytes) for slot in (4, 5, 6, 7)]
    assert stored == [host_page(pool.kvcache, page) for page in pages]
    assert rig.release(1).detail == ""


def test_a_mover_writes_into_named_targets_and_nowhere_else(pool: Any, rig: Rig) -> None:
    import_pool(rig, 1, pool)
    allocator = pool.make_allocator()
    source = allocator.allocate(3)
    assert rig.copy("backup", 1, source, HOST, [1, 2, 3], fences(1, pool.advance())).outcome == "ok"
    torch.cuda._sleep(BUSY_MS * CYCLES_PER_MS)
    targets = allocator.allocate(3)
    quiet = pool.advance()
    done = rig.copy("load_back", HOST, [1, 2, 3], 1, targets, fences(1, quiet))
    assert done.outcome == "ok", done.detail
    torch.cuda.synchronize()
    before = {page: host_page(kvcache(fused=False), page) for page in range(PAGES)}
    from_pages, to_pages = (pool.names.pages(names).tolist() for names in (source, targets))
    wanted = before | {to: before[at] for at, to in zip(from_pages, to_pages, strict=True)}
    assert {page: host_page(pool.kvcache, page) for page in range(PAGES)} == wanted
    assert rig.release(1).detail == ""


def test_one_handle_a_storage_travels_however_many_tensors_lie_in_it(pool: Any) -> None:
    fused = pool.kvcache.k_buffer[0].untyped_storage().data_ptr() == (
        pool.kvcache.v_buffer[0].untyped_storage().data_ptr()
    )
    assert len(pool.layout.allocation_bytes) == (LAYERS if fused else 2 * LAYERS)
    assert [buffer.role for buffer in pool.layout.buffers] == ["k", "v"] * LAYERS
