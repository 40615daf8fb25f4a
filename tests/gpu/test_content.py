"""Every byte of every copy kind, layout, item size and page size, between processes.

Pages and slots are random, targets are poisoned before, and what was not named must stay as it was.
"""

import random
from collections.abc import Iterator

import pytest

from directory.core.ids import HOST
from tests.gpu import peer_messages as m
from tests.gpu.support import Peer, Rig
from transfer.device.cuda import open_device
from transfer.mover import EXIT_DEVICE_LOST

COPIED = 24
POISON = 0xEE
SOURCE, TARGET = 1, 2


def create_pair(peers: tuple[Peer, Peer], **options: object) -> m.Pool:
    """A pool of random bytes and a poisoned one of the same layout."""
    first, second = peers
    pool = first.create(m.Create("source", **options))  # type: ignore[arg-type]
    second.create(m.Create("target", **options))  # type: ignore[arg-type]
    first.fill("source", seed=random.randrange(1 << 30))
    second.fill("target")
    return pool


def check_round(rig: Rig, peers: tuple[Peer, Peer], page_bytes: int, seed: int) -> None:
    """Back pages up, load them into the other pool, copy others between the pools; check all."""
    rng = random.Random(seed)
    first, second = peers
    for number, peer, name in ((SOURCE, first, "source"), (TARGET, second, "target")):
        imported = rig.import_pool(number, peer, name)
        assert imported.ok, imported.detail
    rig.poison(POISON)
    count = first.pools["source"].layout.page_count
    sources = rng.sample(range(count), COPIED)
    slots = rig.slots(COPIED, page_bytes, lambda n: rng.sample(range(n), COPIED))
    content = first.pages("source")
    assert len(set(content)) == count, "pages can be told apart"

    done = rig.copy("backup", SOURCE, sources, HOST, slots)
    assert (done.outcome, done.nbytes) == ("ok", COPIED * page_bytes), done.detail
    for page, slot in zip(sources, slots, strict=True):
        assert rig.host_page(slot, page_bytes) == content[page], f"page {page} in slot {slot}"
    stored = sum(
        segment.nbytes - bytes(segment.view).count(POISON) for segment in rig.tier.segments
    )
    written = sum(len(content[page]) - content[page].count(POISON) for page in sources)
    assert stored == written, "no other byte of the tier has changed"

    expected = [bytes([POISON]) * page_bytes] * count
    targets = rng.sample(range(count), 2 * COPIED)
    done = rig.copy("load_back", HOST, slots, TARGET, targets[:COPIED])
    assert done.outcome == "ok", done.detail
    for page, target in zip(sources, targets[:COPIED], strict=True):
        expected[target] = content[page]
    others = rng.sample(range(count), COPIED)
    done = rig.copy("peer_copy", SOURCE, others, TARGET, targets[COPIED:])
    assert done.outcome == "ok", done.detail
    for page, target in zip(others, targets[COPIED:], strict=True):
        expected[target] = content[page]
    found = second.pages("target")
    assert [n for n in range(count) if found[n] != expected[n]] == []
    assert first.pages("source") == content, "the source is as it was"
    for number in (SOURCE, TARGET):
        assert rig.release(number).detail == ""


@pytest.fixture(scope="module")
def module_rig(uuids: list[str]) -> Iterator[Rig]:
    """One mover for all rounds of this file."""
    made = Rig(uuids[0])
    yield made
    made.close()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("itemsize", [1, 2], ids=["fp8", "bf16"])
@pytest.mark.parametrize("layout", ["mha", "mha-one", "page-first", "mla", "mla-index"])
def test_every_copy_kind_moves_exactly_its_pages(
    module_rig: Rig, peers: tuple[Peer, Peer], layout: str, itemsize: int, page_size: int
) -> None:
    pool = create_pair(peers, layout=layout, itemsize=itemsize, page_size=page_size)
    check_round(module_rig, peers, pool.layout.page_bytes, seed=page_size * itemsize)


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
    options: dict[str, int] = {"layers": 1, "page_size": 64, "page_count": 100_000}
    pool = first.create(m.Create("source", "mla", **options))  # type: ignore[arg-type]
    second.create(m.Create("target", "mla", **options))  # type: ignore[arg-type]
    first.fill("source", seed=3)
    assert pool.layout.allocation_bytes[0] == 100_000 * 64 * 4 * 64 * 2 == 3_276_800_000
    for number, peer, name in ((SOURCE, first, "source"), (TARGET, second, "target")):
        assert module_rig.import_pool(number, peer, name).ok
    pages = [0, 99_999, 65_535, 65_536, 81_920]
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
