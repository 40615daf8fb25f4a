"""What a slab remembers of requests that failed: those that some copy is still to look at."""

import os
from collections.abc import Iterator

import pytest

from tests.unit.transfer.staged import Scene, backup
from transfer.ipc.memory import SharedMemoryIPC
from transfer.ipc.stage_ring import ENTRIES, PART_ALIGNMENT, StageRequest, StageRing
from transfer.staging import Slab

REQUEST = StageRequest(True, 0, 0, 0, PART_ALIGNMENT, [0])


@pytest.fixture
def slab() -> Iterator[Slab]:
    """A slab of so many parts as the ring has entries."""
    ring = StageRing.make(SharedMemoryIPC())
    made = Slab(1, 0, ENTRIES * PART_ALIGNMENT, ring, os.eventfd(0, os.EFD_NONBLOCK), 0)
    made.divide(PART_ALIGNMENT)
    yield made
    made.close()


def carried_out(slab: Slab, *, fail: bool) -> int:
    """Ask for something and have it done, or fail; returns its number."""
    number = slab.post(REQUEST)
    if fail:
        slab.ring.fail(number)
    slab.ring.finish(number)
    return number


def test_requests_that_failed_and_were_looked_at_are_forgotten() -> None:
    scene = Scene()
    slab = scene.engine._pools[1].slab
    assert slab is not None
    for op in range(1, 4 * ENTRIES):
        scene.submit(backup(op, range(8), range(8)))
        while not scene.engine.idle:
            scene.stage(fail=True)
            scene.move()
    assert slab._posted > 3 * ENTRIES
    assert len(slab._failed) + len(slab._awaited) == 0
    scene.close()


@pytest.mark.parametrize("fail", [True, False])
def test_one_that_is_looked_at_late_is_still_known(slab: Slab, *, fail: bool) -> None:
    late = carried_out(slab, fail=fail)
    for _ in range(2 * ENTRIES):
        assert slab.failed(carried_out(slab, fail=not fail)) is not fail
    assert slab.failed(late) is fail
    assert not slab.failed(late), "asked once"
    assert not slab._failed


@pytest.mark.parametrize("posts", [0, 2 * ENTRIES])
def test_one_that_nobody_waits_for_any_more_is_forgotten(slab: Slab, posts: int) -> None:
    part = slab.take(pack=True)
    assert part is not None
    left = carried_out(slab, fail=True)
    for _ in range(posts):
        assert not slab.failed(carried_out(slab, fail=False))
    slab.leave(left, part)
    for _ in range(2 * ENTRIES):
        assert not slab.failed(carried_out(slab, fail=False))
    assert not slab._failed
    spare = len(slab._spare)
    assert slab.take(pack=True) == part
    assert len(slab._spare) == spare, "its part came back, and went"
