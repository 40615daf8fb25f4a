"""Every byte of every copy kind x layout x dtype x page size, between two schedulers' processes.

On one GPU and across two, whichever mover copies, and with CUDA_VISIBLE_DEVICES in another order
at the schedulers, at the mover and at both. Pages and slots are random, targets are poisoned
before, and what was not named must stay as it was.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.gpu.conftest import gpus
from tests.gpu.rounds import check_round, create_pair
from tests.gpu.support import Peer, Rig

VISIBLE = "CUDA_VISIBLE_DEVICES"
TIER_BYTES = 16 << 20

NATURAL, ORDINALS, UUIDS = "natural", "reversed ordinals", "reversed UUIDs"


class Setting(NamedTuple):
    """Who runs where: `source`, `target`, `mover` are GPUs by number; `sees`: in which order the
    schedulers and the mover see them."""

    source: int
    target: int
    mover: int
    schedulers_see: str = NATURAL
    mover_sees: str = NATURAL

    @property
    def gpu_count(self) -> int:
        """GPUs that this needs."""
        orders = self.schedulers_see, self.mover_sees
        return 2 if self.source or self.target or self.mover or orders != (NATURAL,) * 2 else 1


SETTINGS = {
    "one GPU": Setting(0, 0, 0),
    "two GPUs, the source's mover": Setting(0, 1, 0),
    "two GPUs, the target's mover": Setting(0, 1, 1),
    "the schedulers see them by reversed ordinals": Setting(1, 1, 1, ORDINALS),
    "the mover sees them by reversed UUIDs": Setting(1, 0, 1, NATURAL, UUIDS),
    "both see them reversed": Setting(0, 1, 0, UUIDS, ORDINALS),
}


def order(uuids: list[str], number: int, sees: str) -> str:
    """CUDA_VISIBLE_DEVICES of a scheduler whose cuda:0 is that GPU."""
    other = 1 - number
    if sees == NATURAL:
        return uuids[number]
    return f"{number},{other}" if sees == ORDINALS else f"{uuids[number]},{uuids[other]}"


@pytest.fixture(scope="session")
def processes(uuids: list[str]) -> Iterator[dict[tuple[str, int], Peer]]:
    """Schedulers by (what they see, which of several); torch takes seconds to load."""
    made: dict[tuple[str, int], Peer] = {}
    yield made
    for peer in made.values():
        peer.close()


@pytest.fixture(scope="module", params=list(SETTINGS.values()), ids=list(SETTINGS))
def scene(
    request: pytest.FixtureRequest, uuids: list[str], processes: dict[tuple[str, int], Peer]
) -> Iterator[tuple[Rig, tuple[Peer, Peer]]]:
    """A mover and two schedulers as a setting wants them."""
    setting: Setting = request.param
    if len(gpus()) < setting.gpu_count:
        pytest.skip("needs two CUDA devices")
    first, second = (
        (order(uuids, number, setting.schedulers_see), which)
        for which, number in enumerate((setting.source, setting.target))
    )
    fresh = [key for key in (first, second) if key not in processes]
    for key in fresh:
        processes[key] = Peer(key[0])
    for key in fresh:
        processes[key].ready()
    pair = processes[first], processes[second]
    assert [peer.device for peer in pair] == [uuids[setting.source], uuids[setting.target]]
    before = os.environ.get(VISIBLE)
    if setting.mover_sees != NATURAL:
        reversed_uuids = f"{uuids[1]},{uuids[0]}"
        os.environ[VISIBLE] = "1,0" if setting.mover_sees == ORDINALS else reversed_uuids
    try:
        rig = Rig(uuids[setting.mover], tier_bytes=TIER_BYTES)
    finally:
        os.environ.pop(VISIBLE, None)
        if before is not None:
            os.environ[VISIBLE] = before
    yield rig, pair
    rig.close()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("itemsize", [1, 2], ids=["fp8", "bf16"])
@pytest.mark.parametrize("layout", ["mha", "mha-one", "page-first", "mla", "mla-index"])
def test_every_copy_kind_moves_exactly_its_pages(
    scene: tuple[Rig, tuple[Peer, Peer]], layout: str, itemsize: int, page_size: int
) -> None:
    rig, pair = scene
    try:
        pool = create_pair(pair, layout=layout, itemsize=itemsize, page_size=page_size)
        check_round(rig, pair, pool.layout.page_bytes, seed=page_size * itemsize)
    finally:
        for peer in pair:
            peer.drop_all()
