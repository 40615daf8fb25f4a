"""Gaps: how long running decodes wait for each token, while prefixes are restored and backed up.

Owns the phases of one engine, with the same decodes in each: alone, and beside prompts that come at
the phase's pace whatever the engine makes of them (nobody waits for an answer before the next one
is asked): prompts whose prefix is not in the pool any more, new ones, which are computed and backed
up, or both. Paces are the same for every system, and at full rate: a prompt each time that an
engine which moves nothing needs for one and for one step of its decodes (`pace`). How much was
moved, and what part of the bus's time that takes, stands beside the gaps. A system without a
lower tier is asked for one prompt that it has in its pool, so it computes the same tokens and moves
nothing. Gaps count of which a part lies where prompts came; each is measured whole. What is made of
all that is `judged`'s: a system that could not keep up was asked for less, and has it easier.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, pairwise
from typing import Any, Final, NamedTuple

from benchmarks.sglang_gpu.workload import prompt
from tests.sglang import wire
from tests.sglang.engines import Engine

ANSWER_S: Final = 120.0
LEAD_S: Final = 0.3
"""Decodes have begun, and run alone, for so long."""
TAIL_S: Final = 0.1
"""For the token that ends the last gap, once nothing is asked any more."""
BUS_GB_PER_S: Final = 55.3
"""Each way: one large copy between an H200 and pinned host memory (benchmarks/README.md, "Copies at
the speed of the bus")."""
GOALS: Final = {"none": 1.05, "hicache": 1.0}
"""Of p50 and p99 beside what is moved: times another system's."""
Phases = dict[str, dict[str, Any]]
Moved = Callable[[], Mapping[str, int]]
"""Bytes `restored` and `backed_up` so far, of a system that counts them."""


@dataclass(frozen=True)
class Phase:
    """`seconds` of decodes; beside them, for each so many seconds, a prompt of a kind (0: none), as
    they are (`pace` unknown) or as multiples of what one prompt and one step take. `full`: this is
    what the goals are for."""

    name: str
    seconds: float
    restore_every: float = 0.0
    fresh_every: float = 0.0
    full: bool = True


class Pace(NamedTuple):
    """Seconds that one prompt of a kind and one step of the decodes take an engine that moves
    nothing."""

    restore_s: float = 1.0
    fresh_s: float = 1.0


UNPACED: Final = Pace()
PACE_PROMPTS: Final = 10
PACE_SEED: Final = 500_000


@dataclass(frozen=True)
class Decodes:
    """`streams` requests of `tokens` decode for as long as a phase lasts, `new` tokens at most;
    beside them prompts of `beside` tokens of which `kept` are more than the pool holds, and new
    ones of `fresh` tokens. None is asked while `open_max` of its kind have no answer yet, because
    prompts go before decodes, and a machine that is too slow would be measured by its queue: that
    one is left out, and told."""

    streams: int
    tokens: int
    new: int
    beside: int
    kept: int
    fresh: int
    phases: tuple[Phase, ...]
    open_max: int = 6
    pace_s: float = 1.0
    """For finding out the pace of each kind."""


@dataclass
class Asker:
    """Prompts of one kind, and what became of them."""

    prompts: list[list[int]]
    every_s: float
    due: float
    asked: int = 0
    left_out: int = 0
    open: set[str] = field(default_factory=set)
    answers: list[wire.Output] = field(default_factory=list)

    def ask(self, engine: Engine, now: float, open_max: int) -> None:
        """Whatever is due by now. Being late oneself moves no later prompt."""
        while self.prompts and now >= self.due:
            self.due += self.every_s
            tokens = self.prompts.pop()
            if len(self.open) >= open_max:
                self.left_out += 1
                continue
            self.asked += 1
            self.open.add(engine.submit(tokens, 1))

    def take(self, answers: Mapping[str, wire.Output]) -> None:
        """Its own ones of what has ended."""
        self.answers += [answers[name] for name in self.open & answers.keys()]
        self.open -= answers.keys()

    @property
    def tokens(self) -> tuple[int, int]:
        """Of the answered prompts: that were cached, and those of them that the host tier had."""
        host = sum(int(str((one.details or {}).get("host", 0))) for one in self.answers)
        return sum(one.cached for one in self.answers), host


def prepare(engine: Engine, decodes: Decodes, *, tiers: bool) -> list[list[int]]:
    """Compute the prompts that are asked for beside; one alone where there is no lower tier."""
    kept = [list(prompt(70_000 + n, decodes.beside)) for n in range(decodes.kept if tiers else 1)]
    for tokens in kept:
        engine.generate(tokens, 1)
    return kept


def pace(engine: Engine, decodes: Decodes, kept: Sequence[list[int]]) -> Pace:
    """Find out, with prompts so far apart that each is alone: what all gaps together have grown by,
    a prompt, and the usual gap. The first prompts are not counted: something may be compiled."""
    seconds, apart_s = decodes.pace_s, decodes.pace_s / PACE_PROMPTS
    took = []
    for number in range(4):
        restores, new = (apart_s, 0.0) if number % 2 == 0 else (0.0, apart_s)
        phase = Phase("", seconds if number > 1 else 2 * apart_s, restores, new)
        one, _ = _phase(engine, decodes, phase, kept, PACE_SEED + 100 * number)
        steps = one["gaps"] / decodes.streams
        grown = steps * (one["mean_ms"] - one["p50_ms"])
        took.append((grown / max(1, one["asked"]) + one["p50_ms"]) / 1e3)
    return Pace(round(took[2], 5), round(took[3], 5))


def measure(
    engine: Engine,
    decodes: Decodes,
    kept: Sequence[list[int]],
    seed: int,
    pace: Pace = UNPACED,
    token_bytes: int = 0,
    moved: Moved | None = None,
) -> Phases:
    """Every phase once, at this pace. `token_bytes`: of one token's KV, where that is to be told;
    `moved`: what the system counts itself (what it is said to have had in its host tier, and all
    that is new, where nothing is counted)."""
    found = {}
    for number, phase in enumerate(decodes.phases):
        before = moved() if moved else {}
        phase = replace(
            phase, restore_every=pace.restore_s * phase.restore_every,
            fresh_every=pace.fresh_s * phase.fresh_every,
        )  # fmt: skip
        one, askers = _phase(engine, decodes, phase, kept, 1_000 * seed + 100 * number)
        if moved:
            after = moved()
            bytes_ = {name: after[name] - before[name] for name in ("restored", "backed_up")}
        else:
            tiers = len(kept) > 1
            bytes_ = {
                "restored": token_bytes * askers[0].tokens[1],
                "backed_up": token_bytes * tiers * decodes.fresh * len(askers[1].answers),
            }
        one["full"] = phase.full
        one["every_s"] = [round(phase.restore_every, 4), round(phase.fresh_every, 4)]
        one["bytes"] = bytes_
        if token_bytes:
            one["bus"] = {
                name: round(count / 1e9 / BUS_GB_PER_S / one["seconds"], 3)
                for name, count in bytes_.items()
            }
        found[phase.name] = one
    return found


def _phase(
    engine: Engine, decodes: Decodes, phase: Phase, kept: Sequence[list[int]], seed: int
) -> tuple[dict[str, Any], tuple[Asker, Asker]]:
    def times(every_s: float) -> int:
        return math.ceil(phase.seconds / every_s) if every_s else 0

    restoring = list(islice(cycle(kept), times(phase.restore_every)))
    fresh = [list(prompt(1_000 * seed + n, decodes.fresh)) for n in range(times(phase.fresh_every))]
    began = {
        engine.submit(list(prompt(seed + n, decodes.tokens)), decodes.new, stream=True): (
            time.monotonic()
        )
        for n in range(decodes.streams)
    }
    begin = time.monotonic() + LEAD_S
    end = begin + phase.seconds
    askers = (
        Asker(restoring[::-1], phase.restore_every, begin),
        Asker(fresh, phase.fresh_every, begin + phase.fresh_every / 2),
    )
    running, ended = set(began), dict[str, wire.Output]()

    def take() -> None:
        taken: dict[str, wire.Output] = {}
        wanted = running.union(*(asker.open for asker in askers))
        for name, answer in engine.take_ended(wanted).items():
            if not isinstance(answer, wire.Output):
                raise engine.trouble(f"{name}: {answer}")
            taken[name] = answer
        ended.update((name, taken[name]) for name in running & taken.keys())
        running.difference_update(taken)
        for asker in askers:
            asker.take(taken)

    while running and (now := time.monotonic()) < end:
        take()
        for asker in askers:
            asker.ask(engine, now, decodes.open_max)
        time.sleep(0.0005)
    early = decodes.streams - len(running)
    for asker in () if early else askers:
        asker.ask(engine, end, decodes.open_max)  # what this process was too late for
    seconds = time.monotonic() - begin
    while any(asker.open for asker in askers):
        take()
        if time.monotonic() > end + ANSWER_S:
            raise engine.trouble(f"no answer within {ANSWER_S} s")
        time.sleep(0.0005)
    drained = time.monotonic() - begin
    time.sleep(TAIL_S)
    for name in list(running):
        engine.abort(name)
    for name in list(running):
        ended[name] = engine.collect(name, ANSWER_S)
    found = _figures(
        1e3 * (b - a)
        for name, one in ended.items()
        for a, b in pairwise(began[name] + after for after in one.came)
        if a < end and b > begin
    )
    found |= {
        "seconds": round(drained, 3),
        "asked": sum(asker.asked for asker in askers),
        "left_out": sum(asker.left_out for asker in askers),
        "asked_s": round(seconds, 3),
        "ended_early": early,
        "cached_tokens": sum(asker.tokens[0] for asker in askers),
    }
    return found, askers


def _figures(gaps_ms: Any) -> dict[str, Any]:
    gaps = sorted(gaps_ms)
    if not gaps:
        return {"gaps": 0}
    return {
        "p50_ms": round(statistics.median(gaps), 3),
        "p90_ms": round(gaps[int(0.9 * len(gaps))], 3),
        "p99_ms": round(gaps[int(0.99 * len(gaps))], 3),
        "longest_ms": round(gaps[-1], 3),
        "mean_ms": round(statistics.fmean(gaps), 3),
        "gaps": len(gaps),
        "by_tenths_of_ms": Counter(int(10 * gap) for gap in gaps),
    }


def pooled_p99_ms(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Of the gaps of several rounds together: one round has too few for what is that rare."""
    counts: Counter[int] = sum((one["by_tenths_of_ms"] for one in rounds), Counter())
    return sorted(counts.elements())[int(0.99 * counts.total())] / 10


def judged(found: Mapping[str, Sequence[Phases]], ours: str) -> dict[str, dict[str, Any]]:
    """One system's gaps beside each other's, by phase: the median over rounds of the ratios of p50,
    the ratio of the p99 of all rounds' gaps, and whether both keep to the goal, where there is one.
    No ratio, and no verdict, where
    ours was asked for less than the other, or decodes ended before the phase did. Where the *other*
    was asked for less it had it easier, so the ratio is an upper bound: that is told beside it."""
    return {
        name: {
            phase: _beside(
                [one[phase] for one in found[ours]],
                others,
                GOALS.get(name) if others[0]["full"] else None,
            )
            for phase, others in _by_phase(theirs).items()
        }
        for name, theirs in found.items()
        if name != ours and ours in found
    }


def _by_phase(rounds: Sequence[Phases]) -> dict[str, list[dict[str, Any]]]:
    """Every phase that asks for something."""
    names = [name for name, one in rounds[0].items() if one["asked"] or one["left_out"]]
    return {name: [one[name] for one in rounds] for name in names}


def _beside(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], goal: float | None
) -> dict[str, Any]:
    rounds = list(zip(ours, theirs, strict=False))  # a run that was cut off has not all of the last
    unlike = [
        f"asked {a['asked']} and {b['asked']}, ended early {a['ended_early']} and "
        f"{b['ended_early']}"
        for a, b in rounds
        if a["asked"] < b["asked"] or a["ended_early"] or b["ended_early"] or not a["gaps"]
    ]
    if unlike:
        return {"not comparable": unlike}
    p99 = pooled_p99_ms([a for a, _ in rounds]) / pooled_p99_ms([b for _, b in rounds])
    ratios: dict[str, Any] = {
        "p50": round(statistics.median(a["p50_ms"] / b["p50_ms"] for a, b in rounds), 3),
        "p99": round(p99, 3),
    }
    if goal is not None:
        ratios |= {"goal": goal, "ok": max(ratios.values()) <= goal}
    if fewer := sum(a["asked"] - b["asked"] for a, b in rounds):
        ratios["asked more"] = fewer
    return ratios
