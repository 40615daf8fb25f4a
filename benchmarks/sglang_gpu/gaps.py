"""Gaps: how long running decodes wait for each token, while prefixes are restored and backed up.

Owns three phases of one engine, with the same decodes in each: alone; beside prompts whose prefix
is not in the pool any more, one every `every_s`; beside new prompts, which are computed and backed
up, at the same pace; and what is made of them. What is asked beside is the same for every system:
for one without a lower tier the prefixes stay in the pool, so that it computes the same tokens and
moves nothing. A system that could not keep up was asked for less, and is better off the slower it
is: such phases are not compared (`judged`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any, Final

from benchmarks.sglang_gpu.workload import prompt
from tests.sglang import wire
from tests.sglang.engines import Engine

ANSWER_S: Final = 120.0
PHASES: Final = ("alone", "restores", "backups")
GOALS: Final = {"none": 1.05, "hicache": 1.0}
"""Of p50 and p99 beside what is moved: times another system's."""
Phases = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Decodes:
    """`streams` requests of `tokens` decode `new` tokens each; beside them, every `every_s`, a
    prompt of `beside` tokens of which `kept` are more than the pool holds, or a new one of
    `fresh` tokens: `asks` of them, so few that decodes which nothing disturbs last longer. None
    while `open_max` of these have no answer yet, because prompts go before decodes, and a machine
    that is too slow would be measured by its queue: that one is left out, and told."""

    streams: int
    tokens: int
    new: int
    beside: int
    kept: int
    fresh: int
    every_s: float
    asks: int
    open_max: int = 8


def prepare(engine: Engine, decodes: Decodes, *, tiers: bool) -> list[list[int]]:
    """Compute the prompts that are asked for beside; one alone where there is no lower tier."""
    kept = [list(prompt(70_000 + n, decodes.beside)) for n in range(decodes.kept if tiers else 1)]
    for tokens in kept:
        engine.generate(tokens, 1)
    return kept


def measure(engine: Engine, decodes: Decodes, kept: Sequence[list[int]], seed: int) -> Phases:
    """Every phase once."""
    fresh = (list(prompt(seed * 1_000 + n, decodes.fresh)) for n in range(1_000))
    beside: dict[str, Iterator[list[int]]] = {
        "alone": iter(()), "restores": cycle(kept), "backups": fresh,
    }  # fmt: skip
    return {phase: _phase(engine, decodes, beside[phase], seed) for phase in PHASES}


def _phase(
    engine: Engine, decodes: Decodes, beside: Iterator[list[int]], seed: int
) -> dict[str, Any]:
    running = {
        engine.submit(list(prompt(seed * 100 + n, decodes.tokens)), decodes.new, stream=True)
        for n in range(decodes.streams)
    }
    ended: list[wire.Output] = []
    others: set[str] = set()
    asked, left_out, cached, due = 0, 0, 0, time.monotonic() + 2 * decodes.every_s
    while running:
        taken = engine.take_ended(running | others)
        for name, answer in taken.items():
            if not isinstance(answer, wire.Output):
                raise engine.trouble(f"{name}: {answer}")
            if name in running:
                ended.append(answer)
            else:
                cached += answer.cached
        running -= taken.keys()
        others -= taken.keys()
        if running and asked + left_out < decodes.asks and time.monotonic() >= due:
            due += decodes.every_s
            if len(others) >= decodes.open_max:
                left_out += 1
            elif (tokens := next(beside, None)) is not None:
                asked += 1
                others.add(engine.submit(tokens, 1))
        time.sleep(0.0005)
    for name in others:
        cached += engine.collect(name, ANSWER_S).cached
    gaps = sorted(1e3 * (b - a) for one in ended for a, b in pairwise(one.came))
    return {
        "p50_ms": round(statistics.median(gaps), 3),
        "p99_ms": round(gaps[int(0.99 * len(gaps))], 3),
        "longest_ms": round(gaps[-1], 3),
        "mean_ms": round(statistics.fmean(gaps), 3),
        "gaps": len(gaps),
        "asked": asked,
        "left_out": left_out,
        "cached_tokens": cached,
    }


def judged(found: Mapping[str, Sequence[Phases]], ours: str) -> dict[str, dict[str, Any]]:
    """One system's gaps beside each other's, by phase: the medians over rounds of the ratios of p50
    and p99, and whether both keep to the goal, where there is one. No ratio, and no verdict, where
    a round of either was asked for another number of prompts, or left one out."""
    return {
        name: {
            phase: _beside(
                [one[phase] for one in found[ours]], [one[phase] for one in theirs], GOALS.get(name)
            )
            for phase in PHASES[1:]
        }
        for name, theirs in found.items()
        if name != ours and ours in found
    }


def _beside(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], goal: float | None
) -> dict[str, Any]:
    rounds = list(zip(ours, theirs, strict=False))  # a run that was cut off has not all of the last
    unlike = [
        f"asked {a['asked']} and {b['asked']}, left out {a['left_out']} and {b['left_out']}"
        for a, b in rounds
        if a["asked"] != b["asked"] or a["left_out"] or b["left_out"]
    ]
    if unlike:
        return {"not comparable": unlike}
    ratios = {
        key: round(statistics.median(a[f"{key}_ms"] / b[f"{key}_ms"] for a, b in rounds), 3)
        for key in ("p50", "p99")
    }
    if goal is None:
        return dict(ratios)
    return {**ratios, "goal": goal, "ok": max(ratios.values()) <= goal}
