"""Lanes: restores before everything, bounds, caps and pauses; and the engine over a page device."""

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.actions import Landing, SubmitCopy
from directory.core.events import CopyDone
from directory.core.ids import LANDINGS
from tests.unit.transfer.support import (
    HOST,
    OwnedPool,
    copy,
    part,
    slot,
    small_layout,
    small_tier,
)
from transfer.alone import LAUNCH_US, TRUSTED_US
from transfer.copies import Copy
from transfer.device.fake import FakeDevice, FakePageDevice
from transfer.device.protocol import PageDevice
from transfer.engine import Engine, EngineEvent
from transfer.engine_limits import EngineLimits
from transfer.imports import ImportedPool
from transfer.lanes import Lanes, Pace

GPU, OTHER = "GPU-1", "GPU-2"


class Scene:
    """Pools 1 and 2 on one GPU and 3 on another, a tier, a clock that the test turns."""

    def __init__(self, *, computing: bool = False, **limits: int) -> None:
        self.now_us = 1
        self.device = FakePageDevice()
        self.computing = computing
        bounds = EngineLimits(submissions_max=9, lane_submissions_max=3)._replace(**limits)
        self.engine = Engine(self.device, lambda: self.now_us, bounds, lambda: self.computing)
        self.layout = small_layout(16, layers=4)
        self.pools = {n: OwnedPool(self.layout, landings=2) for n in (1, 2, 3)}
        for number, pool in self.pools.items():
            pool.fill(number)
            imported: ImportedPool = pool.import_as(number)
            imported.device = OTHER if number == 3 else GPU
            self.engine.add_pool(imported)
        self.tier = small_tier(self.layout)
        self.engine.open_tier(self.tier)

    def submit(self, *requests: SubmitCopy) -> None:
        for request in requests:
            self.engine.submit(request)
        self.engine.step()

    def ends(self) -> list[int]:
        events: list[EngineEvent] = []
        while not self.engine.idle:
            self.device.step()
            self.now_us += 1_000_000
            events += self.engine.step()
        return [e.op for e in events if isinstance(e, CopyDone) and e.outcome == "ok"]

    def close(self) -> None:
        for number in self.pools:
            self.engine.release_pool(number)
        self.ends()
        self.engine.close()
        for pool in self.pools.values():
            pool.close()
        self.tier.close()


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterable[Scene]:
    """A scene; indirect parameters are its limits."""
    made = Scene(**getattr(request, "param", {}))
    yield made
    made.close()


def limits(**values: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", [values], indirect=True, ids=[""])


def backup(op: int, pages: Iterable[int], slots: Iterable[int]) -> SubmitCopy:
    return copy(op, "backup", part(1, pages, HOST, map(slot, slots)))


def load(op: int, slots: Iterable[int], pages: Iterable[int], pool: int = 2) -> SubmitCopy:
    return copy(op, "load_back", part(HOST, map(slot, slots), pool, pages))


def peer(op: int, pages: Iterable[int], onto: Iterable[int], target: int = 2) -> SubmitCopy:
    return copy(op, "peer_copy", part(1, pages, target, onto))


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


def alone(**more: int) -> Scene:
    """A GPU that has computed lately; 10,000 bytes a microsecond are as fast as its memory goes."""
    return Scene(computing=True, alone_bytes_per_us=10_000, local_percent=25, **more)


def ended_after(scene: Scene, took_us: int) -> None:
    """What is in flight is done so much later."""
    scene.now_us += took_us
    scene.device.step(9)
    scene.engine.step()


def sizes(scene: Scene) -> list[int]:
    """Bytes of every slice that was submitted."""
    return [sum(batch.nbytes for batch in piece) for piece in scene.device.pages]


def test_behind_a_slice_that_shared_the_gpu_with_nobody_large_ones_follow_without_a_pause() -> None:
    scene = alone(near_slice_bytes=256, calm_slice_bytes=1024)
    scene.submit(peer(1, range(16), range(16)))
    first = sizes(scene)[0]
    assert (len(sizes(scene)), first) == (1, 256), "nobody knows yet"
    ended_after(scene, LAUNCH_US)
    assert scene.device.in_flight == 2, "as where nothing computes"
    assert sizes(scene)[1:3] == [1024 - first, 1024]
    assert scene.ends() == [1]
    for page in range(16):
        assert scene.pools[2].read_page(page) == scene.pools[1].pattern(1, page)
    scene.close()


def test_behind_slices_that_waited_for_somebody_small_ones_go_with_a_pause_behind_each() -> None:
    scene = alone(near_slice_bytes=256, calm_slice_bytes=1024)
    scene.submit(peer(1, range(16), range(16)))
    first = sizes(scene)[0]
    ended_after(scene, LAUNCH_US)
    assert scene.device.in_flight == 2
    ended_after(scene, 1_000)
    assert (scene.device.in_flight, sizes(scene)[-1]) == (1, first), "a step has begun meanwhile"
    ended_after(scene, 1_000)
    assert scene.device.in_flight == 0
    scene.now_us += 2_999
    scene.engine.step()
    assert scene.device.in_flight == 0
    scene.now_us += 1
    scene.engine.step()
    assert (scene.device.in_flight, sizes(scene)[-1]) == (1, first)
    assert scene.ends() == [1]
    for page in range(16):
        assert scene.pools[2].read_page(page) == scene.pools[1].pattern(1, page)
    scene.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([1, LAUNCH_US, 1_000, 20_000]), min_size=1), st.booleans())
