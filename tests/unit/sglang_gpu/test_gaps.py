"""Gaps between tokens: every system is asked the same beside its decodes, or is not compared."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from benchmarks.sglang_gpu import gaps
from tests.sglang import wire


class Overrun:
    """An engine whose decodes end after so many looks. `answers`: what is asked beside is answered
    at once, or not before the decodes have ended."""

    def __init__(self, looks: int, *, answers: bool = False) -> None:
        self.beside: list[str] = []
        self._answers = answers
        self._looks = looks
        self._names = 0

    def submit(self, tokens: list[int], new: int, *, stream: bool = False) -> str:
        self._names += 1
        name = f"{'decode' if stream else 'beside'}-{self._names}"
        if not stream:
            self.beside.append(name)
        return name

    def take_ended(self, names: Any) -> dict[str, wire.Report]:
        self._looks -= 1
        ended = [
            name
            for name in names
            if (self._looks <= 0 if name.startswith("decode") else self._answers)
        ]
        return {name: self._output(name) for name in ended}

    def collect(self, name: str, deadline_s: float) -> wire.Output:
        return self._output(name)

    def _output(self, name: str) -> wire.Output:
        return wire.Output(name, [7] * 3, 16, {}, "length", (0.25, 0.5, 0.75))


def decodes(asks: int) -> gaps.Decodes:
    return gaps.Decodes(
        streams=2, tokens=8, new=3, beside=8, kept=2, fresh=8, every_s=0.001, asks=asks, open_max=3
    )


def phase(engine: Overrun, asks: int) -> dict[str, Any]:
    return gaps._phase(engine, decodes(asks), cycle([[1], [2]]), 1)  # type: ignore[arg-type]


def test_no_more_than_so_many_prompts_are_open_beside_decodes() -> None:
    engine = Overrun(looks=60)
    found = phase(engine, asks=10)
    assert len(engine.beside) == found["asked"] == 3
    assert found["left_out"] == 7
    assert (found["p50_ms"], found["gaps"], found["cached_tokens"]) == (250.0, 4, 48)


def test_a_system_whose_decodes_last_longer_is_asked_no_more_beside_them() -> None:
    fast, slow = (phase(Overrun(looks, answers=True), asks=5) for looks in (100, 300))
    assert (fast["asked"], slow["asked"]) == (5, 5)
    assert (fast["left_out"], slow["left_out"]) == (0, 0)


def one(p99: float, asked: int = 10, left_out: int = 0) -> gaps.Phases:
    found = {"p50_ms": 5.0, "p99_ms": p99, "asked": asked, "left_out": left_out}
    return {name: dict(found) for name in gaps.PHASES}


def test_gaps_are_judged_by_the_goals_beside_each_other_system() -> None:
    found = {
        "adaptive": [one(21.0), one(22.0)], "none": [one(20.0), one(20.0)],
        "hicache": [one(24.0), one(24.0)], "hicache-direct": [one(40.0)],
    }  # fmt: skip
    judged = gaps.judged(found, "adaptive")
    assert judged["none"]["restores"] == {"p50": 1.0, "p99": 1.075, "goal": 1.05, "ok": False}
    assert judged["hicache"]["backups"] == {"p50": 1.0, "p99": 0.896, "goal": 1.0, "ok": True}
    assert judged["hicache-direct"]["backups"] == {"p50": 1.0, "p99": 0.525}
    assert gaps.judged({"none": found["none"]}, "adaptive") == {}


def test_there_is_no_verdict_where_one_was_asked_for_less_beside_its_decodes() -> None:
    for unlike in (one(10.0, asked=9), one(10.0, left_out=1)):
        for ours, theirs in ((unlike, one(20.0)), (one(20.0), unlike)):
            found = {"adaptive": [one(10.0), ours], "none": [one(20.0), theirs]}
            verdict = gaps.judged(found, "adaptive")["none"]["restores"]
            assert list(verdict) == ["not comparable"]
            assert len(verdict["not comparable"]) == 1
    less = {name: [one(10.0, asked=9)] for name in ("adaptive", "none")}
    assert gaps.judged(less, "adaptive")["none"]["backups"]["ok"], "both were asked the same"
