"""Ends of copies that still wait when their mover dies, or when the daemon ends."""

from collections.abc import Iterator
from typing import Literal

import msgspec
import pytest
from structlog.testing import capture_logs

from directory.core.events import CopyDone, Event, MoverLost
from directory.daemon.turns import Rank
from tests.unit.directory.daemon.mover_rig import Rig, copy, pretended_movers


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig whose movers are pretended."""
    with pretended_movers(monkeypatch) as rig:
        yield rig


def test_a_dying_mover_is_told_nothing_however_many_ends_waited(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.start_serving()
    for op in range(1, 9):
        rig.movers.submit(copy(op))
    rig.loop.later("before", Rank.RESTORES, lambda: None)
    rig.mover.say(*(CopyDone(op, "ok") for op in range(1, 9)))
    rig.loop.turn(0)
    told, heard = len(rig.mover.told), rig.tell

    def begin_another(event: Event) -> None:
        heard(event)
        if isinstance(event, CopyDone):
            rig.movers.submit(copy(100 + event.op))

    monkeypatch.setattr(rig, "tell", begin_another)
    with capture_logs() as lines:
        rig.movers._lose("it hangs")
    assert [type(event) for event in rig.events] == [CopyDone] * 8 + [MoverLost]
    assert len(rig.mover.told) == told
    assert [line["event"] for line in lines] == ["mover lost"]
    assert not rig.movers._busy, "the directory ends those too"


@pytest.mark.parametrize(("kind", "waited"), [("load_back", True), ("backup", False)])
def test_the_loop_sleeps_as_ever_after_the_end_of_what_somebody_waits_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, kind: Literal["load_back", "backup"], waited: bool
) -> None:
    rig.start_serving()
    rig.movers.submit(msgspec.structs.replace(copy(1), kind=kind))
    asked: list[bool] = []
    monkeypatch.setattr(rig.loop._waking, "asked", lambda: asked.append(True))
    rig.mover.say(CopyDone(1, "ok"))
    rig.loop.turn(0)
    rig.loop.turn(0)
    assert rig.events == [CopyDone(1, "ok")]
    assert bool(asked) == waited


def test_the_ends_that_wait_are_told_last_and_what_that_raises_stops_nothing_but_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.start_serving()
    for op in (1, 2, 3):
        rig.movers.submit(copy(op))
    rig.loop.later("before", Rank.RESTORES, lambda: None)
    rig.mover.say(*(CopyDone(op, "ok") for op in (1, 2, 3)))
    rig.loop.turn(0)
    heard: list[Event] = []

    def raise_over_the_second(event: Event) -> None:
        heard.append(event)
        if len(heard) == 2:
            raise OSError("no room for the journal")

    monkeypatch.setattr(rig, "tell", raise_over_the_second)
    rig.movers.ends.tell_last()
    assert heard == [CopyDone(1, "ok"), CopyDone(2, "ok")]
    assert len(rig.movers.ends) == 0
    rig.loop.turn(0)
    assert len(heard) == 2, "none after it"
