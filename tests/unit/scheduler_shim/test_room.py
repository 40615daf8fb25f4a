"""The room: what a mirror gives up goes to whoever takes it, and is evictable till then."""

from __future__ import annotations

from array import array

import pytest

from directory.core.actions import Totals
from directory.core.events import Mode
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.pools import PageAllocator
from scheduler_shim.room import Room
from scheduler_shim.thin_tree import ThinTree
from tests.unit.scheduler_shim.support import Cluster, Node, tokens

PAGES = 8


class WatchedAllocator(PageAllocator):
    """Counts what is asked of it: with a device's, each is many calls."""

    def __init__(self, page_count: int) -> None:
        super().__init__(page_count)
        self.calls = 0

    def allocate(self, count: int) -> array[int] | None:
        self.calls += 1
        return super().allocate(count)

    def free(self, pages: bytes | array[int]) -> None:
        self.calls += 1
        super().free(pages)


def full(cluster: Cluster, mode: Mode) -> tuple[Node, Room, WatchedAllocator]:
    """A node whose pool has two paths of three pages, the first of them colder, and two free ones.
    Its allocator is watched from here on."""
    node = cluster.add("a", mode, page_count=PAGES)
    node.serve(1, tokens(1, 2, 3))
    node.serve(2, tokens(4, 5, 6))
    room = node.scheduler.room
    watched = WatchedAllocator(PAGES)
    watched._free, watched._is_free = room.allocator._free, room.allocator._is_free  # type: ignore[attr-defined]
    room.allocator = watched
    return node, room, watched


def test_what_is_given_up_for_somebody_does_not_go_through_the_allocator(cluster: Cluster) -> None:
    node, room, watched = full(cluster, "mirrored")
    assert room.allocate(2) is not None, "the free ones"
    watched.calls = 0
    before = [node.pool.words.read(slot) for slot in range(1, PAGES + 1)]
    taken = room.allocate(3)
    assert taken is not None
    assert len(set(taken)) == 3
    assert watched.calls == 0
    after = [node.pool.words.read(slot) for slot in range(1, PAGES + 1)]
    assert sum(new > old for old, new in zip(before, after, strict=True)) == 1, "its word moved on"
    assert (room.free_count, room.tree.pages) == (0, 3)
    assert room.allocate(4) is None
    assert (room.free_count, room.tree.pages) == (0, 3), "all or none"
    assert len(room.allocate_up_to(4)) == 3


def test_room_that_is_made_ahead_is_free_here_and_evictable_for_others(cluster: Cluster) -> None:
    node, room, watched = full(cluster, "mirrored")
    room.make_ready(3, leave=2)
    assert (watched.free_count, room.free_count, room.tree.pages) == (2, 5, 3)
    assert room.totals == Totals(6, 0), "three in the tree, and three that it gave up"
    node.check()
    watched.calls = 0
    room.make_ready(3, leave=2)
    assert (watched.calls, room.tree.pages) == (0, 3), "there it is"
    assert room.evict(1) == 1
    assert (watched.free_count, room.tree.pages) == (3, 3), "what was given up goes first"
    node.check()
    watched.calls = 0
    assert len(room.allocate(2) or ()) == 2
    assert watched.calls == 0
    assert room.totals == Totals(3, 0)
    assert room.evict(9) == 0, "a mirror gives up all that is wanted, or nothing"
    assert room.evict(3) == 3


def test_what_is_left_when_it_was_taken_is_given_back_to_the_allocator(cluster: Cluster) -> None:
    node, room, watched = full(cluster, "mirrored")
    assert room.allocate(2) is not None
    watched.calls = 0
    room.make_ready(3, leave=2)
    taken = room.allocate_up_to(3)
    assert (len(taken), watched.calls, room.free_count) == (3, 0, 2)
    room.sent(array("I"), b"")
    assert (watched.free_count, room.free_count, room.tree.pages) == (2, 2, 1)
    room.make_ready(9, leave=1)
    assert (watched.free_count, room.free_count, room.tree.pages) == (2, 3, 0), "as far as it goes"
    room.sent(array("I"), b"")
    room.free(array("I", watched.used()))
    node.check()


def test_a_spare_page_that_the_tree_has_is_found(cluster: Cluster) -> None:
    _, room, _ = full(cluster, "mirrored")
    room.make_ready(3, leave=2)
    assert isinstance(room.tree, MirroredTree)
    assert room.check([], []) == []
    room._spare[0] = room.tree.mirror.page_list()[0]
    assert room.check([], []) == ["pages: a page is held twice, or held and free"]


def test_a_flush_leaves_nothing_spare(cluster: Cluster) -> None:
    node, room, watched = full(cluster, "mirrored")
    room.make_ready(4, leave=0)
    assert watched.free_count == 2
    room.flush()
    assert (watched.free_count, room.totals) == (PAGES, Totals(0, 0))
    node.check()


def test_a_thin_tree_leaves_nothing_spare(cluster: Cluster) -> None:
    """If its daemon is lost, whatever no row has is freed."""
    node, room, watched = full(cluster, "thin")
    room.make_ready(4, leave=2)
    assert (watched.free_count, room.free_count) == (6, 6)
    assert room.totals == room.tree.totals
    taken = room.allocate(7)
    assert taken is not None
    assert (watched.free_count, room.tree.pages) == (0, 1)
    room.free(taken)
    node.check()


@pytest.mark.parametrize("times", range(3))
def test_what_is_spare_when_a_thin_scheduler_returns_is_free(cluster: Cluster, times: int) -> None:
    node, room, watched = full(cluster, "thin")
    assert node.daemon is not None
    node.daemon.die()
    node.tick(2)
    assert isinstance(room.tree, MirroredTree)
    node.serve(3, tokens(1, 2, 3))
    node.serve(4, tokens(4, 5, 6))
    room.make_ready(3 + times, leave=0)
    assert room.free_count > watched.free_count
    node.daemon.restart()
    for _ in range(400):
        node.tick()
        node.daemon.run()
        node.daemon.clock_us += 20_000
    assert isinstance(node.scheduler.room.tree, ThinTree)
    assert room.free_count == watched.free_count
    node.daemon.die()
    node.tick(2)
    assert watched.free_count + room.tree.pages == PAGES
