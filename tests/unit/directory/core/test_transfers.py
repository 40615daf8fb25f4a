"""Backups, restores, peer copies: what is submitted, and what an ending means."""

from __future__ import annotations

import pytest

from directory.core import limits
from directory.core.actions import Fence, Refused, Restored, SubmitCopy
from directory.core.errors import InternalError
from directory.core.events import CopyDone, Flush, Insert, Lock, MoverLost, Restore
from directory.core.ids import CURRENT, FORWARD, HOST, POOL_WORD
from directory.core.tokens import pack_pages, pack_tokens, unpack_pages
from tests.unit.directory.core.world import KEY, Scheduler, World


def only(world: World) -> SubmitCopy:
    (copy,) = world.copies.values()
    return copy


def restored(who: Scheduler, tokens: list[int]) -> Restored:
    got = who.match(tokens)
    seq = who.restore(tokens, got)
    who.world.finish_all()
    answer = who.landed(seq)
    assert answer is not None
    if got.receipt:
        who.unlock(got.receipt)
    return answer


def test_a_backup_waits_for_the_source_and_is_guarded_by_its_words() -> None:
    world = World()
    a = Scheduler(world, "a")
    world.words[a.pool][3] = 17
    a.ask(Insert("r", 1, KEY, pack_tokens([1]), pack_pages([4]), 3, 17, (11, 12)))
    copy = only(world)
    assert copy.kind == "backup"
    assert set(copy.fences) == {Fence(a.pool, FORWARD, 11), Fence(a.pool, CURRENT, 12)}
    assert {(word.slot, word.value) for word in copy.words} == {(POOL_WORD, 0), (3, 17)}


def test_a_child_is_backed_up_only_after_its_parent_has_landed() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    a.publish([1, 2, 3])
    first = only(world)
    world.finish(first.op)
    second = only(world)
    assert len(second.parts[0].source_pages) == 4
    world.finish_all()
    assert world.directory.host.pages == 3


def test_a_long_node_is_backed_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BACKUP_PAGES_MAX", 2)
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2, 3, 4, 5])
    sizes = []
    while world.copies:
        sizes.append(len(only(world).parts[0].target_pages) // 4)
        world.finish(only(world).op)
    assert sizes == [2, 2, 1]


def test_the_queue_of_backups_has_a_limit_and_counts_what_it_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "BACKUPS_IN_FLIGHT_MAX", 1)
    monkeypatch.setattr(limits, "BACKUPS_PENDING_MAX", 1)
    world = World()
    a = Scheduler(world, "a")
    for first in (1, 2, 3):
        a.publish([first])
    assert world.directory.counters["backups_dropped"] == 1


def test_a_node_that_is_split_under_a_held_backup_keeps_both_halves_pinned_f19() -> None:
    world = World(host_pages=4, segment_pages=4)
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2, 3, 4])
    held = only(world)
    a.publish([1, 2, 9])
    for first in range(20, 24):
        b.publish([first])
    assert list(world.copies) == [held.op], "no slot of the held copy was given to anything else"
    world.finish(held.op)
    host = world.memory[HOST]
    want = [(KEY, pack_tokens([1, 2, 3, 4][: n + 1])) for n in range(4)]
    assert [host[slot] for slot in unpack_pages(held.parts[0].target_pages)] == want
    world.finish_all()
    a.flush()
    assert world.directory.host.locked_pages == 0


def test_a_node_that_is_split_under_a_restore_is_read_whole_f19() -> None:
    world = World(host_pages=4, segment_pages=4)
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2, 3, 4])
    world.finish_all()
    a.flush()
    got = b.match([1, 2, 3, 4])
    seq = b.restore([1, 2, 3, 4], got)
    b.unlock(got.receipt)
    a.publish([1, 2, 9])
    a.publish([5, 6, 7])
    assert world.directory.counters["backups_refused"]
    for op in sorted(world.copies, reverse=True):
        world.finish(op)
    answer = b.landed(seq)
    assert answer is not None
    assert answer.landed
    assert answer.host_pages == 4
    assert world.directory.host.locked_pages == 0


