"""Gaps between tokens: every system is asked the same beside its decodes, or is not compared."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Any

import pytest

from benchmarks.sglang_gpu import gaps
from benchmarks.sglang_gpu.gaps import Decodes, Phase
from tests.sglang import wire

STEP_S = 0.01


class Steady:
    """An engine that decodes a token every 10 ms, `stalled` once for so many seconds from 50 ms
    on; decodes end by themselves after `lasts_s`. What is asked beside is answered `answers_s`
    later; `host` tokens of it came from a lower tier."""

    def __init__(
        self, *, answers_s: float = 0.0, lasts_s: float = 60.0, stalled: float = 0.0, host: int = 0
    ) -> None:
        self.beside: list[list[int]] = []
        self.aborted: set[str] = set()
        self._answers_s = answers_s
        self._lasts_s = lasts_s
        self._stalled = stalled
        self._host = host
        self._asked: dict[str, float] = {}
        self._ends: dict[str, float] = {}

    def submit(self, tokens: list[int], new: int, *, stream: bool = False) -> str:
        name = f"{'decode' if stream else 'beside'}-{len(self._asked)}"
        self._asked[name] = time.monotonic()
        self._ends[name] = self._asked[name] + (self._lasts_s if stream else self._answers_s)
        if not stream:
            self.beside.append(tokens)
        return name

    def generate(self, tokens: list[int], new: int) -> None:
        self.beside.append(tokens)

    def abort(self, name: str) -> None:
        self.aborted.add(name)
        self._ends[name] = time.monotonic()

    def take_ended(self, names: Any) -> dict[str, wire.Report]:
        now = time.monotonic()
        return {name: self._output(name) for name in names if now >= self._ends[name]}

    def collect(self, name: str, deadline_s: float) -> wire.Output:
        return self._output(name)

    def trouble(self, what: str) -> AssertionError:
        return AssertionError(what)

    def _output(self, name: str) -> wire.Output:
        end = self._ends[name] - self._asked[name]
        came = [STEP_S * n for n in range(1, 1 + int(end / STEP_S))]
        came = [at + (self._stalled if at > 0.05 else 0.0) for at in came]
        came = [at for at in came if at <= end]
        return wire.Output(name, [7], 16, {"device": 1, "host": self._host}, "length", tuple(came))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "LEAD_S", 0.0)


def decodes(*phases: Phase, open_max: int = 100) -> Decodes:
    return Decodes(
        streams=2, tokens=8, new=99, beside=8, kept=3, fresh=4, phases=phases, open_max=open_max
    )


def measured(engine: Steady, asked: Decodes, tiers: int = 3, **more: Any) -> gaps.Phases:
    kept = [[n] for n in range(tiers)]
    return gaps.measure(engine, asked, kept, 1, **more)  # type: ignore[arg-type]


def test_prompts_come_at_their_pace_whether_or_not_they_are_answered() -> None:
    both = Phase("both", 0.2, restore_every=0.02, fresh_every=0.04)
    for engine in (Steady(), Steady(answers_s=0.3)):
        found = measured(engine, decodes(both))["both"]
        assert (found["asked"], found["left_out"], found["ended_early"]) == (15, 0, 0)
        restored = [tokens for tokens in engine.beside if len(tokens) == 1]
        assert restored == [[n % 3] for n in range(10)]
        fresh = [tuple(tokens) for tokens in engine.beside if len(tokens) == 4]
        assert len(set(fresh)) == 5


def test_a_pace_is_what_a_prompt_and_a_step_take_an_engine_that_moves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten prompts of 30 ms beside two decodes with steps of 5 ms; new ones take 45."""

    def phase(engine: object, asked: Decodes, one: Phase, *_: object) -> tuple[Any, None]:
        assert one.restore_every in (0, 0.2)
        assert one.fresh_every in (0, 0.2)
        prompt_ms = 30.0 if one.restore_every else 45.0
        steps = 100
        mean = (steps * 5.0 + 10 * prompt_ms) / steps
        return {"gaps": 2 * steps, "asked": 10, "mean_ms": mean, "p50_ms": 5.0}, None

    monkeypatch.setattr(gaps, "_phase", phase)
    asked = dataclasses.replace(decodes(), pace_s=2.0)
    assert gaps.pace(Steady(), asked, [[1]]) == gaps.Pace(0.035, 0.05)  # type: ignore[arg-type]


