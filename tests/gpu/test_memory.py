"""Importing GPU memory: one mapping an allocation, nothing on trust, every refusal explained."""

import itertools
import os
import random
import time

import msgspec
import pytest

from directory.core.errors import ImportFailed, TransferError
from directory.core.ids import HOST
from tests.gpu import peer_messages as m
from tests.gpu.support import Peer, Rig
from transfer.ipc.cuda_driver import Driver
from transfer.ipc.cuda_memory import CudaMemoryIPC, CudaOpaque, pack_opaque, read_opaque
from transfer.ipc.memory import CUDA_IPC, MemoryHandle

MIB = 1 << 20


@pytest.fixture(scope="module")
def ipc(uuids: list[str]) -> CudaMemoryIPC:
    """An importer in this process."""
    return CudaMemoryIPC(Driver.open(uuids[0]))


def test_pools_carved_from_one_allocation_share_one_mapping_f39(
    ipc: CudaMemoryIPC, rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    pools = peer.carve(m.Carve(("k", "v", "side")))
    mappings = [ipc.import_memory(pool.handles[0], ()) for pool in pools]
    assert ipc.open_count == 1
    spacing = {b.address - a.address for a, b in itertools.pairwise(mappings)}
    assert spacing == {pools[0].layout.allocation_bytes[0]}
    ipc.close(mappings[1])
    assert ipc.open_count == 1
    for mapping in (mappings[0], mappings[2]):
        ipc.close(mapping)
    assert ipc.open_count == 0
    with pytest.raises(TransferError, match="closed"):
        ipc.close(mappings[0])

    page_bytes = pools[0].layout.page_bytes
    for number, name in enumerate(("k", "v", "side"), 1):
        peer.fill(name, seed=number)
        assert rig.import_pool(number, peer, name).ok
    assert rig.release(1).detail == ""
    for number, name in ((2, "v"), (3, "side")):
        assert rig.copy("backup", number, [0, 15], HOST, [4, 5]).outcome == "ok"
        stored = rig.host_page(4, page_bytes) + rig.host_page(5, page_bytes)
        assert stored == peer.read(name, [0, 15])


@pytest.mark.parametrize("how", ["sliced", "expanded"])
def test_a_tensor_that_is_not_dense_is_refused_with_shape_and_strides_f44(
    peers: tuple[Peer, Peer], how: str
) -> None:
    failed = peers[0].refused(m.ExportOdd(how))  # type: ignore[arg-type]
    assert failed.code == "bad_layout"
    assert "shape (64, " in failed.detail
    assert "strides (256, " in failed.detail


def test_a_permuted_tensor_is_exported_as_the_bytes_that_it_has_f44(
    peers: tuple[Peer, Peer],
) -> None:
    assert peers[0].ask(m.ExportOdd("permuted"), m.Done).detail == str(64 * 8 * 32 * 2)


def test_a_tensor_of_another_gpu_than_announced_is_refused(peers: tuple[Peer, Peer]) -> None:
    assert "lies on GPU-" in peers[0].refused(m.ExportOdd("other-device")).detail


def forged(original: MemoryHandle, /, **changes: object) -> MemoryHandle:
    """The handle with its opaque part changed."""
    opaque = msgspec.structs.replace(read_opaque(original), **changes)
    return msgspec.structs.replace(original, opaque=pack_opaque(opaque))


def test_forged_handles_offsets_and_sizes_are_refused_f143(
    ipc: CudaMemoryIPC, rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    pool = peer.create(m.Create("pool"))
    handle = pool.handles[0]
    real = read_opaque(handle)
    replace = msgspec.structs.replace
    rng = random.Random(7)
    beyond = real.allocation_bytes + 1 + real.offset
    attempts = {
        "not within an allocation": [
            forged(handle, offset=real.allocation_bytes),
            replace(handle, nbytes=real.allocation_bytes + 1),
        ],
        "the real allocation has": [
            forged(handle, allocation_bytes=1 << 40, offset=real.allocation_bytes - 1),
            replace(
                forged(handle, allocation_bytes=1 << 41),
                nbytes=beyond,
            ),
        ],
        "cannot be decoded": [replace(handle, opaque=b""), replace(handle, opaque=b"\xc1" * 64)],
        "bytes of the driver's": [forged(handle, handle=b""), forged(handle, handle=bytes(64))],
        "the driver refuses": [forged(handle, handle=rng.randbytes(64)) for _ in range(20)],
        "is not visible": [replace(handle, device="GPU-00000000-0000-0000-0000-000000000000")],
        "is not GPU memory": [replace(handle, kind="memfd"), replace(handle, kind="cuda-vmm")],
    }
    for words, handles in attempts.items():
        for attempt in handles:
            with pytest.raises(ImportFailed, match=words):
                ipc.import_memory(attempt, ())
    assert ipc.open_count == 0
    # A mover survives all of them, and then takes the real one.
    for handles in attempts.values():
        for attempt in handles:
            bad = replace(pool, handles=(attempt, *pool.handles[1:]))
            assert not rig.import_raw(1, bad, peer.fds["pool"]).ok
    assert rig.import_pool(1, peer, "pool").ok


def test_forged_descriptors_are_refused_f143(
    ipc: CudaMemoryIPC, rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    pool = peer.create(m.Create("pool", memory="vmm"))
    handle = pool.handles[0]
    fd = peer.fds["pool"][0]
    size = read_opaque(handle).allocation_bytes
    larger = msgspec.structs.replace(
        handle, nbytes=2 * size, opaque=pack_opaque(CudaOpaque(0, 2 * size))
    )
    memfd = os.memfd_create("forged")
    null = os.open("/dev/null", os.O_RDWR)
    try:
        for attempt, descriptor in ((larger, fd), (handle, memfd), (handle, null)):
            with pytest.raises(ImportFailed):
                ipc.import_memory(attempt, (descriptor,))
        assert ipc.open_count == 0
        mapping = ipc.import_memory(handle, (fd,))
        assert mapping.nbytes == handle.nbytes
        ipc.close(mapping)
    finally:
        os.close(memfd)
        os.close(null)
    assert rig.import_pool(1, peer, "pool").ok


def test_a_handle_of_a_process_that_is_gone_is_refused(
    ipc: CudaMemoryIPC, uuids: list[str], rig: Rig
) -> None:
    peer = Peer(uuids[0])
    peer.ready()
    handle = peer.create(m.Create("pool")).handles[0]
    peer.kill()
    with pytest.raises(ImportFailed, match="the driver refuses"):
        ipc.import_memory(handle, ())
    assert not rig.import_pool(1, peer, "pool").ok
    peer.close()


def test_expandable_segments_work_or_fail_at_once_with_the_cure_f36(
    uuids: list[str], rig: Rig
) -> None:
    options = "expandable_segments:True"
    peer = Peer(uuids[0], PYTORCH_CUDA_ALLOC_CONF=options, PYTORCH_ALLOC_CONF=options)
    peer.ready()
    try:
        started = time.monotonic()
        # More than one of torch's physical pieces (20 MiB), then less than one.
        failed = peer.refused(m.Create("large", layout="mla", layers=1, page_count=8192))
        assert "expandable_segments:True" in failed.detail
        assert "expandable_segments:False" in failed.detail
        assert time.monotonic() - started < 5
        page_bytes = peer.create(m.Create("small")).layout.page_bytes
        peer.fill("small", seed=4)
        imported = rig.import_pool(1, peer, "small")
        assert imported.ok, imported.detail
        assert rig.copy("backup", 1, [9], HOST, [0]).outcome == "ok"
        assert rig.host_page(0, page_bytes) == peer.read("small", [9])
    finally:
        peer.close()


def test_what_was_imported_cannot_be_exported_again(
    ipc: CudaMemoryIPC, peers: tuple[Peer, Peer]
) -> None:
    peer, _ = peers
    handle = peer.create(m.Create("pool")).handles[0]
    assert handle.kind == CUDA_IPC
    mapping = ipc.import_memory(handle, ())
    with pytest.raises(TransferError, match="only its owner"):
        ipc.export(mapping)
    ipc.close(mapping)
