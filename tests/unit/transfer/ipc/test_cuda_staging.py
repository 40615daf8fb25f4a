"""A slab on a GPU: a request is one launch with the right addresses, and nothing else is named."""

import struct

import pytest

from directory.core.errors import ImportFailed, LayoutError
from tests.unit.transfer.device.test_cuda_pages import SeeingDriver
from transfer.ipc import cuda_staging
from transfer.ipc.cuda_driver import CudaError
from transfer.ipc.cuda_export import Exported
from transfer.ipc.cuda_staging import CudaPacker, CudaSlab
from transfer.ipc.memory import CUDA_IPC, MemoryHandle, SharedMemoryIPC
from transfer.ipc.stage_ring import DONE, StageRequest, StageRing
from transfer.ipc.sync import COUNTER_BYTES
from transfer.layout import PoolLayout, mha_layer_first

POOL = mha_layer_first(layers=2, page_size=1, page_count=8, heads=2, head_dim=128, itemsize=2)
ADDRESSES = [(n + 1) << 20 for n in range(4)]
SLAB = 0x7000_0000
PRIORITIES = (0, -5)
ROWS = 4


class Scene:
    """A slab of four rows, a ring, and a driver that remembers."""

    def __init__(self, pool: PoolLayout = POOL, rows: int = ROWS) -> None:
        self.driver = SeeingDriver()
        self.slab = CudaSlab(self.driver, pool, ADDRESSES, rows * pool.page_bytes)
        self.ipc = SharedMemoryIPC()
        self.ring = StageRing.make(self.ipc)
        self.packer: CudaPacker = self.slab.packer(self.ring)

    def move(self, *, pack: bool, offset: int, pages: list[int], layers: int = 0) -> None:
        row = POOL.page_bytes // 2 * layers if layers else POOL.page_bytes
        self.packer.move(StageRequest(pack, 1 if layers else 0, layers, offset, row, pages))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    handle = MemoryHandle(CUDA_IPC, 1, "GPU-fake", b"h")
    monkeypatch.setattr(cuda_staging, "export_tensor", lambda *_, **__: Exported(handle, ()))
    return Scene()


def test_packing_goes_from_every_buffer_into_consecutive_rows_and_unpacking_back(
    scene: Scene,
) -> None:
    row = POOL.page_bytes
    scene.move(pack=True, offset=row, pages=[7, 2])
    scene.move(pack=False, offset=row, pages=[7, 2])
    out, back = scene.driver.tables
    chunks = [(ADDRESSES[n], 512, SLAB + row + n * 512, row) for n in range(len(ADDRESSES))]
    assert [struct.unpack_from("<4Q", out, 32 * n) for n in range(4)] == chunks
    assert struct.unpack("<4I", out[128:]) == (7, 0, 2, 1)
    turned = [(c[2], c[3], c[0], c[1]) for c in chunks]
    assert [struct.unpack_from("<4Q", back, 32 * n) for n in range(4)] == turned
    assert struct.unpack("<4I", back[128:]) == (0, 7, 1, 2)


def test_some_layers_lie_in_rows_of_their_own_size(scene: Scene) -> None:
    scene.move(pack=False, offset=512, pages=[3], layers=1)
    (table,) = scene.driver.tables
    chunks = [struct.unpack_from("<4Q", table, 32 * n) for n in range(2)]
    assert chunks == [
        (SLAB + 512, 1024, ADDRESSES[2], 512), (SLAB + 1024, 1024, ADDRESSES[3], 512)
    ]  # fmt: skip


def test_the_stream_itself_says_that_a_request_is_done(scene: Scene) -> None:
    scene.move(pack=True, offset=0, pages=[0])
    scene.packer.signal(scene.ring, 9)
    names = [call[0] for call in scene.driver.calls]
    assert names.index("cuLaunchKernel") < names.index("cuStreamWriteValue64")
    (written,) = scene.driver.named("cuStreamWriteValue64")
    (launched,) = scene.driver.named("cuLaunchKernel")
    assert written[0] == launched[8], "on the same stream"
    assert written[1:3] == (0x1000 + DONE * COUNTER_BYTES, 9)


@pytest.mark.parametrize(
    ("pages", "offset"),
    [
        ([0, 1], 3 * POOL.page_bytes),
        ([8], 0),
        ([0] * 5, 0),
        ([0], 1),
        ([0], 16),
        ([0], 2**64 - 512),
    ],
)
def test_rows_and_pages_that_do_not_exist_are_refused(
    scene: Scene, pages: list[int], offset: int
) -> None:
    with pytest.raises(LayoutError):
        scene.move(pack=True, offset=offset, pages=pages)
    with pytest.raises(LayoutError, match="layers"):
        scene.move(pack=True, offset=0, pages=[0], layers=3)
    assert scene.driver.named("cuLaunchKernel") == []


def test_a_pool_whose_chunks_cannot_be_moved_by_a_warp_is_refused_with_the_cure() -> None:
    odd = mha_layer_first(layers=1, page_size=1, page_count=4, heads=1, head_dim=4, itemsize=2)
    with pytest.raises(LayoutError, match="register it without a slab"):
        Scene(odd)
    with pytest.raises(LayoutError, match="no room"):
        Scene(rows=0)


def test_packing_goes_before_whatever_else_the_scheduler_has_queued(scene: Scene) -> None:
    scene.move(pack=True, offset=0, pages=[0])
    (made,) = scene.driver.named("cuStreamCreateWithPriority")
    assert made[1] == min(PRIORITIES) < 0
    (launched,) = scene.driver.named("cuLaunchKernel")
    assert launched[8] == 1, "the first stream that was made"


def test_a_slab_that_cannot_be_exported_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Exported:
        raise ImportFailed("no more descriptors")

    driver = SeeingDriver()
    monkeypatch.setattr(cuda_staging, "export_tensor", refuse)
    with pytest.raises(ImportFailed):
        CudaSlab(driver, POOL, ADDRESSES, ROWS * POOL.page_bytes)
    assert driver.named("cuMemFree") == [(SLAB,)]


def test_a_ring_that_the_gpu_cannot_reach_is_not_left_registered(scene: Scene) -> None:
    scene.driver.fail("cuMemHostGetDevicePointer", "CUDA_ERROR_INVALID_VALUE")
    before = len(scene.driver.named("cuMemHostUnregister"))
    ring = StageRing.make(scene.ipc)
    with pytest.raises(CudaError):
        scene.slab.packer(ring)
    assert scene.driver.named("cuMemHostUnregister")[before:] == [(ring.mapping.address,)]
    ring.close()


def test_what_was_taken_is_given_back_once(scene: Scene) -> None:
    scene.packer.finish()
    for _ in range(2):
        scene.packer.close()
        scene.slab.close()
    assert len(scene.driver.named("cuMemHostUnregister")) == 1
    assert scene.driver.named("cuMemFree") == [(SLAB,)]