def test_redundant_mirrors_go_first_and_backups_are_never_refused_f93() -> None:
    world = World(host_pages=16)
    a, b = Scheduler(world, "a", pages=16), Scheduler(world, "b", pages=16)
    a.publish([500, 501])
    world.finish_all()
    a.flush()
    for number in range(200):
        who = (a, b)[number % 2]
        who.publish([number, number])
        world.finish_all()
    assert "backups_refused" not in world.directory.counters
    fresh = World(host_pages=4, segment_pages=4)
    a = Scheduler(fresh, "a")
    for tokens in ([1, 2], [3, 4]):
        a.publish(tokens)
        fresh.finish_all()
    a.evict(2)
    a.publish([5, 6])
    fresh.finish_all()
    assert a.match([1, 2]).host_pages == 2, "the only copy stays, the mirror of [3, 4] went"


def test_a_backup_without_memory_is_never_taken_for_done_f94() -> None:
    world = World(host_pages=2, segment_pages=2)
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    world.finish_all()
    held = b.match([1, 2])
    a.publish([5, 6])
    assert not world.copies
    assert world.directory.counters["backups_refused"] == 2
    a.flush()
    assert b.match([5, 6]).restorable_pages == 0
    assert b.match([1, 2]).host_pages == 2
    b.unlock(held.receipt)


def test_a_restore_takes_peers_first_and_the_host_for_the_rest() -> None:
    world = World()
    a, b, c = (Scheduler(world, name) for name in "abc")
    a.publish([1, 2, 3, 4])
    world.finish_all()
    a.flush()
    b.publish([1, 2])
    got = c.match([1, 2, 3, 4])
    assert (got.peer_pages, got.host_pages) == (2, 2)
    seq = c.restore([1, 2, 3, 4], got)
    copy = next(iter(world.copies.values()))
    assert copy.kind == "mixed"
    assert [part.source for part in copy.parts] == [b.pool, HOST]
    assert Fence(c.pool, FORWARD, 3) in copy.fences
    world.finish_all()
    answer = c.landed(seq)
    assert answer is not None
    assert (answer.landed, answer.peer_pages, answer.host_pages) == (True, 2, 2)


def test_a_restore_may_start_in_the_middle_of_a_node() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b", "mirrored")
    a.publish([1, 2, 3, 4])
    world.finish_all()
    for host in (False, True):
        if host:
            a.flush()
        got = b.match([1, 2, 3, 4], own=1)
        assert got.restorable_pages == 3
        b.ask(Restore("r", 1, got.receipt, 2, pack_pages([9, 10]), (0, 0)))
        world.finish_all()
        want = [(KEY, pack_tokens([1, 2, 3])), (KEY, pack_tokens([1, 2, 3, 4]))]
        assert [world.memory[b.pool].pop(page) for page in (9, 10)] == want
        b.unlock(got.receipt)


def test_a_peer_copy_that_is_void_is_tried_again_from_the_host() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    world.finish_all()
    got = b.match([1, 2])
    seq = b.restore([1, 2], got)
    assert only(world).kind == "peer_copy"
    a.flush()
    world.finish(only(world).op)
    assert only(world).kind == "load_back"
    world.finish_all()
    answer = b.landed(seq)
    assert answer is not None
    assert answer.landed


def test_a_restore_that_lands_in_part_is_lost_whole() -> None:
    world = World(host_pages=0)
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    got = b.match([1, 2])
    seq = b.restore([1, 2], got)
    a.evict(1)
    world.finish(only(world).op)
    answer = b.landed(seq)
    assert answer == Restored(False, 0, 0, 0, 0, "the path is not in the tree any more")
    b.check()


def test_a_copy_whose_owner_died_never_counts_though_the_mover_says_ok() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    backup = only(world)
    got = b.match([1, 2])
    seq = b.restore([1, 2], got)
    for op in list(world.copies):
        world.carry_out(op)
    world.close(a.pool)
    world.finish(backup.op)
    assert world.directory.host.pages == 0
    world.finish_all()
    answer = b.landed(seq)
    assert answer is not None
    assert not answer.landed
    assert list(world.directory.pools) == [b.pool]


def test_a_dead_targets_restore_is_answered_to_nobody() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    world.finish_all()
    got = b.match([1, 2])
    b.restore([1, 2], got)
    world.close(b.pool)
    assert world.finish(only(world).op) == []
    assert list(world.directory.pools) == [a.pool]


