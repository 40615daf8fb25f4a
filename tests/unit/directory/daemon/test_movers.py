"""Mover supervision with a pretended mover: when it is started, told, and replaced."""

from collections.abc import Iterator

import msgspec
import pytest

from directory.core.events import CopyDone, Event, MoverLost, PagesDamaged
from directory.core.limits import COPY_WAIT_MS_MAX
from directory.core.tokens import pack_pages
from directory.daemon import movers as module
from directory.daemon.breaker import FAILURES_MAX, REST_US_MIN
from directory.daemon.mover_states import MOVER, MoverState
from directory.daemon.movers import STARTS_WITHOUT_SUCCESS_MAX, Movers
from directory.daemon.registration import Registration
from directory.daemon.runtime import StartError
from directory.daemon.turns import Rank
from tests.unit.directory.daemon.mover_rig import (
    LAYOUT,
    REGISTRATION,
    SILENCE_MS,
    PretendMover,
    PretendTier,
    Rig,
    copy,
    pretended_movers,
)
from transfer import messages
from transfer.ipc.sync import SyncHandle
from transfer.messages import Imported, Pong, Ready, Rejected, Released, TierOpened


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig whose movers are pretended."""
    with pretended_movers(monkeypatch) as rig:
        yield rig


def test_it_serves_once_the_mover_and_all_of_the_tier_are_there(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.movers, "_tier", PretendTier())
    rig.movers.start()
    for reply in (Ready(1, "cpu"), TierOpened(True, 1)):
        rig.mover.say(reply)
        rig.loop.turn(0)
        assert rig.serving == 0
    rig.mover.say(TierOpened(True, 2))
    rig.loop.turn(0)
    assert rig.serving == 1


def test_a_tier_that_cannot_be_opened_ends_the_mover(rig: Rig) -> None:
    rig.movers.start()
    rig.mover.say(TierOpened(False, 0, "no memory"))
    rig.loop.turn(0)
    assert rig.mover.closed
    assert rig.movers.state is MoverState.NONE


def test_copies_and_their_ends_are_handed_on(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.submit(copy(5))
    assert rig.mover.told == [("copy", 5)]
    rig.mover.say(CopyDone(5, "ok"))
    rig.loop.turn(0)
    assert rig.events == [CopyDone(5, "ok")]
    assert rig.movers.due_us() is None


def test_restores_have_their_turn_before_backups_and_others_words_behind_both(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.import_pool(1, REGISTRATION)
    for op in (1, 2):
        rig.movers.submit(copy(op))
    rig.movers.submit(msgspec.structs.replace(copy(3), kind="load_back"))
    rig.mover.say(CopyDone(1, "ok"), CopyDone(3, "ok"), CopyDone(2, "ok"))
    for _ in range(2):
        rig.loop.turn(0)
    assert rig.events == [CopyDone(3, "ok"), CopyDone(1, "ok"), CopyDone(2, "ok")]
    rig.movers.submit(copy(4))
    heard: list[object] = rig.events  # type: ignore[assignment]
    rig.on_imported = lambda *what: heard.append(what)  # type: ignore[method-assign]
    rig.mover.say(CopyDone(4, "ok"), Imported(1, True))
    rig.loop.turn(0)
    assert heard[3:] == [CopyDone(4, "ok"), (1, True, "", "")]


def test_ends_that_wait_are_told_before_a_death_and_none_of_a_mover_that_was_replaced(
    rig: Rig,
) -> None:
    rig.start_serving()
    for op in (1, 2):
        rig.movers.submit(copy(op))
    rig.loop.later("before", Rank.RESTORES, rig.mover.die)
    rig.mover.say(CopyDone(1, "ok"))
    rig.loop.turn(0)
    assert rig.events == []
    rig.movers._lose("it hangs")
    assert [type(event) for event in rig.events] == [CopyDone, MoverLost]
    rig.wait_for_successor()
    rig.mover.say(Ready(1, "cpu"))
    rig.loop.turn(0)
    rig.movers.submit(copy(3))
    rig.loop.later("before", Rank.RESTORES, lambda: None)
    rig.mover.say(CopyDone(3, "ok"))
    rig.loop.turn(0)
    rig.movers.replace()
    for _ in range(3):
        rig.loop.turn(0)
    assert len(rig.events) == 2, "the directory has begun anew: its numbers are others' now"


def test_the_last_words_of_a_mover_are_the_reason(rig: Rig) -> None:
    for _ in range(STARTS_WITHOUT_SUCCESS_MAX - 1):
        rig.movers.start()
        rig.mover.says.append(Rejected("import_failed", "there is no such GPU"))
        rig.die()
    lost = rig.events[-1]
    assert isinstance(lost, MoverLost)
    assert lost.detail == "it rejected a request: import_failed: there is no such GPU"
    rig.movers.start()
    rig.mover.says.append(Rejected("import_failed", "there is no such GPU"))
    with pytest.raises(StartError, match=r"no mover could be started: .*there is no such GPU"):
        rig.die()


def test_death_is_told_once_and_what_was_finished_before_still_counts(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.submit(copy(5))
    rig.movers.submit(copy(6))
    dying = rig.mover
    dying.says.append(CopyDone(5, "ok"))
    rig.die()
    assert rig.events[0] == CopyDone(5, "ok")
    assert [type(event) for event in rig.events] == [CopyDone, MoverLost]
    assert (dying.closed, rig.counters["movers_lost"]) == (True, 1)


def test_the_directory_hears_of_the_death_only_when_the_process_is_reaped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.start_serving()
    dying = rig.mover
    heard: list[tuple[type[Event], bool]] = []
    monkeypatch.setattr(rig, "tell", lambda event: heard.append((type(event), dying.closed)))
    rig.die()
    assert heard == [(MoverLost, True)]


def test_a_successor_is_told_of_live_pools_and_of_copies_that_came_meanwhile(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.import_pool(1, REGISTRATION)
    rig.movers.import_pool(2, REGISTRATION)
    rig.mover.say(Imported(1, True), Imported(2, True))
    rig.loop.turn(0)
    rig.movers.release_pool(2)
    rig.die()
    rig.movers.submit(copy(9))
    rig.movers.import_pool(3, REGISTRATION)
    rig.wait_for_successor()
    assert rig.mover.told == [("import", 1), ("import", 3)]
    rig.mover.say(Ready(1, "cpu"))
    rig.loop.turn(0)
    assert rig.mover.told[2:] == [("copy", 9)], "copies are for a mover that serves"


def test_a_copy_that_no_mover_serves_in_time_fails_and_is_never_handed_on(rig: Rig) -> None:
    rig.start_serving()
    rig.die()
    rig.movers.submit(copy(9))
    rig.movers.submit(copy(10))
    PretendMover.spawn_error = OSError("no memory")
    events = len(rig.events)
    waited = rig.now + COPY_WAIT_MS_MAX * 1000
    while rig.now < waited:
        assert len(rig.events) == events
        rig.wait_for_successor()
    assert [(done.op, done.outcome) for done in rig.events[events:]] == [  # type: ignore[union-attr]
        (9, "failed"),
        (10, "failed"),
    ]
    PretendMover.spawn_error = None
    rig.wait_for_successor()
    rig.mover.say(Ready(1, "cpu"))
    rig.loop.turn(0)
    assert rig.mover.told == []
    assert rig.counters["copies_overdue"] == 2


def test_copies_that_the_device_keeps_failing_fail_at_once_until_one_succeeds(rig: Rig) -> None:
    rig.start_serving()
    for op in range(1, FAILURES_MAX + 1):
        rig.movers.submit(copy(op))
        rig.mover.say(CopyDone(op, "failed", "broken", 0, 0, True))
        rig.loop.turn(0)
    told = len(rig.mover.told)
    assert rig.movers.breakers_open == 1
    rig.movers.submit(copy(50))
    assert rig.movers.due_us() == 0, "not from inside the directory's turn"
    rig.movers.on_time(rig.now)
    assert rig.events[-1] == CopyDone(
        50, "failed", "copies of kind backup keep failing; they are tried again soon"
    )
    assert len(rig.mover.told) == told
    rig.now += REST_US_MIN
    rig.movers.submit(copy(51))
    rig.movers.submit(copy(52))
    assert rig.mover.told[told:] == [("copy", 51)]
    rig.mover.say(CopyDone(51, "ok"))
    rig.loop.turn(0)
    rig.movers.submit(copy(53))
    assert rig.mover.told[told:] == [("copy", 51), ("copy", 53)]
    assert rig.counters["copies_not_tried"] == 2, "50, and 52 beside the one that is tried"
    assert rig.counters["breakers_opened"] == 1
    assert rig.movers.breakers_open == 0


def test_movers_that_die_of_their_copies_are_given_none_for_a_while(rig: Rig) -> None:
    rig.start_serving()
    for round_ in range(FAILURES_MAX):
        for op in range(3):
            rig.movers.submit(copy(10 * round_ + op))
        rig.die()
        rig.wait_for_successor()
        rig.mover.say(Ready(1, "cpu"))
        rig.loop.turn(0)
    rig.movers.submit(copy(99))
    assert rig.mover.told == []
    assert rig.counters["breakers_opened"] == 1


def test_damage_is_logged_and_handed_on(rig: Rig) -> None:
    rig.start_serving()
    found = PagesDamaged(pack_pages([65_537]), "scrub")
    rig.mover.say(found)
    rig.loop.turn(0)
    assert rig.events == [found]


def test_what_was_waiting_is_dropped_when_the_successor_dies_too(rig: Rig) -> None:
    rig.start_serving()
    rig.die()
    rig.movers.submit(copy(9))
    rig.wait_for_successor()
    rig.die()
    rig.wait_for_successor()
    assert rig.mover.told == []
    assert len(rig.events) == 2


def test_movers_that_keep_dying_are_replaced_ever_later_up_to_a_cap(rig: Rig) -> None:
    rig.start_serving()
    pauses = []
    for _ in range(12):
        rig.die()
        pauses.append(rig.wait_for_successor())
    assert pauses[0] == 0
    assert pauses == sorted(pauses)
    assert pauses[-1] == pauses[-2] == module.RESTART_AFTER_MS_MAX


def test_a_mover_that_lived_long_is_replaced_at_once(rig: Rig) -> None:
    rig.start_serving()
    for _ in range(5):
        rig.die()
        rig.wait_for_successor()
    rig.now += module.STEADY_AFTER_MS * 1000
    rig.die()
    assert rig.wait_for_successor() == 0


def test_a_mover_that_never_serves_is_not_tried_for_ever(rig: Rig) -> None:
    rig.movers.start()
    for _ in range(module.STARTS_WITHOUT_SUCCESS_MAX - 1):
        rig.die()
        rig.wait_for_successor()
    with pytest.raises(StartError, match="no mover could be started"):
        rig.die()


def test_a_process_that_cannot_be_started_is_tried_again(rig: Rig) -> None:
    rig.start_serving()
    rig.die()
    PretendMover.spawn_error = OSError("no memory")
    rig.wait_for_successor()
    assert rig.movers.pid == 0
    PretendMover.spawn_error = None
    rig.wait_for_successor()
    assert rig.movers.pid == rig.mover.pid


def test_device_and_options_are_those_of_the_settings(rig: Rig) -> None:
    other = Movers(
        rig.loop, rig, "cuda:GPU-1", None, SILENCE_MS, rig.counters, options=["--unpinned"]
    )
    other.start()
    assert PretendMover.spawned == [("cuda:GPU-1", ("--unpinned",))]
    other.close()


def test_a_pools_sync_and_page_table_are_told_to_every_mover(rig: Rig) -> None:
    sync = SyncHandle("cuda-events", b"handles")
    message = msgspec.structs.replace(REGISTRATION.message, page_table=True)
    rig.start_serving()
    rig.movers.import_pool(1, Registration(message, LAYOUT, (), (), sync))
    assert rig.mover.described == (LAYOUT, (), [], sync, True, False)
    rig.die()
    rig.wait_for_successor()
    assert rig.mover.described == (LAYOUT, (), [], sync, True, False)
    rig.movers.import_pool(2, REGISTRATION)
    assert rig.mover.described[-2] is False, "pages of this one are no names"


def test_a_rejected_request_costs_the_mover(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.submit(copy(1))
    rig.mover.say(Rejected("bad_message", "what?"), CopyDone(1, "ok"))
    rig.loop.turn(0)
    # The copy's end was said after the rejection; by then everything was told to be lost.
    assert [type(event) for event in rig.events] == [MoverLost]


def test_a_mover_that_cannot_be_told_dies_by_its_pidfd(rig: Rig) -> None:
    rig.start_serving()
    rig.mover.gone = True
    rig.movers.submit(copy(1))
    assert rig.events == []
    rig.die()
    assert isinstance(rig.events[-1], MoverLost)


def test_outcomes_of_imports_are_handed_on(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.import_pool(1, REGISTRATION)
    rig.mover.say(Imported(1, False, "why", "bad_layout"))
    rig.loop.turn(0)
    assert rig.imported == [(1, False, "bad_layout", "why")]


def test_a_replacement_knows_nothing_and_the_directory_hears_nothing(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.import_pool(1, REGISTRATION)
    rig.movers.submit(copy(1))
    old = rig.mover
    rig.movers.replace()
    assert old.closed
    assert rig.mover is not old
    assert rig.mover.told == []
    assert rig.events == []


def test_closing_asks_the_mover_to_end_first(rig: Rig) -> None:
    assert rig.movers.begin_close() == -1
    rig.start_serving()
    assert rig.movers.begin_close() == rig.mover.pidfd
    assert rig.mover.told == [("shutdown",)]
    rig.movers.close()
    rig.movers.close()
    assert rig.movers.state is MoverState.ENDED
    assert "ended" in repr(rig.movers)


def test_every_reply_of_a_mover_is_understood(rig: Rig) -> None:
    rig.start_serving()
    rig.mover.say(messages.Released(1), messages.Released(2, "in use"), Pong(1))
    rig.loop.turn(0)
    assert rig.movers.state is MoverState.SERVING


def test_the_state_table_has_a_way_out_of_every_state_but_the_last() -> None:
    assert {state for state, _ in MOVER} == set(MoverState) - {MoverState.ENDED}


def test_a_released_pool_is_unmapped_when_the_mover_says_so_or_is_dead(rig: Rig) -> None:
    rig.start_serving()
    for pool in (1, 2, 3):
        rig.movers.import_pool(pool, REGISTRATION)
    rig.movers.release_pool(1)
    rig.movers.release_pool(2)
    rig.mover.say(Imported(3, True), Released(1))
    rig.loop.turn(0)
    assert rig.unmapped == [1]
    assert rig.movers.due_us() is not None, "a mover that does not answer is found out"
    rig.die()
    rig.movers.release_pool(3)
    assert rig.unmapped == [1, 2, 3], "without a mover nothing touches them"
