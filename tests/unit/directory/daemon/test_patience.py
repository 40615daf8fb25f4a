"""How long a mover may be silent, by what it does, and that a healthy one is left alone."""

from collections.abc import Iterator

import pytest

from directory.core.events import CopyDone, MoverLost
from directory.daemon.mover_states import MoverState
from directory.daemon.patience import Patience
from tests.unit.directory.daemon.mover_rig import (
    PING_MS,
    REGISTRATION,
    SILENCE_MS,
    START_MS,
    PretendTier,
    Rig,
    copy,
    pretended_movers,
)
from transfer.messages import Imported, Pong, Ready, TierOpened


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig whose movers are pretended."""
    with pretended_movers(monkeypatch) as rig:
        yield rig


def test_an_idle_mover_has_no_deadline_f65(rig: Rig) -> None:
    rig.start_serving()
    assert rig.movers.due_us() is None
    rig.now += 10**15
    rig.movers.on_time(rig.now)
    assert rig.movers.state is MoverState.SERVING
    assert rig.mover.told == []


def test_a_busy_mover_that_is_silent_is_asked_and_then_killed_within_two_seconds(
    rig: Rig,
) -> None:
    rig.start_serving()
    rig.now += 10**9
    rig.movers.submit(copy(1))
    assert rig.wait_for_successor() == PING_MS, "its silence counts from the copy on"
    assert rig.mover.told[-1] == ("ping",)
    silent = rig.mover
    assert rig.wait_for_successor() == SILENCE_MS - PING_MS
    assert silent.closed
    assert isinstance(rig.events[-1], MoverLost)
    assert rig.wait_for_successor() == 0


def test_a_mover_that_starts_may_be_silent_for_longer(rig: Rig) -> None:
    rig.movers.start()
    starting = rig.mover
    first, rest = rig.wait_for_successor(), rig.wait_for_successor()
    assert first + rest == START_MS
    assert starting.closed


def test_every_sign_of_a_starting_mover_begins_its_patience_anew(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.movers, "_tier", PretendTier())
    rig.movers.start()
    for reply in (Ready(1, "cpu"), TierOpened(True, 1)):
        rig.now += (START_MS - 1) * 1000
        rig.mover.say(reply)
        rig.loop.turn(0)
        rig.movers.on_time(rig.now)
        assert not rig.mover.closed


@pytest.mark.parametrize("what", ["import", "release"])
def test_a_mover_that_maps_or_unmaps_may_be_silent_for_longer(rig: Rig, what: str) -> None:
    rig.start_serving()
    rig.movers.import_pool(1, REGISTRATION)
    if what == "release":
        rig.mover.say(Imported(1, True))
        rig.loop.turn(0)
        rig.movers.release_pool(1)
    rig.movers.submit(copy(1))
    busy = rig.mover
    first, rest = rig.wait_for_successor(), rig.wait_for_successor()
    assert first + rest == START_MS
    assert busy.closed


def test_what_a_mover_has_said_is_read_before_it_is_given_up_on(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.submit(copy(1))
    rig.wait_for_successor()
    rig.mover.say(Pong())  # the loop has not come to it
    rig.wait_for_successor()
    assert not rig.mover.closed
    rig.mover.say(CopyDone(1, "ok"))
    assert rig.wait_for_successor() == PING_MS
    assert rig.movers.due_us() is not None, "it was asked"
    rig.wait_for_successor()
    assert rig.events == [CopyDone(1, "ok")]
    assert rig.movers.due_us() is None


def test_a_daemon_that_was_away_itself_asks_once_more_before_it_gives_up(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.submit(copy(1))
    rig.wait_for_successor()
    rig.now += 10**9  # both were stopped, and the mover has not come to answering
    rig.movers.on_time(rig.now)
    assert rig.mover.told[-2:] == [("ping",), ("ping",)]
    assert not rig.mover.closed
    silent = rig.mover
    rig.now += 10**9
    rig.movers.on_time(rig.now)
    assert silent.closed, "that excuse counts once"


def test_a_busy_mover_that_answers_is_left_alone(rig: Rig) -> None:
    rig.start_serving()
    rig.movers.submit(copy(1))
    for _ in range(10):
        rig.wait_for_successor()
        assert rig.mover.told[-1] == ("ping",)
        rig.mover.say(Pong())
        rig.loop.turn(0)
    assert not rig.mover.closed


def test_a_patience_shorter_than_the_time_to_ask_is_halved() -> None:
    patience = Patience(100, 1_000)
    patience.heard(1)
    assert patience.due_us(slow=False) == 50_001
    assert patience.due_us(slow=True) == 250_001
    assert repr(patience) == "<Patience heard 1 us, asked 0 us>"
