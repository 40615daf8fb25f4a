"""Bytes of copies in special cases: virtual memory, large pools, an unpinned tier, lost pages.

The ordinary ones are in test_matrix.py.
"""

from collections.abc import Iterator

import pytest

from directory.core.ids import HOST
from tests.gpu import peer_messages as m
from tests.gpu.rounds import SOURCE, TARGET, check_round, create_pair
from tests.gpu.support import Peer, Rig
from transfer.device.cuda import open_device
from transfer.mover import EXIT_DEVICE_LOST


@pytest.fixture(scope="module")
def module_rig(uuids: list[str]) -> Iterator[Rig]:
    """One mover for all rounds of this file."""
    made = Rig(uuids[0])
    yield made
    made.close()


def test_virtual_memory_pools_come_as_descriptors(
    module_rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    pool = create_pair(peers, memory="vmm")
    assert {handle.kind for handle in pool.handles} == {"cuda-vmm"}
    check_round(module_rig, peers, pool.layout.page_bytes, seed=5)


def test_large_pools_are_right_beyond_four_gigabytes(
    module_rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    first, second = peers
    options: dict[str, int] = {"layers": 1, "page_size": 64, "page_count": 140_000}
    pool = first.create(m.Create("source", "mla", **options))  # type: ignore[arg-type]
    second.create(m.Create("target", "mla", **options))  # type: ignore[arg-type]
    first.fill("source", seed=3)
    assert pool.layout.allocation_bytes[0] == 140_000 * 64 * 4 * 64 * 2 > 1 << 32
    for number, peer, name in ((SOURCE, first, "source"), (TARGET, second, "target")):
        assert module_rig.import_pool(number, peer, name).ok
    pages = [0, 139_999, 131_071, 131_072, 65_536]
    done = module_rig.copy("peer_copy", SOURCE, pages, TARGET, pages[::-1])
    assert done.outcome == "ok", done.detail
    assert second.read("target", pages[::-1]) == first.read("source", pages)
    for number in (SOURCE, TARGET):
        module_rig.release(number)


@pytest.mark.parametrize("options", [("--unpinned",)])
def test_an_unpinned_tier_is_slower_but_right_f132(
    uuids: list[str], peers: tuple[Peer, Peer], options: tuple[str, ...]
) -> None:
    rig = Rig(uuids[0], options=options)
    try:
        pool = create_pair(peers)
        check_round(rig, peers, pool.layout.page_bytes, seed=6)
    finally:
        rig.close()


def test_a_copy_of_which_one_page_fails_counts_for_nothing_f51(
    module_rig: Rig, peers: tuple[Peer, Peer]
) -> None:
    create_pair(peers)
    first, _ = peers
    module_rig.import_pool(SOURCE, first, "source")
    slots = module_rig.slots(3, 1 << 16, lambda n: list(range(n)))
    done = module_rig.copy("load_back", HOST, [*slots, 0xFFFF_FFFF], SOURCE, [0, 1, 2, 3])
    assert done.outcome == "failed"
    assert "not in the tier" in done.detail
    module_rig.release(SOURCE)


def test_no_mover_starts_on_a_gpu_that_is_not_there() -> None:
    with pytest.raises(Exception, match="not visible to this process, which sees GPU-"):
        open_device("GPU-00000000-0000-0000-0000-000000000000")
    assert EXIT_DEVICE_LOST not in (0, 1)
