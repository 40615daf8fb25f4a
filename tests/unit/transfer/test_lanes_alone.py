"""Slices by a kernel: what they do where they are alone on their GPU, and how they find out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.transfer.lane_scene import Scene, peer
from transfer.alone import DOUBT_US_MIN, LAUNCH_US, TRUSTED_US


def alone(**more: int) -> Scene:
    """A GPU that has computed lately; 10,000 bytes a microsecond are as fast as its memory goes."""
    return Scene(computing=True, alone_bytes_per_us=10_000, local_percent=25, **more)


def ended_after(scene: Scene, took_us: int, *, seen: bool = True) -> None:
    """What is in flight is done so much later; `seen`: the engine has looked just before."""
    scene.now_us += took_us
    flying = sorted(scene.device.waiting)
    if seen:
        scene.engine.step()
    for ticket in flying:
        scene.device.complete(ticket)
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


def test_a_try_waits_until_nothing_stands_before_it() -> None:
    scene = linked()
    scene.submit(peer(1, range(16), range(16), 3))
    scene.now_us += 200
    scene.engine.step()
    assert scene.device.calm == [True, False, False], "it was late, and others have gone"
    scene.now_us += DOUBT_US_MIN
    scene.device.step(1)
    scene.engine.step()
    assert scene.device.in_flight == 3
    scene.now_us += DOUBT_US_MIN
    scene.device.step(1)
    scene.engine.step()
    assert scene.device.in_flight == 2, (
        "it may be tried again, behind those in flight it would be late"
    )
    scene.device.step(2)
    scene.engine.step()
    assert (scene.device.in_flight, scene.device.calm[-1]) == (1, True)
    ended_after(scene, LAUNCH_US)
    assert scene.device.calm[-2:] == [True, True], "nobody computes, and that is known now"
    assert scene.ends() == [1]
    assert moved_once(scene)
    scene.close()


def test_what_goes_while_nothing_computes_is_evidence_for_when_it_is_not_known_any_more() -> None:
    scene = linked()
    scene.computing = False
    scene.submit(peer(1, range(16), range(16), 3))
    assert scene.device.calm == [True, True]
    scene.computing = True
    while not scene.engine.idle:
        ended_after(scene, LAUNCH_US)
    assert all(scene.device.calm)
    assert 256 not in sizes(scene), "there was nothing to find out"
    assert moved_once(scene)
    scene.close()


def test_nothing_is_tried_over_a_bus_whose_speed_is_another_one() -> None:
    scene = linked()
    scene.links.clear()
    scene.submit(peer(1, range(16), range(16), 3))
    assert scene.device.calm == [False] * 3
    assert scene.ends() == [1]
    assert moved_once(scene)
    scene.close()