def test_a_lost_mover_ends_every_copy_and_answers_every_restore() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    world.finish_all()
    got = b.match([1, 2])
    seq = b.restore([1, 2], got)
    world.copies.clear()
    world.send(MoverLost(0, "mover 12 was killed"))
    answer = b.landed(seq)
    assert answer is not None
    assert answer.detail == "mover 12 was killed"
    assert not world.directory.transfers.copies


def test_a_completion_of_no_copy_in_flight_has_no_effect() -> None:
    world = World()
    assert world.send(CopyDone(5, "ok")) == []
    assert world.directory.counters["late_completions"] == 1


@pytest.mark.parametrize(
    ("start", "pages", "code"),
    [
        (0, [], "bad_message"),
        (0, [1, 1], "bad_message"),
        (0, [32], "bad_message"),
        (-1, [1], "bad_message"),
        (0, [31], "bad_message"),
    ],
)
def test_targets_that_cannot_be_right_are_refused(start: int, pages: list[int], code: str) -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    b.ask(Insert("r", 1, KEY, pack_tokens([8]), pack_pages([31]), 1, 0, (0, 0)))
    got = b.match([1, 2])
    answer = b.ask(Restore("r", 1, got.receipt, start, pack_pages(pages), (0, 0)))
    assert isinstance(answer, Refused)
    assert answer.code == code


def test_a_restore_beyond_its_path_or_without_one_is_lost_at_once() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    got = b.match([1, 2])
    answer = b.ask(Restore("r", 1, got.receipt, 1, pack_pages([3, 4]), (0, 0)))
    assert isinstance(answer, Restored)
    assert "shorter than the targets" in answer.detail
    node = a.match([1, 2], acquire=False).node
    locked = a.ask(Lock("r", 1, node))
    answer = a.ask(Restore("r", 1, locked.receipt, 0, pack_pages([3]), (0, 0)))  # type: ignore[union-attr]
    assert isinstance(answer, Restored)
    assert "not in the tree" in answer.detail
    world.copies.clear()
    world.send(MoverLost(0))
    a.ask(Flush("host"))
    a.unlock(locked.receipt)  # type: ignore[union-attr]
    a.flush()
    answer = b.ask(Restore("r", 1, got.receipt, 0, pack_pages([3, 4]), (0, 0)))
    assert isinstance(answer, Restored)
    assert not answer.landed


def test_restores_of_a_pool_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESTORES_PER_POOL_MAX", 1)
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    got = b.match([1, 2])
    b.restore([1, 2], got)
    answer = b.ask(Restore("r", 1, got.receipt, 0, pack_pages([3, 4]), (0, 0)))
    assert isinstance(answer, Refused)
    assert answer.code == "too_many"


def test_leased_host_pages_stay_readable_until_let_go_though_the_host_was_flushed() -> None:
    world = World()
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    world.finish_all()
    a.flush()
    got = b.match([1, 2])
    seq = b.restore([1, 2], got)
    b.ask(Flush("host"))
    assert b.match([1, 2]).restorable_pages == 0
    assert world.directory.slots.free_count(64) == 6
    world.finish_all()
    b.unlock(got.receipt)
    answer = b.landed(seq)
    assert answer is not None
    assert answer.landed
    # The landed pages were published again, and may be backed up again.
    world.finish_all()
    assert restored(a, [1, 2]).landed
    assert world.directory.host.locked_pages == 0


def test_a_defect_is_raised_with_the_story_that_led_to_it() -> None:
    world = World()
    a = Scheduler(world, "a")
    a.publish([1, 2])
    receipt = a.match([1, 2]).receipt
    (node,) = world.directory.tree.nodes.values()
    node.places[a.pool].locks = 0
    with pytest.raises(InternalError, match=r"(?s)negative lock count.*\nstory:\n.*Insert 1 3"):
        a.unlock(receipt)


def test_pages_that_went_from_everywhere_are_restorable_from_nowhere() -> None:
    world = World(host_pages=0)
    a, b = Scheduler(world, "a"), Scheduler(world, "b")
    a.publish([1, 2])
    got = b.match([1, 2])
    b.publish([1, 2])
    a.flush()
    answer = b.ask(Restore("r", 1, got.receipt, 0, pack_pages([9, 10]), (0, 0)))
    assert answer == Restored(False, 0, 0, 0, 0, "a page is restorable from nowhere now")
