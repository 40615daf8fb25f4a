"""Whose lane is served first: who asks before who reports, however many they are."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from directory.core.events import (
    Evict,
    Evicted,
    Flush,
    Insert,
    Live,
    Lock,
    Match,
    Restore,
    Stats,
    Unlock,
)
from directory.daemon import lanes
from directory.daemon import loop as loop_module
from directory.daemon.turns import Rank
from directory.protocol.codec import encode
from directory.protocol.ended import Ended
from directory.protocol.messages import ClientBody, Envelope
from tests.unit.directory.daemon.lane_rig import EPOCH, KEY, POOL, Rig

INSERT = Insert("r", 1, KEY, b"1234", b"1234", 0, 0, (0, 0))
ENDED = Ended(request="r", attempt=1, namespace=KEY, kind="request", prompt_tokens=4)
RESTORE = Restore("r", 1, 1, 0, b"1234", (0, 0))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "router.sock")
    yield rig
    rig.close()


def test_a_question_is_answered_at_once_beside_more_lanes_than_one_look_used_to_find(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "TURN_NS", 1 << 62)
    others = [rig.another(pool) for pool in range(POOL + 1, POOL + 130)]
    rig.open()
    for seq in (1, 2):  # the second stays unread: what was put off is not read any further
        for lane in others:
            lane.send(encode(Envelope(EPOCH, seq, 0, Stats())))
        rig.loop.turn(0)
    rig.asked.clear()
    rig.say(1, Match("r", 1, KEY, b"1234"))
    rig.loop.turn(0)
    assert rig.asked[0] == Match("r", 1, KEY, b"1234")
    for lane in others:
        lane.close()


@pytest.mark.parametrize(
    ("body", "thin", "first"),
    [
        (Evict(1), True, True),
        (INSERT, True, True),
        (Flush("pool"), True, True),
        (INSERT, False, False),
        (Flush("pool"), False, False),
    ],
)
def test_what_a_thin_pools_scheduler_waits_for_comes_before_reports(
    rig: Rig, body: ClientBody, thin: bool, first: bool
) -> None:
    reporter = rig.another(POOL + 1)
    rig.open(thin=thin)
    for seq in (1, 2):
        reporter.send(encode(Envelope(EPOCH, seq, 0, Stats())))
    rig.loop.later("before", Rank.RESTORES, lambda: None)
    rig.loop.turn(0)
    rig.say(1, body)
    rig.loop.turn(0)
    assert (rig.asked[0] == body) == first
    reporter.close()


@pytest.mark.parametrize(
    ("bodies", "thin", "reported"),
    [
        ([INSERT], False, True),
        ([INSERT, Evicted((), ()), Flush("pool"), Live(())], False, True),
        ([INSERT], True, False),
        ([INSERT, RESTORE], False, False),
        ([RESTORE], False, False),
        ([Match("r", 1, KEY, b"1234")], False, False),
        ([Stats()], False, False),
    ],
)
def test_what_nobody_waits_for_is_said_to_the_loop_to_be_reports(
    rig: Rig,
    bodies: list[ClientBody],
    thin: bool,
    reported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "PIECE_NS", 1 << 62)
    rig.open(thin=thin)
    for seq, body in enumerate(bodies, 1):
        rig.say(seq, body)
    rig.loop.turn(0)
    assert len(rig.asked) == len(bodies)
    assert rig.loop.reported == reported


@pytest.mark.parametrize(
    ("bodies", "thin", "waited"),
    [
        ([INSERT], False, False),
        ([INSERT], True, True),
        ([Flush("pool")], True, True),
        ([Evict(1)], True, True),
        ([Lock("r", 1, 1)], True, True),
        ([RESTORE], False, True),
        ([INSERT, RESTORE], False, True),
        ([Live(())], True, False),
        ([Unlock(1)], True, False),
        ([INSERT, Unlock(1)], False, False),
        ([INSERT, ENDED], False, False),
    ],
)
def test_the_loop_sleeps_as_ever_after_whatever_somebody_waits_for(
    rig: Rig,
    bodies: list[ClientBody],
    thin: bool,
    waited: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not matches alone: a report shortly before must not have others' questions wait."""
    monkeypatch.setattr(lanes, "PIECE_NS", 1 << 62)
    asked: list[bool] = []
    rig.open(thin=thin)
    rig.turn()
    monkeypatch.setattr(rig.loop._waking, "asked", lambda: asked.append(True))
    for seq, body in enumerate(bodies, 1):
        rig.say(seq, body)
    rig.loop.turn(0)
    assert len(rig.asked) == len(bodies)
    assert bool(asked) == waited
    assert not rig.loop.asked, "what waits has no less of the time for it"


def test_a_match_behind_reports_is_a_question(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends both waits for the answer, and the loop is to be woken for the next one."""
    monkeypatch.setattr(lanes, "PIECE_NS", 1 << 62)
    rig.open()
    rig.say(1, INSERT)
    rig.say(2, Match("r", 1, KEY, b"1234"))
    rig.loop.turn(0)
    assert len(rig.asked) == 2
    assert rig.loop.asked
    assert not rig.loop.reported
