"""Defects that were found once and must not come back."""

from __future__ import annotations

import pytest

from directory.core import limits
from directory.core.actions import Inserted, Refused, Restored
from directory.core.errors import InternalError, error_classes
from directory.core.events import Asked, Evicted, Flush, Insert, MoverLost, Restore
from directory.core.host import HostSlots
from directory.core.ids import HOST
from directory.core.namespace import Fingerprint
from directory.core.tokens import pack_pages, pack_tokens
from tests.unit.directory.core.world import KEY, Scheduler, World


def insert(tokens: list[int], pages: list[int], span: int = 1, receipt: int = 0) -> Insert:
    return Insert("r", 1, KEY, pack_tokens(tokens), pack_pages(pages), span, 0, (0, 0), receipt)


def test_a_diverging_report_that_is_half_carried_out_leaves_no_page_owned() -> None:
    world = World(host_pages=0)
    a = Scheduler(world, "a", "mirrored")
    a.ask(insert([1, 2, 3], [0, 1, 2], span=1))
    refused = a.ask(Evicted(((1, 2, 1), (9, 0, 1)), ((1, 1),)))
    assert isinstance(refused, Refused)
    assert refused.code == "diverged"
    assert set(world.directory.pools[a.pool].owned) == set()
    assert a.ask(insert([1, 2, 3], [0, 1, 2], span=1)) is None


def test_a_node_that_is_split_while_it_waits_for_its_backup_is_backed_up_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "BACKUPS_IN_FLIGHT_MAX", 1)
    world = World()
    a = Scheduler(world, "a")
    a.publish([9])
    a.publish([1, 2, 3, 4])
    a.publish([1, 2, 7])
    world.finish_all()
    assert world.directory.host.pages == 6


def test_a_void_backup_is_tried_again_from_another_pool_and_only_once() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    b.publish([1, 2])
    (first,) = world.copies
    assert world.copies[first].parts[0].source == a.pool
    world.finish(first, "void")
    (second,) = world.copies
    assert world.copies[second].parts[0].source == b.pool
    world.finish(second, "failed")
    assert not world.copies


def test_a_lost_mover_does_not_make_backups_go_round_for_ever() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    b.publish([1, 2])
    for _ in range(2):
        world.copies.clear()
        world.send(MoverLost(0))
    assert not world.copies


def test_a_mirrored_pools_insert_takes_no_lease_on_its_own_pages() -> None:
    world = World()
    a, b = Scheduler(world, "a", "mirrored"), Scheduler(world, "b")
    b.publish([1, 2])
    receipt = a.match([1, 2]).receipt
    refused = a.ask(insert([1, 2], [0, 1], receipt=receipt))
    assert isinstance(refused, Refused)
    assert refused.code == "wrong_mode"
    assert a.ask(insert([1, 2], [0, 1])) is None
    assert a.ask(Evicted(((1, 0, 2),), ((1, 1),))) is None


def test_pages_larger_than_a_segment_leave_the_host_tier_to_others() -> None:
    slots = HostSlots(total_bytes=1000, segment_bytes=100)
    assert slots.reserve(101, 1) is None
    assert slots.reserve(50, 20) is not None


def test_a_reservation_that_can_never_be_met_takes_no_segment() -> None:
    slots = HostSlots(total_bytes=1000, segment_bytes=100)
    assert slots.reserve(50, 21) is None
    assert slots.reserve(100, 10) is not None


def test_a_short_last_segment_counts_for_what_it_holds() -> None:
    slots = HostSlots(total_bytes=250, segment_bytes=100)
    assert slots.could_hold(50, 5)
    assert not slots.could_hold(50, 6)
    assert not slots.could_hold(100, 3)


def test_pages_that_a_restore_is_filling_can_be_neither_published_nor_targeted_again() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    b.publish([1, 2])
    got = a.match([1, 2])
    restore = Restore("r", 1, got.receipt, 0, pack_pages([4, 5]), (0, 0))
    a.seq += 1
    world.send(Asked(a.pool, a.seq, 0, restore))
    for body in (insert([1, 2], [4, 5]), restore):
        refused = a.ask(body)
        assert isinstance(refused, Refused)
        assert refused.code == "bad_message"
    world.finish_all()
    assert isinstance(world.answers[a.pool, 1 + 1], Restored)
    assert isinstance(a.ask(insert([1, 2], [4, 5])), Inserted)


