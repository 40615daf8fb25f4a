"""One round of all copy kinds between two pools, with every byte compared."""

import random

from directory.core.actions import Landing
from directory.core.ids import HOST, LANDINGS
from tests.gpu import peer_messages as m
from tests.gpu.support import Peer, Rig
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.sync import TimelineTable

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
    """Back pages up, load them into the other pool (whole, and layer by layer), copy others
    between the pools; check all."""
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
    whole, layered = targets[: COPIED // 2], targets[COPIED // 2 : COPIED]
    done = rig.copy("load_back", HOST, slots[: COPIED // 2], TARGET, whole)
    assert done.outcome == "ok", done.detail
    check_layered(rig, second, slots[COPIED // 2 :], layered)
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


def check_layered(rig: Rig, peer: Peer, slots: list[int], targets: list[int]) -> None:
    """Load slots layer by layer; the counter ends with all layers."""
    layers = len(peer.pools["target"].layout.layers())
    table = TimelineTable.open(SharedMemoryIPC(), peer.fds["target"][-2])
    first = table.read(LANDINGS)
    # In two parts, as a path of two nodes comes: a layer has landed when it has in both.
    parts = [(HOST, slots[at::2], TARGET, targets[at::2]) for at in range(2)]
    op = rig.submit("load_back", parts, landing=Landing(TARGET, LANDINGS, first))
    done = rig.done(op)
    assert done.outcome == "ok", done.detail
    assert table.read(LANDINGS) == first + layers
    table.close()