def test_phases_are_paced_by_multiples_of_what_one_prompt_takes() -> None:
    both = Phase("both", 0.2, restore_every=2, fresh_every=4)
    found = measured(Steady(), decodes(both), pace=gaps.Pace(0.02, 0.01))["both"]
    assert (found["asked"], found["every_s"]) == (10, [0.04, 0.04])


def test_no_more_than_so_many_prompts_are_open_beside_decodes() -> None:
    restores = Phase("restores", 0.2, restore_every=0.02)
    found = measured(Steady(answers_s=0.5), decodes(restores, open_max=3))["restores"]
    assert (found["asked"], found["left_out"]) == (3, 7)


def test_gaps_count_that_lie_where_prompts_came_each_whole() -> None:
    engine = Steady(stalled=0.08)
    found = measured(engine, decodes(Phase("restores", 0.07, restore_every=0.05)))["restores"]
    assert found["longest_ms"] == pytest.approx(90.0), "it ended after the last prompt had come"
    assert found["p50_ms"] == pytest.approx(10.0)
    assert 4 <= found["gaps"] <= 12, "none of those since, of two decodes"
    assert engine.aborted == {"decode-0", "decode-1"}


def test_a_gap_over_the_whole_phase_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "LEAD_S", 0.055)
    found = measured(Steady(stalled=0.15), decodes(Phase("restores", 0.1, restore_every=0.05)))
    assert found["restores"]["gaps"] == 2
    assert found["restores"]["p50_ms"] == pytest.approx(160.0)


def test_decodes_that_end_before_their_phase_are_told() -> None:
    found = measured(Steady(lasts_s=0.05), decodes(Phase("backups", 0.3, fresh_every=0.02)))
    assert found["backups"]["ended_early"] == 2
    assert found["backups"]["asked"] < 15


def test_what_a_system_moved_is_what_it_counts_or_what_it_says_of_its_answers() -> None:
    both = Phase("both", 0.1, restore_every=0.05, fresh_every=0.05)
    told = measured(Steady(host=6), decodes(both), token_bytes=1_000)["both"]
    assert told["bytes"] == {"restored": 12_000, "backed_up": 8_000}
    seconds, bus = told["seconds"], gaps.BUS_GB_PER_S * 1e9
    assert told["bus"]["restored"] == pytest.approx(12_000 / bus / seconds, abs=1e-3)
    nothing = measured(Steady(), decodes(both), tiers=1, token_bytes=1_000)["both"]
    assert nothing["bytes"] == {"restored": 0, "backed_up": 0}

    so_far = iter([(True, 100, 10), (False, 400, 15), (True, 400, 95)])

    def moved(at_rest: bool) -> dict[str, int]:
        waits, *counts = next(so_far)
        assert at_rest is waits
        return dict(zip(("restored", "backed_up"), counts, strict=True))

    counted = measured(Steady(host=6), decodes(both), token_bytes=1_000, moved=moved)["both"]
    assert counted["bytes"] == {"restored": 300, "backed_up": 5}
    assert counted["bytes_later"] == {"restored": 0, "backed_up": 80}


def test_what_is_moved_only_once_nothing_decodes_takes_no_part_of_the_bus() -> None:
    """A system that puts its backups off until then has nothing beside the gaps."""
    engine, half = Steady(), int(gaps.BUS_GB_PER_S * 1e9 * 0.1)

    def moved(at_rest: bool) -> dict[str, int]:
        over = at_rest and bool(engine.aborted)
        return {"restored": 0, "backed_up": half if over else 0}

    found = measured(
        engine, decodes(Phase("backups", 0.1, fresh_every=0.05)), token_bytes=1, moved=moved
    )["backups"]
    assert found["bus"]["backed_up"] == 0
    assert found["bytes_later"]["backed_up"] == half


def test_kept_prompts_go_on_from_phase_to_phase() -> None:
    engine = Steady()
    measured(engine, decodes(*(Phase(name, 0.1, restore_every=0.05) for name in "abc")))
    assert engine.beside == [[0], [1], [2], [0], [1], [2]]


def test_how_long_prompts_took_is_told_by_their_kind() -> None:
    both = Phase("both", 0.2, restore_every=0.02, fresh_every=0.0)
    found = measured(Steady(answers_s=0.05), decodes(both))["both"]
    (p50, p99), new = found["answers_ms"]
    assert 50 <= p50 <= p99
    assert p50 < 200
    assert new == []
    assert gaps.quantiles([float(n) for n in range(100)]) == [50.0, 99.0]


