"""A turn is left out only where it would find nothing to do; one reason is enough to have it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from directory.core.namespace import NamespaceKey
from scheduler_shim.request import Request
from scheduler_shim.sglang import ends, hooks
from scheduler_shim.sglang.held import HeldBack
from scheduler_shim.sglang.layerwise import Layerwise
from scheduler_shim.sglang.rest import Rest
from scheduler_shim.sglang.waiting import NEVER_US, Entry, Stage

DUE_US = 1_000_000


class Parts:
    """What is looked at, all of it at rest."""

    def __init__(self) -> None:
        self.now = 0
        self.client: Any = SimpleNamespace(
            at_rest=True, now_us=lambda: self.now, live_us=2 * DUE_US, leases_out=0
        )
        self.room: Any = SimpleNamespace(late=False)
        self.held: Any = SimpleNamespace(alive=[], fills=[], due_us=2 * DUE_US, changes=0)
        self.queue: list[Any] = []
        self.loads: Any = SimpleNamespace(rows=[], has_turns=False)
        self.rest = Rest(self, cast(HeldBack, self.held), cast(Layerwise, self.loads))
        for _ in range(2):  # with the first one the client has just come
            self.rest.until(DUE_US, NEVER_US, self.queue)

    def holds(self, *, busy: bool = True) -> bool:
        return self.rest.holds(self.queue, lambda: busy)

    def wait(self, *rids: str) -> None:
        self.queue = [SimpleNamespace(rid=rid) for rid in rids]


def lose(parts: Parts) -> None:
    parts.client = None


def late(parts: Parts) -> None:
    parts.now = DUE_US


def something_open(parts: Parts) -> None:
    parts.client.at_rest = False


def somebody_waits(parts: Parts) -> None:
    parts.held.alive = [("s1", 0)]


def a_restore(parts: Parts) -> None:
    parts.held.fills = [array("I", [1])]


def a_load(parts: Parts) -> None:
    parts.loads.rows = [object()]


def something_of_a_load(parts: Parts) -> None:
    parts.loads.has_turns = True


def a_change(parts: Parts) -> None:
    parts.wait("a")
    parts.rest.until(DUE_US, NEVER_US, parts.queue)
    parts.held.changes += 1


def quarantine(parts: Parts) -> None:
    parts.room.late = True


def test_it_rests_where_nothing_is_to_be_done() -> None:
    parts = Parts()
    assert parts.holds()
    assert parts.holds(busy=False)
    assert parts.rest.turns == 2


@pytest.mark.parametrize(
    "reason",
    [
        lose, late, something_open, somebody_waits, a_restore, a_load, something_of_a_load,
        a_change, quarantine,
    ],
)  # fmt: skip
def test_any_reason_ends_the_rest(reason: Callable[[Parts], None]) -> None:
    parts = Parts()
    reason(parts)
    assert not parts.holds()
    assert parts.rest.turns == 0


def test_the_list_of_the_living_is_due_by_the_clock_though_nothing_else_is() -> None:
    parts = Parts()
    parts.client.live_us = 10
    parts.rest.until(DUE_US, NEVER_US, [])
    parts.now = 9
    assert parts.holds()
    parts.now = 10
    assert not parts.holds()


def test_a_queue_that_was_looked_at_rests_as_long_as_it_stays_as_it_is() -> None:
    parts = Parts()
    parts.wait("a", "b")
    parts.held.alive = [("s1", 0), ("s2", 0)]
    assert not parts.holds(), "they have just come"
    parts.rest.until(DUE_US, NEVER_US, parts.queue)
    assert parts.holds()
    for changed in (("a",), ("a", "b", "c"), ("b", "a"), ("a", "c"), ()):
        parts.wait(*changed)
        assert not parts.holds(), changed
    parts.wait("a", "b")
    assert parts.holds(), "others with the same names are the same requests"


def test_what_changed_before_the_end_of_a_turn_is_no_reason_for_the_next() -> None:
    parts = Parts()
    a_change(parts)
    parts.rest.until(DUE_US, NEVER_US, parts.queue)
    assert parts.holds()
    a_change(parts)
    assert not parts.holds()


def test_the_step_after_the_admission_of_the_only_one_who_waited_has_no_turn() -> None:
    parts = Parts()
    parts.wait("a")
    parts.held.alive = [("s1", 0)]
    parts.rest.until(DUE_US, NEVER_US, parts.queue)
    parts.wait()
    parts.held.changes += 1
    assert not parts.holds(), "its look-up is still there"
    parts.held.alive = []
    assert parts.holds()
    parts.wait("a")
    parts.held.changes -= 1
    assert not parts.holds(), "who comes back is looked at, though nothing else has changed"


def test_what_waits_for_an_idle_moment_is_due_then_and_not_before() -> None:
    parts = Parts()
    parts.rest.until(DUE_US, 10, [])
    parts.now = 9
    assert parts.holds(busy=False)
    parts.now = 10
    assert parts.holds(busy=True)
    assert not parts.holds(busy=False)
    parts.wait("a")
    parts.rest.until(DUE_US, 10, parts.queue)
    assert parts.holds(busy=False), "somebody waits, so it is no idle moment"


def test_somebody_in_the_queue_is_asked_for_again_when_it_is_time() -> None:
    parts = Parts()
    parts.wait("a")
    parts.held.due_us = 10
    parts.rest.until(DUE_US, NEVER_US, parts.queue)
    parts.now = 9
    assert parts.holds()
    parts.now = 10
    assert not parts.holds()


def entry(stage: Stage) -> Entry:
    made = Entry("r", Request(1, "s1", NamespaceKey(), b"", b"", 4), 5_000)
    made.stage = stage
    return made


def test_who_is_held_back_is_due_at_once_who_has_passed_when_it_is_asked_for_again() -> None:
    assert [entry(stage).due_us(1) for stage in (Stage.NEW, Stage.ASKING, Stage.FILLING)] == [0] * 3
    passed = entry(Stage.PASSED)
    assert passed.due_us(1) == 6_000
    assert not passed.worth_asking(5_999, 1_000)
    assert passed.worth_asking(6_000, 1_000)
    assert entry(Stage.OFFERED).due_us(1) == NEVER_US


def test_leases_that_nobody_is_left_to_release_are_told_of_at_once() -> None:
    parts = Parts()
    parts.client.leases_out = 1
    assert parts.holds(busy=True)
    assert not parts.holds(busy=False)


def test_the_turn_in_which_the_daemon_came_is_followed_by_another() -> None:
    parts = Parts()
    parts.client = SimpleNamespace(**vars(parts.client))
    parts.rest.until(DUE_US, NEVER_US, [])
    assert not parts.holds()
    parts.rest.until(DUE_US, NEVER_US, [])
    assert parts.holds()


def test_without_a_turn_there_is_no_rest() -> None:
    parts = Parts()
    rest = Rest(parts, parts.held, parts.loads)
    assert not rest.holds([], lambda: True)


class Turns(SimpleNamespace):
    """A shim that says whether it rests, and counts its turns."""

    turns = 0

    def rests(self, waiting: list[object], busy: Callable[[], bool]) -> bool:
        assert not waiting
        assert not busy()
        return bool(self.resting)

    def tick(self, *_: object, **__: object) -> None:
        self.turns += 1


@pytest.mark.parametrize(
    ("resting", "waiting", "turns"), [(True, 0, 0), (True, 1, 1), (False, 0, 1)]
)
def test_a_loop_is_left_out_only_at_rest_and_with_nobody_in_the_queue(
    resting: bool, waiting: int, turns: int
) -> None:
    shim: Any = Turns(resting=resting, ended=[], loads=SimpleNamespace(offers=None))
    batch = SimpleNamespace(is_empty=lambda: True, batch_is_full=True, reqs=[])
    scheduler = SimpleNamespace(
        waiting_queue=[object()] * waiting, running_batch=batch, last_batch=None, chunked_req=None
    )
    hooks.tick(shim, scheduler)
    assert shim.turns == turns
    assert batch.batch_is_full is not bool(turns)


class Watched:
    """A request that is told of once, when it has given its row back."""

    def __init__(self, *, finished: bool) -> None:
        self.rid = "r"
        self.origin_input_ids = array("q", range(8))
        self.output_ids = array("q", [1, 2])
        self.cached_tokens = 4
        self._finished = finished

    def finished(self) -> bool:
        return self._finished


def test_ends_are_told_of_those_that_have_finished_among_those_that_gave_their_rows_back() -> None:
    told: list[Any] = []
    key = SimpleNamespace(unit_bytes=4)
    client = SimpleNamespace(
        lost="",
        registration=SimpleNamespace(ended="counts"),
        report=lambda report, **_: told.append(report),
    )
    done = Watched(finished=True)
    shim: Any = SimpleNamespace(
        client=client, ended=[done, Watched(finished=False), done], now_us=lambda: 1,
        pool=SimpleNamespace(page_size=4), key_of=lambda _: (key, b""),
    )  # fmt: skip
    ends.results(shim)
    assert len(told) == 1, "a retracted one has not ended, and nobody is told of twice"
    assert shim.ended == []
    shim.client, shim.ended = None, [Watched(finished=True)]
    ends.results(shim)
    assert shim.ended == [], "nobody's request is kept for a daemon that is not there"
