"""Lanes: restores before everything, bounds, caps and pauses; and the engine over a page device."""

from collections.abc import Iterable

import msgspec
import pytest

from directory.core.actions import Landing
from directory.core.ids import LANDINGS
from tests.unit.transfer.lane_scene import Scene, backup, load, peer
from tests.unit.transfer.support import (
    HOST,
    copy,
    part,
)
from transfer.copies import Copy
from transfer.device.fake import FakeDevice, FakePageDevice
from transfer.device.protocol import PageDevice
from transfer.engine_limits import EngineLimits
from transfer.lanes import Lanes, Pace


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterable[Scene]:
    """A scene; indirect parameters are its limits."""
    made = Scene(**getattr(request, "param", {}))
    yield made
    made.close()


def limits(**values: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", [values], indirect=True, ids=[""])


def test_the_fake_is_a_page_device_and_a_plain_one_is_not() -> None:
    assert isinstance(FakePageDevice(), PageDevice)
    assert not isinstance(FakeDevice(), PageDevice)


@limits(slice_bytes=200, near_slice_bytes=200, calm_slice_bytes=200)
def test_a_page_device_moves_the_same_bytes_of_every_kind(scene: Scene) -> None:
    scene.submit(backup(1, [3, 7, 8], [9, 2, 17]))
    assert scene.ends() == [1]
    scene.submit(load(2, [9, 17], [5, 11]), peer(3, [1, 2], [0, 15]))
    assert sorted(scene.ends()) == [2, 3]
    pools = scene.pools
    for target, source in ((5, 3), (11, 8), (0, 1), (15, 2)):
        assert pools[2].read_page(target) == pools[1].pattern(1, source)
    assert pools[2].read_page(4) == pools[2].pattern(2, 4)
    assert scene.device.pages, "it went by pages"
    assert max(sum(b.nbytes for b in piece) for piece in scene.device.pages) <= 256


@limits(slice_bytes=64, landing_bytes=0)
def test_layers_land_one_by_one_by_pages_too(scene: Scene) -> None:
    scene.submit(backup(1, range(4), range(4)))
    scene.ends()
    table = scene.pools[2].timelines
    landing = Landing(2, LANDINGS, table.read(LANDINGS))
    first = landing.first
    scene.submit(msgspec.structs.replace(load(2, range(4), range(8, 12)), landing=landing))
    seen = []
    while not scene.engine.idle:
        scene.device.step()
        scene.engine.step()
        seen.append(table.read(LANDINGS) - first)
    assert sorted(set(seen)) == [0, 1, 2, 3, 4] or sorted(set(seen)) == [1, 2, 3, 4]
    for page in range(4):
        assert scene.pools[2].read_page(8 + page) == scene.pools[1].pattern(1, page)


@limits(slice_bytes=64)
def test_a_restore_goes_at_once_though_backups_fill_their_lane(scene: Scene) -> None:
    scene.submit(backup(1, range(16), range(16)))
    assert scene.device.in_flight == 3
    scene.submit(load(2, [20], [0]))
    assert scene.device.history[3].urgent, "it waited for no backup"
    assert scene.ends() == [2, 1]


@limits(slice_bytes=64, calm_slice_bytes=64, calm_submissions_max=9, submissions_max=4)
def test_no_lane_takes_every_place_and_all_of_them_keep_to_the_bound(scene: Scene) -> None:
    scene.submit(backup(1, range(16), range(16)), peer(2, range(8), range(8)))
    kinds = [piece[0].target for piece in scene.device.pages]
    assert kinds == [2, 2, 2, HOST], "peers are before backups, and not more than three"
    assert sorted(scene.ends()) == [1, 2]


@limits(slice_bytes=64, lane_bytes_per_s=64_000)
def test_a_capped_lane_sends_a_slice_only_when_the_last_ones_time_is_over(scene: Scene) -> None:
    scene.submit(backup(1, range(8), range(8)))
    assert len(scene.device.pages) == 1
    scene.device.step()
    scene.now_us += 999
    scene.engine.step()
    assert len(scene.device.pages) == 1, "64 bytes are a millisecond"
    scene.now_us += 1
    scene.engine.step()
    assert len(scene.device.pages) == 2
    assert scene.ends() == [1]


@pytest.mark.parametrize(
    ("computing", "target", "in_flight"), [(True, 2, 1), (False, 2, 2), (True, 3, 3)]
)
def test_copies_within_a_gpu_go_one_slice_at_a_time_while_it_computes(
    computing: bool, target: int, in_flight: int
) -> None:
    scene = Scene(computing=computing, near_slice_bytes=64, calm_slice_bytes=64)
    scene.submit(peer(1, range(8), range(8), target))
    assert scene.device.in_flight == in_flight
    assert scene.ends() == [1]
    scene.close()


def test_behind_a_paced_slice_there_is_a_pause_in_proportion() -> None:
    scene = Scene(computing=True, near_slice_bytes=64, local_percent=25)
    scene.submit(peer(1, range(8), range(8)))
    scene.now_us += 100  # so long does the slice take
    scene.device.step()
    scene.engine.step()
    assert scene.device.in_flight == 0
    scene.now_us += 299
    scene.engine.step()
    assert scene.device.in_flight == 0
    scene.now_us += 1
    scene.engine.step()
    assert scene.device.in_flight == 1
    assert scene.ends() == [1]
    scene.close()


@limits(slice_bytes=64, near_slice_bytes=256, calm_slice_bytes=100_000, lane_submissions_max=1)
def test_slices_between_gpu_memories_have_sizes_of_their_own(scene: Scene) -> None:
    far = copy(3, "peer_copy", part(1, range(8), 3, range(8)))
    scene.submit(peer(1, range(8), range(8)), backup(2, range(8), range(8)), far)
    assert sorted(scene.ends()) == [1, 2, 3]
    assert not any(scene.device.beside), "what goes as it lies is the loop's"
    largest = {piece[0].target: sum(b.nbytes for b in piece) for piece in scene.device.pages}
    assert largest[2] == 8 * scene.layout.page_bytes
    assert largest[3] == 256
    assert largest[HOST] <= 64


@limits(near_slice_bytes=128, calm_slice_bytes=512)
def test_what_was_cut_while_the_gpu_was_calm_is_cut_again_once_it_computes(scene: Scene) -> None:
    scene.submit(peer(1, range(16), range(16)))
    assert [sum(b.nbytes for b in piece) for piece in scene.device.pages] == [512, 512]
    scene.computing = True
    assert scene.ends() == [1]
    later = [sum(b.nbytes for b in piece) for piece in scene.device.pages[2:]]
    assert later == [128] * (16 * scene.layout.page_bytes // 128 - 8)
    for page in range(16):
        assert scene.pools[2].read_page(page) == scene.pools[1].pattern(1, page)


def test_a_copy_that_is_lost_leaves_its_lane_wherever_it_stands() -> None:
    lanes = Lanes(4, 4, 2, Pace(), lambda: True)
    copies = [Copy(backup(op, [0], [0]), 0) for op in range(3)]
    for one in copies:
        lanes.add(one)
    lanes.discard(copies[1])
    lanes.discard(copies[1])
    lanes.discard(copies[0])
    assert next(lanes.ready(lambda: 0)) is copies[2]


@pytest.mark.parametrize("change", ["slice_bytes", "slice_bytes=x", "nothing=1", "slice_bytes=-1"])
def test_a_limit_that_is_none_is_refused_with_those_that_are(change: str) -> None:
    with pytest.raises(SystemExit, match="slice_bytes"):
        EngineLimits().changed([change])
    assert EngineLimits().changed(["slice_bytes=5", "copies_max=7"])[:1] == (5,)
