"""The exhaustive small scope: what it knows of states is true, and it finds what is wrong."""

from __future__ import annotations

import random

import pytest

from directory.core.events import Mode
from directory.core.host import HostSlots
from directory.core.transfers import Transfers
from tests.simulation import exhaustive
from tests.simulation.__main__ import main
from tests.simulation.exhaustive import Search, search
from tests.simulation.nameless import key
from tests.simulation.saved import Saved, load, save
from tests.simulation.tiny import Tiny
from tests.simulation.tiny_parts import WHATS, Move, move_of

PAIRS: list[tuple[Mode, Mode]] = [
    ("mirrored", "thin"),
    ("thin", "thin"),
    ("mirrored", "mirrored"),
]


def wander(tiny: Tiny, seed: int, steps: int) -> list[Move]:
    """Moves at random, ends of schedulers seldom."""
    draws = random.Random(seed)
    made: list[Move] = []
    for _ in range(steps):
        moves = list(tiny.moves())
        move = draws.choice([m for m in moves if m.what != "close"] or moves)
        if draws.random() < 0.05:
            move = draws.choice(moves)
        tiny.do(move)
        made.append(move)
    return made


@pytest.mark.parametrize("modes", PAIRS)
def test_a_node_that_is_set_back_goes_on_as_the_one_that_was_never_set_back(
    modes: tuple[Mode, Mode],
) -> None:
    draws = random.Random(1)
    other = Tiny(modes)
    for _ in range(40):
        tiny = Tiny(modes)
        for _ in range(30):
            saved = save(tiny)
            load(other, saved)
            assert save(other) == saved
            assert key(other) == key(tiny)
            moves = list(tiny.moves())
            assert list(other.moves()) == moves
            for move in draws.sample(moves, min(2, len(moves))):
                other.do(move)
                load(other, saved)
            move = draws.choice(moves)
            tiny.do(move)
            other.do(move)
            assert save(other) == save(tiny)
            other.check()


@pytest.mark.parametrize("modes", PAIRS)
def test_states_that_are_taken_for_one_lead_to_the_same_states(modes: tuple[Mode, Mode]) -> None:
    tiny = Tiny(modes)
    level: dict[bytes, list[Saved]] = {key(tiny): [save(tiny)]}
    compared = 0
    for _ in range(5):
        following: dict[bytes, list[Saved]] = {}
        for states in level.values():
            leads_to: set[frozenset[bytes]] = set()
            for state in states:
                load(tiny, state)
                after: set[bytes] = set()
                for move in list(tiny.moves()):
                    load(tiny, state)
                    tiny.do(move)
                    name = key(tiny)
                    after.add(name)
                    same = following.setdefault(name, [])
                    if len(same) < 3 and (there := save(tiny)) not in same:
                        same.append(there)
                leads_to.add(frozenset(after))
                compared += len(states) > 1
            assert len(leads_to) == 1
        level = following
    assert compared > 50


def test_every_move_has_a_number_of_its_own() -> None:
    moves = [Move(what, who, which) for what in WHATS for who in range(4) for which in range(3)]
    codes = {move.code() for move in moves}
    assert len(codes) == len(moves)
    assert max(codes) < 1 << 16
    assert [move_of(move.code()) for move in moves] == moves


def test_two_processes_find_the_same_states_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "CHUNK", 8)
    one = search(states_max=1, depth_min=5)
    two = search(states_max=1, depth_min=5, jobs=2)
    assert one._replace(seconds=0.0) == two._replace(seconds=0.0)
    assert one.states > 600
    assert one.depth == 5


def test_a_search_that_finds_nothing_new_says_that_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves = Tiny.moves
    few = ("register", "close")
    monkeypatch.setattr(Tiny, "moves", lambda tiny: (m for m in moves(tiny) if m.what in few))
    report = search(depth_min=100)
    assert report.closed
    assert not report.broken
    # No scheduler, either one, both: the end of one that has nothing leaves nothing.
    assert report.states == 4


def test_a_defect_is_found_and_told_with_the_moves_that_lead_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lands(self: Transfers, copy: object, landed: bool, event: object) -> object:
        return finish(self, copy, True, event)  # type: ignore[arg-type]

    finish = Transfers._finish_backup
    monkeypatch.setattr(Transfers, "_finish_backup", lands)
    assert main(["--exhaustive", "--depth", "6", "--states", "1"]) == 1
    said = capsys.readouterr().out
    assert "holds b'?'" in said
    assert "replayed: Broken" in said
    assert "Move(what='void'" in said


def test_a_defect_is_found_by_whichever_process_meets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustive, "CHUNK", 2)
    monkeypatch.setattr(HostSlots, "release", lambda *_: None)
    report = search(states_max=1, depth_min=6, jobs=2)
    assert "host:" in report.broken
    assert not report.closed


def test_a_search_without_time_says_how_far_it_got_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--exhaustive", "--seconds", "0.2"]) == 1
    assert "time was over" in capsys.readouterr().out


def test_the_path_to_a_state_leads_to_it() -> None:
    known = Search()
    found = bytearray()
    known.follow(iter(range(1)), found.extend)
    known.learn(bytes(found))
    assert len(known) == 3
    for state in range(len(known)):
        tiny = exhaustive.replay([move_of(code) for code in known.path_to(state)])
        assert sum(scheduler is not None for scheduler in tiny.schedulers) == min(state, 1)


def test_wandering_far_from_the_beginning_breaks_nothing() -> None:
    for seed in range(30):
        tiny = Tiny()
        wander(tiny, seed, 150)
        tiny.check()