def test_whatever_slices_take_and_whoever_computes_every_page_is_moved_once(
    took_us: list[int], computing: bool
) -> None:
    scene = alone(near_slice_bytes=512, calm_slice_bytes=2048)
    scene.submit(peer(1, range(15), range(1, 16)))
    for turn in range(10 * 16):
        scene.computing = computing or turn % 3 == 0
        ended_after(scene, took_us[turn % len(took_us)])
    assert scene.ends() == []
    assert scene.engine.idle
    moved = [page for piece in scene.device.pages for b in piece for page in b.target_pages]
    assert moved == list(range(1, 16))
    for page in range(15):
        assert scene.pools[2].read_page(page + 1) == scene.pools[1].pattern(1, page)
    scene.close()


def test_the_next_copy_finds_out_anew_whether_it_is_alone_unless_it_comes_at_once() -> None:
    scene = alone(near_slice_bytes=256, calm_slice_bytes=1024)
    scene.submit(peer(1, [0], [0]))
    ended_after(scene, LAUNCH_US)
    scene.submit(peer(2, range(16), range(16)))
    assert scene.device.in_flight == 2
    ended_after(scene, LAUNCH_US)
    assert scene.ends() == [2]
    scene.now_us += 10 * TRUSTED_US
    scene.submit(peer(3, range(16), range(16)))
    assert scene.device.in_flight == 1
    assert scene.ends() == [3]
    scene.close()


def test_between_gpus_nothing_is_concluded_of_the_gpu_s_own_memory() -> None:
    scene = alone(near_slice_bytes=64)
    scene.submit(peer(1, range(8), range(8), 3))
    assert scene.device.in_flight == 3
    while not scene.engine.idle:
        ended_after(scene, 1)
    assert not any(scene.device.calm), "nobody knows how fast the link is"
    scene.submit(peer(2, range(8), range(8)))
    assert scene.device.in_flight == 1
    assert scene.ends() == [2]
    scene.close()


def linked(**more: int) -> Scene:
    """The same with a link whose speed is known, too."""
    sizes = {"near_slice_bytes": 1024, "link_slice_bytes": 256, "calm_slice_bytes": 4096}
    return alone(link_bytes_per_us=10_000, **sizes | more)


def moved_once(scene: Scene, target: int = 3) -> bool:
    """Whether sixteen pages of the first pool were moved, each once, and hold the same bytes."""
    moved = [page for piece in scene.device.pages for b in piece for page in b.target_pages]
    pools = scene.pools
    return sorted(moved) == list(range(16)) and all(
        pools[target].read_page(page) == pools[1].pattern(1, page) for page in range(16)
    )


def test_over_a_link_a_small_slice_finds_out_whether_the_gpu_is_calm_and_large_ones_follow() -> (
    None
):
    scene = linked()
    scene.submit(peer(1, range(16), range(16), 3))
    assert (sizes(scene), scene.device.calm) == ([256], [True]), "all the others wait for it"
    ended_after(scene, LAUNCH_US)
    assert scene.device.in_flight == 2
    assert sizes(scene)[1:3] == [1024 - 256, 1024]
    while not scene.engine.idle:
        ended_after(scene, LAUNCH_US)
    assert all(scene.device.calm)
    assert moved_once(scene)
    scene.close()


def test_over_a_link_to_a_gpu_that_computes_slices_are_small_and_as_many_as_there_may_be() -> None:
    scene = linked()
    scene.submit(peer(1, range(16), range(16), 3))
    scene.now_us += 200  # so late is it known, and the try is still in flight
    scene.engine.step()
    assert sizes(scene) == [256] * 3
    assert scene.device.calm == [True, False, False]
    while not scene.engine.idle:
        ended_after(scene, 500)
    assert set(sizes(scene)) == {256}
    assert scene.device.calm.count(True) == 1, "within the time of a doubt it is not tried again"
    assert moved_once(scene)
    scene.close()


def test_over_a_link_what_was_believed_ends_with_the_first_slice_that_is_late() -> None:
    scene = linked()
    scene.submit(peer(1, range(16), range(16), 3))
    ended_after(scene, LAUNCH_US)
    assert scene.device.calm == [True] * 3
    ended_after(scene, 1_000)
    assert scene.device.calm[3:] == [False] * 3
    assert sizes(scene)[3:] == [256] * 3
    while not scene.engine.idle:
        ended_after(scene, 1)
    assert moved_once(scene)
    scene.close()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([1, LAUNCH_US, 1_000, 6_000, 20_000]), min_size=1),
    st.booleans(),
    st.sampled_from([2, 3]),
)
def test_whatever_slices_over_a_link_take_every_page_is_moved_once(
    took_us: list[int], computing: bool, target: int
) -> None:
    scene = linked(lane_submissions_max=3)
    scene.submit(peer(1, range(16), range(16), target))
    for turn in range(10 * 16):
        scene.computing = computing or turn % 3 == 0
        ended_after(scene, took_us[turn % len(took_us)])
    assert scene.engine.idle
    assert moved_once(scene, target)
    scene.close()


@limits(slice_bytes=64, near_slice_bytes=256, calm_slice_bytes=100_000, lane_submissions_max=1)
def test_slices_between_gpu_memories_have_sizes_of_their_own(scene: Scene) -> None:
    far = copy(3, "peer_copy", part(1, range(8), 3, range(8)))
    scene.submit(peer(1, range(8), range(8)), backup(2, range(8), range(8)), far)
    assert sorted(scene.ends()) == [1, 2, 3]
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
