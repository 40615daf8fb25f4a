"""How long a step of republication may take, by the clock of the links."""

import itertools
from itertools import pairwise

import pytest

from directory.core.events import Insert
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.republish import (
    HEAR_AT,
    HOLD_MAX,
    SLOTS_A_LOOK,
    SPANS_PER_BATCH_MAX,
    STEP_SHARE,
    STEP_US_MAX,
    STEP_US_MIN,
    WAITS,
    Republisher,
)
from scheduler_shim.way import BELOW_NODES_MAX, Way
from tests.unit.scheduler_shim.support import Cluster, FakeDaemon, tokens


def test_a_batch_takes_no_longer_than_its_share_of_a_schedulers_time(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = SPANS_PER_BATCH_MAX
    node = cluster.add("a", "mirrored", page_count=2 * count)
    daemon.die()
    node.tick()
    assert node.scheduler.mode == "degraded"
    for number in range(count):
        node.serve(number, tokens(number))
    daemon.restart()
    say = Republisher._say

    def slowly(self: Republisher, report: Insert, fresh: int) -> None:
        say(self, report, fresh)
        daemon.clock_us += STEP_US_MIN // 2

    monkeypatch.setattr(Republisher, "_say", slowly)
    daemon.heard.clear()
    said = [0]
    while node.scheduler.client is None:
        daemon.clock_us += 5 * STEP_US_MIN
        node.tick()
        daemon.run()
        said.append(sum(isinstance(body, Insert) for body in daemon.heard))
    steps = [after - before for before, after in pairwise(said)]
    assert max(steps) == 2, "two take the whole time of a batch"
    assert said[-1] == count


def test_long_waits_make_no_batch_longer_unless_there_is_no_short_one(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else had the core now and then; that is no reason to hold the next step up."""
    count = 2 * SPANS_PER_BATCH_MAX
    node = cluster.add("a", "mirrored", page_count=2 * count)
    daemon.die()
    node.tick()
    assert node.scheduler.mode == "degraded"
    for number in range(count):
        node.serve(number, tokens(number))
    daemon.restart()
    say = Republisher._say
    said: list[int] = []

    def slowly(self: Republisher, report: Insert, fresh: int) -> None:
        say(self, report, fresh)
        said[-1] += 1
        daemon.clock_us += STEP_US_MIN // 2

    monkeypatch.setattr(Republisher, "_say", slowly)
    long_us = STEP_SHARE * 4 * STEP_US_MIN  # a share of four of the shortest batches
    short = 2 * WAITS
    while node.scheduler.client is None:
        said.append(0)
        steps = [step for step in said if step]
        waited = len(steps) >= short or (steps and len(steps) % WAITS)
        daemon.clock_us += long_us if waited else STEP_US_MIN
        node.tick()
        daemon.run()
    steps = [step for step in said if step]
    assert sum(steps) == count
    assert set(steps[:short]) == {2}, "there was a short one among the last ones"
    assert set(steps[short:-1]) == {8}


def _begun(cluster: Cluster, daemon: FakeDaemon, *spans: int, pages: int) -> Republisher:
    """A pool with spans of a page, and a new daemon that is to be told of them."""
    node = cluster.add("a", "mirrored", page_count=pages)
    daemon.die()
    node.tick()
    for number in spans:
        node.scheduler.submit(number, tokens(number))
        while not node.scheduler.tick():
            pass
    daemon.restart()
    tree = node.scheduler.room.tree
    assert isinstance(tree, MirroredTree)
    client, _ = daemon.connect(node.pool, instance="a")
    tree.returning = Republisher(tree.mirror, client, thin=False)
    return tree.returning


def test_slots_without_a_span_are_passed_over_a_few_at_a_time(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool was full once, and all but its last span are gone; no step looks at all of it."""
    count = 40 * SLOTS_A_LOOK
    republisher = _begun(cluster, daemon, *range(count), pages=count)
    (node,) = cluster.nodes
    assert node.scheduler.room.evict(count - 1) == count - 1
    assert list(republisher.mirror.pool.spans) == [count]
    clock = itertools.count(daemon.clock_us, STEP_US_MAX)  # time is over at every look
    monkeypatch.setattr(republisher.client, "now_us", lambda: next(clock))
    steps = 0
    while not republisher.done:
        republisher.step()
        steps += 1
    assert steps == count // SLOTS_A_LOOK + 1, "and making its way was enough for one step"
    assert republisher.spans_said == 1


def test_a_span_that_comes_in_a_slot_from_before_waits_for_no_other_round(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    republisher = _begun(cluster, daemon, 1, 2, 3, pages=8 * SLOTS_A_LOOK)
    (node,) = cluster.nodes
    republisher.step()
    assert republisher.done
    node.scheduler.flush()
    node.scheduler.submit(4, tokens(4))
    node.scheduler.tick()
    assert list(republisher.mirror.pool.spans) == [1]
    assert republisher._left == 1
    republisher.step()
    assert republisher.done
    daemon.run()
    assert [body.span for body in daemon.heard if isinstance(body, Insert)] == [1, 2, 3, 1]


def test_a_span_of_which_nobody_has_told_is_said_all_the_same(
    cluster: Cluster, daemon: FakeDaemon
) -> None:
    republisher = _begun(cluster, daemon, 1, 2, 3, pages=8 * SLOTS_A_LOOK)
    (node,) = cluster.nodes
    republisher.step()
    node.scheduler.flush()
    republisher.mirror.insert("r", 0, NamespaceKey(), tokens(4), pack_pages([5]), (1, 1))
    assert list(republisher.mirror.pool.spans) == [1]
    assert republisher._left == 1
    republisher.step()
    republisher.step()
    assert republisher.done


@pytest.mark.parametrize("over", ["bytes", "time"])
def test_it_comes_to_an_end_while_a_span_comes_at_every_step(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    """Long paths, or slow steps: a batch is over with its first span, and as many come as go."""
    before, most = 20, 100
    republisher = _begun(cluster, daemon, *range(before), pages=before + most)
    (node,) = cluster.nodes
    if over == "bytes":
        monkeypatch.setattr("scheduler_shim.republish.BATCH_BYTES_MAX", 1)
    else:
        say = Republisher._say

        def slowly(self: Republisher, report: Insert, fresh: int) -> None:
            say(self, report, fresh)
            daemon.clock_us += STEP_US_MIN

        monkeypatch.setattr(Republisher, "_say", slowly)
    said = [0]
    while not republisher.done and len(said) <= most:
        node.scheduler.submit(before + len(said), tokens(before + len(said)))
        while not node.scheduler.tick():
            pass
        republisher.step()
        daemon.run()
        republisher.client.poll()
        said.append(republisher.spans_said)
    assert republisher.done
    assert {after - before for before, after in pairwise(said)} == {2}, "no step is longer for it"


def _slow(
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    what: type[object],
    name: str,
    takes_us: int = STEP_US_MIN,
) -> list[object]:
    """Have a method take the whole time of a step, or so much; returns a list with an item a
    call."""
    done, calls = getattr(what, name), list[object]()

    def slowly(*arguments: object) -> object:
        calls.append(name)
        daemon.clock_us += takes_us
        return done(*arguments)

    monkeypatch.setattr(what, name, slowly)
    return calls


def test_where_answers_took_the_time_nothing_is_said_in_the_same_step(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And though more comes at every step it comes to an end."""
    monkeypatch.setattr("scheduler_shim.republish.HEAR_AT", 1)
    monkeypatch.setattr("scheduler_shim.republish.HOLD_MAX", 1)
    before, most = 20, 100
    republisher = _begun(cluster, daemon, *range(before), pages=before + most)
    (node,) = cluster.nodes
    _slow(daemon, monkeypatch, Republisher, "take")
    _slow(daemon, monkeypatch, Republisher, "_say")
    monkeypatch.setattr(Way, "outdated", False)  # its making is no other reason
    said = [0]
    while not republisher.done and len(said) <= most:
        node.scheduler.submit(before + len(said), tokens(before + len(said)))
        while not node.scheduler.tick():
            pass
        daemon.run()
        republisher.step()
        said.append(republisher.spans_said)
    assert republisher.done
    steps = [after - before for before, after in pairwise(said)]
    assert set(steps[::2]) == {0}
    assert set(steps[1::2]) == {3}, "what came in two steps, and one more"


def test_who_looked_for_answers_says_a_span_before_it_looks_again(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though none come, and as many are open: no two steps in a row say nothing for it."""
    monkeypatch.setattr("scheduler_shim.republish.HEAR_AT", 1)
    monkeypatch.setattr("scheduler_shim.republish.HOLD_MAX", 1)
    republisher = _begun(cluster, daemon, *range(10), pages=20)
    looks = _slow(daemon, monkeypatch, Republisher, "take")
    _slow(daemon, monkeypatch, Republisher, "_say")
    for number in range(5):
        republisher.step()
        assert (republisher.spans_said, len(looks)) == (number, number + 1)
        republisher.step()
        assert (republisher.spans_said, len(looks)) == (number + 1, number + 1)


@pytest.mark.parametrize(("way_us", "a_step"), [(STEP_US_MIN // 2, 1), (STEP_US_MIN // 8, 4)])
def test_no_way_is_begun_for_which_there_is_no_time(
    cluster: Cluster,
    daemon: FakeDaemon,
    monkeypatch: pytest.MonkeyPatch,
    way_us: int,
    a_step: int,
) -> None:
    """A step that has said something leaves the next way to the next step, which has all its time,
    where one takes too long for what is left."""
    count = 12
    republisher = _begun(cluster, daemon, *range(count), pages=count)
    _slow(daemon, monkeypatch, Way, "__init__", way_us)
    _slow(daemon, monkeypatch, Republisher, "_say", STEP_US_MIN // 8)
    said = [0]
    while republisher._left:
        republisher.step()
        daemon.run()
        said.append(republisher.spans_said)
    assert {after - before for before, after in pairwise(said)} == {a_step}


@pytest.mark.parametrize("often", [True, False])
def test_the_daemon_is_woken_once_for_many_spans_unless_steps_come_seldom(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, often: bool
) -> None:
    count = 4 * HOLD_MAX
    republisher = _begun(cluster, daemon, *range(count), pages=count)
    _slow(daemon, monkeypatch, Republisher, "_say")  # a step says one span
    sends = _slow(daemon, monkeypatch, type(republisher.client), "send_held", 0)
    step_us = STEP_US_MIN * STEP_SHARE + (0 if often else 1)
    steps = 0
    while republisher._left:
        daemon.clock_us += step_us
        republisher.step()
        daemon.run()
        steps += 1
    if often:
        looks = count // HEAR_AT + 1  # each sends what is held first
        assert count // HOLD_MAX <= len(sends) <= count // HOLD_MAX + looks
    else:
        assert len(sends) >= steps == count


def test_answers_are_looked_for_once_there_are_some_and_when_all_is_said(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2 * HEAR_AT
    republisher = _begun(cluster, daemon, *range(count), pages=count)
    _slow(daemon, monkeypatch, Republisher, "_say")  # a step says one span
    looks, take = list[tuple[int, int]](), Republisher.take

    def look(self: Republisher) -> None:
        looks.append((self.client.open_count, self._left))
        take(self)

    monkeypatch.setattr(Republisher, "take", look)
    while not republisher.done:
        republisher.step()
        daemon.run()
    republisher.step()
    assert all(open_count >= HEAR_AT or not left for open_count, left in looks)
    assert [left for _, left in looks][-1] == 0
    assert 1 < len(looks) < count // 4


def test_making_a_way_that_took_the_time_is_a_step_and_never_two_in_a_row(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests go on, so a way is of no use any more in the next step: it is made again there."""
    before, most = 12, 60
    republisher = _begun(cluster, daemon, *range(before), pages=before + most)
    (node,) = cluster.nodes
    ways = _slow(daemon, monkeypatch, Way, "__init__")
    said = [0]
    while not republisher.done and len(said) <= most:
        node.scheduler.submit(before + len(said), tokens(before + len(said)))
        while not node.scheduler.tick():
            pass
        made = len(ways)
        republisher.step()
        assert len(ways) > made
        daemon.run()
        republisher.client.poll()
        said.append(republisher.spans_said)
    assert republisher.done
    steps = [after - before for before, after in pairwise(said)]
    assert not steps[0]
    assert all(one or other for one, other in pairwise(steps))
    assert set(steps[1::2]) == {3}, "what came in two steps, and one more"


def test_one_way_is_made_for_all_the_turns_of_a_chat(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though their slots lie far apart, because others had their turns in between."""
    chats, turns = 3, 4
    node = cluster.add("a", "mirrored", page_count=64)
    daemon.die()
    node.tick()
    for turn in range(turns):
        for chat in range(chats):
            node.serve(turn * chats + chat, tokens(chat, *range(turn + 1)))
    daemon.restart()
    ways = _slow(daemon, monkeypatch, Way, "__init__")
    while node.scheduler.client is None:
        daemon.clock_us += STEP_SHARE * STEP_US_MAX
        node.tick()
        daemon.run()
    assert node.scheduler.counters["spans_republished"] == chats * turns
    assert len(ways) == chats


def test_a_way_goes_on_below_by_a_bounded_part(
    cluster: Cluster, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.add("a", "mirrored", page_count=8 * BELOW_NODES_MAX)
    daemon.die()
    node.tick()
    long = range(3 * BELOW_NODES_MAX)
    node.serve(0, tokens(*long))
    for number in long:  # each leaves the path at another page, so that it consists of many nodes
        node.serve(1 + number, tokens(*long[: number + 1], 99))
    tree = node.scheduler.room.tree
    assert isinstance(tree, MirroredTree)
    first = next(on for on in tree.mirror._tree.nodes.values() if len(on.path()) == 1)
    assert len(Way.beyond(first)._node.path()) == len(first.path()) + BELOW_NODES_MAX
    edge = len(first.edge)
    monkeypatch.setattr("scheduler_shim.way.BELOW_BYTES_MAX", 3 * edge)
    assert len(Way.beyond(first)._node.path()) == len(first.path()) + 3