def test_a_system_without_a_lower_tier_is_asked_for_what_its_pool_has() -> None:
    engine = Steady()
    some = gaps.prepare(engine, decodes(), tiers=True)  # type: ignore[arg-type]
    one = gaps.prepare(engine, decodes(), tiers=False)  # type: ignore[arg-type]
    assert (len(some), one) == (3, some[:1])
    assert engine.beside == [*some, *one]


def one(p99: float, asked: int = 10, ended_early: int = 0, left_out: int = 0) -> gaps.Phases:
    found = {
        "p50_ms": 5.0, "by_tenths_of_ms": Counter({50: 98, int(10 * p99): 2}), "asked": asked,
        "left_out": left_out, "ended_early": ended_early, "full": True, "gaps": 100,
        "pass_ms": 10.0,
    }  # fmt: skip
    alone = {**found, "asked": 0, "left_out": 0}
    return {"alone": alone, **{name: dict(found) for name in ("restores", "backups")}}


def test_gaps_are_judged_by_the_goals_beside_each_other_system() -> None:
    found = {
        "adaptive": [one(21.0), one(22.0)], "none": [one(20.0), one(20.0)],
        "hicache": [one(24.0), one(24.0)], "hicache-direct": [one(40.0)],
    }  # fmt: skip
    judged = gaps.judged(found, "adaptive")
    assert list(judged["none"]) == ["restores", "backups"]
    assert judged["none"]["restores"] == {
        "p50": 1.0, "p99": 1.1, "goal": 1.05, "ok": False, "passes": 2.0,
    }  # fmt: skip
    assert judged["hicache"]["backups"] == {"p50": 1.0, "p99": 0.917, "goal": 1.0, "ok": True}
    assert judged["hicache-direct"]["backups"] == {"p50": 1.0, "p99": 0.525}
    assert gaps.judged({"none": found["none"]}, "adaptive") == {}
    for rounds in found.values():
        for of in rounds:
            of["restores"]["full"] = False
    assert "ok" not in gaps.judged(found, "adaptive")["none"]["restores"], "not at full rate"


def test_what_is_rare_is_looked_for_in_all_rounds_together() -> None:
    rounds = [{"by_tenths_of_ms": Counter({50: 99, 900: 1})}, {"by_tenths_of_ms": Counter([50])}]
    assert gaps.pooled_p99_ms(rounds[:1]) == 90.0
    assert gaps.pooled_p99_ms([*rounds, {"by_tenths_of_ms": Counter({50: 30, 280: 1})}]) == 28.0


@pytest.mark.parametrize("ours", [one(10.0, asked=9), one(10.0, ended_early=1)])
def test_there_is_no_verdict_for_who_was_asked_for_less(ours: gaps.Phases) -> None:
    found = {"adaptive": [one(10.0), ours], "none": [one(20.0), one(20.0)]}
    verdict = gaps.judged(found, "adaptive")["none"]["restores"]
    assert list(verdict) == ["not comparable"]
    assert len(verdict["not comparable"]) == 1


def test_there_is_no_verdict_beside_what_moves_nothing_where_that_was_overrun() -> None:
    found = {"adaptive": [one(10.0)], "none": [one(20.0, left_out=1)]}
    verdict = gaps.judged(found, "adaptive")["none"]["restores"]
    assert list(verdict) == ["not comparable"]
    found["none"] = [one(20.0)]
    found["none"][0]["restores"] = {
        "gaps": 0, "asked": 10, "left_out": 0, "ended_early": 0, "full": True,
    }  # fmt: skip
    assert list(gaps.judged(found, "adaptive")["none"]["restores"]) == ["not comparable"]
    assert gaps.judged(found, "adaptive")["none"]["backups"]["ok"]


def test_who_was_overrun_as_well_may_miss_its_goal_but_not_meet_it() -> None:
    found = {"adaptive": [one(10.0, left_out=2)], "hicache": [one(20.0, left_out=3)]}
    verdict = gaps.judged(found, "adaptive")["hicache"]["backups"]
    assert verdict == {"p50": 1.0, "p99": 0.5, "goal": 1.0, "left out": [2, 3]}
    found["hicache"] = [one(9.0, left_out=3)]
    assert gaps.judged(found, "adaptive")["hicache"]["backups"]["ok"] is False


def test_a_ratio_to_who_was_asked_for_less_is_told_as_such() -> None:
    found = {"adaptive": [one(10.0), one(10.0)], "hicache": [one(20.0), one(20.0, asked=6)]}
    verdict = gaps.judged(found, "adaptive")["hicache"]["backups"]
    assert verdict == {"p50": 1.0, "p99": 0.5, "goal": 1.0, "ok": True, "asked more": 4}
