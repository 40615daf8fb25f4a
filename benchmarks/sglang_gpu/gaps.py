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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
KINDS_MOVED: Final = ("restored", "backed_up")
Phases = dict[str, dict[str, Any]]
Moved = Callable[[bool], Mapping[str, int]]
"""Bytes `restored` and `backed_up` so far, of a system that counts them: at once, or (true) when
nothing is under way any more."""


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
    open: dict[str, float] = field(default_factory=dict)
    """When each was asked."""
    answers: list[wire.Output] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)
    """Each answer."""

    def ask(self, engine: Engine, now: float, open_max: int) -> None:
        """Whatever is due by now. Being late oneself moves no later prompt."""
        while self.prompts and now >= self.due:
            self.due += self.every_s
            tokens = self.prompts.pop()
            if len(self.open) >= open_max:
                self.left_out += 1
                continue
            self.asked += 1
            self.open[engine.submit(tokens, 1)] = time.monotonic()

    def take(self, answers: Mapping[str, wire.Output]) -> None:
        """Its own ones of what has ended."""
        now = time.monotonic()
        for name in self.open.keys() & answers.keys():
            self.answers.append(answers[name])
            self.took_ms.append(1e3 * (now - self.open.pop(name)))

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
        one, _ = _phase(engine, decodes, phase, cycle(kept), PACE_SEED + 100 * number)
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
    that is new, where nothing is counted). What it moves only when all is answered is told apart:
    that was not beside these gaps. Kept prompts go on from phase to phase, because those that were
    asked for last may be in the pool still."""
    found, kept_on = {}, cycle(kept)
    for number, phase in enumerate(decodes.phases):
        before = moved(True) if moved else {}
        phase = replace(
            phase, restore_every=pace.restore_s * phase.restore_every,
            fresh_every=pace.fresh_s * phase.fresh_every,
        )  # fmt: skip
        by_now: list[Mapping[str, int]] = []
        count = partial(_count, moved, by_now)
        one, askers = _phase(engine, decodes, phase, kept_on, 1_000 * seed + 100 * number, count)
        if moved:
            bytes_ = {name: by_now[0][name] - before[name] for name in KINDS_MOVED}
            after = moved(True)
            one["bytes_later"] = {name: after[name] - by_now[0][name] for name in KINDS_MOVED}
        else:
            tiers = len(kept) > 1
            bytes_ = {
                "restored": token_bytes * askers[0].tokens[1],
                "backed_up": token_bytes * tiers * decodes.fresh * len(askers[1].answers),
            }
        one["full"] = phase.full
        one["every_s"] = [round(phase.restore_every, 4), round(phase.fresh_every, 4)]
        asked_for = ((pace.restore_s, phase.restore_every), (pace.fresh_s, phase.fresh_every))
        one["pass_ms"] = round(1e3 * max((s for s, every in asked_for if every), default=0.0), 3)
        one["bytes"] = bytes_
        if token_bytes:
            one["bus"] = {
                name: round(count / 1e9 / BUS_GB_PER_S / one["seconds"], 3)
                for name, count in bytes_.items()
            }
        found[phase.name] = one
    return found


def _count(moved: Moved | None, found: list[Mapping[str, int]]) -> None:
    if moved:
        found.append(moved(False))


def _phase(
    engine: Engine,
    decodes: Decodes,
    phase: Phase,
    kept: Iterator[list[int]],
    seed: int,
    answered: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Any], tuple[Asker, Asker]]:
    """One phase. `answered`: called as soon as all that was asked is."""

    def times(every_s: float) -> int:
        return math.ceil(phase.seconds / every_s) if every_s else 0

    restoring = list(islice(kept, times(phase.restore_every)))
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
    answered()
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
        "answers_ms": [quantiles(asker.took_ms) for asker in askers],
    }
    return found, askers


def quantiles(took_ms: Sequence[float]) -> list[float]:
    """The p50 and the p99, or nothing where there is nothing."""
    if not took_ms:
        return []
    sorted_ms = sorted(took_ms)
    return [round(sorted_ms[int(part * len(sorted_ms))], 3) for part in (0.5, 0.99)]


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
    No ratio, and no verdict, where ours was asked for less than the other, decodes ended before
    the phase did, or what moves nothing left prompts out itself: that load nobody can carry. Where
    another one was asked for less it had it easier, so the ratio is an upper bound: that is told
    beside it. Where prompts were left out of ours, too, it may miss its goal and not meet it.
    `passes`: the p99 of what moves nothing, in times that one prompt and one step take it: from 2
    on several prompts stood between two of its tokens, and the load is one that it hardly carries.
    """
    return {
        name: {
            phase: _beside(
                [one[phase] for one in found[ours]],
                others,
                GOALS.get(name) if others[0]["full"] else None,
                still=name == "none",
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
    ours: Sequence[dict[str, Any]],
    theirs: Sequence[dict[str, Any]],
    goal: float | None,
    *,
    still: bool,
) -> dict[str, Any]:
    """`still`: the other one moves nothing."""
    rounds = list(zip(ours, theirs, strict=False))  # a run that was cut off has not all of the last
    unlike = [
        f"asked {a['asked']} and {b['asked']}, left out {a['left_out']} and {b['left_out']}, ended "
        f"early {a['ended_early']} and {b['ended_early']}, gaps {a['gaps']} and {b['gaps']}"
        for a, b in rounds
        if a["asked"] < b["asked"]
        or a["ended_early"]
        or b["ended_early"]
        or not (a["gaps"] and b["gaps"])
        or (still and b["left_out"])
    ]
    if unlike:
        return {"not comparable": unlike}
    its_p99 = pooled_p99_ms([b for _, b in rounds])
    ratios: dict[str, Any] = {
        "p50": round(statistics.median(a["p50_ms"] / b["p50_ms"] for a, b in rounds), 3),
        "p99": round(pooled_p99_ms([a for a, _ in rounds]) / its_p99, 3),
    }
    left_out = [sum(one["left_out"] for one in of) for of in zip(*rounds, strict=True)]
    if goal is not None:
        missed = max(ratios.values()) > goal
        ratios["goal"] = goal
        if missed or not left_out[0]:
            ratios["ok"] = not missed
    if any(left_out):
        ratios["left out"] = left_out
    if still and theirs[0]["pass_ms"]:
        ratios["passes"] = round(its_p99 / theirs[0]["pass_ms"], 2)
    if fewer := sum(a["asked"] - b["asked"] for a, b in rounds):
        ratios["asked more"] = fewer
    return ratios
