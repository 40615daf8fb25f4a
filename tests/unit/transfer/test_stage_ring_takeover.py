"""Taking a stage ring over from a scheduler that may write into it whatever it likes, whenever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.errors import ImportFailed
from directory.core.events import CopyDone
from tests.unit.transfer.staged import SLAB, SPREAD, Scene, StagedPool, backup, layer_wise, load
from transfer.ipc.stage_ring import (
    DONE,
    ENTRIES,
    ENTRIES_AT,
    ENTRY_WORDS,
    FAILED,
    HEAD,
    StageRing,
)


@pytest.mark.parametrize(("head", "done"), [(2**64 - 1, 2**64 - 1), (5, 6), (ENTRIES + 3, 2)])
def test_a_ring_whose_counters_no_ring_has_is_not_taken_over(head: int, done: int) -> None:
    pool = StagedPool(SPREAD, SLAB, landings=4)
    pool.ring._store(HEAD, head)
    pool.ring.finish(done)
    with pytest.raises(ImportFailed, match="requests"):
        pool.import_as(1)
    pool.close()


NO_COUNT = 2**64 - 1


def test_a_ring_is_counted_on_from_the_number_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its scheduler can write another one between the look and the use."""
    check = StageRing.check

    def then_written(ring: StageRing) -> int:
        head = check(ring)
        ring._store(HEAD, NO_COUNT)
        return head

    monkeypatch.setattr(StageRing, "check", then_written)
    scene = Scene()
    scene.pool.ring._store(HEAD, 0)
    scene.submit(backup(1, range(4), range(4)), load(2, range(8, 12), range(8, 12)))
    assert sorted(scene.finish()) == [(1, "ok"), (2, "ok")]
    assert scene.pool.ring.head < NO_COUNT
    scene.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_nothing_that_a_scheduler_writes_into_its_ring_raises_out_of_a_step(
    data: st.DataObject,
) -> None:
    scene = Scene(fence_deadline_us=2)
    words = len(scene.pool.ring)
    # Where a mover looks: the two counters, and what is said of each request.
    places = [HEAD, DONE, *range(ENTRIES_AT + FAILED, words, ENTRY_WORDS)]
    written = st.sampled_from([0, 1, 7, ENTRIES, 2**62, 2**63, NO_COUNT]) | st.integers(0, NO_COUNT)
    scene.submit(backup(1, range(8), range(8)), load(2, range(8, 12), range(8, 12)))
    scene.submit(layer_wise(scene, load(3, range(12, 16), range(12, 16))))
    for _ in range(data.draw(st.integers(1, 12))):
        scene.pool.ring._store(data.draw(st.sampled_from(places)), data.draw(written))
        scene.now_us += 1
        scene.move()
    scene.pool.ring._store(DONE, NO_COUNT)
    for _ in range(100):
        scene.now_us += 1
        scene.move()
    ends = [e.op for e in scene.events if isinstance(e, CopyDone)]
    assert sorted(ends) == [1, 2, 3], "each has its end, whatever it is"
    slab = scene.engine._pools[1].slab
    assert slab is not None
    parts = sorted([*slab._spare, *slab._orphans.values()])
    assert parts == list(range(8)), "each is spare, or is when somebody looks for one"
    scene.close()