@pytest.mark.parametrize("start", [-1, 3, 1 << 62])
def test_a_match_cannot_claim_to_start_outside_of_its_tokens(start: int) -> None:
    world = World()
    a, b = Scheduler(world, "a", "mirrored"), Scheduler(world, "b")
    b.publish([1, 2])
    with pytest.raises(AssertionError, match="bad_message"):
        a.match([1, 2], own=start)


def test_a_story_tells_how_things_were_then() -> None:
    world = World()
    a = Scheduler(world, "a")
    world.close(a.pool)
    told = world.directory.story.tell()
    assert "live" in told.splitlines()[0]


def test_ranks_of_a_group_never_share_a_fingerprint() -> None:
    prints = {
        Fingerprint(model="m", tp_size=2, pp_size=2, tp_rank=tp, pp_rank=pp).encode()
        for tp in range(2)
        for pp in range(2)
    }
    assert len(prints) == 4


def test_chains_are_merged_when_the_lease_that_ended_between_them_falls() -> None:
    world = World(host_pages=0)
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    b.publish([1, 2, 3, 4])
    got = a.match([1, 2])
    assert len(world.directory.tree.nodes) == 2
    a.unlock(got.receipt)
    assert len(world.directory.tree.nodes) == 1


def test_a_pool_word_never_goes_back_and_counts_in_both_modes() -> None:
    world = World()
    for name, mode in (("a", "thin"), ("b", "mirrored")):
        who = Scheduler(world, name, mode)  # type: ignore[arg-type]
        for said, kept in ((3, 3), (1, 3)):
            who.ask(Flush("pool", said))
            assert world.directory.pools[who.pool].word == kept


def test_the_wire_code_of_an_internal_error_is_its_own_class() -> None:
    assert error_classes()["internal"] is InternalError


def test_a_flushed_host_holds_nothing_even_where_a_backup_was_under_way() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    a.ask(Flush("host"))
    world.finish_all()
    assert world.directory.host.nodes == {}
    assert HOST not in next(iter(world.directory.tree.nodes.values())).places


def test_nothing_counts_that_is_read_from_a_pool_whose_reports_diverge() -> None:
    world = World()
    a, b, c = Scheduler(world, "a", "mirrored"), Scheduler(world, "b"), Scheduler(world, "c")
    c.publish([8, 9])
    world.finish_all()
    a.publish([1, 2])
    got = b.match([1, 2])
    lost = b.restore([1, 2], got)
    into = a.restore([8, 9], a.match([8, 9]))
    backup, peer, other = world.copies
    refused = a.ask(Evicted(((31, 0, 1),), ()))
    assert isinstance(refused, Refused)
    assert refused.code == "diverged"
    for op in (backup, peer, other):
        assert world.finish(op) is not None
    assert world.directory.host.pages == 2, "8, 9 alone"
    answer = world.answers[b.pool, lost]
    assert isinstance(answer, Restored)
    assert not answer.landed
    landed = world.answers[a.pool, into]
    assert isinstance(landed, Restored)
    assert landed.landed, "what is written into its free pages is nobody's report"


def test_a_backup_that_finds_no_room_evicts_nothing_in_vain() -> None:
    world = World(host_pages=4, segment_pages=4)
    a = Scheduler(world, "a")
    a.publish([1])
    a.publish([5])
    world.finish_all()
    a.publish([1, 2])
    assert len(world.copies) == 1, "2 is filling, so 1 above it cannot go"
    a.publish([7, 8, 9])
    assert len(world.copies) == 1
    assert world.directory.counters["backups_refused"] == 3
    assert "host_pages_evicted" not in world.directory.counters
    world.finish_all()
    a.publish([7, 8, 9, 6])
    world.finish_all()
    assert world.directory.host.pages == 4
    assert world.directory.counters["host_pages_evicted"] == 3
