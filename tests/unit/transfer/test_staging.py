"""Staged copies: the same bytes by way of a slab, and nothing too early, too late, or for ever."""

from collections.abc import Iterable

import msgspec
import pytest

from directory.core.errors import ImportFailed
from directory.core.events import CopyDone
from directory.core.ids import FORWARD, LANDINGS
from tests.unit.transfer.staged import (
    DEADLINE_US,
    LAYERS,
    SLAB,
    SPREAD,
    TOGETHER,
    Scene,
    StagedPool,
    backup,
    layer_wise,
    load,
)
from tests.unit.transfer.support import HOST, copy, part, slot
from transfer.copies import CopyState
from transfer.device.fake import FakePageDevice
from transfer.engine import Engine, PoolReleased
from transfer.imports import ImportedPool
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.stage_ring import ENTRIES
from transfer.staging import PACKED_WITHIN_US


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterable[Scene]:
    """A scene; indirect parameters are its options."""
    made = Scene(**getattr(request, "param", {}))
    yield made
    made.close()


def scenes(*options: dict[str, object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", options, indirect=True, ids=str)


@scenes(
    {},
    {"paged": False},
    {"own": TOGETHER},
    {"own": TOGETHER, "paged": False},
    {"stage_bytes": 2048},
)
def test_pages_that_went_through_the_slab_and_back_are_the_same(scene: Scene) -> None:
    pages, slots = [3, 15, 7, 0, 8, 9, 2, 11], [9, 2, 17, 30, 4, 5, 6, 12]
    scene.submit(backup(1, pages, slots))
    assert scene.finish() == [(1, "ok")]
    for page, index in zip(pages, slots, strict=True):
        assert scene.host_page(index) == scene.pool.pattern(1, page)
    scene.pool.fill(5)
    onto = [1, 0, 2, 14, 5, 6, 13, 12]
    scene.submit(load(2, slots, onto))
    assert scene.finish()[-1] == (2, "ok")
    for page, target in zip(pages, onto, strict=True):
        assert scene.pool.read_page(target) == scene.pool.pattern(1, page)
    assert scene.pool.read_page(3) == scene.pool.pattern(5, 3), "others are as they were"
    assert {r.pack for r in scene.pool.carried_out} == {True, False}
    paged = getattr(scene.device, "beside", None)
    assert paged is None or all(paged), "their calls may be a thread's"
    sizes = [r[2] for s in scene.device.history for b in s.batches for r in b.ranges]
    assert min(sizes) >= scene.pool.own.page_bytes, "whole rows go over the bus"


def test_nothing_goes_to_the_host_before_it_is_packed(scene: Scene) -> None:
    scene.submit(backup(1, range(2), range(2), fences=[(1, FORWARD, 5)]))
    assert scene.pool.open_requests == 0, "nor is anything packed before it is written"
    scene.pool.timelines.write(FORWARD, 5)
    scene.step()
    assert (scene.pool.open_requests, scene.device.history) == (2, [])
    scene.step()
    assert scene.rests(), "the mover may sleep meanwhile"
    scene.pool.write_page(1, b"x" * scene.pool.own.page_bytes)
    scene.stage()
    assert len(scene.device.history) == 2
    assert scene.finish() == [(1, "ok")]
    assert scene.host_page(1) == b"x" * scene.pool.own.page_bytes


def test_a_load_has_landed_only_when_it_is_unpacked(scene: Scene) -> None:
    scene.submit(load(1, range(2), range(2)))
    before = scene.pool.read_page(0)
    scene.move()
    scene.stage(1)
    assert (scene.pool.open_requests, scene.events) == (1, [])
    scene.stage(1)
    assert [(e.op, e.outcome) for e in scene.events if isinstance(e, CopyDone)] == [(1, "ok")]
    assert scene.pool.read_page(0) == scene.host_page(0) != before


@scenes({"landing_bytes": 0}, {"landing_bytes": 0, "paged": False}, {"landing_bytes": 600})
def test_layers_land_in_order_and_each_when_it_is_unpacked(scene: Scene) -> None:
    scene.submit(backup(1, range(8), range(8)))
    scene.finish()
    table = scene.pool.timelines
    scene.submit(layer_wise(scene, load(2, range(8), range(8, 16))))
    seen = [table.read(LANDINGS)]
    for _ in range(100):
        scene.move()
        assert table.read(LANDINGS) == seen[-1], "what is not unpacked has not landed"
        told = table.read(LANDINGS)
        scene.stage(1)
        seen.append(table.read(LANDINGS))
        for layer in range(told, seen[-1]):
            for buffer in (b for b in scene.pool.own.buffers if b.layer == layer):
                for page in range(8):
                    assert chunk(scene, buffer.layer, page + 8) == chunk(scene, layer, page)
    assert seen[-1] == LAYERS
    assert seen == sorted(seen)
    assert scene.finish()[-1] == (2, "ok")


def chunk(scene: Scene, layer: int, page: int) -> bytes:
    return b"".join(
        bytes(scene.pool.allocations[b.allocation].view[at : at + b.chunk_bytes])
        for b in scene.pool.own.buffers
        if b.layer == layer
        for at in (b.offset + page * b.page_stride,)
    )


def test_a_landing_counter_that_was_taken_over_loses_the_load(scene: Scene) -> None:
    scene.submit(layer_wise(scene, load(1, range(8), range(8))))
    scene.move()
    scene.pool.timelines.write(LANDINGS, 77)
    assert scene.finish() == [(1, "failed")]
    assert scene.pool.timelines.read(LANDINGS) == 77
    assert scene.parts_spare() == 8


@pytest.mark.parametrize("when", ["before it is packed", "while it moves"])
def test_pages_that_were_given_up_meanwhile_void_a_backup(scene: Scene, when: str) -> None:
    scene.submit(backup(1, range(2), range(2), words=[(1, 3, 0)]))
    if when == "while it moves":
        scene.stage()
        assert scene.device.in_flight
    scene.pool.words.bump(3)
    assert scene.finish() == [(1, "void")]
    assert scene.parts_spare() == 8


def test_what_the_scheduler_cannot_carry_out_has_failed(scene: Scene) -> None:
    scene.submit(backup(1, range(2), range(2)), load(2, range(2), range(2)))
    scene.move()
    scene.stage(fail=True)
    assert sorted(scene.finish()) == [(1, "failed"), (2, "failed")]
    assert scene.parts_spare() == 8


def test_a_slice_that_the_device_loses_gives_its_part_back(scene: Scene) -> None:
    scene.submit(load(1, range(8), range(8)), backup(2, range(8, 12), range(8, 12)))
    for _ in range(9):
        scene.stage()
        while scene.device.waiting:
            scene.device.fail(min(scene.device.waiting))
        scene.step()
    assert sorted(scene.finish()) == [(1, "failed"), (2, "failed")]
    assert scene.parts_spare() == 8


def test_a_released_pool_waits_for_no_scheduler(scene: Scene) -> None:
    scene.submit(load(1, range(8), range(8)), backup(2, range(8, 12), range(8, 12)))
    scene.move()
    assert scene.pool.open_requests
    scene.engine.release_pool(1)
    for _ in range(9):
        scene.move()
    ends = {(e.op, e.outcome) for e in scene.events if isinstance(e, CopyDone)}
    assert ends == {(1, "void"), (2, "void")}
    assert PoolReleased(1) in scene.events


def test_a_backup_whose_scheduler_hangs_is_lost_and_its_part_waits(scene: Scene) -> None:
    scene.submit(backup(1, [0], [0]))
    scene.step()
    scene.now_us += DEADLINE_US - 1
    scene.step()
    assert scene.events == []
    scene.now_us += 1
    scene.step()
    (done,) = scene.events
    assert isinstance(done, CopyDone)
    assert (done.op, done.outcome, scene.parts_spare()) == (1, "failed", 7)
    assert "scheduler" in done.detail
    scene.submit(load(2, range(8), range(8)))
    for _ in range(9):
        scene.move()
    assert len(scene.device.history) == 7, "the eighth part may still be packed"
    assert scene.finish() == [(1, "failed"), (2, "ok")]
    assert scene.parts_spare() == 8


def test_a_load_whose_scheduler_hangs_keeps_its_targets(scene: Scene) -> None:
    scene.submit(load(1, [0], [0]))
    scene.move()
    scene.now_us += 5 * DEADLINE_US
    scene.step()
    assert scene.events == [], "the scheduler might still write there"
    assert scene.finish() == [(1, "failed")]


def test_waiting_in_line_is_not_the_schedulers_fault(scene: Scene) -> None:
    for op in range(1, 30):
        scene.engine.submit(load(op, range(8), range(8)))
    for _ in range(200):
        scene.now_us += DEADLINE_US // 2
        scene.stage()
        scene.move()
    assert {outcome for _, outcome in scene.finish()} == {"ok"}


def test_the_first_two_slices_are_on_their_way_before_the_rest_is_looked_at(scene: Scene) -> None:
    scene.submit(backup(1, range(16), range(16)))
    for _ in range(4):
        scene.step()
    assert scene.pool.open_requests == 2
    assert scene.rests(), "until they are packed"
    scene.stage(1)
    assert (scene.pool.open_requests, scene.device.in_flight) == (1, 1)
    scene.stage(1)
    scene.step()
    assert scene.device.in_flight == 2
    assert scene.pool.open_requests > 0
    assert scene.finish() == [(1, "ok")]


def crowded(scene: Scene) -> None:
    """A backup that has all the parts it may have: two with the device, four at the scheduler."""
    scene.submit(backup(1, range(16), range(16)))
    scene.stage(2)
    for _ in range(4):
        scene.step()
    assert (scene.pool.open_requests, scene.device.in_flight) == (4, 2)


def test_a_quarter_of_the_parts_is_kept_for_loads(scene: Scene) -> None:
    crowded(scene)
    scene.submit(load(2, range(16, 18), range(2)))
    assert scene.device.in_flight == 4
    assert scene.finish() == [(2, "ok"), (1, "ok")]


def test_what_backups_give_back_goes_to_a_load_that_waits(scene: Scene) -> None:
    crowded(scene)
    scene.submit(load(2, range(16, 20), range(4)))
    assert scene.device.in_flight == 4, "the two parts that were kept"
    scene.move()
    assert scene.device.in_flight == 2, "the load's other two, in the parts of the backup's two"
    assert scene.pool.open_requests == 4 + 2, "none of those is packed into"
    assert scene.finish() == [(2, "ok"), (1, "ok")]


@pytest.mark.parametrize("parts", [2, 3])
def test_of_few_parts_one_is_kept_for_loads(parts: int) -> None:
    few = Scene(slab=parts * 512, stage_bytes=1_024)
    few.submit(backup(1, range(8), range(8)))
    for _ in range(4):
        few.step()
    assert few.pool.open_requests == min(2, parts - 1)
    few.submit(load(2, [9], [9]))
    assert few.device.in_flight == 1
    assert few.finish() == [(2, "ok"), (1, "ok")]
    few.close()


def test_a_successor_touches_no_row_before_its_forerunners_requests_are_done(scene: Scene) -> None:
    scene.submit(backup(1, range(8), range(8)))
    asked = scene.pool.open_requests
    assert asked
    second = Engine(FakePageDevice(), lambda: 1, scene.engine._limits)
    second.add_pool(scene.pool.import_as(1))
    second.open_tier(scene.tier)
    second.submit(load(2, range(2), range(2)))
    second.step()
    assert second._device.in_flight == 0
    scene.pool.carry_out(asked - 1)
    second.step()
    assert second._device.in_flight == 0
    scene.pool.carry_out(1)
    second.step()
    assert second._device.in_flight == 2
    second.release_pool(1)
    second._device.step(9)  # type: ignore[attr-defined]
    second.step()
    second.close()
    scene.finish()


@scenes({"stage_chunks_min": 3 * 2 * LAYERS})
def test_few_chunks_go_as_they_lie(scene: Scene) -> None:
    scene.submit(backup(1, range(2), range(2)))
    assert (scene.pool.open_requests, scene.device.in_flight) == (0, 1)
    scene.submit(backup(2, range(2, 5), range(2, 5)))
    scene.step()
    assert scene.pool.open_requests == 2
    assert scene.finish() == [(1, "ok"), (2, "ok")]


def test_copies_of_other_pools_and_between_pools_go_as_they_lie(scene: Scene) -> None:
    scene.submit(load(1, [0], [0], 2), copy(2, "peer_copy", part(2, [4], 1, [5])))
    assert (scene.pool.open_requests, scene.device.in_flight) == (0, 2)
    assert sorted(scene.finish()) == [(1, "ok"), (2, "ok")]
    mixed = copy(3, "load_back", part(HOST, [slot(3)], 1, [7]), part(2, [6], 1, [8]))
    scene.submit(mixed)
    assert scene.finish()[-1] == (3, "ok")
    assert scene.pool.read_page(8) == scene.plain.pattern(2, 6)
    assert scene.pool.read_page(7) == scene.host_page(3)
    assert len(scene.pool.carried_out) == 1


@pytest.mark.parametrize("wrong", ["event", "ring", "slab"])
def test_a_slab_that_is_none_is_refused_whole(wrong: str) -> None:
    pool = StagedPool(SPREAD, SLAB)
    fds, layout = pool.fds, pool.layout
    if wrong == "event":
        fds = [*fds[:-1], pool.timelines.fd]
    elif wrong == "ring":
        fds = [*fds[:-2], pool.timelines.fd, fds[-1]]
    else:
        last = msgspec.structs.replace(
            layout.buffers[0], allocation=len(layout.allocation_bytes) - 1, page_stride=64
        )
        layout = msgspec.structs.replace(layout, buffers=(last, *layout.buffers[1:]))
    ipc = SharedMemoryIPC()
    with pytest.raises(ImportFailed, match=r"stage ring|slab"):
        ImportedPool.open(1, layout, pool.handles, fds, memory=ipc, tables=ipc, staging=True)
    assert ipc.open_count == 0
    pool.close()


def test_no_more_is_asked_for_at_once_than_the_ring_holds() -> None:
    scene = Scene(stage_bytes=64)
    slab = scene.engine._pools[1].slab
    assert slab is not None
    assert slab._count == ENTRIES
    scene.close()


@scenes({"slab": ENTRIES * 512, "submissions_max": 32, "lane_submissions_max": 32})
def test_a_request_that_failed_is_known_though_its_entry_has_another_one(scene: Scene) -> None:
    scene.submit(backup(90, range(16), range(16)))
    scene.finish()
    scene.pool.fill(5)
    scene.submit(load(1, range(15), range(15)))
    scene.submit(backup(2, [0, 1], [16, 17]))  # waits for a part
    scene.submit(load(3, [15], [15]))
    assert isinstance(scene.device, FakePageDevice)
    scene.device.complete(max(scene.device.waiting))  # the row of load 3 first: request 1
    scene.step()
    scene.move()
    scene.pool.carry_out(1, fail=True)
    scene.pool.carry_out(1_000)
    assert scene.finish()[-3:] == [(1, "ok"), (3, "failed"), (2, "ok")]


@scenes({"own": TOGETHER, "lane_submissions_max": 8, "submissions_max": 16})
def test_what_is_packed_goes_before_another_backup_begins(scene: Scene) -> None:
    def states() -> list[CopyState]:
        return [scene.engine._copies[op].state for op in (1, 2, 3)]

    scene.submit(
        *(backup(op, range(3 * op, 3 * op + 3), range(3 * op, 3 * op + 3)) for op in (1, 2, 3))
    )
    scene.step()
    assert states() == [CopyState.RUNNING, CopyState.READY, CopyState.READY]
    scene.stage()
    assert (scene.device.in_flight, scene.pool.open_requests) == (2, 1)
    assert states() == [CopyState.RUNNING, CopyState.READY, CopyState.READY]
    scene.stage()
    assert scene.device.in_flight == 3, "the bus has work, and nothing is packed meanwhile"
    assert states() == [CopyState.RUNNING, CopyState.RUNNING, CopyState.READY], "one at a time"
    assert scene.finish() == [(1, "ok"), (2, "ok"), (3, "ok")]


@scenes({"fence_deadline_us": 5 * PACKED_WITHIN_US})
def test_a_scheduler_that_hangs_keeps_no_other_pool_from_beginning(scene: Scene) -> None:
    scene.submit(backup(1, range(2), range(2)))
    scene.step()
    other = copy(2, "backup", part(2, [3], HOST, [slot(9)]))
    scene.submit(other)
    scene.step()
    assert scene.device.in_flight == 0
    assert not scene.rests(), "it looks again at once"
    scene.now_us += PACKED_WITHIN_US
    scene.step()
    assert scene.device.in_flight == 1
    assert scene.finish() == [(2, "ok"), (1, "ok")]
