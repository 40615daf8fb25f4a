"""A daemon's clocks are there for a part of the time, and what they say is own time by kind."""

from __future__ import annotations

import pytest

from benchmarks import bench_clients, costed_daemon
from benchmarks.costed_daemon import PERIOD_NS, REST_NS_MAX, Costs
from benchmarks.node import Used


class Clock:
    """Goes on when it is told."""

    ns = 0


class Part:
    """A turn that has an inner part, each of which takes its time."""

    def inner(self) -> None:
        Clock.ns += 300

    def turn(self) -> None:
        Clock.ns += 1_000
        self.inner()


def test_own_time_counts_while_it_is_looked_and_between_the_functions_are_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costed_daemon, "clock", lambda: Clock.ns)
    monkeypatch.setattr(Clock, "ns", 1)

    class Watched(Part):
        inner = Part.inner
        turn = Part.turn

    costs, plain = Costs(), Part.inner
    costs.put(Watched, "inner", "inner")
    Watched.turn = costs.of_turns(Watched.turn)
    watched, looked, turns = Watched(), 0, 0
    while Clock.ns < 20 * (PERIOD_NS + REST_NS_MAX):
        watched.turn()
        turns += 1
        looked += costs.looks
        assert (Watched.inner is plain) == (not costs.looks)
        if turns % 10 == 0:
            Clock.ns += PERIOD_NS // 50
    assert 0 < looked < turns / 8, "some turns are looked at, and most are not"
    assert costs.spent_ns["-", "inner"] == looked * 300
    assert costs.spent_ns["-", "turn, with waiting"] == looked * 1_000
    told = costs.as_json()
    assert told["kinds"]["-"]["inner"] == pytest.approx(looked * 0.3)
    assert told["looked_us"] <= told["wall_us"] / 8
    while not costs.looks:
        watched.turn()
    before = costs.as_json()["looked_us"]
    watched.turn()
    assert costs.as_json()["looked_us"] == pytest.approx(before + 1.3), "as its sums are"


def test_what_is_looked_for_in_vain_is_no_work() -> None:
    used = Used(9_000.0, 2_500.0).since(Used(1_000.0, 500.0), 100)
    assert used == {"daemon_cpu_us": 80.0, "daemon_looking_us": 20.0, "daemon_work_us": 60.0}


def test_a_daemon_is_asked_for_clocks_or_for_marks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_clients", "--late", "--costs", "costs.json"])
    with pytest.raises(SystemExit):
        bench_clients.main()
    assert "--late and --costs" in capsys.readouterr().err
