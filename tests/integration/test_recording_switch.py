"""The daemon whose log, events and metrics are switched: off, none of them hears of anything."""

from collections import defaultdict
from contextlib import ExitStack
from random import Random

import pytest

from benchmarks import recording_switch
from benchmarks.recording_sides import (
    EVICTED_AT_ONCE,
    FRESH_PAGES,
    PARTS,
    SIDES,
    kept_by,
    places_for,
    subscribe,
)
from benchmarks.recording_switch import SETTLING_TIMES, TIMES, WAKING_TIMES, SwitchedSide
from directory.analytics.reader import LogReader
from directory.analytics.record import Eviction

pytest.importorskip("prometheus_client")


def test_only_what_ends_while_it_is_on_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_switch, "TIMES", 60)
    monkeypatch.setattr(recording_switch, "WAKING_TIMES", 5)
    with ExitStack() as stack:
        on = places_for(stack, PARTS)
        side = SwitchedSide(stack, on)
        subscriber = subscribe(stack, on.events)
        side.settle()
        for name in ("off", "on", "off again", "off", "on"):
            assert len(side.switched_turn(name)) == 60
        assert side.requests == 5 * 65
        assert side.told == 2 * 65
        assert {name: side.counted[name] for name in SIDES} == {
            "off": 120,
            "off again": 60,
            "on": 120,
        }
        side.settle()
        kept = kept_by(side, on.folder, subscriber)
        assert on.folder is not None
        gone = [
            frame.pages
            for frame in LogReader(on.folder)
            if isinstance(frame, Eviction) and frame.reason == "capacity"
        ]
    assert (kept.requests, kept.counted, kept.logged, kept.dropped) == (130, 130, 130, 0)
    assert kept.batches
    taken = 130 * FRESH_PAGES
    assert taken - 2 * EVICTED_AT_ONCE <= sum(gone) <= taken + 2 * EVICTED_AT_ONCE


def test_a_round_has_turns_of_every_side_with_the_same_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording_switch, "TURNS", 3)
    pauses = defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        on = places_for(stack, PARTS)
        side = SwitchedSide(stack, on)
        subscriber = subscribe(stack, on.events)
        match = side.match

        def noted(gap_s: float = 0.0) -> float:
            pauses[side.turn_of].append(gap_s)
            return match(gap_s)

        monkeypatch.setattr(side, "match", noted)
        found = side.round(Random(1))
        side.settle()
        kept = kept_by(side, on.folder, subscriber)
    assert {name: len(taken) for name, taken in found.items()} == dict.fromkeys(SIDES, 3 * TIMES)
    assert pauses["on"] == pauses["off"] == pauses["off again"]
    assert len(set(pauses["on"])) == 3 * (TIMES + WAKING_TIMES)
    assert kept.whole
    assert kept.requests == SETTLING_TIMES + 3 * (TIMES + WAKING_TIMES)
    assert len(side.after_work) == len(side.shifts) == 1
    assert 0 < side.after_work[0] < 1
