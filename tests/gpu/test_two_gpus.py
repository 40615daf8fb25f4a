"""Two GPUs: peer copies, and GPUs named by UUID under any order of CUDA_VISIBLE_DEVICES."""

from collections.abc import Iterator

import msgspec
import pytest

from directory.core.ids import HOST
from tests.gpu import peer_messages as m
from tests.gpu.conftest import gpus
from tests.gpu.rounds import check_round, create_pair
from tests.gpu.support import CYCLES_PER_MS, Peer, Rig, fences, figure, packed
from transfer.ipc.channel import ChannelClosed

pytestmark = pytest.mark.skipif(len(gpus()) < 2, reason="needs two CUDA devices")

MIB = 1 << 20


@pytest.fixture(scope="module")
def both(uuids: list[str]) -> Iterator[tuple[Peer, Peer]]:
    """A scheduler on each GPU; the first sees both, the second only its own."""
    pair = Peer("0,1"), Peer(uuids[1])
    for peer in pair:
        peer.ready()
    yield pair
    for peer in pair:
        peer.close()


@pytest.fixture
def across(both: tuple[Peer, Peer]) -> Iterator[tuple[Peer, Peer]]:
    """The two schedulers, without pools before and after."""
    yield both
    for peer in both:
        peer.drop_all()


def see(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    """Let movers that are started from now on see these GPUs."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize("memory", ["torch", "vmm"])
@pytest.mark.parametrize("mover", [0, 1], ids=["source's mover", "target's mover"])
def test_pages_cross_from_gpu_to_gpu(
    uuids: list[str], across: tuple[Peer, Peer], mover: int, memory: str
) -> None:
    assert [peer.device for peer in across] == uuids
    rig = Rig(uuids[mover])
    try:
        for page_size, itemsize, layout in ((1, 2, "mha"), (16, 1, "mla-index"), (64, 2, "mha")):
            pool = create_pair(
                across, layout=layout, page_size=page_size, itemsize=itemsize, memory=memory
            )
            check_round(rig, across, pool.layout.page_bytes, seed=page_size)
            for peer in across:
                peer.drop_all()
    finally:
        rig.close()


@pytest.mark.parametrize("visible", ["all", "reversed ordinals", "reversed UUIDs"])
def test_gpus_are_known_by_uuid_whatever_each_side_sees_f38(
    uuids: list[str],
    across: tuple[Peer, Peer],
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
) -> None:
    seen = {"all": None, "reversed ordinals": "1,0", "reversed UUIDs": f"{uuids[1]},{uuids[0]}"}
    see(monkeypatch, seen[visible])
    second = Peer(f"{uuids[1]},{uuids[0]}")  # torch calls GPU 1 cuda:0 there, as the other does
    assert second.ready().device == uuids[1]
    rig = Rig(uuids[1])
    try:
        peers = (across[1], second)
        pool = create_pair(peers)
        assert {h.device for h in pool.handles} == {uuids[1]}
        check_round(rig, peers, pool.layout.page_bytes, seed=8)
        real = across[1].pools["source"].handles[0]
        nowhere = "GPU-00000000-0000-0000-0000-000000000000"
        lying = msgspec.structs.replace(
            across[1].pools["source"],
            handles=(
                msgspec.structs.replace(real, device=nowhere),
                *across[1].pools["source"].handles[1:],
            ),
        )
        refused = rig.import_raw(9, lying, across[1].fds["source"])
        assert not refused.ok
        assert f"{nowhere} is not visible" in refused.detail
    finally:
        rig.close()
        second.close()


def test_a_mover_that_cannot_see_its_gpu_ends_and_says_so_f38(
    uuids: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    see(monkeypatch, uuids[0])
    with pytest.raises(ChannelClosed):
        Rig(uuids[1])
    errors = capfd.readouterr().err
    assert f"GPU {uuids[1]} is not visible to this process, which sees {uuids[0]}" in errors


def test_a_pool_on_a_gpu_that_the_mover_cannot_see_is_refused_f38(
    uuids: list[str], across: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = across
    first.create(m.Create("near"))
    second.create(m.Create("far"))
    see(monkeypatch, uuids[0])
    rig = Rig(uuids[0])
    try:
        refused = rig.import_pool(1, second, "far")
        assert not refused.ok
        assert f"GPU {uuids[1]} is not visible to this mover, which sees {uuids[0]}" in (
            refused.detail
        )
        assert rig.import_pool(2, first, "near").ok, "the mover goes on"
    finally:
        rig.close()


@pytest.mark.parametrize("sync", ["stream", "events"])
def test_fences_of_the_other_gpu_hold_f47(
    uuids: list[str], across: tuple[Peer, Peer], sync: m.Sync
) -> None:
    _, far = across
    page_bytes = far.create(m.Create("pool", sync=sync)).layout.page_bytes
    far.fill("pool")
    rig = Rig(uuids[0])
    try:
        assert rig.import_pool(1, far, "pool").ok
        late = m.LateWrite("pool", packed([3, 4]), 0x22, 60 * CYCLES_PER_MS)
        position = far.ask(late, m.Position)
        done = rig.copy("backup", 1, [3, 4], HOST, [0, 1], fences(1, position))
        assert done.outcome == "ok", done.detail
        assert rig.host_page(0, page_bytes) == b"\x22" * page_bytes
    finally:
        rig.close()


def test_what_a_mover_takes_of_the_other_gpu_is_known(
    uuids: list[str], across: tuple[Peer, Peer]
) -> None:
    near, far = across
    far.create(m.Create("pool"))
    near.create(m.Create("pool"))
    before = far.free_bytes()
    rig = Rig(uuids[0])
    try:
        started = before - far.free_bytes()
        assert rig.import_pool(1, far, "pool").ok
        assert rig.import_pool(2, near, "pool").ok
        assert rig.copy("peer_copy", 1, [1], 2, [2]).outcome == "ok"
        working = before - far.free_bytes()
        figure(
            f"mover on the other GPU: {started / MIB:.0f} MiB after start, "
            f"{working / MIB:.0f} MiB with a pool of it"
        )
    finally:
        rig.close()
